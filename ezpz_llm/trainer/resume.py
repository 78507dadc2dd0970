"""Decision of `--resume`: continue a run, start over or do nothing; and the run's settings (imports no torch).

A requeued job runs the same command each time, so this module determines how far its run has come.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, shorten_value, user_path
from ezpz_llm.checkpoint.manifest import read_state
from ezpz_llm.checkpoint.retention import find, has_any
from ezpz_llm.layout.batch import option_of
from ezpz_llm.layout.value_source import DEFAULT, Origin, ValueSource
from ezpz_llm.rundir import RUN_DIR_VARIABLE, RunDir, read_json as read_plain_json, read_record
from ezpz_llm.trainer.config import FIELDS
from ezpz_llm.trainer.options import Options
from ezpz_llm.trainer.resume_data import check_data

AUTO = "auto"
"""Value of `--resume` that continues the run directory if it has a checkpoint."""

_NOT_CHOSEN = (Origin.DEFAULT, Origin.RECIPE, Origin.FINE_TUNING)
"""Sources of values that the user did not choose for this run."""
_FOLLOWED = (Origin.DERIVED, Origin.TENTH, Origin.WEIGHTS)
"""Sources of values that are derived again from other settings."""
_OF_ONE_START = {"resume", "run_dir", "device", "trace_steps"}
_BATCH = ("global_batch", "micro_batch", "accumulation")
_DEGREES = ("tp", "pp", "sp")


@dataclass(frozen=True)
class ResumePoint:
    """Starting point of a run: its first step or a checkpoint, with its complete `options`.

    `notes` are for the user. `complete` is a message if nothing is left to do. `renames_old_metrics` is True if the
    run directory holds the metrics of an attempt that saved no checkpoint.
    """

    options: Options
    notes: tuple[str, ...] = ()
    complete: str | None = None
    renames_old_metrics: bool = False


def find_resume_point(options: Options) -> ResumePoint:
    """Find the starting point of the run, from its directory or from what `--resume` names.

    Raises:
        UserError: `--resume` names neither a run nor a checkpoint, or it names a damaged one, or a complete run and
            options differ from those of that run.
    """
    config = options.config
    if config.resume is None:
        return ResumePoint(options)
    own = config.run_dir or os.environ.get(RUN_DIR_VARIABLE)
    where = own if config.resume == AUTO else config.resume
    if where is None:
        note = "--resume auto requires --run-dir to find earlier attempts: the run starts in a new directory"
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
        find(where)  # raises an error that describes the problem
    options = _with_settings(options, run, record).set(options.sources["resume"], resume=None)
    if is_own and options.config.save_every < 0 and record.get("steps") == options.config.steps:
        _check_same(given, run, record, options.config.steps)
        return ResumePoint(options, complete=f"{where} is complete, without checkpoints: nothing is left to do")
    has_begun = run.metrics.exists()
    notes: tuple[str, ...] = ()
    if has_begun or config.resume != AUTO:
        notes = (f"{where} ended before its first checkpoint: the run starts over",)
    return ResumePoint(options, notes, renames_old_metrics=has_begun and is_own)


def rename_old_metrics(run_dir: RunDir) -> Path:
    """Rename the metrics of an attempt that saved no checkpoint; return the new path."""
    path = run_dir.metrics.with_name(f"metrics-before-{time.time():.0f}.jsonl")
    run_dir.metrics.rename(path)
    return path


def _check_same(given: Options, run: RunDir, record: dict[str, Any], step: int) -> None:
    """Raise a UserError if options differ from those of a complete run, which would ignore them."""
    saved = record.get("config") or {}
    sources = ValueSource.read_all(record.get("sources") or {})
    differing = []
    for name, value in asdict(given.config).items():
        if name in {*_OF_ONE_START, "steps"} or name not in saved or _is_same(value, saved[name]):
            continue
        before, origin = sources.get(name, DEFAULT), given.origin(name)
        # The ds_config, derived settings and fewer steps may override the value of a file or preset, and the same
        # command overrides it each time. Nothing overrides an option on the command line.
        overridden = before != given.sources[name] and (
            before.origin in _FOLLOWED or "in proportion to" in before.detail
            or str(saved.get("ds_config")) in before.detail)
        if origin is Origin.COMMAND_LINE or (origin in (Origin.FILE, Origin.PRESET) and not overridden):
            differing.append(name)
    if differing:
        values = (f"{option_of(name)} {shorten_value(getattr(given.config, name))} differs from its "
                  f"{shorten_value(saved[name])}" for name in differing)
        raise UserError(f"the run is complete, step {step} of {step}, and {', '.join(values)}",
                        where=f"{run.path}; {', '.join(given.where(name) for name in differing)}",
                        instead=f"--steps N with N above {step} to continue training, or omit "
                                f"{', '.join(map(option_of, differing))}")


def _is_same(value: Any, saved: Any) -> bool:
    """Return True for equal values, and for two spellings of a path."""
    if isinstance(value, str) and isinstance(saved, str):
        return value == saved or user_path(value).resolve() == user_path(saved).resolve()
    return bool(value == saved)


def run_of(where: Path) -> RunDir:
    """Return the run directory of a checkpoint, of a checkpoints folder, or itself."""
    if where.parent.name == "checkpoints":
        return RunDir(where.parent.parent)
    return RunDir(where.parent if where.name == "checkpoints" else where)


def _with_settings(options: Options, run: RunDir, record: dict[str, Any]) -> Options:
    """Set the options to the run's settings, except those that the user chose in addition to `--resume`."""
    saved = record.get("config") or {}
    sources = ValueSource.read_all(record.get("sources") or {})
    chosen = _chosen(options)
    settings = {name: value for name, value in saved.items()
                if name in FIELDS and name not in chosen | _OF_ONE_START
                and (name not in sources or sources[name].origin not in _FOLLOWED)}
    if "ds_config" in chosen and options.config.ds_config != saved.get("ds_config"):
        settings = {name: value for name, value in settings.items() if name not in _DEGREES}
    settings = {**{name: value for name, value in settings.items() if name not in _BATCH}, **_batch(run, chosen)}
    for name, value in settings.items():
        options = options.set(ValueSource.of_run(run.path, sources.get(name, DEFAULT)), **{name: value})
    return options


def _chosen(options: Options) -> set[str]:
    """Return the names of the settings that the user chose for this run."""
    return {name for name in options.sources if options.origin(name) not in _NOT_CHOSEN}


def _batch(run: RunDir, chosen: set[str]) -> dict[str, int]:
    """Return the run's batch: its global batch on any number of ranks, its micro batch as the upper limit."""
    try:
        batch = (read_plain_json(run.layout) or {}).get("batch") or {}
    except UserError:
        return {}
    given = chosen.intersection(_BATCH)
    sizes = {}
    if "global_batch" not in given and len(given) < 2:
        sizes["global_batch"] = batch.get("global_batch")
    if not given & {"micro_batch", "accumulation"}:
        sizes["micro_batch"] = batch.get("micro_batch")
    return {name: number for name, number in sizes.items() if number is not None}
