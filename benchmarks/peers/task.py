"""What every program is given, and the clock that it has to keep."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

SKIP = 3
"""Steps that are not counted: first touches of memory, first moments, compilation."""


@dataclass(frozen=True)
class Task:
    """One program's part in a comparison. Batches are in sequences; `vocab_size` counts rows of the embedding.

    `data` is a folder as peers/data.py makes it, `scratch` one of the program's own, `peer` a checkout of another
    project, for the programs that need one.
    """

    program: str
    data: str
    scratch: str
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    global_batch: int
    steps: int
    precision: str = "bf16"
    compile: bool = False
    layout: str = "ddp"
    ranks: int = 1
    threads: int = 2
    lr: float = 6e-4
    warmup_steps: int = 2
    eval_windows: int = 16
    peer: str | None = None
    collectives: bool = False

    @classmethod
    def read(cls, path: Path) -> Task:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.global_batch * self.block_size

    @property
    def micro_batch(self) -> int:
        """Sequences that a rank takes a step, all at once."""
        return self.global_batch // self.ranks

    def tokens(self, split: str) -> np.ndarray:
        """All tokens of "train" or "val", (N,) uint16, by memory map."""
        return np.memmap(Path(self.data) / f"{split}.bin", np.uint16, "r")


class Clock:
    """Notes time, processor time and loss at the end of each optimizer step, and the memory after the last one.

    From one step's end to the next lies everything that a program does for a step: reading its samples, too.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.start_bytes = most_memory()
        self.peak_bytes = 0
        self._walls: list[float] = []
        self._processors: list[float] = []
        self._losses: list[Any] = []

    def tick(self, loss: Any = None) -> None:
        """A step has ended; `loss` is a number or a 0-d tensor, read when all is over."""
        self._walls.append(time.perf_counter())
        self._processors.append(time.process_time())
        if loss is not None:
            self._losses.append(loss)
        if len(self._walls) == self.steps:
            self.peak_bytes = most_memory()

    @property
    def is_over(self) -> bool:
        return len(self._walls) >= self.steps

    def found(self) -> dict[str, Any]:
        """Seconds of the steps that count, losses of all, bytes."""
        found = {"wall_s": np.diff(self._walls)[SKIP - 1:].tolist(),
                 "cpu_s": np.diff(self._processors)[SKIP - 1:].tolist(),
                 "peak_bytes": self.peak_bytes, "start_bytes": self.start_bytes}
        if self._losses:
            found["losses"] = [float(loss) for loss in self._losses]
        return found


def most_memory() -> int:
    """The most bytes that this process and its living descendants have each held, added up."""
    import psutil

    own = psutil.Process()
    return sum(_high_water(process.pid) for process in (own, *own.children(recursive=True)))


def _high_water(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def validation_loss(task: Task, logits: Callable[[Any], Any]) -> float:
    """The mean loss, in nats, over the first windows of the validation tokens: the same ones for every program.

    Args:
        logits: from tokens (B, T) to (B, T, V), in evaluation.
    """
    import torch

    total, windows = 0.0, 0
    with torch.no_grad():
        for tokens, targets in validation_batches(task):
            found = logits(tokens).float()
            total += len(tokens) * torch.nn.functional.cross_entropy(found.flatten(0, 1), targets.flatten()).item()
            windows += len(tokens)
    return total / windows


def validation_batches(task: Task) -> Iterator[tuple[Any, Any]]:
    """Tokens and targets (B, T) int64, one window after the other from the start of the split."""
    import torch

    length, at_once = task.block_size, 4
    stream = task.tokens("val")[:task.eval_windows * length + 1].astype(np.int64)
    rows = (len(stream) - 1) // length
    tokens = torch.from_numpy(stream[:rows * length].reshape(rows, length))
    targets = torch.from_numpy(stream[1:rows * length + 1].reshape(rows, length))
    yield from zip(tokens.split(at_once), targets.split(at_once), strict=True)
