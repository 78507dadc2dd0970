"""Metrics of a run, read from its directory, and selection of the steps for a summary."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from ezpz_llm.core.base import UserError, as_type, shorten_value
from ezpz_llm.core.rundir import RunDir, SideFiles, read_lines, write_atomic
from ezpz_llm.core.rundir.summary_record import Spread

Rows = TypeVar("Rows", "list[Any]", "array[Any]", "Sequence[Any]", "History")

PHASES = ("data", "forward", "backward", "optimizer")
"""Phases of a step. Collectives overlap with them, so that spans cannot separate communication."""
OTHER = "other"

_WARMUP_STEPS = 10
"""Number of first steps that summaries skip; fewer in a run of under 100 steps."""


ON_EACH_LINE = ("loss", "lr", "grad_norm", "step_time_s", "tokens_per_second", "tokens_per_second_per_device",
                *(f"{phase}_s" for phase in (*PHASES, OTHER)))
ON_SOME_LINES = ("mfu", "val_loss", "val_tokens", "skipped")
"""Fields that are read from each line, besides `step`: fields of every line, and fields of some lines."""


@dataclass(frozen=True)
class History:
    """Columns of metrics.jsonl, sorted by step: 130 MB for a million steps.

    Missing values and null are NaN. A slice of a history is a history. The columns are arrays of the standard
    library, because reports must work without numpy.
    """

    steps: array[int]
    columns: Mapping[str, array[float]]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, part: slice) -> History:
        return History(self.steps[part], {name: values[part] for name, values in self.columns.items()})

    def select(self, keep: Iterable[bool]) -> History:
        """Return the lines for which `keep`, with one value per line, is True."""
        kept = list(keep)
        return History(array("q", compress(self.steps, kept)),
                       {name: array("d", compress(values, kept)) for name, values in self.columns.items()})

    def column(self, name: str) -> array[int] | array[float]:
        """Return the values of a metric, or the step numbers for "step"."""
        return self.steps if name == "step" else self.columns[name]

    def finite(self, name: str) -> list[float]:
        """Return the finite values of a metric."""
        return list(filter(math.isfinite, self.columns[name]))


def read_history(run_dir: RunDir, waiting: Iterable[Mapping[str, Any]] = ()) -> History:
    """Return the lines of metrics.jsonl, if it exists, and the lines in `waiting`, which are not written yet.

    If a step occurs twice, the later line is used.

    Raises:
        UserError: the file cannot be read, or a line is not a step record.
    """
    return make_history(chain(read_lines(run_dir.metrics), waiting), str(run_dir.metrics))


def whole_history(run_dir: RunDir, side: SideFiles) -> History:
    """Return the run's lines, including unwritten ones; only these if metrics.jsonl cannot be read."""
    waiting = side.waiting(run_dir.metrics)
    try:
        return read_history(run_dir, waiting)
    except UserError:  # the file is damaged, or the file system fails
        return make_history(waiting, str(run_dir.metrics))


def make_history(lines: Iterable[Mapping[str, Any]], where: str) -> History:
    """Return a history of parsed lines. Errors name `where`, the source of the lines."""
    # itemgetter avoids a Python loop over the values, so a million lines take only seconds.
    steps, values, fields_of = array("q"), array("d"), itemgetter(*ON_EACH_LINE)
    optional_values: dict[str, dict[int, float]] = {name: {} for name in ON_SOME_LINES}
    for line in lines:
        number = len(steps)
        try:
            steps.append(line["step"])
            try:
                values.extend(fields_of(line))
            except (KeyError, TypeError):  # some fields are missing or null
                del values[number * len(ON_EACH_LINE):]
                values.extend([_number(line.get(name)) for name in ON_EACH_LINE])
            for name in ON_SOME_LINES:
                if name in line:
                    optional_values[name][number] = _number(line[name])
        except (KeyError, TypeError, OverflowError) as error:
            problem = ("step is missing" if "step" not in line else
                       str(error) if isinstance(line["step"], int) else
                       f"step is {shorten_value(line['step'])}, not a whole number")
            raise UserError(f"step record {number + 1} is invalid: {problem}", where=where,
                            instead="remove this line") from error
    width = len(ON_EACH_LINE)
    columns = {name: values[index::width] for index, name in enumerate(ON_EACH_LINE)}
    for name, value_by_line in optional_values.items():
        columns[name] = array("d", [math.nan]) * len(steps)
        for number, value in value_by_line.items():
            columns[name][number] = value
    if all(before < after for before, after in pairwise(steps)):
        return History(steps, columns)
    line_of_step = {step: number for number, step in enumerate(steps)}  # the last line of each step
    order = [line_of_step[step] for step in sorted(line_of_step)]
    return History(array("q", [steps[number] for number in order]),
                   {name: array("d", [column[number] for number in order]) for name, column in columns.items()})


