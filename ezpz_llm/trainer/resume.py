"""Resume decision: continue a run, begin anew, or nothing left to do; and the settings (imports no torch).

The command of a job that is queued again is the same each time: how far its run has come is found out here.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, shown, user_path
from ezpz_llm.checkpoint.manifest import read_state
from ezpz_llm.checkpoint.retention import find, has_any
from ezpz_llm.layout.batch import option_of
from ezpz_llm.layout.value_source import DEFAULT, Origin, ValueSource
from ezpz_llm.rundir import RUN_DIR_VARIABLE, RunDir, read_json as read_plain_json, read_record
from ezpz_llm.trainer.config import FIELDS
from ezpz_llm.trainer.options import Options
from ezpz_llm.trainer.resume_data import check_data

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
        UserError: `--resume` names neither a run nor a checkpoint, one that is damaged, or a complete run beside
            options that it did not have.
    """
    config = options.config
    if config.resume is None:
        return ResumePoint(options)
    own = config.run_dir or os.environ.get(RUN_DIR_VARIABLE)
    where = own if config.resume == AUTO else config.resume
    if where is None:
        note = "--resume auto looks into --run-dir, and none is named: the run begins in a new directory"
        return ResumePoint(options.set(ValueSource(Origin.FILE, "--resume auto"), resume=None), (note,))
    run = run_of(Path(where))
    record = read_record(run)
    given = options
    is_own = own is not None and Path(own).resolve() == run.path.resolve()
    if has_any(where):
        options = _with_settings(options, run, record).set(options.sources["resume"], resume=str(where))
        state, steps = read_state(find(where)), options.config.steps
        step = state["step"]
        if step != steps:
            check_data(options, _chosen(given), run, record, state)
            return ResumePoint(options)
        _check_same(given, run, record, step)
        return ResumePoint(options, complete=f"{where} is complete, step {step} of {steps}: nothing is left to do")
    if not record and config.resume != AUTO:
        find(where)  # says what is wrong
    options = _with_settings(options, run, record).set(options.sources["resume"], resume=None)
    if is_own and options.config.save_every < 0 and record.get("steps") == options.config.steps:
        _check_same(given, run, record, options.config.steps)
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


def _check_same(given: Options, run: RunDir, record: dict[str, Any], step: int) -> None:
    """Raise a UserError if options differ from those of a complete run, where they would be ignored."""
    saved = record.get("config") or {}
    sources = ValueSource.read_all(record.get("sources") or {})
    differing = []
    for name, value in asdict(given.config).items():
        if name in {*_OF_ONE_START, "steps"} or name not in saved or _is_same(value, saved[name]):
            continue
        before, origin = sources.get(name, DEFAULT), given.origin(name)
        # A ds_config, other settings and fewer steps change what a file or a preset says, in the same way for the
        # same command; nothing changes what is typed.
        overruled = before != given.sources[name] and (
            before.origin in _FOLLOWED or "in proportion to" in before.detail
            or str(saved.get("ds_config")) in before.detail)
        if origin is Origin.COMMAND_LINE or (origin in (Origin.FILE, Origin.PRESET) and not overruled):
            differing.append(name)
    if differing:
        values = (f"{option_of(name)} {shown(getattr(given.config, name))} is not its {shown(saved[name])}"
                  for name in differing)
        raise UserError(f"the run is complete, step {step} of {step}, and {', '.join(values)}",
                        where=f"{run.path}; {', '.join(given.where(name) for name in differing)}",
                        instead=f"--steps N with more than {step} to continue training, or leave out "
                                f"{', '.join(map(option_of, differing))}")


def _is_same(value: Any, saved: Any) -> bool:
    """Return True for equal values, and for two spellings of one path."""
    if isinstance(value, str) and isinstance(saved, str):
        return value == saved or user_path(value).resolve() == user_path(saved).resolve()
    return bool(value == saved)


def run_of(where: Path) -> RunDir:
    """The run directory that a checkpoint's folder, or the folder of all of them, is part of."""
    if where.parent.name == "checkpoints":
        return RunDir(where.parent.parent)
    return RunDir(where.parent if where.name == "checkpoints" else where)


def _with_settings(options: Options, run: RunDir, record: dict[str, Any]) -> Options:
    """The run's own settings, except what was chosen beside `--resume`."""
    saved = record.get("config") or {}
    sources = ValueSource.read_all(record.get("sources") or {})
    chosen = _chosen(options)
    taken = {name: value for name, value in saved.items()
             if name in FIELDS and name not in chosen | _OF_ONE_START
             and (name not in sources or sources[name].origin not in _FOLLOWED)}
    if "ds_config" in chosen and options.config.ds_config != saved.get("ds_config"):
        taken = {name: value for name, value in taken.items() if name not in _DEGREES}
    taken = {**{name: value for name, value in taken.items() if name not in _BATCH}, **_batch(run, chosen)}
    for name, value in taken.items():
        options = options.set(ValueSource.of_run(run.path, sources.get(name, DEFAULT)), **{name: value})
    return options


def _chosen(options: Options) -> set[str]:
    """Names of the settings that were chosen for this run."""
    return {name for name in options.sources if options.origin(name) not in _NOT_CHOSEN}


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
