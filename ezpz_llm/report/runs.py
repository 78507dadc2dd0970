"""A run directory as a report sees it: its steps with their tokens and hours, and how the run stands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from ezpz_llm.errors import UserError
from ezpz_llm.observe.history import finite, spread, steady
from ezpz_llm.rundir import RunDir, read_json, read_lines, read_record

_SILENT_AFTER_S = 600.0
"""Besides three times what it took to write the last lines: an evaluation or a save may come between."""


@dataclass(frozen=True)
class Run:
    """One run directory, read once.

    `rows` are the lines of metrics.jsonl, one a step in order; `name` tells the run from the others of a report;
    `state` says in words how it stands or ended; `notes` what a reader of its curves should know.
    """

    path: Path
    name: str
    record: dict[str, Any]
    layout: dict[str, Any]
    rows: list[dict[str, Any]]
    state: str
    notes: tuple[str, ...]

    def column(self, metric: str) -> list[float | None]:
        """A metric of every step, None where it is missing or not a number."""
        values = [row.get(metric) for row in self.rows]
        return [value if finite(value) else None for value in values]

    @cached_property
    def step_tokens(self) -> list[int]:
        """Tokens of each step: they change when a run is resumed with another batch."""
        return [round((row.get("tokens_per_second") or 0) * (row.get("step_time_s") or 0)) for row in self.rows]

    @cached_property
    def tokens(self) -> list[float]:
        """Tokens consumed after each step. Steps before the first line are taken to have been as large as it."""
        before = (self.rows[0]["step"] - 1) * self.step_tokens[0] if self.rows else 0
        return [before + done for done in accumulate(self.step_tokens)]

    @cached_property
    def hours(self) -> list[float]:
        """Hours of training after each step: step times alone, of the steps that have a line."""
        return list(accumulate((row.get("step_time_s") or 0.0) / 3600 for row in self.rows))

    def median(self, metric: str) -> float | None:
        """The median of a metric over the steady steps, None where it was never measured."""
        values = [row[metric] for row in steady(self.rows) if finite(row.get(metric))]
        return spread(values).median if values else None

    @property
    def last_loss(self) -> float | None:
        """The mean over the last tenth of the steps, at most 50; None if one of them is not a number."""
        losses = [row.get("loss") for row in self.rows[-max(1, min(50, len(self.rows) // 10)) :]]
        return sum(losses) / len(losses) if losses and all(map(finite, losses)) else None

    @property
    def validation(self) -> tuple[int, float] | None:
        """The last step that evaluated, and its loss."""
        found = [(row["step"], row["val_loss"]) for row in self.rows if finite(row.get("val_loss"))]
        return found[-1] if found else None

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
    record = read_record(run_dir)
    if not record and not run_dir.metrics.exists():
        inside = sorted(path.glob("*/metrics.jsonl")) if path.is_dir() else []
        raise UserError("this is no run directory: it has neither run.json nor metrics.jsonl", where=str(path),
                        instead=f"ezpz-llm report {inside[0].parent}" if inside else None)
    rows = _rows(run_dir)
    layout = read_json(run_dir.layout) or {}
    written = run_dir.metrics.stat().st_mtime if rows else run_dir.record.stat().st_mtime
    run = Run(path, name, record, layout, rows, _state(record, rows, now - written), ())
    return replace(run, notes=tuple(_notes(run)))


def _rows(run_dir: RunDir) -> list[dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    try:
        for row in read_lines(run_dir.metrics):
            rows[row["step"]] = row  # of a step written twice, the later attempt's line
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"after {len(rows)} steps comes a line that is none of a run's ({error})",
                        where=str(run_dir.metrics), instead="remove that line") from error
    return [rows[step] for step in sorted(rows)]


def _names(places: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart, all of equally many parts."""
    for parts in range(1, max((len(path.parts) for path in places), default=1)):
        names = ["/".join(path.parts[-parts:]) for path in places]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in places]


def _state(record: dict[str, Any], rows: Sequence[dict[str, Any]], silent_s: float) -> str:
    """How the run stands. What run.json says of an end counts only if it is of the latest attempt."""
    planned = (record.get("config") or {}).get("steps")
    last = rows[-1]["step"] if rows else 0
    reached = f"step {last} of {planned}" if planned else f"step {last}"
    ended = record.get("exit") or {}
    if ended.get("ended", 0) < (record.get("launch") or {}).get("started", 0):
        ended = {}
    if ended.get("code"):
        return f"failed after {reached}: {ended.get('cause')} (code {ended['code']})"
    if record.get("stopped") and record.get("steps") == last:
        return f"stopped after {reached}: {record['stopped']}"
    if planned and last >= planned:
        return f"finished, {reached}"
    if ended:
        return f"ended after {reached}: {ended.get('cause')}"
    lately = [row.get("step_time_s") or 0.0 for row in rows[-(record.get("config") or {}).get("log_every", 50) :]]
    if silent_s < _SILENT_AFTER_S + 3 * sum(lately):
        return f"running, {reached} written {max(0, silent_s):.0f} s ago"
    return f"no word of an end; {reached} was written {_ago(silent_s)} ago"


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 60:.0f} minutes"


def _notes(run: Run) -> list[str]:
    notes, rows = [], run.rows
    if not rows:
        return ["no step has been written yet"]
    if rows[0]["step"] > 1:
        origin = (run.record.get("config") or {}).get("resume")
        resumed = f": it goes on from {origin}" if origin else ""
        notes.append(f"its lines begin at step {rows[0]['step']}{resumed}; "
                     "steps before them are taken to have had as many tokens each, and no time")
    changes = [(row["step"], was, now) for row, (was, now) in zip(rows[1:], pairwise(run.step_tokens), strict=True)
               if was != now]
    notes += [f"from step {step} on a step has {now:,} tokens, before {was:,}" for step, was, now in changes[:3]]
    if len(changes) > 3:
        notes.append(f"the tokens of a step change {len(changes) - 3} more times")
    if missing := sum(after["step"] - before["step"] - 1 for before, after in pairwise(rows)):
        notes.append(f"{missing} steps between the first and the last have no line")
    bad = [row["step"] for row in rows if not finite(row.get("loss"))]
    if bad:
        notes.append(f"the loss is not a number at {len(bad)} step(s), first at step {bad[0]}")
    return notes
