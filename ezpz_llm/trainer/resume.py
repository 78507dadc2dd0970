"""Resume decision: continue a run, begin anew, or nothing left to do; and the settings (imports no torch).

The command of a job that is queued again is the same each time: how far its run has come is found out here.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError
from ezpz_llm.checkpoint.manifest import read_state
from ezpz_llm.checkpoint.retention import find, has_any
from ezpz_llm.layout.value_source import DEFAULT, Origin, ValueSource
from ezpz_llm.rundir import RUN_DIR_VARIABLE, RunDir, read_json as read_plain_json, read_record
from ezpz_llm.trainer.config import FIELDS
from ezpz_llm.trainer.options import Options

AUTO = "auto"
"""Instead of a run: the run directory's own, if it has saved anything."""

_NOT_CHOSEN = (Origin.DEFAULT, Origin.RECIPE, Origin.FINE_TUNING)
"""Sources of values that nobody chose for this run."""
_FOLLOWED = (Origin.DERIVED, Origin.TENTH, Origin.WEIGHTS)
"""Sources of values that follow again from the others."""
_OF_ONE_START = {"resume", "run_dir", "device", "trace_steps"}
_BATCH = ("global_batch", "micro_batch", "accumulation")
_DEGREES = ("tp", "pp", "sp")


@dataclass(frozen=True)
class ResumePoint:
    """Start of a run: its first step, or where it resumes. `options` are complete; `notes` say what is not obvious.

    `complete` says that there is nothing left to do; `puts_aside` that the run directory holds the metrics of an
    attempt which saved nothing.
    """

    options: Options
    notes: tuple[str, ...] = ()
    complete: str | None = None
    puts_aside: bool = False


def find_resume_point(options: Options) -> ResumePoint:
    """Decide how the run begins, from what stands in its directory or the one that `--resume` names.

    Raises:
        UserError: `--resume` names neither a run nor a checkpoint, or one that is damaged.
    """
    config = options.config
    if config.resume is None:
        return ResumePoint(options)
    own = config.run_dir or os.environ.get(RUN_DIR_VARIABLE)
    where = own if config.resume == AUTO else config.resume
    if where is None:
        note = "--resume auto looks into --run-dir, and none is named: the run begins in a new directory"
        return ResumePoint(options.set(ValueSource(Origin.FILE, "--resume auto"), resume=None), (note,))
    run = _run_of(Path(where))
    record = read_record(run)
    is_own = own is not None and Path(own).resolve() == run.path.resolve()
    if has_any(where):
        options = _with_settings(options, run, record).set(options.sources["resume"], resume=str(where))
        newest = find(where)
        step, steps = read_state(newest)["step"], options.config.steps
        complete = f"{where} is complete, step {step} of {steps}: nothing is left to do" if step == steps else None
        return ResumePoint(options, complete=complete)
    if not record and config.resume != AUTO:
        find(where)  # says what is wrong
    options = _with_settings(options, run, record).set(options.sources["resume"], resume=None)
    if is_own and options.config.save_every < 0 and record.get("steps") == options.config.steps:
        return ResumePoint(options, complete=f"{where} is complete, without checkpoints: nothing is left to do")
    has_begun = run.metrics.exists()
    notes: tuple[str, ...] = ()
    if has_begun or config.resume != AUTO:
        notes = (f"{where} ended before its first checkpoint: the run begins anew",)
    return ResumePoint(options, notes, puts_aside=has_begun and is_own)


def put_aside(run_dir: RunDir) -> Path:
    """Rename the metrics of an attempt that saved nothing, so that nothing is lost; their new place."""
    place = run_dir.metrics.with_name(f"metrics-before-{time.time():.0f}.jsonl")
    run_dir.metrics.rename(place)
    return place


def _run_of(where: Path) -> RunDir:
    """The run directory that a checkpoint's folder, or the folder of all of them, is part of."""
    if where.parent.name == "checkpoints":
        return RunDir(where.parent.parent)
    return RunDir(where.parent if where.name == "checkpoints" else where)


def _with_settings(options: Options, run: RunDir, record: dict[str, Any]) -> Options:
    """The run's own settings, except what was chosen beside `--resume`."""
    saved = record.get("config") or {}
    sources = ValueSource.read_all(record.get("sources") or {})
    chosen = {name for name in options.sources if options.origin(name) not in _NOT_CHOSEN}
    taken = {name: value for name, value in saved.items()
             if name in FIELDS and name not in chosen | _OF_ONE_START
             and (name not in sources or sources[name].origin not in _FOLLOWED)}
    if "ds_config" in chosen and options.config.ds_config != saved.get("ds_config"):
        taken = {name: value for name, value in taken.items() if name not in _DEGREES}
    taken = {**{name: value for name, value in taken.items() if name not in _BATCH}, **_batch(run, chosen)}
    for name, value in taken.items():
        options = options.set(ValueSource.of_run(run.path, sources.get(name, DEFAULT)), **{name: value})
    return options


def _batch(run: RunDir, chosen: set[str]) -> dict[str, int]:
    """The run's batch: the global one holds on any number of ranks, the micro batch is the largest."""
    try:
        batch = (read_plain_json(run.layout) or {}).get("batch") or {}
    except UserError:
        return {}
    given = chosen.intersection(_BATCH)
    taken = {}
    if "global_batch" not in given and len(given) < 2:
        taken["global_batch"] = batch.get("global_batch")
    if not given & {"micro_batch", "accumulation"}:
        taken["micro_batch"] = batch.get("micro_batch")
    return {name: number for name, number in taken.items() if number is not None}
