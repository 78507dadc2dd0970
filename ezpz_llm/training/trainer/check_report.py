"""Reports of --check and --verbose: settings with their sources, rank map, warnings (imports no torch)."""

from __future__ import annotations

import textwrap
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from ezpz_llm.core.base import UserError, count_noun
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.launcher.basics.variables import RUN_ID_VARIABLE
from ezpz_llm.launcher.jobs.option_parsing import parse as parse_launch, read_command
from ezpz_llm.training.layout.layout import Places, rank_map, tp_crossing_warning
from ezpz_llm.training.layout.memory import memory_per_rank, total
from ezpz_llm.training.layout.value_source import Origin, ValueSource
from ezpz_llm.training.trainer.config import FIELDS, MODEL_OVERRIDES, RunConfig
from ezpz_llm.training.trainer.options import Options
from ezpz_llm.training.trainer.plan import RunPlan, plan_run
from ezpz_llm.training.trainer.schedule import WITHOUT_DECAY, learning_rate

_WIDTH = 110


def settings_by_source(plan: RunPlan) -> str:
    """Return all values that the run uses, grouped by source; "-" stands for None."""
    groups: dict[ValueSource, list[str]] = {}
    for name, (value, source) in effective_settings(plan).items():
        groups.setdefault(source, []).append(f"{name} {_show(value)}")
    lines = ["settings by source"]
    for source in sorted(groups, key=lambda source: (source.origin.rank, source.detail)):
        lines += textwrap.wrap(", ".join(groups[source]), _WIDTH, initial_indent=f"  {source}: ",
                               subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def effective_settings(plan: RunPlan) -> dict[str, tuple[Any, ValueSource]]:
    """Return each setting's value and source; an unset value comes from the model, the layout or the plan."""
    config, resolved = plan.config, plan.resolved
    layout, batch = resolved.layout, resolved.batch
    values = {name: (getattr(config, name), plan.sources[name]) for name in FIELDS}
    for name, value in asdict(plan.model).items():
        is_set = name in MODEL_OVERRIDES and getattr(config, name) is not None
        values[name] = (value, plan.sources[name] if is_set else ValueSource(Origin.MODEL, config.model))
    of_layout = ValueSource(Origin.DS_CONFIG, f"ds_config {config.ds_config}")
    for name in ("tp", "pp", "sp"):
        is_set = getattr(config, name) is not None
        values[name] = (getattr(layout, name), plan.sources[name] if is_set else of_layout)
    for name, value in (*asdict(batch).items(), ("precision", resolved.precision), ("clip", resolved.clip)):
        if name in FIELDS:
            values[name] = (value, resolved.sources.get(name, plan.sources[name]))
    return values


_LEAST_RATE = 1e-3
"""Part of the peak below which steps train almost nothing; DeepSpeed's WarmupCosineLR ends at 1e-4 of it."""


def setting_warnings(plan: RunPlan) -> list[str]:
    """Return warnings about settings that look like mistakes."""
    config, warnings = plan.config, list(plan.resolved.warnings)
    if config.warmup_steps > config.steps:
        warnings.append(f"the learning rate never reaches its peak: the warm-up takes {config.warmup_steps} steps, "
                        f"but the run has only {config.steps}")
    elif config.decay_steps > config.steps and config.schedule not in WITHOUT_DECAY:
        last = learning_rate(config.steps - 1, config)
        warnings.append(f"the learning rate ends at {last:.3g} instead of {config.min_lr:.3g}: the run ends after "
                        f"step {config.steps}, but its {config.schedule} schedule only after step "
                        f"{config.decay_steps}")
    last, first = learning_rate(config.steps - 1, config), _first_step_of_last_rate(config)
    if config.steps - first > 1 and last < _LEAST_RATE * config.lr:
        warnings.append(f"the learning rate is {last:.3g} from step {first + 1} to {config.steps}, which train "
                        f"{'almost ' if last else ''}nothing: the {config.schedule} schedule ends after step "
                        f"{config.decay_steps}. Pass --decay-steps {config.steps}")
    return warnings


def memory_warning(plan: RunPlan, local_size: int, node_bytes: int) -> str | None:
    """Return a warning if the model states of a node's CPU ranks alone need more than its memory."""
    resolved = plan.resolved
    world_size = resolved.batch.dp_size * resolved.layout.tp * resolved.layout.pp * resolved.layout.sp
    precision = "fp32" if resolved.precision == "auto" else resolved.precision  # auto never needs less
    parts = memory_per_rank(resolved.layout, plan.model, world_size, resolved.optimizer, precision,
                            resolved.gradients)
    needed = local_size * (total(parts, "device") + total(parts, "host"))
    if needed <= node_bytes:
        return None
    return (f"warning: the weights, gradients and optimizer states of {count_noun(local_size, 'rank')} need "
            f"{needed / 1e9:,.0f} GB on this node, which has {node_bytes / 1e9:,.0f} GB: use a smaller --model, a "
            "--ds-config that shards more, or more nodes")


def was_checked_by_launch(run_dir: RunDir, env: Mapping[str, str]) -> bool:
    """Return True if launch has run the command's check, and printed its warnings on the console."""
    with suppress(UserError):  # run.json is damaged, or not of this launch
        launch = read_record(run_dir).launch
        if RUN_ID_VARIABLE in env and launch is not None and launch.typed:
            options = parse_launch(launch.typed[1:])
            return not options.no_check and read_command(options.command).module is not None
    return False


def _first_step_of_last_rate(config: RunConfig) -> int:
    """Return the first of the last steps (from 0) that have the last learning rate, or the number of steps.

    After the warm-up, learning rates never increase.
    """
    last = learning_rate(config.steps - 1, config)
    return bisect_left(range(config.steps), True, key=lambda step: (
        step >= config.warmup_steps and learning_rate(step, config) <= last))


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if isinstance(value, str) and (" " in value or not value) else str(value)


def explain_plan(plan: RunPlan, places: Places) -> str:
    """Return layout, precision and batch with their sources. If the nodes are known and the layout is tensor-,
    pipeline- or sequence-parallel, also return the map of ranks."""
    layout = plan.resolved.layout
    parts = [plan.resolved.explain()]
    if places and layout.tp * layout.pp * layout.sp > 1:
        parts.append(rank_map(layout, places))
    return "\n\n".join(parts)


def warning(plan: RunPlan, options: Options, places: Places) -> str | None:
    """Return a warning with a remedy if tensor-parallel groups would cross nodes."""
    def can_run(world_size: int, tp: int) -> bool:
        """Return True if the same run is valid with this tensor-parallel degree."""
        try:
            plan_run(replace(options, config=replace(options.config, tp=tp)), world_size)
        except UserError:
            return False
        return True

    return tp_crossing_warning(plan.resolved.layout, places, can_run) if places else None
