"""Runs of a report: their steps, state and results, and the settings in which they differ."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, count_noun
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.layout_record import LayoutRecord, read_layout_record
from ezpz_llm.core.rundir.records import Data, Environment, Exit, Launch, RunRecord, read_record
from ezpz_llm.training.observe.history import OTHER, PHASES, History, last_loss, read_history, steady_steps
from ezpz_llm.training.observe.throughput import format_number
from ezpz_llm.training.observe.trackers.tracker import flatten_settings

_SILENT_AFTER_S = 600.0
"""A run without new lines is shown as running for this time plus three times the duration of the last log interval.

This leaves time for an evaluation or a save.
"""


_MAX_TOKENS = 2**53
"""Largest number of tokens of a step, the limit of exact integers in a float. A larger value means a damaged
line."""


@dataclass(frozen=True)
class Run:
    """Contents of a run directory.

    Attributes:
        name: name that is unique in the report.
        rows: lines of metrics.jsonl, by column.
        state: current state or outcome, in words.
        notes: remarks that readers of the curves need, such as gaps.
    """

    path: Path
    name: str
    record: RunRecord
    layout: LayoutRecord
    rows: History
    state: str
    notes: tuple[str, ...]

    def column(self, metric: str) -> array[int] | array[float]:
        """Return a metric of every step; NaN where it is missing or not a number."""
        return self.rows.column(metric)

    @cached_property
    def step_tokens(self) -> list[int]:
        """Tokens of each step, which change if a run is resumed with another batch."""
        rates = zip(self.column("tokens_per_second"), self.column("step_time_s"), strict=True)
        return [round(min(max(_finite_or_zero(rate * seconds), 0), _MAX_TOKENS)) for rate, seconds in rates]

    @cached_property
    def tokens(self) -> list[float]:
        """Cumulative tokens, assuming that steps before the first line have as many tokens as that line's step."""
        if not len(self.rows):
            return []
        before = (self.rows.steps[0] - 1) * self.step_tokens[0]
        return [float(before + tokens) for tokens in accumulate(self.step_tokens)]

    @cached_property
    def hours(self) -> list[float]:
        """Cumulative step times in hours, of the steps that have a line."""
        return [seconds / 3600 for seconds in accumulate(map(_finite_or_zero, self.column("step_time_s")))]

    def median(self, metric: str) -> float | None:
        """Return the median of a metric over the steady steps; None if it was never measured."""
        values = steady_steps(self.rows).finite(metric)
        return statistics.median(values) if values else None

    @property
    def last_loss(self) -> float | None:
        """Mean loss over the last tenth of the steps, at most 50; None if one of them is non-finite."""
        return last_loss(self.rows)

    @property
    def validation(self) -> tuple[int, float] | None:
        """Step and loss of the last evaluation; None without one."""
        rows = self.rows
        evaluations = zip(rows.steps, rows.column("val_loss"), strict=True)
        return next(((step, loss) for step, loss in reversed(list(evaluations)) if math.isfinite(loss)), None)

    @property
    def world_size(self) -> int | None:
        """Number of ranks."""
        return self.record.world_size


def _finite_or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def load_runs(paths: Sequence[Path], now: float | None = None) -> list[Run]:
    """Read run directories, ignoring duplicates, and name each by the shortest unique end of its path.

    Raises:
        UserError: a path is not a run directory, or its files cannot be read.
    """
    folders = list(dict.fromkeys(path.absolute() for path in paths))
    now = time.time() if now is None else now
    return [_load(path, name, now) for path, name in zip(folders, _names(folders), strict=True)]


def _load(path: Path, name: str, now: float) -> Run:
    run_dir = RunDir(path)
    run_dir.check_exists()
    record = read_record(run_dir)
    if not run_dir.record.exists() and not run_dir.metrics.exists():
        inside = sorted(path.glob("*/metrics.jsonl"))
        raise UserError("this is not a run directory: it has neither run.json nor metrics.jsonl", where=str(path),
                        instead=f"ezpz-llm report {inside[0].parent}" if inside else None)
    rows = read_history(run_dir)
    written = run_dir.metrics.stat().st_mtime if len(rows) else run_dir.record.stat().st_mtime
    return _build_run(path, name, record, rows, now - written)


def run_of(run_dir: RunDir, rows: History) -> Run:
    """Return the run that this process has just finished, from `rows`, which it has already read."""
    return _build_run(run_dir.path, run_dir.path.name, read_record(run_dir), rows, 0.0)


