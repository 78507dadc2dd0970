"""Decide everything about a run's layout before it starts, and keep where each value came from (imports no torch).

Precedence: command line > the user's ds_config > YAML > preset > default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ezpz_llm.engine.batch import Batch, solve_batch
from ezpz_llm.engine.ds_config import OUR_BLOCK, DsConfig, load
from ezpz_llm.engine.foreign import BATCH_KEYS, Wishes, read_wishes
from ezpz_llm.engine.layout import DEGREE_NAMES, DEGREES, Layout
from ezpz_llm.engine.ops import refuse_unbuilt
from ezpz_llm.errors import UserError, unknown
from ezpz_llm.rundir import RunDir, write_json

COMMAND_LINE = "command line"
PRECISIONS = ("fp32", "bf16", "fp16")
ENGINES = ("torch", "deepspeed")


@dataclass(frozen=True)
class Resolved:
    """A run's layout, batch and precision, with the source of each value.

    `precision` is "auto" as long as the device that decides it is not known. `clip` is the largest gradient norm, 0
    for none. `deepspeed` is what DeepSpeed gets, None where it is not used. `adam` holds what the user's ds_config
    says of the optimizer and schedule (lr, beta1, beta2, eps, weight_decay, warmup_steps) and the command line does
    not.
    """

    layout: Layout
    batch: Batch
    precision: str
    clip: float
    deepspeed: dict[str, Any] | None
    adam: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def write(self, run_dir: RunDir) -> None:
        """Write layout.json, and deepspeed.json where DeepSpeed is used."""
        write_json(run_dir.layout, {
            "layout": asdict(self.layout), "batch": asdict(self.batch), "precision": self.precision,
            "clip": self.clip, "optimizer": self.adam, "sources": self.sources, "notes": list(self.notes)})
        if self.deepspeed is not None:
            write_json(run_dir.deepspeed, self.deepspeed)

    def explain(self) -> str:
        """What was decided and by whom, a line each."""
        batch = self.batch
        values = {"layout": self.layout.name, "precision": self.precision, "global_batch": batch.global_batch,
                  "micro_batch": batch.micro_batch, "accumulation": batch.accumulation, "clip": self.clip or "none",
                  **self.adam}
        lines = [f"{name:<14}{value!s:<16}{self.sources.get(name, '')}".rstrip() for name, value in values.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def resolve(ds_config: str, *, world_size: int, global_batch: int | None = None, micro_batch: int | None = None,
            accumulation: int | None = None, clip: float | None = None, precision: str | None = None,
            device: str | None = None, sources: Mapping[str, str] | None = None,
            default_micro_batch: int = 4) -> Resolved:
    """Bring a ds_config and a run's own numbers together.

    Args:
        ds_config: a name in ds_configs/ or a path.
        global_batch, micro_batch, accumulation: in sequences; None where the run does not say.
        precision: "fp32", "bf16", "fp16", or "auto" (also None) where the device is to decide.
        device: "cpu", "cuda", "xpu" or "mps" where it is known; "auto" or None where not.
        sources: where each value came from, by name, also for lr and its like; what is not in it was typed on the
            command line.

    Raises:
        UserError: an unknown name or key, numbers that do not work out, a layout that cannot run here.
    """
    sources = sources or {}
    config = load(ds_config)
    wishes = read_wishes(config)
    layout = _layout(config)
    numbers = {"global_batch": global_batch, "micro_batch": micro_batch, "accumulation": accumulation}
    batch, used = _batch(numbers, wishes, config, sources, layout.dp_size(world_size), default_micro_batch)
    used["layout"] = sources.get("ds_config", COMMAND_LINE)
    chosen_clip, used["clip"] = _choose("clip", clip, wishes.clip, config, sources)
    chosen_precision, used["precision"] = _choose("precision", None if precision == "auto" else precision,
                                                  wishes.precision, config, sources)
    check_precision(chosen_precision, used["precision"], device)
    adam = {name: value for name, value in wishes.adam.items() if sources.get(name) != COMMAND_LINE}
    used.update(dict.fromkeys(adam, str(config.path)))
    deepspeed = None
    if layout.engine == "deepspeed":
        if layout.offload_optimizer == "cpu":
            refuse_unbuilt("cpu_adam", needed_by=f"layout {layout.name}")
        deepspeed = _for_deepspeed(wishes.rest, layout, batch, chosen_clip or 0.0, device)
    elif wishes.rest:
        wishes.notes.append(f"engine torch does not read {', '.join(wishes.rest)} of {config.path.name}")
    return Resolved(layout, batch, chosen_precision or "auto", float(chosen_clip or 0), deepspeed, adam, used,
                    tuple(wishes.notes))


def _layout(config: DsConfig) -> Layout:
    place = f"{OUR_BLOCK} in {config.path}"
    engine = config.ours.get("engine", "deepspeed")
    if engine not in ENGINES:
        raise unknown("engine", str(engine), ENGINES, where=place)
    for degree in DEGREES:
        value = config.ours.get(degree, 1)
        if value != 1 or isinstance(value, bool):
            raise UserError(f"the {DEGREE_NAMES[degree]} degree {degree} is {value}; supported: 1", where=place,
                            instead=f'"{degree}": 1')
    zero = config.values.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise UserError(f"zero_optimization.stage is {stage!r}", where=str(config.path), instead="0, 1, 2 or 3")
    if engine == "torch":
        if stage:
            raise UserError(f"engine torch has no ZeRO stage {stage}", where=str(config.path),
                            instead='"engine": "deepspeed", or no zero_optimization')
        return Layout(config.name, "torch")
    offloaded = zero.get("offload_optimizer", {}).get("device") == "cpu" or bool(zero.get("cpu_offload"))
    if offloaded and stage == 0:
        raise UserError("ZeRO stage 0 keeps the optimizer's state on the device", where=str(config.path),
                        instead='offload_optimizer with "stage": 1, 2 or 3')
    return Layout(config.name, "deepspeed", stage, offload_optimizer="cpu" if offloaded else None)


def _choose(name: str, given: Any, wish: Any, config: DsConfig, sources: Mapping[str, str]) -> tuple[Any, str]:
    """One value by precedence, with its source."""
    source = sources.get(name, COMMAND_LINE if given is not None else "default")
    if wish is not None and (given is None or source != COMMAND_LINE):
        return wish, str(config.path)
    return given, source


def _batch(numbers: Mapping[str, int | None], wishes: Wishes, config: DsConfig, sources: Mapping[str, str],
           dp_size: int, default_micro_batch: int) -> tuple[Batch, dict[str, str]]:
    """The batch by precedence: a number of lower precedence that contradicts two of higher gives way."""
    typed = {name: value for name, value in numbers.items()
             if value is not None and sources.get(name, COMMAND_LINE) == COMMAND_LINE}
    others = {name: value for name, value in numbers.items() if value is not None and name not in typed}
    levels = [(COMMAND_LINE, typed), (str(config.path), wishes.batch)]
    for source in sorted({sources[name] for name in others}, key=_precedence):
        levels.append((source, {name: value for name, value in others.items() if sources[name] == source}))
    known: dict[str, int] = {}
    used: dict[str, str] = {}
    for source, level in levels:
        # Where one more number would say all, the micro batch is the one to keep: it was sized for the memory.
        for name in BATCH_KEYS:
            if name not in level or name in known:
                continue
            if len(known) == 2 and set(used.values()) != {source}:
                if getattr(_solve(known, used, dp_size, default_micro_batch), name) != level[name]:
                    stronger = ", ".join(f"{other} {known[other]} ({used[other]})" for other in known)
                    wishes.notes.append(f"{name} {level[name]} of {source} gives way to {stronger}")
                continue
            known[name], used[name] = level[name], source
    batch = _solve(known, used, dp_size, default_micro_batch)
    given = " and ".join(used) or "the default"
    for name in BATCH_KEYS:
        used.setdefault(name, f"follows from {given}")
    return batch, used


def _solve(known: Mapping[str, int], used: Mapping[str, str], dp_size: int, default_micro_batch: int) -> Batch:
    where = ", ".join(f"{name} from {source}" for name, source in used.items()) or None
    return solve_batch(*map(known.get, BATCH_KEYS), dp_size, default_micro_batch=default_micro_batch, where=where)


def _precedence(source: str) -> int:
    """A YAML file (named by its path) comes before a preset, a model's recipe and the defaults."""
    kinds = ("preset ", "recipe ", "default")
    return next((rank for rank, kind in enumerate(kinds, 1) if source.startswith(kind)), 0)


def check_precision(precision: str | None, source: str, device: str | None) -> None:
    """Refuse a precision that does not exist, or not on this kind of device.

    Raises:
        UserError: names what does.
    """
    if precision is not None and precision not in PRECISIONS:
        raise unknown("precision", precision, ("auto", *PRECISIONS), where=source)
    if precision == "fp16" and device == "cpu":
        raise UserError("fp16 on a CPU: its matrix products are about a hundred times slower than fp32 there",
                        where=f"precision ({source})", instead="--precision bf16 or fp32")


def _for_deepspeed(rest: dict[str, Any], layout: Layout, batch: Batch, clip: float,
                   device: str | None) -> dict[str, Any]:
    """Exactly what DeepSpeed gets: the user's blocks and the run's numbers."""
    zero = {"stage": layout.zero_stage, **rest.get("zero_optimization", {})}
    if device == "cpu":
        zero["overlap_comm"] = False  # on CPUs there is no stream to overlap on
    return {
        "train_batch_size": batch.global_batch,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        # Stage 0 is clipped by the engine itself, which needs the norm that DeepSpeed does not give there.
        "gradient_clipping": clip if layout.zero_stage else 0.0,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # else it synchronises the device twice a step
        **rest,
        "zero_optimization": zero,
    }
