"""A run's metrics as they stand in its directory, and which of its steps a summary may use."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, TypeGuard, TypeVar

import numpy as np

from ezpz_llm.base import UserError, as_type, shown
from ezpz_llm.rundir import RunDir, SideFiles, read_lines, write_atomic

Rows = TypeVar("Rows", "list[Any]", "Sequence[Any]", "np.ndarray", "History")

PHASES = ("data", "forward", "backward", "optimizer")
"""Phases of a step; collectives overlap with them and cannot be told apart by spans."""
OTHER = "other"

WARMUP_STEPS = 10
"""Steps at the start of a run that summaries leave out (fewer in a run of under a hundred)."""


@dataclass(frozen=True)
class Spread:
    """A median with the values that a tenth of the sample lies below and above."""

    median: float
    low: float
    high: float


ON_EACH_LINE = ("loss", "lr", "grad_norm", "step_time_s", "tokens_per_second", "tokens_per_second_per_device",
                *(f"{phase}_s" for phase in (*PHASES, OTHER)))
ON_SOME_LINES = ("mfu", "val_loss", "val_tokens", "skipped")
"""Fields read of a line, besides its step."""


@dataclass(frozen=True)
class History:
    """The lines of metrics.jsonl by columns, one value a step in order of the steps: 130 MB for a million of them.

    What a line lacks, and a null, is NaN. A slice of a history is a history.
    """

    steps: np.ndarray
    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, part: slice | np.ndarray) -> History:
        return History(self.steps[part], {name: values[part] for name, values in self.columns.items()})

    def column(self, name: str) -> np.ndarray:
        """A metric of every step, or the steps themselves."""
        return self.steps if name == "step" else self.columns[name]


def read_history(run_dir: RunDir, waiting: Iterable[Mapping[str, Any]] = ()) -> History:
    """The lines of metrics.jsonl, none where it is not there, and after them those that still wait to be written.

    Of a step that was written twice the later line counts.

    Raises:
        UserError: it cannot be read, or a line is none of a run's.
    """
    return make_history(chain(read_lines(run_dir.metrics), waiting), str(run_dir.metrics))


def whole_history(run_dir: RunDir, side: SideFiles) -> History:
    """The run's lines, with those that could not be written so far."""
    waiting = side.waiting(run_dir.metrics)
    try:
        return read_history(run_dir, waiting)
    except UserError:  # damaged, or a file system that fails
        return make_history(waiting, str(run_dir.metrics))


def make_history(lines: Iterable[Mapping[str, Any]], where: str) -> History:
    """The same of lines that are read already, of `where` they came from."""
    # Whole lines at a time, and values without a loop of ours: a million lines are seconds.
    steps, values, of_each = array("q"), array("d"), itemgetter(*ON_EACH_LINE)
    of_some: dict[str, dict[int, float]] = {name: {} for name in ON_SOME_LINES}
    for line in lines:
        number = len(steps)
        try:
            steps.append(line["step"])
            try:
                values.extend(of_each(line))
            except (KeyError, TypeError):  # some are missing, or null
                del values[number * len(ON_EACH_LINE):]
                values.extend([_number(line.get(name)) for name in ON_EACH_LINE])
            for name in ON_SOME_LINES:
                if name in line:
                    of_some[name][number] = _number(line[name])
        except (KeyError, TypeError, OverflowError) as error:
            raise UserError(f"after {number} steps comes a line that is none of a run's ({error!r})", where=where,
                            instead="remove that line") from error
    table = np.asarray(values).reshape(-1, len(ON_EACH_LINE))
    columns = dict(zip(ON_EACH_LINE, table.T, strict=True))
    for name, found in of_some.items():
        columns[name] = np.full(len(steps), math.nan)
        columns[name][list(found)] = list(found.values())
    history = History(np.asarray(steps), columns)
    if np.all(history.steps[1:] > history.steps[:-1]):
        return history
    order = np.argsort(history.steps, kind="stable")
    last = np.append(np.diff(history.steps[order]) > 0, True)
    return history[order[last]]


def _number(value: Any) -> float:
    if value is not None and not isinstance(value, (int, float)):
        raise TypeError(f"{shown(value)} is not a number")
    return math.nan if value is None else float(value)


def steady(rows: Rows) -> Rows:
    """`rows` without the first (warm-up, compilation) and the last (closing work); up to three are kept whole."""
    if len(rows) <= 3:
        return rows
    return rows[min(WARMUP_STEPS, max(1, len(rows) // 10)) : -1]


def spread(values: Sequence[float] | np.ndarray) -> Spread:
    """Median, 10 % and 90 % points of `values` (at least one)."""
    low, median, high = np.quantile(values, (0.1, 0.5, 0.9))
    return Spread(float(median), float(low), float(high))


def trim_history(run_dir: RunDir, last_step: int) -> int:
    """Prepare metrics.jsonl for a run that goes on after `last_step`; returns how many lines were dropped.

    Lines of later steps, from an attempt that got further than its last checkpoint, are dropped in one atomic
    replacement, so that the curve has one value a step. Lines up to `last_step` are kept byte for byte.

    Raises:
        UserError: a run starts at step 0 in a directory that holds another run's metrics.
    """
    if not run_dir.metrics.exists():
        return 0
    steps = [as_type(int, row.get("step"), str(run_dir.metrics), "step") for row in read_lines(run_dir.metrics)]
    if steps and last_step == 0:
        raise UserError(f"the run directory already holds {len(steps)} steps of another run",
                        where=str(run_dir.metrics),
                        instead="choose another --run-dir, or resume from its checkpoint with --resume")

    def kept() -> Iterator[bytes]:
        of_lines = iter(steps)
        with run_dir.metrics.open("rb") as file:
            for line in file:
                # Like read_lines, without blank lines and a last line that a crash cut short.
                if line.endswith(b"\n") and line.strip() and next(of_lines) <= last_step:
                    yield line

    with run_dir.metrics.open("rb") as file:
        dropped = sum(1 for _ in file) - sum(1 for _ in kept())
    if dropped:
        write_atomic(run_dir.metrics, kept())
    return dropped


def last_loss(rows: History) -> float | None:
    """The mean over the last tenth of the steps, at most 50; None if one of them is not a number."""
    losses = rows.column("loss")[-max(1, min(50, len(rows) // 10)):]
    return known(np.mean(losses)) if len(losses) else None


def known(value: float) -> float | None:
    """A value of a column; None where it is not a number."""
    return float(value) if math.isfinite(value) else None


def finite(value: float | None) -> TypeGuard[float]:
    """True if `value` is a number that can be drawn or averaged (metrics.jsonl has null for NaN and infinities)."""
    return value is not None and math.isfinite(value)
