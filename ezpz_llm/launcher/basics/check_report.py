"""Result of the check of a command, which `scale` reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckReport:
    """Result of a training command's check: the one JSON object that `--check --json` prints.

    Attributes:
        layout, precision: names. They and the batch sizes are None if the run cannot start or is already complete.
        global_batch, micro_batch: batch sizes of a step in sequences.
        accumulation: number of micro-batches per step.
        explanation: every decision with its source, as `--check` without --json prints it.
        warnings: lines that `--check` without --json prints to standard error.
        error, where, instead: reason why the run cannot start, as in `UserError`.
    """

    layout: str | None = None
    precision: str | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    explanation: str = ""
    warnings: tuple[str, ...] = ()
    error: str | None = None
    where: str | None = None
    instead: str | None = None
