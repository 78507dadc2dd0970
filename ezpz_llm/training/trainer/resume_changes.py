"""Settings that differ between a resumed run and the run that saved its checkpoint (imports no torch)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import shorten_value
from ezpz_llm.core.rundir.layout_record import LayoutRecord, read_layout_record
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.layout.batch import option_of
from ezpz_llm.training.trainer.plan import RANGES, RunPlan
from ezpz_llm.training.trainer.resume import run_of
from ezpz_llm.training.trainer.schedule import SCHEDULES, learning_rate

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
    if name in RANGES:
        return isinstance(saved, (int, float)) and RANGES[name].beyond(saved) is None
    return isinstance(saved, (int, float, str))
