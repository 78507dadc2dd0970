"""A row of the table: a fault, and what should see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHARED = ("forward", "backward", "accumulation", "clipping", "optimizer", "schedule", "data reader", "resume",
          "evaluation", "precision")
"""Classes of code that all layouts share, and so the reference: certify holds one process to the definition."""
LAYOUTS = ("ddp", "zero", "fsdp2", "tp", "pp", "sp", "hpz", "tied table", "norm over ranks", "offload")
"""Classes of code that only a layout has: compared with a reference that clean code made."""
STEPS = 3


@dataclass(frozen=True)
class Cell:
    """One layout in one shape and precision on a number of ranks, over as few steps as certify takes."""

    layout: str
    world: int
    model: str
    dtype: str

    @property
    def reference(self) -> str:
        """The folder of its reference."""
        return f"{self.model}-{self.dtype}-{STEPS}"

    def __str__(self) -> str:
        return f"certify {options([self])}"


def options(cells: Sequence[Cell]) -> str:
    """The options of certify for cells that differ in their layout alone."""
    one = cells[0]
    return (f"--layouts {','.join(cell.layout for cell in cells)} --world {one.world} --model {one.model} "
            f"--dtype {one.dtype} --steps {STEPS}")


def cell(layout: str, world: int, model: str = "gpt2", dtype: str = "fp32") -> Cell:
    """A cell of certify; `model` without its "tiny-"."""
    return Cell(layout, world, f"tiny-{model}", dtype)


@dataclass(frozen=True)
class Definitions:
    """What certify checks before it compares anything: `ezpz_llm/certify/definitions.py`.

    Attributes:
        topic: the one that should be wrong, which is then asked alone.
    """

    topic: str

    def __str__(self) -> str:
        return "certify: definitions"


RATES, PARTS, SCALE, DROPOUT, WIDE_SUMS, TRAINER = map(Definitions, (
    "rates", "parts", "loss scale", "dropout", "sums", "trainer"))
GPT2, LLAMA, GPT2_BF16 = cell("ddp", 1), cell("ddp", 1, "llama"), cell("ddp", 1, dtype="bf16")
"""One process, which is held to the definition of the step."""


@dataclass(frozen=True)
class Fault:
    """A fault to plant.

    Attributes:
        kind: its class, of SHARED or LAYOUTS.
        file: where it is, below the checkout.
        right: a piece of the file's text that is there exactly once.
        wrong: what replaces it.
        sees: what should fail then: a cell, the definitions, or a test.
    """

    name: str
    kind: str
    file: str
    right: str
    wrong: str
    sees: Cell | Definitions | str

    @property
    def is_of_a_layout(self) -> bool:
        """True if no process alone has it."""
        return self.kind in LAYOUTS