def _number(value: Any) -> float:
    if value is not None and not isinstance(value, (int, float)):
        raise TypeError(f"{shorten_value(value)} is not a number")
    return math.nan if value is None else float(value)


def steady_steps(rows: Rows) -> Rows:
    """Drop the first rows (warm-up, compilation) and the last row (work at the end); if at most three, none."""
    if len(rows) <= 3:
        return rows
    return rows[min(_WARMUP_STEPS, max(1, len(rows) // 10)) : -1]


def spread(values: Iterable[float]) -> Spread:
    """Return the median and the 10 % and 90 % quantiles of at least one value, all NaN if one value is."""
    ordered = sorted(values)
    if any(map(math.isnan, ordered)):
        return Spread(math.nan, math.nan, math.nan)
    return Spread(statistics.median(ordered), quantile(ordered, 0.1), quantile(ordered, 0.9))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, interpolated between the two values next to it."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def check_no_history(run_dir: RunDir) -> None:
    """Check that a new run does not start in the directory of another.

    Raises:
        UserError: metrics.jsonl has steps.
    """
    if steps := _written_steps(run_dir):
        raise UserError(f"the run directory already holds {len(steps)} steps of another run",
                        where=str(run_dir.metrics),
                        instead="choose another --run-dir, or continue from its checkpoint (ezpz_llm.train --resume"
                                " auto; a script: ezpz_llm.load_checkpoint)")


def rename_old_metrics(run_dir: RunDir) -> Path:
    """Rename the metrics of an attempt that saved no checkpoint; return the new path."""
    path = run_dir.metrics.with_name(f"metrics-before-{time.time():.0f}.jsonl")
    run_dir.metrics.rename(path)
    return path


def _written_steps(run_dir: RunDir) -> list[int]:
    return [as_type(int, row.get("step"), str(run_dir.metrics), "step") for row in read_lines(run_dir.metrics)]


def trim_history(run_dir: RunDir, last_step: int) -> int:
    """Drop lines after `last_step` from metrics.jsonl before a run resumes there; return how many were dropped.

    Later lines exist if an earlier attempt continued after its last checkpoint. The file is replaced atomically,
    and lines up to `last_step` are kept unchanged.
    """
    if not run_dir.metrics.exists():
        return 0
    steps = _written_steps(run_dir)

    def kept() -> Iterator[bytes]:
        """Yield the lines up to `last_step`."""
        step_of_line = iter(steps)
        with run_dir.metrics.open("rb") as file:
            for line in file:
                # Like read_lines, skip blank lines and a last line that was truncated by a crash.
                if line.endswith(b"\n") and line.strip() and next(step_of_line) <= last_step:
                    yield line

    with run_dir.metrics.open("rb") as file:
        dropped = sum(1 for _ in file) - sum(1 for _ in kept())
    if dropped:
        write_atomic(run_dir.metrics, kept())
    return dropped


def last_loss(rows: History) -> float | None:
    """Return the mean loss of the last tenth of the steps (at most 50 steps); None if a loss is not finite."""
    losses = rows.column("loss")[-max(1, min(50, len(rows) // 10)):]
    return finite_or_none(statistics.fmean(losses)) if len(losses) else None


def finite_or_none(value: float) -> float | None:
    """Convert a value of a column; NaN and Inf become None."""
    return float(value) if math.isfinite(value) else None


def is_finite(value: float | None) -> TypeGuard[float]:
    """Return True for a finite number. metrics.jsonl has null in place of NaN and Inf."""
    return value is not None and math.isfinite(value)
