"""A run's metrics as they stand in its directory, and which of its steps a summary may use."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ezpz_llm.errors import UserError
from ezpz_llm.rundir import RunDir, read_lines, write_atomic

Row = TypeVar("Row")

PHASES = ("data", "forward", "backward", "optimizer")
"""What a step is made of; collectives run inside them, overlapped, and cannot be told apart by spans."""
OTHER = "other"

WARMUP_STEPS = 10
"""Steps at the start of a run that summaries leave out (fewer in a run of under a hundred)."""


@dataclass(frozen=True)
class Spread:
    """A median with the values that a tenth of the sample lies below and above."""

    median: float
    low: float
    high: float


def read_history(run_dir: RunDir) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, in order of their steps."""
    return list(read_lines(run_dir.metrics))


def steady(rows: Sequence[Row]) -> list[Row]:
    """`rows` without the first (warm-up, compilation) and the last (closing work); up to three are kept whole."""
    if len(rows) <= 3:
        return list(rows)
    return list(rows[min(WARMUP_STEPS, max(1, len(rows) // 10)) : -1])


def spread(values: Sequence[float]) -> Spread:
    """Median, 10 % and 90 % points of `values` (at least one)."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), tenths[0], tenths[-1])


def trim_history(run_dir: RunDir, last_step: int) -> int:
    """Prepare metrics.jsonl for a run that goes on after `last_step`; returns how many lines were dropped.

    Lines of later steps, from an attempt that got further than its last checkpoint, are dropped in one atomic
    replacement, so that the curve has one value a step. Lines up to `last_step` are kept byte for byte.

    Raises:
        UserError: a run starts at step 0 in a directory that holds another run's metrics.
    """
    if not run_dir.metrics.exists():
        return 0
    lines = list(read_lines(run_dir.metrics))
    if lines and last_step == 0:
        raise UserError(f"the run directory already holds {len(lines)} steps of another run",
                        where=str(run_dir.metrics),
                        instead="choose another --run-dir, or go on from its checkpoint with --resume")
    raw = run_dir.metrics.read_bytes().splitlines(keepends=True)
    # read_lines leaves out blank lines and a last line that a crash cut short, and so does the new file.
    whole = [line for line in raw if line.endswith(b"\n") and line.strip()]
    kept = [line for line, row in zip(whole, lines, strict=True) if row["step"] <= last_step]
    if len(kept) < len(raw):
        write_atomic(run_dir.metrics, b"".join(kept))
    return len(raw) - len(kept)


def finite(value: float | None) -> bool:
    """Whether `value` is a number that can be drawn or averaged (metrics.jsonl has null for NaN and infinities)."""
    return value is not None and math.isfinite(value)
