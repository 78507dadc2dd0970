"""Handling of `--resume`: continue, start over or do nothing, and restore settings (imports no torch).

A requeued job runs the same command each time, so this module determines how far the run has progressed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, is_own, shorten_value, user_path
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir
from ezpz_llm.core.rundir.layout_record import read_layout_record
from ezpz_llm.core.rundir.records import RunRecord, read_record
from ezpz_llm.training.checkpoint.retention import find, has_checkpoint
from ezpz_llm.training.checkpoint.state import read_state
from ezpz_llm.training.hf.source import find_checkpoint
from ezpz_llm.training.layout.batch import option_of
from ezpz_llm.training.layout.value_source import DEFAULT, FROM_DS_CONFIG, Origin, ValueSource, read_sources
from ezpz_llm.training.trainer.checkpoint_identity import check_origin
from ezpz_llm.training.trainer.config import FIELDS
from ezpz_llm.training.trainer.options import Options
from ezpz_llm.training.trainer.recorded_settings import recorded_settings
from ezpz_llm.training.trainer.resume_data import check_data

AUTO = "auto"
"""Value of `--resume` that continues the run directory if it has a checkpoint."""

_NOT_FROM_USER = (Origin.DEFAULT, Origin.RECIPE, Origin.FINE_TUNING)
"""Origins of values that the user did not choose for this run."""
_REDERIVED = (Origin.DERIVED, Origin.TENTH, Origin.WEIGHTS)
"""Origins of values that are not restored, but derived again from other settings."""
_PER_ATTEMPT = {"resume", "run_dir", "device", "trace_steps"}
"""Settings of a single attempt, which are not restored."""
_BATCH = ("global_batch", "micro_batch", "accumulation")
_OF_LAYOUT = ("tp", "pp", "sp", "nvme_path")
"""Settings that are not restored under another ds_config. Only layouts that offload to files accept `nvme_path`."""


@dataclass(frozen=True)
class ResumePoint:
    """Starting point of a run: its first step or a checkpoint, with restored `options`.

    `notes` are for the user. If nothing is left to do, `complete` is a message that says so. `renames_old_metrics`
    is True if the run directory holds the metrics of an attempt that saved no checkpoint.
    """

    options: Options
    notes: tuple[str, ...] = ()
    complete: str | None = None
    renames_old_metrics: bool = False


def find_resume_point(options: Options) -> ResumePoint:
    """Find the starting point of the run, in its directory or in the path of `--resume`.

    Raises:
        UserError: `--resume` names neither a run nor a checkpoint; the checkpoint is damaged; the run used other
            data; the run has no checkpoint, and was resumed from one that is gone; or the run is complete, and
            options differ from its own.
    """
    config = options.config
    if config.resume is None:
        return ResumePoint(options)
    own_dir = config.run_dir or os.environ.get(RUN_DIR_VARIABLE)
    target = own_dir if config.resume == AUTO else config.resume
    if target is None:
        note = "--resume auto requires --run-dir to find earlier attempts: the run starts in a new directory"
        return ResumePoint(options.set(ValueSource(Origin.FILE, "--resume auto"), resume=None), (note,))
    run = run_of(Path(target))
    record = read_record(run)
    given = options
    is_own = own_dir is not None and Path(own_dir).resolve() == run.path.resolve()
    is_saved = has_checkpoint(target)
    if is_saved:
        checkpoint_folder = find(target)
        check_origin(checkpoint_folder, read_state(checkpoint_folder))
    if not is_saved and config.resume != AUTO:
        if Path(target) != run.path or not run.record.exists():
            find_checkpoint(Path(target), "--resume")  # raises an error that describes the problem
        if record.config is None:
            raise UserError(f"the run in {target} ended before it recorded its settings", where="--resume",
                            instead="repeat the command that started that run")
    options = _with_settings(options, run, record).set(options.sources["resume"], resume=None)
    steps = options.config.steps
    if is_own and not is_saved and options.config.save_every < 0 and record.steps == steps:
        _check_unchanged(given, run, record, steps)
        return ResumePoint(options, complete=f"{target} is complete, without checkpoints: nothing is left to do")
    checkpoint = target if is_saved else _parent_checkpoint(run, record)
    if checkpoint is None:
        has_begun = run.metrics.exists()
        note = f"{target} ended before its first checkpoint: the run starts over"
        return ResumePoint(options, (note,) if has_begun or config.resume != AUTO else (),
                           renames_old_metrics=has_begun and is_own)
    options = options.set(given.sources["resume"], resume=str(checkpoint))
    state = read_state(find(checkpoint))
    if is_saved and state.step == steps:
        _check_unchanged(given, run, record, steps)
        message = f"{target} is complete, step {steps} of {steps}: nothing is left to do"
        return ResumePoint(options, complete=message)
    check_data(options, _chosen(given), run, record, state)
    note = f"{target} ended before its first checkpoint: the run resumes from {checkpoint}, as that run did"
    return ResumePoint(options, () if is_saved else (note,))


def _parent_checkpoint(run: RunDir, record: RunRecord) -> str | None:
    """Return the path that a run without checkpoints was resumed from; None if it began at step 1.

    Raises:
        UserError: there is no checkpoint at that path.
    """
    parent = record.settings.resume
    if parent is not None and not has_checkpoint(parent):
        raise UserError(f"the run was resumed from {parent}, where no checkpoint is left, and saved none itself",
                        where=f"--resume {run.path}",
                        instead=f"restore {parent}, or start a new run in another --run-dir without --resume")
    return parent


def _check_unchanged(given: Options, run: RunDir, record: RunRecord, step: int) -> None:
    """Raise a UserError if options differ from those of a complete run, since they would be ignored."""
    saved = record.config or {}
    sources = read_sources(record.sources)
    differing = []
    for name, value in recorded_settings(given.config).items():
        if name in {*_PER_ATTEMPT, "steps"} or name not in saved or _is_same(value, saved[name]):
            continue
        before, origin = sources.get(name, DEFAULT), given.origin(name)
        # A value of a file or preset may have been overridden by the ds_config, a derived setting or fewer steps,
        # as it would be again by the same command. Nothing overrides an option on the command line.
        overridden = before != given.sources[name] and (
            before.origin in (*_REDERIVED, *FROM_DS_CONFIG) or before.scaled_to is not None)
        if origin is Origin.COMMAND_LINE or (origin in (Origin.FILE, Origin.PRESET) and not overridden):
            differing.append(name)
    if differing:
        values = (f"{option_of(name)} {shorten_value(getattr(given.config, name))} differs from the run's "
                  f"{shorten_value(saved[name])}" for name in differing)
        raise UserError(f"the run is complete, step {step} of {step}, and {', '.join(values)}",
                        where=f"{run.path}; {', '.join(given.where(name) for name in differing)}",
                        instead=f"pass --steps N with N above {step} to continue training, or omit "
                                f"{', '.join(map(option_of, differing))}")


def _is_same(value: Any, saved: Any) -> bool:
    """Return True for equal values, and for two spellings of the same path."""
    if isinstance(value, str) and isinstance(saved, str):
        return value == saved or user_path(value).resolve() == user_path(saved).resolve()
    return bool(value == saved)


def run_of(target: Path) -> RunDir:
    """Return the run directory of a checkpoint or checkpoints folder, or of the run directory itself."""
    if target.parent.name == "checkpoints":
        return RunDir(target.parent.parent)
    return RunDir(target.parent if target.name == "checkpoints" else target)


def _with_settings(options: Options, run: RunDir, record: RunRecord) -> Options:
    """Restore the run's settings, except those that the user chose in addition to `--resume`."""
    saved = record.config or {}
    sources = read_sources(record.sources)
    chosen = _chosen(options)
    settings = {name: value for name, value in saved.items()
                if name in FIELDS and name not in chosen | _PER_ATTEMPT
                and (name not in sources or sources[name].origin not in _REDERIVED)}
    if not is_own(run.record):  # a folder that another user named must not be written to
        settings.pop("nvme_path", None)
    if "ds_config" in chosen:  # the run may have had the same one with another --tp
        settings = {name: value for name, value in settings.items() if name not in _OF_LAYOUT}
    settings = {**{name: value for name, value in settings.items() if name not in _BATCH}, **_batch(run, chosen)}
    for name, value in settings.items():
        options = options.set(ValueSource.of_run(run.path, sources.get(name, DEFAULT)), **{name: value})
    return options


def _chosen(options: Options) -> set[str]:
    """Return the names of the settings that the user chose for this run."""
    return {name for name in options.sources if options.origin(name) not in _NOT_FROM_USER}


def _batch(run: RunDir, chosen: set[str]) -> dict[str, int]:
    """Return the run's batch sizes to restore: the global batch, and the micro-batch as an upper limit."""
    try:
        layout = read_layout_record(run)
    except UserError:
        return {}
    if layout is None or layout.batch is None:
        return {}
    given = chosen.intersection(_BATCH)
    sizes: dict[str, int] = {}
    if "global_batch" not in given and len(given) < 2:
        sizes["global_batch"] = layout.batch.global_batch
    if not given & {"micro_batch", "accumulation"}:
        sizes["micro_batch"] = layout.batch.micro_batch
    return sizes