def _build_run(path: Path, name: str, record: RunRecord, rows: History, silent_s: float) -> Run:
    layout = read_layout_record(RunDir(path)) or LayoutRecord()
    is_resumable = (RunDir(path).checkpoints / "latest").exists()
    run = Run(path, name, record, layout, rows, _state(record, rows, silent_s, is_resumable=is_resumable), ())
    return replace(run, notes=tuple(_notes(run)))


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest unique ends of the paths, all with the same number of parts."""
    for parts in range(1, max((len(path.parts) for path in folders), default=1)):
        names = ["/".join(path.parts[-parts:]) for path in folders]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in folders]


def _state(record: RunRecord, rows: History, silent_s: float, *, is_resumable: bool) -> str:
    """Return the state of the run in words. An exit of an earlier attempt in run.json is ignored."""
    planned = record.settings.steps
    last = rows.steps[-1] if len(rows) else 0
    reached = f"step {last} of {planned}" if planned else f"step {last}"
    ended = record.exit
    if ended and (ended.ended or 0) < ((record.launch or Launch()).started or 0):
        ended = None
    reason = record.stopped if record.steps == last else None
    if ended and ended.code and not (ended.is_interrupted and (reason or is_resumable)):
        return f"failed after {reached}: {ended.cause} (code {ended.code})"
    if reason or (ended and ended.code):
        return f"stopped after {reached}: {reason or (ended or Exit()).cause}"
    if planned and last >= planned:
        return f"finished, {reached}"
    if ended:
        return f"ended after {reached}: {ended.cause}"
    recent_s = rows.column("step_time_s")[-max(1, record.settings.log_every or 50):]
    if silent_s < _SILENT_AFTER_S + 3 * sum(map(_finite_or_zero, recent_s)):
        return f"running, {reached} written {max(0, silent_s):.0f} s ago"
    return f"no exit recorded; {reached} was written {_ago(silent_s)} ago"


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 60:.0f} minutes"


def _notes(run: Run) -> Iterator[str]:
    rows = run.rows
    if not len(rows):
        yield "no step has been written yet"
        return
    first, steps = rows.steps[0], rows.steps
    if first > 1:
        origin = run.record.settings.resume
        resumed = f" (resumed from {origin})" if origin else ""
        yield (f"the records begin at step {first}{resumed}; earlier steps are assumed to have the same number of "
               "tokens, and are not included in times")
    changes = [i for i, (before, after) in enumerate(pairwise(run.step_tokens), 1) if before != after]
    for i in changes[:3]:
        yield (f"the tokens per step change from {run.step_tokens[i - 1]:,} to {run.step_tokens[i]:,} at step "
               f"{steps[i]}")
    if len(changes) > 3:
        yield f"the tokens per step change {len(changes) - 3} more times"
    if missing := steps[-1] - first + 1 - len(rows):
        yield f"{count_noun(missing, 'step')} between the first and the last recorded step missing"
    skipped = [step for step, was_skipped in zip(steps, rows.column("skipped"), strict=True) if was_skipped > 0]
    if skipped:
        were = "was" if len(skipped) == 1 else "were"
        yield f"{count_noun(len(skipped), 'step')} {were} skipped and changed nothing, first step {skipped[0]}"
    bad = [step for step, loss in zip(steps, rows.column("loss"), strict=True) if not math.isfinite(loss)]
    if bad:
        yield f"the loss is non-finite at {count_noun(len(bad), 'step')}, first at step {bad[0]}"


RESULTS = ("run", "step", "tokens", "loss", "val loss", "step ms", "tok/s", "tok/s/dev", "MFU")
SETTINGS = ("run", "model", "parameters", "layout", "ranks", "precision", "sequences/step", "tokens/step",
            "device", "started")


def result_row(run: Run) -> list[str]:
    """Return a row for RESULTS. The loss is the mean over the last tenth of the steps (at most 50)."""
    validation = run.validation
    step_time = run.median("step_time_s")
    reached = (str(run.rows.steps[-1]), format_number(run.tokens[-1])) if len(run.rows) else ("-", "-")
    return [run.name, *reached,
            _fixed(run.last_loss), _fixed(validation[1] if validation else None),
            f"{step_time * 1e3:.1f}" if step_time is not None else "-", _short(run.median("tokens_per_second")),
            _short(run.median("tokens_per_second_per_device")),
            f"{mfu:.1%}" if (mfu := run.median("mfu")) is not None else "-"]


def setting_row(run: Run) -> list[str]:
    """Return a row for SETTINGS."""
    record = run.record
    started = (record.launch or Launch()).started
    return [run.name, record.settings.model or "-", _short(record.parameters),
            _layout_text(run), str(run.world_size or "-"), str(record.precision or "-"),
            _describe_batch(run), f"{run.step_tokens[-1]:,}" if len(run.rows) else "-", _describe_device(run),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if started else "-"]


def phase_seconds(run: Run) -> dict[str, float]:
    """Return rank 0's mean seconds per steady step in each phase; empty if a run did not record them."""
    rows = steady_steps(run.rows)
    names = {phase: f"{phase}_s" for phase in (*PHASES, OTHER)}
    if not len(rows) or not all(math.isfinite(value) for name in names.values() for value in rows.column(name)):
        return {}
    return {phase: statistics.fmean(rows.column(name)) for phase, name in names.items()}


