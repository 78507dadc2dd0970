"""Handling of `--resume`: where a run continues, and with which settings and data (imports no torch).

A requeued job runs the same command each time, so this module determines how far the run has progressed.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, is_own, shorten_value, user_path
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir
from ezpz_llm.core.rundir.layout_record import LayoutRecord, read_layout_record
from ezpz_llm.core.rundir.records import Data, RunRecord, read_record
from ezpz_llm.training.checkpoint.retention import find, has_checkpoint
from ezpz_llm.training.checkpoint.state import State, read_state
from ezpz_llm.training.data.corpora import CORPORA
from ezpz_llm.training.data.mixture import absolute_corpus, canonical_corpus, find_mixture
from ezpz_llm.training.data.prepare import find_prepared
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenizers import TOKENIZERS, choose_tokenizer, describe
from ezpz_llm.training.hf.source import find_checkpoint
from ezpz_llm.training.layout.batch import option_of
from ezpz_llm.training.layout.ds_config import names
from ezpz_llm.training.layout.value_source import DEFAULT, FROM_DS_CONFIG, Origin, ValueSource, read_sources
from ezpz_llm.training.trainer.checkpoint_identity import check_origin
from ezpz_llm.training.trainer.config import FIELDS, RANGES, TrainConfig
from ezpz_llm.training.trainer.options import Options
from ezpz_llm.training.trainer.plan import RunPlan
from ezpz_llm.training.trainer.schedule import SCHEDULES, learning_rate

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
    _check_data(options, _chosen(given), run, record, state)
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


_SCHEDULE = ("lr", "schedule", "min_lr", "warmup_steps", "warmup_type", "warmup_min_lr", "decay_steps",
             "wsd_decay_steps")
_OTHER_SETTINGS = ("optimizer", "beta1", "beta2", "eps", "weight_decay", "grad_accum_dtype", "reduce_dtype",
                   "z_loss", "spike_norm", "spike_loss", "bad_steps", "on_bad_steps", "overfit_one_batch",
                   "mask_documents")


def resume_warning(plan: RunPlan, step: int) -> str | None:
    """Return a warning about changed training settings, with the options that restore them; None if there are none.

    Args:
        step: step of the checkpoint.
    """
    run = run_of(Path(str(plan.config.resume)))
    record, layout = read_record(run), read_layout_record(run) or LayoutRecord()
    saved, model = record.config or {}, record.model_settings
    now = {name: getattr(plan.config, name) for name in (*_SCHEDULE, *_OTHER_SETTINGS)}
    before = {name: saved[name] for name in now if _is_usable(name, saved.get(name))}
    resolved = plan.resolved
    for name, old, new in (
            ("global_batch", layout.batch and layout.batch.global_batch, resolved.batch.global_batch),
            ("clip", layout.clip, resolved.clip),
            ("precision", layout.precision, resolved.precision),
            ("dropout", model.dropout, plan.model.dropout),
            ("block_size", model.block_size, plan.model.block_size)):
        if old is not None and "auto" not in (old, new):
            before[name], now[name] = old, new
    changed = [name for name in before if before[name] != now[name]]
    if not changed:
        return None
    rate = ""
    if before.get("schedule") in SCHEDULES and not set(changed).isdisjoint(_SCHEDULE):
        old_config = replace(plan.config, **{name: before[name] for name in _SCHEDULE if name in before})
        rate = (f"The learning rate was {learning_rate(step - 1, old_config):.3g} at step {step}. At step "
                f"{step + 1} it is now {learning_rate(step, plan.config):.3g}; with the old settings it would be "
                f"{learning_rate(step, old_config):.3g}. ")
    values = ", ".join(f"{name} was {shorten_value(before[name])} and is {shorten_value(now[name])} "
                       f"({resolved.sources.get(name, plan.sources[name])})" for name in changed)
    keep = " ".join(f"{option_of(name)} {shorten_value(before[name])}" for name in changed)
    return f"resuming {run.path} with different settings: {values}. {rate}To keep the old settings, add {keep}"


def _is_usable(name: str, saved: Any) -> bool:
    """Return True if a recorded value has a usable type and, if the setting has a range, is in it. Other versions
    may record other values, or none."""
    if name in RANGES and (name, saved) != ("recompute", "selective"):
        return isinstance(saved, (int, float)) and RANGES[name].beyond(saved) is None
    return isinstance(saved, (int, float, str))


def _check_data(options: Options, chosen: set[str], run: RunDir, record: RunRecord,
               state: State) -> None:
    """Check that corpus, tokenizer and text key select the tokens that the run was trained on.

    Corpora with different names may hold the same tokens. If the new corpus is prepared, compare fingerprints
    of the tokens. If the run's corpus is gone, accept the new one here, since it may be a copy; it is compared once
    it is prepared.

    Args:
        options: complete options, with the run's settings.
        chosen: names of the settings that were given with `--resume`.
        record: the run's run.json, without members if it does not exist.
        state: state of the run's checkpoint.

    Raises:
        UserError: the tokens differ, or may differ.
    """
    config, saved = options.config, record.config or {}
    saved_tokenizer = state.tokenizer
    if "tokenizer" in chosen and config.tokenizer and saved_tokenizer \
            and not choose_tokenizer(config.tokenizer).fits(saved_tokenizer):
        raise _mismatch(run, "tokenizer", describe(saved_tokenizer), config.tokenizer)
    before = saved.get("corpus")
    if not before:
        return
    source = (record.data or Data()).source.get("corpus", before)
    if "corpus" in chosen and _identity(config.corpus) not in (_identity(before), _identity(source)):
        folder = find_prepared(config.corpus, config.tokenizer, config.text_key)
        is_mixture = bool(find_mixture(config.corpus))
        differs = (TokenData.open(folder).fingerprint != state.data if folder else
                    is_mixture or source in CORPORA or os.path.exists(user_path(source)))
        if differs:
            advice = ("" if folder or is_mixture else f"; if {config.corpus} holds the same text, prepare it "
                      f"first: python3 -m ezpz_llm.data prepare {shlex.quote(config.corpus)}")
            raise _mismatch(run, "corpus", before, config.corpus, advice)
    elif "text_key" in chosen and saved.get("text_key", config.text_key) != config.text_key:
        raise _mismatch(run, "text-key", saved["text_key"], config.text_key)


def _identity(corpus: str) -> str | list[tuple[str, float]]:
    """Return a value that is equal for all spellings of the same corpus or mixture."""
    if parts := find_mixture(corpus):
        return [(canonical_corpus(part), weight) for part, weight in parts]
    return canonical_corpus(corpus)


def _mismatch(run: RunDir, option: str, before: str, now: str, advice: str = "") -> UserError:
    return UserError(f"the run was trained with --{option} {before}, not {now}: the training samples would change",
                     where=f"{run.path}; --{option}",
                     instead=f"omit --{option} to use the run's {option}, or start a new run without "
                             f"--resume{advice}")


def recorded_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings by name, with absolute paths, so that a run can be resumed from any working directory."""
    settings = asdict(config)
    settings["corpus"] = absolute_corpus(config.corpus)
    if config.init_from is not None and user_path(config.init_from).is_dir():  # otherwise a hub id
        settings["init_from"] = _absolute(config.init_from)
    if config.tokenizer is not None and config.tokenizer not in TOKENIZERS:
        settings["tokenizer"] = _absolute(config.tokenizer)
    if config.ds_config not in names():
        settings["ds_config"] = _absolute(config.ds_config)
    for name in ("hellaswag", "nvme_path", "resume"):
        if settings[name] is not None:
            settings[name] = _absolute(settings[name])
    return settings


def _absolute(path: str) -> str:
    return str(user_path(path).absolute())
