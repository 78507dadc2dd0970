"""Rows of the mutation table: a fault, and the check that should detect it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHARED = ("forward", "backward", "accumulation", "clipping", "optimizer", "schedule", "data reader", "resume",
          "evaluation", "precision")
"""Classes of code shared by all layouts and the reference: certify compares one process with the definitions."""
LAYOUTS = ("ddp", "zero", "fsdp2", "tp", "pp", "sp", "hpz", "tied table", "norm over ranks", "offload")
"""Classes of code of single layouts, compared with a reference from clean code."""
STEPS = 3


@dataclass(frozen=True)
class Cell:
    """Cell of certify: a layout, model, precision and number of ranks, over the minimum number of steps."""

    layout: str
    world: int
    model: str
    dtype: str

    @property
    def reference(self) -> str:
        """Folder of its reference."""
        return f"{self.model}-{self.dtype}-{STEPS}"

    def __str__(self) -> str:
        return f"certify {options([self])}"


def options(cells: Sequence[Cell]) -> str:
    """Return certify's options for cells that differ only in their layout."""
    one = cells[0]
    return (f"--layouts {','.join(cell.layout for cell in cells)} --world {one.world} --model {one.model} "
            f"--dtype {one.dtype} --steps {STEPS}")


def cell(layout: str, world: int, model: str = "gpt2", dtype: str = "fp32") -> Cell:
    """Return a cell of certify; `model` is given without the prefix "tiny-"."""
    return Cell(layout, world, f"tiny-{model}", dtype)


GPT2, LLAMA, GPT2_BF16 = cell("ddp", 1), cell("ddp", 1, "llama"), cell("ddp", 1, dtype="bf16")
"""Cells of a single process, which certify compares with the definition of the step."""
ARCHITECTURES = "tests/model/test_model_architectures.py::test_losses_logits_and_gradients_match_the_definition"
"""Test that detects faults of several tables."""


@dataclass(frozen=True)
class Fault:
    """Fault to plant.

    Attributes:
        kind: class of code, from SHARED or LAYOUTS.
        file: path relative to the checkout.
        right: text that occurs exactly once in the file.
        wrong: replacement for it.
        sees: check that should fail: a cell or a test.
        what: use of the code in which results change; "" if all uses change.
    """

    name: str
    kind: str
    file: str
    right: str
    wrong: str
    sees: Cell | str
    what: str = ""

    @property
    def is_of_a_layout(self) -> bool:
        """True for a fault in code of single layouts."""
        return self.kind in LAYOUTS