def remarks(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return (name of the run, remark) pairs: the state of each run, then its notes."""
    return [(run.name, text) for run in runs for text in (run.state, *run.notes)]


def _short(value: float | None) -> str:
    return format_number(value) if value is not None else "-"


def _fixed(value: float | None) -> str:
    return f"{value:.4f}" if value is not None else "-"


_IGNORED = {"run_dir", "resume", "track", "profile", "trace_steps", "log_every", "save_every", "keep_last",
            "eval_every", "sample_every", "sample_tokens", "prompt", "nvme_path", "tokenizer", "precision",
            "global_batch", "micro_batch", "accumulation", "ds_config", "device"}
"""Options that do not change the curves, or whose outcome is compared instead."""
_MAX_NAMES = 5
_DERIVED = ("default", "tenth", "derived")
"""Origins of values that the user did not choose; see `ezpz_llm.training.layout.value_source`."""


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the chosen options and the outcomes that differ, with each run's value as text.

    A difference between curves has a single cause only if a single setting differs. A missing value is "-".
    """
    if len(runs) < 2:
        return {}
    differing = {}
    for tables, is_relevant in (([_options(run) for run in runs], _is_chosen),
                                ([_outcomes(run) for run in runs], None)):
        for name in dict.fromkeys(name for table in tables for name in table):
            values = [table.get(name, "-") for table in tables]
            if len(set(values)) > 1 and (is_relevant is None or any(is_relevant(run, name) for run in runs)):
                differing[name] = values
    return differing


def _is_chosen(run: Run, name: str) -> bool:
    """Return True if the user chose this option; False if the run's version did not have it."""
    has_option, source = name in (run.record.config or {}), (run.record.sources or {}).get(name)
    return has_option and not (source and source.origin in _DERIVED)


def comparison_sentence(differing: dict[str, list[str]]) -> str:
    """Return a sentence that says if a difference between the curves can have a single cause."""
    if not differing:
        return "The runs have the same settings."
    if len(differing) == 1:
        return f"The runs differ in one setting: {next(iter(differing))}."
    names = [*list(differing)[:_MAX_NAMES],
             *([f"{len(differing) - _MAX_NAMES} more"] if len(differing) > _MAX_NAMES else [])]
    return (f"warning: the runs differ in {len(differing)} settings ({', '.join(names)}), so a difference between "
            "their curves has no single cause.")


def _layout_text(run: Run) -> str:
    """Return the layout's name and degrees; "-" if unknown."""
    if not run.layout.layout:
        return run.record.settings.ds_config or "-"
    layout, batch = run.layout.degrees, run.layout.batch
    sizes = {"dp": batch.dp_size if batch else 1, "tp": layout.tp, "pp": layout.pp, "sp": layout.sp}
    degrees = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    name = layout.name or "-"
    return f"{name} ({degrees})" if degrees else name


def _describe_batch(run: Run) -> str:
    """Return the global batch and its factors."""
    batch = run.layout.batch
    if batch is None:
        return "-"
    return (f"{batch.global_batch} ({batch.micro_batch} x {batch.accumulation} micro-steps x {batch.dp_size}"
            " ranks)")


def _describe_device(run: Run) -> str:
    """Return the name or type of the ranks' device."""
    device = (run.record.environment or Environment()).device
    return device.name or device.type or "-"


def _options(run: Run) -> dict[str, str]:
    return _as_text({name: value for name, value in (run.record.config or {}).items()
                     if name not in _IGNORED})


def _outcomes(run: Run) -> dict[str, str]:
    versions, data = (run.record.environment or Environment()).versions, run.record.data or Data()
    return _as_text({
        "data": f"{data.tokenizer or '-'} {(data.fingerprint or '-')[:12]}",
        "precision": run.record.precision,
        "batch": run.layout.batch and run.layout.batch.global_batch,
        "layout": _layout_text(run),
        "ranks": run.world_size,
        "device": _describe_device(run),
        **{f"{name} version": versions.get(name) for name in ("torch", "deepspeed", "ezpz_llm")},
    })


def _as_text(settings: dict[str, Any]) -> dict[str, str]:
    return {name: "-" if value is None else str(value) for name, value in flatten_settings(settings).items()}
