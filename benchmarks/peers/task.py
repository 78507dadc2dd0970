"""Task and clock that every program gets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

SKIP = 3
"""Number of first steps that are not measured: they allocate memory and moments, and compile."""


@dataclass(frozen=True)
class Task:
    """A program's part of a comparison. Batches are in sequences; `vocab_size` counts rows of the embedding.

    `data` is a folder written by peers/data.py, `scratch` is the program's own folder, and `peer` is the checkout
    of another project for programs that need one.
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
        """Tokens in a step over all ranks."""
        return self.global_batch * self.block_size

    @property
    def micro_batch(self) -> int:
        """Sequences of a rank in a step, processed as one batch."""
        return self.global_batch // self.ranks

    def tokens(self, split: str) -> np.ndarray:
        """Return all tokens of "train" or "val", (N,) uint16, memory-mapped."""
        return np.memmap(Path(self.data) / f"{split}.bin", np.uint16, "r")


class Clock:
    """Record of time, processor time and loss at the end of each step, and of the memory after the last one.

    The time between the ends of two steps includes all work for a step, such as reading samples.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.start_bytes = most_memory()
        self.peak_bytes = 0
        self._walls: list[float] = []
        self._processors: list[float] = []
        self._losses: list[Any] = []

    def tick(self, loss: Any = None) -> None:
        """Record the end of a step. `loss` is a number or a 0-d tensor, which is read after the last step."""
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
        """Return the seconds of measured steps, the losses of all steps, and the memory in bytes."""
        measured = {"wall_s": np.diff(self._walls)[SKIP - 1:].tolist(),
                    "cpu_s": np.diff(self._processors)[SKIP - 1:].tolist(),
                    "peak_bytes": self.peak_bytes, "start_bytes": self.start_bytes}
        if self._losses:
            measured["losses"] = [float(loss) for loss in self._losses]
        return measured


def most_memory() -> int:
    """Return the sum of the peak resident bytes of this process and its living descendants."""
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
    """Return the mean loss in nats over the first windows of the validation tokens, the same for all programs.

    Args:
        logits: function from tokens (B, T) to logits (B, T, V), in evaluation mode.
    """
    import torch

    total, windows = 0.0, 0
    with torch.no_grad():
        for tokens, targets in validation_batches(task):
            loss = torch.nn.functional.cross_entropy(logits(tokens).float().flatten(0, 1), targets.flatten())
            total += len(tokens) * loss.item()
            windows += len(tokens)
    return total / windows


def validation_batches(task: Task) -> Iterator[tuple[Any, Any]]:
    """Yield tokens and targets (B, T) int64, in consecutive windows from the start of the split."""
    import torch

    length, at_once = task.block_size, 4
    stream = task.tokens("val")[:task.eval_windows * length + 1].astype(np.int64)
    rows = (len(stream) - 1) // length
    tokens = torch.from_numpy(stream[:rows * length].reshape(rows, length))
    targets = torch.from_numpy(stream[1:rows * length + 1].reshape(rows, length))
    yield from zip(tokens.split(at_once), targets.split(at_once), strict=True)
