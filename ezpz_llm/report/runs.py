"""Run directories as a report sees them: their steps, state and results, and the settings in which they differ."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.base import UserError, counted
from ezpz_llm.observe.history import OTHER, PHASES, History, last_loss, read_history, steady
from ezpz_llm.observe.throughput import short_number
from ezpz_llm.observe.trackers import flat
from ezpz_llm.rundir import RunDir, is_interrupted, read_layout, read_record

_SILENT_AFTER_S = 600.0
"""Besides three times what it took to write the last lines: an evaluation or a save may come between."""


_MOST_TOKENS = 2**53
"""Of one step, as far as a float counts: more is a damaged line."""


@dataclass(frozen=True)
class Run:
    """One run directory, read once.

    `rows` are the lines of metrics.jsonl by columns; `name` tells the run from the others of a report; `state`
    says in words how it stands or ended; `notes` what a reader of its curves should know.
    """

    path: Path
    name: str
    record: dict[str, Any]
    layout: dict[str, Any]
    rows: History
    state: str
    notes: tuple[str, ...]

    def column(self, metric: str) -> np.ndarray:
        """A metric of every step, NaN where it is missing or not a number."""
        return self.rows.column(metric)

    @cached_property
    def step_tokens(self) -> np.ndarray:
        """Tokens of each step: they change when a run is resumed with another batch."""
        tokens = np.nan_to_num(self.column("tokens_per_second") * self.column("step_time_s"), posinf=0, neginf=0)
        return np.rint(tokens.clip(0, _MOST_TOKENS)).astype(np.int64)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens consumed after each step. Steps before the first line are taken to have been as large as it."""
        before = (float(self.rows.steps[0]) - 1) * self.step_tokens[0] if len(self.rows) else 0
        return before + np.cumsum(self.step_tokens, dtype=float)

    @cached_property
    def hours(self) -> np.ndarray:
        """Hours of training after each step: step times alone, of the steps that have a line."""
        return np.cumsum(np.nan_to_num(self.column("step_time_s"), posinf=0, neginf=0)) / 3600

    def median(self, metric: str) -> float | None:
        """The median of a metric over the steady steps, None where it was never measured."""
        values = steady(self.column(metric))
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None

    @property
    def last_loss(self) -> float | None:
        """The mean over the last tenth of the steps, at most 50; None if one of them is not a number."""
        return last_loss(self.rows)

    @property
    def validation(self) -> tuple[int, float] | None:
        """The last step that evaluated, and its loss."""
        found = np.flatnonzero(np.isfinite(self.column("val_loss")))
        return (int(self.rows.steps[found[-1]]), float(self.column("val_loss")[found[-1]])) if len(found) else None

    @property
    def world_size(self) -> int | None:
        """Its ranks."""
        return (self.record.get("environment") or self.record.get("launch") or {}).get("world_size")


def load_runs(paths: Sequence[Path], now: float | None = None) -> list[Run]:
    """Read the run directories, each once however often it is named; names are as short as they can be.

    Raises:
        UserError: a path is no run directory, or its files cannot be read.
    """
    places = list(dict.fromkeys(path.absolute() for path in paths))
    now = time.time() if now is None else now
    return [_load(path, name, now) for path, name in zip(places, _names(places), strict=True)]


def _load(path: Path, name: str, now: float) -> Run:
    run_dir = RunDir(path)
    run_dir.check_there()
    record = read_record(run_dir)
    if not record and not run_dir.metrics.exists():
        inside = sorted(path.glob("*/metrics.jsonl"))
        raise UserError("this is not a run directory: it has neither run.json nor metrics.jsonl", where=str(path),
                        instead=f"ezpz-llm report {inside[0].parent}" if inside else None)
    rows = read_history(run_dir)
    written = run_dir.metrics.stat().st_mtime if len(rows) else run_dir.record.stat().st_mtime
    return _noted(path, name, record, rows, now - written)


def run_of(run_dir: RunDir, rows: History) -> Run:
    """The run that this process has just ended, of which it has the lines already."""
    return _noted(run_dir.path, run_dir.path.name, read_record(run_dir), rows, 0.0)


def _noted(path: Path, name: str, record: dict[str, Any], rows: History, silent_s: float) -> Run:
    layout = read_layout(RunDir(path).layout) or {}
    is_resumable = (RunDir(path).checkpoints / "latest").exists()
    run = Run(path, name, record, layout, rows, _state(record, rows, silent_s, is_resumable=is_resumable), ())
    return replace(run, notes=tuple(_notes(run)))


def _names(places: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart, all of equally many parts."""
    for parts in range(1, max((len(path.parts) for path in places), default=1)):
        names = ["/".join(path.parts[-parts:]) for path in places]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in places]


def _state(record: dict[str, Any], rows: History, silent_s: float, *, is_resumable: bool) -> str:
    """Return the state of the run. What run.json says of an end counts only if it is of the latest attempt."""
    planned = (record.get("config") or {}).get("steps")
    last = int(rows.steps[-1]) if len(rows) else 0
    reached = f"step {last} of {planned}" if planned else f"step {last}"
    ended = record.get("exit") or {}
    if ended.get("ended", 0) < (record.get("launch") or {}).get("started", 0):
        ended = {}
    reason = record.get("stopped") if record.get("steps") == last else None
    if ended.get("code") and not (is_interrupted(ended) and (reason or is_resumable)):
        return f"failed after {reached}: {ended.get('cause')} (code {ended['code']})"
    if reason or ended.get("code"):
        return f"stopped after {reached}: {reason or ended.get('cause')}"
    if planned and last >= planned:
        return f"finished, {reached}"
    if ended:
        return f"ended after {reached}: {ended.get('cause')}"
    lately = rows.column("step_time_s")[-max(1, (record.get("config") or {}).get("log_every", 50)):]
    if silent_s < _SILENT_AFTER_S + 3 * np.nansum(lately):
        return f"running, {reached} written {max(0, silent_s):.0f} s ago"
    return f"no word of an end; {reached} was written {_ago(silent_s)} ago"


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
    first, steps = int(rows.steps[0]), rows.steps
    if first > 1:
        origin = (run.record.get("config") or {}).get("resume")
        resumed = f": it continues {origin}" if origin else ""
        yield (f"its lines begin at step {first}{resumed}; "
               "steps before them are taken to have had as many tokens each, and no time")
    changes = np.flatnonzero(np.diff(run.step_tokens)) + 1
    for i in changes[:3]:
        yield f"from step {steps[i]} on a step has {run.step_tokens[i]:,} tokens, before {run.step_tokens[i - 1]:,}"
    if len(changes) > 3:
        yield f"the tokens of a step change {len(changes) - 3} more times"
    if missing := int(steps[-1]) - first + 1 - len(rows):
        yield f"{missing} steps between the first and the last have no line"
    skipped = steps[rows.column("skipped") > 0]
    if len(skipped):
        were = "was" if len(skipped) == 1 else "were"
        yield f"{counted(len(skipped), 'step')} {were} skipped and changed nothing, first step {skipped[0]}"
    bad = steps[~np.isfinite(rows.column("loss"))]
    if len(bad):
        yield f"the loss is not a number at {counted(len(bad), 'step')}, first at step {bad[0]}"


# Rows of a report: results, settings, and those in which runs differ.
RESULTS = ("run", "step", "tokens", "loss", "val loss", "step ms", "tok/s", "tok/s/dev", "MFU")
SETTINGS = ("run", "model", "parameters", "layout", "ranks", "precision", "sequences a step", "tokens a step",
            "device", "started")


def result_row(run: Run) -> list[str]:
    """A row under RESULTS. The loss is the mean over the last tenth of the steps (at most 50)."""
    validation = run.validation
    step_time = run.median("step_time_s")
    reached = (str(run.rows.steps[-1]), short_number(run.tokens[-1])) if len(run.rows) else ("-", "-")
    return [run.name, *reached,
            _fixed(run.last_loss), _fixed(validation[1] if validation else None),
            f"{step_time * 1e3:.1f}" if step_time is not None else "-", _short(run.median("tokens_per_second")),
            _short(run.median("tokens_per_second_per_device")),
            f"{mfu:.1%}" if (mfu := run.median("mfu")) is not None else "-"]


def setting_row(run: Run) -> list[str]:
    """A row under SETTINGS."""
    record = run.record
    started = (record.get("launch") or {}).get("started")
    return [run.name, str((record.get("config") or {}).get("model", "-")), _short(record.get("parameters")),
            describe_layout(run), str(run.world_size or "-"), str(record.get("precision", "-")),
            describe_batch(run), f"{run.step_tokens[-1]:,}" if len(run.rows) else "-", describe_device(run),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if started else "-"]


def phase_seconds(run: Run) -> dict[str, float]:
    """Mean seconds a steady step spends in each phase (rank 0's); empty where a run has no such record."""
    rows = steady(run.rows)
    names = {phase: f"{phase}_s" for phase in (*PHASES, OTHER)}
    if not len(rows) or not all(np.isfinite(rows.column(name)).all() for name in names.values()):
        return {}
    return {phase: float(np.mean(rows.column(name))) for phase, name in names.items()}


def comments(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(run, what to know of it), the state first."""
    return [(run.name, text) for run in runs for text in (run.state, *run.notes)]


def _short(value: float | None) -> str:
    return short_number(value) if value is not None else "-"


def _fixed(value: float | None) -> str:
    return f"{value:.4f}" if value is not None else "-"


# Which settings of several runs differ: a difference between curves has one cause only if one of them does.
_NO_BEARING = {"run_dir", "resume", "track", "profile", "trace_steps", "log_every", "save_every", "keep_last",
               "eval_every", "sample_every", "sample_tokens", "prompt", "nvme_path", "tokenizer", "precision",
               "global_batch", "micro_batch", "accumulation", "ds_config", "device"}
"""Options that leave the curves as they are, or whose outcome is compared in their place."""
_NAMED = 5
_DERIVED = ("default", "a tenth of", "follows from")
"""Beginnings of the sources of values that nobody chose."""


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Settings chosen differently, and what came of others, with each run's value as text ("-" for none)."""
    if len(runs) < 2:
        return {}
    found = {}
    for tables, counts in (([_options(run) for run in runs], _is_chosen), ([_outcomes(run) for run in runs], None)):
        for name in dict.fromkeys(name for table in tables for name in table):
            values = [table.get(name, "-") for table in tables]
            if len(set(values)) > 1 and (counts is None or any(counts(run, name) for run in runs)):
                found[name] = values
    return found


def _is_chosen(run: Run, name: str) -> bool:
    """True if somebody decided on this option; one that the run's version did not have yet was not."""
    known = name in (run.record.get("config") or {})
    return known and not (run.record.get("sources") or {}).get(name, "").startswith(_DERIVED)


def verdict(found: dict[str, list[str]]) -> str:
    """Return in one sentence what differing settings mean for comparing the curves."""
    if not found:
        return "The runs have the same settings."
    if len(found) == 1:
        return f"The runs differ in one setting: {next(iter(found))}."
    names = [*list(found)[:_NAMED], *([f"{len(found) - _NAMED} more"] if len(found) > _NAMED else [])]
    return (f"warning: the runs differ in {len(found)} settings ({', '.join(names)}): what their curves differ in "
            "has no single cause.")


def describe_layout(run: Run) -> str:
    """The layout's name with its degrees, "-" where it is not known."""
    layout = run.layout.get("layout") or {}
    if not layout:
        return str((run.record.get("config") or {}).get("ds_config", "-"))
    sizes = {"dp": (run.layout.get("batch") or {}).get("dp_size", 1),
             **{axis: layout.get(axis, 1) for axis in ("tp", "pp", "sp")}}
    degrees = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    name = layout.get("name", "-")
    return f"{name} ({degrees})" if degrees else name


def describe_batch(run: Run) -> str:
    """Sequences of a step and how they are divided."""
    batch = run.layout.get("batch") or {}
    sizes = [batch.get(name) for name in ("global_batch", "micro_batch", "accumulation", "dp_size")]
    if None in sizes:
        return "-"
    return "{} ({} x {} micro-steps x {} ranks)".format(*sizes)


def describe_device(run: Run) -> str:
    """Return the kind of device that the ranks ran on."""
    device = (run.record.get("environment") or {}).get("device") or {}
    return str(device.get("name") or device.get("type") or "-")


def _options(run: Run) -> dict[str, str]:
    return _as_text({name: value for name, value in (run.record.get("config") or {}).items()
                  if name not in _NO_BEARING})


def _outcomes(run: Run) -> dict[str, str]:
    environment, data = run.record.get("environment") or {}, run.record.get("data") or {}
    versions = environment.get("versions") or {}
    return _as_text({
        "data": f"{data.get('tokenizer', '-')} {str(data.get('fingerprint', '-'))[:12]}",
        "precision": run.record.get("precision"),
        "batch": (run.layout.get("batch") or {}).get("global_batch"),
        "layout": describe_layout(run),
        "ranks": run.world_size,
        "device": describe_device(run),
        **{f"{name} version": versions.get(name) for name in ("torch", "deepspeed", "ezpz_llm")},
    })


def _as_text(settings: dict[str, Any]) -> dict[str, str]:
    return {name: "-" if value is None else str(value) for name, value in flat(settings).items()}
