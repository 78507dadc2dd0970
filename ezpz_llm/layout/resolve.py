"""Decide everything about a run's layout before it starts, and keep where each value came from (imports no torch).

Precedence: command line > the user's ds_config > YAML > preset > default.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from ezpz_llm.base.errors import UserError, unknown
from ezpz_llm.base.package_data import data_dir
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.layout import ds_defaults
from ezpz_llm.layout.batch import Batch, solve_batch
from ezpz_llm.layout.constraints import check_gradient_scaling
from ezpz_llm.layout.ds_config import DsConfig, load
from ezpz_llm.layout.ds_config_blocks import DynamicScale
from ezpz_llm.layout.ds_config_overrides import BATCH_KEYS, RunOverrides, split_ds_config
from ezpz_llm.layout.ds_defaults import sized
from ezpz_llm.layout.knobs import KNOBS, Case, uncertified
from ezpz_llm.layout.layout import DEGREE_NAMES, Layout, read_layout
from ezpz_llm.layout.ops import needed_ops, refuse_unbuilt
from ezpz_llm.layout.optimizers import OPTIMIZERS, OptimizerName, check_optimizer
from ezpz_llm.layout.suggest import validate_or_suggest
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.rundir import RunDir, SideFiles

COMMAND_LINE = "command line"
TYPED = " (its command line)"
"""Ending of the source of a setting that was typed for the run that is resumed: no ds_config wins over it."""


class Origin(Enum):
    """Kinds of sources, in the order in which settings are listed: their sentences, or how they begin."""

    COMMAND_LINE = (COMMAND_LINE,)
    # Not empty: Enum of Python 3.11.2 takes an empty tuple for no value at all.
    FILE = ("file",)
    """A YAML file or a ds_config, named by its path; and what has no kind of its own."""
    RUN = ("run ",)
    WEIGHTS = ("weights to begin with",)
    PRESET = ("preset ",)
    RECIPE = ("recipe of ",)
    FINE_TUNING = ("fine-tuning",)
    MODEL = ("model ",)
    DERIVED = ("follows from ", "a tenth of ")
    DEFAULT = ("default",)

    @classmethod
    def of(cls, source: str) -> Origin:
        """The kind of a source, as run.json has it."""
        return next((origin for origin in cls for text in origin.value
                     if source == text or (text.endswith(" ") and source.startswith(text))), cls.FILE)

    @property
    def rank(self) -> int:
        """Place in the list; also the precedence of batch numbers, the least first."""
        return list(Origin).index(self)


UNASKED = (Origin.DEFAULT, Origin.PRESET, Origin.RECIPE)
"""What a value that somebody wrote for this run, DeepSpeed's default for a ds_config among it, wins over."""
DEFAULT_MICRO_BATCH = 4
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class Resolved:
    """A run's layout, batch and precision, with the source of each value.

    `precision` is "auto" as long as the device that decides it is not known. `clip` is the largest gradient norm, 0
    for none. `deepspeed` is what DeepSpeed gets, None where it is not used. `adam` holds what the user's ds_config
    says of the optimizer and schedule (lr, beta1, beta2, eps, weight_decay, schedule, warmup_steps, …) and the
    command line does not, `of_peak` what it says as shares of the peak learning rate; `recompute` likewise which
    blocks' activations it wants recomputed. `loss_scale` is how fp16's moves. `nvme_path` is the folder that was
    named for offloaded files; None leaves them in the run directory.
    """

    layout: Layout
    batch: Batch
    precision: str
    clip: float
    deepspeed: dict[str, Any] | None
    adam: dict[str, Any] = field(default_factory=dict)
    of_peak: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    recompute: int | None = None
    optimizer: OptimizerName = "adamw"
    nvme_path: str | None = None
    loss_scale: DynamicScale = field(default_factory=DynamicScale)

    def write(self, run_dir: RunDir, side: SideFiles | None = None) -> None:
        """Write layout.json, and deepspeed.json where DeepSpeed is used."""
        side = side or SideFiles()
        side.write_json(run_dir.layout, {
            "layout": self.layout.as_record(), "batch": asdict(self.batch), "precision": self.precision,
            "clip": self.clip, "optimizer": self.adam, "sources": self.sources, "notes": list(self.notes)})
        if self.deepspeed is not None:
            side.write_json(run_dir.deepspeed, self.for_deepspeed(run_dir))

    def for_deepspeed(self, run_dir: RunDir) -> dict[str, Any]:
        """Exactly what DeepSpeed gets, with a place in the run directory for its own curves where none is named."""
        config = deepcopy(self.deepspeed or {})
        for name in ("csv_monitor", "tensorboard"):
            if config.get(name, {}).get("enabled") and not config[name].get("output_path"):
                config[name]["output_path"] = str(run_dir.tracker(f"deepspeed-{name}"))
        return config

    def explain(self) -> str:
        """What was decided and by whom, a line each."""
        batch = self.batch
        world_size = batch.dp_size * self.layout.tp * self.layout.pp * self.layout.sp
        values = {"layout": self.layout.describe(world_size), "precision": self.precision,
                  "global_batch": batch.global_batch, "micro_batch": batch.micro_batch,
                  "accumulation": batch.accumulation, "clip": self.clip or "none",
                  **({"nvme_path": self.nvme_path} if self.nvme_path else {}), **self.adam}
        zero = (self.deepspeed or {}).get("zero_optimization", {})
        knobs = {knob.name: knob.shown(self.layout) for knob in KNOBS[1:] if knob.is_set(self.layout)}
        sizes = {name: str(value).lower() if isinstance(value, bool) else f"{value:,}"
                 for name, value in zero.items() if name in self.sources and name not in knobs}
        lines = [*self._table(values, 14), *self._table({**knobs, **sizes}, 36)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _table(self, values: Mapping[str, Any], column: int) -> list[str]:
        """Name, value and source, a line each."""
        width = max((len(str(value)) for value in values.values()), default=0)
        return [f"{name:<{column}}{value!s:<{width}}  {self.sources.get(name, '')}".rstrip()
                for name, value in values.items()]


def resolve(ds_config: str, *, world_size: int, global_batch: int | None = None, micro_batch: int | None = None,
            accumulation: int | None = None, clip: float | None = None, precision: str | None = None,
            device: str | None = None, tp: int | None = None, pp: int | None = None, sp: int | None = None,
            model: ModelConfig | None = None, sources: Mapping[str, str] | None = None,
            nvme_path: str | None = None, optimizer: OptimizerName = "adamw",
            default_micro_batch: int = DEFAULT_MICRO_BATCH) -> Resolved:
    """Bring a ds_config and a run's own numbers together.

    Args:
        ds_config: a name in ds_configs/ or a path.
        global_batch, micro_batch, accumulation: in sequences; None where the run does not say.
        precision: "fp32", "tf32", "bf16", "fp16", or "auto" (also None) where the device is to decide.
        device: "cpu", "cuda", "xpu" or "mps" where it is known; "auto" or None where not.
        tp, pp, sp: degrees in place of the ds_config's.
        model: the shape that is to be divided; None where it is no GPT.
        optimizer: a name of `ezpz_llm.layout.optimizers`.
        nvme_path: the folder for state that a layout offloads to files, on each node.
        default_micro_batch: at most as many sequences a rank takes at once where nothing says how many.
        sources: where each value came from, by name, also for lr and its like; what is not in it was typed on the
            command line.

    Raises:
        UserError: an unknown name or key, numbers that do not work out, a layout that cannot run here.
    """
    sources = {name: COMMAND_LINE if source.endswith(TYPED) else source for name, source in (sources or {}).items()}
    config = load(ds_config)
    overrides = split_ds_config(config)
    degrees = {"tp": tp, "pp": pp, "sp": sp}
    numbers = {"global_batch": global_batch, "micro_batch": micro_batch, "accumulation": accumulation}

    def batch_of(dp_size: int) -> tuple[Batch, dict[str, str], list[str]]:
        return _batch(numbers, overrides, config, sources, dp_size, default_micro_batch)

    asked = Case(read_layout(config, **degrees), world_size, model,
                 batch=lambda dp_size: batch_of(dp_size)[0],
                 shipped=config.path.parent == data_dir("ds_configs"))
    layout, notes = validate_or_suggest(asked, _origins(degrees, config, sources))
    batch, used, gave_way = batch_of(layout.dp_size(world_size))
    notes = (*overrides.notes, *notes, *gave_way)
    used["layout"] = sources.get("ds_config", COMMAND_LINE)
    used.update({knob.name: str(config.path) for knob in KNOBS[1:] if knob.is_set(layout)})
    chosen_clip, used["clip"] = _choose("clip", clip, overrides.clip, config, sources)
    chosen_precision, used["precision"] = _choose("precision", None if precision == "auto" else precision,
                                                  overrides.precision.name, config, sources)
    check_precision(chosen_precision, used["precision"], device)
    adam, of_peak, more = _hyperparameters(overrides, config, sources)
    notes += (*more, *_unsaid_precision(overrides, config, chosen_precision, used["precision"]))
    used.update({name: source for name, (_, source) in adam.items()})
    recompute = overrides.recompute if sources.get("recompute") != COMMAND_LINE else None
    if recompute is not None:
        used["recompute"] = str(config.path)
    deepspeed = None
    if layout.engine == "deepspeed":
        refuse_unbuilt(needed_ops(layout), needed_by=f"layout {layout.name}")
        if left := uncertified(overrides.rest, layout):
            notes += (f"no certificate covers these keys of {config.path.name}, which DeepSpeed gets as they are: "
                      f"{', '.join(left)}; ezpz-llm certify --layouts {config.path} tests them here",)
        check_gradient_scaling(overrides.rest, layout, str(config.path))
        deepspeed = _for_deepspeed(overrides.rest, layout, batch, chosen_clip or 0.0, device)
        deepspeed["zero_optimization"] = ds_defaults.complete(
            deepspeed["zero_optimization"], layout, model, world_size, str(config.path))
        for key, (value, source) in sized(deepspeed["zero_optimization"], layout, model, device).items():
            deepspeed["zero_optimization"][key], used[key] = value, source
    elif overrides.rest:
        notes += (f"engine {layout.engine} does not read {', '.join(overrides.rest)} of {config.path.name}",)
    check_optimizer(optimizer, layout)
    if deepspeed is not None and not OPTIMIZERS[optimizer].is_known_to_deepspeed:
        deepspeed["zero_allow_untested_optimizer"] = True
    nvme_path, used["nvme_path"] = _choose("nvme_path", nvme_path, ds_defaults.wished_path(config), config, sources)
    notes += ds_defaults.place(layout, nvme_path, used["nvme_path"])
    return Resolved(layout, batch, chosen_precision or "auto", float(chosen_clip or 0), deepspeed,
                    {name: value for name, (value, _) in adam.items()}, of_peak, used, notes, config.warnings,
                    recompute, optimizer, nvme_path, overrides.precision.scale)


def _hyperparameters(overrides: RunOverrides, config: DsConfig, sources: Mapping[str, str],
                     ) -> tuple[dict[str, tuple[Any, str]], dict[str, float], list[str]]:
    """What the user's optimizer and scheduler say: values with their sources, shares of the peak rate, notes.

    DeepSpeed's default for what they leave out comes after what a YAML file says: somebody wrote that.
    """
    blocks, notes = [overrides.optimizer], []
    if overrides.scheduler.values and sources.get("schedule") == COMMAND_LINE:
        notes.append(f"scheduler of {config.path.name} gives way to --schedule")
    else:
        blocks.append(overrides.scheduler)
    found: dict[str, tuple[Any, str]] = {}
    for block in blocks:
        found.update({name: (value, f"DeepSpeed's default, left out of {config.path}")
                      for name, value in block.defaults.items()
                      if Origin.of(sources.get(name, "default")) in UNASKED})
        found.update({name: (value, str(config.path)) for name, value in block.values.items()})
    found = {name: found[name] for name in found if sources.get(name) != COMMAND_LINE}
    of_peak = {name: share for block in blocks for name, share in block.of_peak.items()
               if sources.get(name) != COMMAND_LINE}
    left_out = [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                for name, (value, source) in found.items() if source.startswith("DeepSpeed's default")]
    if left_out:
        notes.append(f"left out of the optimizer or scheduler in {config.path.name}, so DeepSpeed's defaults: "
                     f"{', '.join(left_out)}")
    return found, of_peak, notes


def _unsaid_precision(overrides: RunOverrides, config: DsConfig, precision: str | None,
                      source: str) -> tuple[str, ...]:
    """What to say of a foreign file that does not speak of precision, which is fp32 to DeepSpeed."""
    theirs = config.path.parent != data_dir("ds_configs") and not config.ours
    if overrides.precision.blocks or not theirs or precision == "fp32":
        return ()
    takes = precision or "auto, bf16 where the device computes in it"
    return (f"{config.path.name} has no bf16 or fp16 block, and DeepSpeed would compute in fp32; this run's "
            f"precision is {takes} ({source}): --precision fp32 for the same",)


def _origins(degrees: Mapping[str, int | None], config: DsConfig, sources: Mapping[str, str]) -> dict[str, str]:
    """Where the values that make a layout came from."""
    return {**dict.fromkeys(("engine", *(knob.name for knob in KNOBS)), str(config.path)),
            **{name: str(config.path) if degrees[name] is None else sources.get(name, COMMAND_LINE)
               for name in DEGREE_NAMES}}


def _choose(name: str, given: Any, wish: Any, config: DsConfig, sources: Mapping[str, str]) -> tuple[Any, str]:
    """One value by precedence, with its source."""
    source = sources.get(name, COMMAND_LINE if given is not None else "default")
    if wish is not None and (given is None or source != COMMAND_LINE):
        return wish, str(config.path)
    return given, source


def _batch(numbers: Mapping[str, int | None], overrides: RunOverrides, config: DsConfig, sources: Mapping[str, str],
           dp_size: int, default_micro_batch: int) -> tuple[Batch, dict[str, str], list[str]]:
    """The batch by precedence, the source of each of its numbers, and a note for each number that gave way.

    A number of lower precedence gives way where it contradicts two of higher.
    """
    typed = {name: value for name, value in numbers.items()
             if value is not None and sources.get(name, COMMAND_LINE) == COMMAND_LINE}
    others = {name: value for name, value in numbers.items() if value is not None and name not in typed}
    levels = [(COMMAND_LINE, typed), (str(config.path), overrides.batch)]
    for source in sorted({sources[name] for name in others}, key=lambda source: Origin.of(source).rank):
        levels.append((source, {name: value for name, value in others.items() if sources[name] == source}))
    known: dict[str, int] = {}
    used: dict[str, str] = {}
    notes = []
    for source, level in levels:
        # Where one more number would say all, the micro batch is the one to keep: it was sized for the memory.
        for name in BATCH_KEYS:
            if name not in level or name in known:
                continue
            if len(known) == 2 and set(used.values()) != {source}:
                if getattr(_solve(known, used, dp_size, default_micro_batch), name) != level[name]:
                    stronger = ", ".join(f"{other} {known[other]} ({used[other]})" for other in known)
                    notes.append(f"{name} {level[name]} of {source} gives way to {stronger}")
                continue
            known[name], used[name] = level[name], source
    batch = _solve(known, used, dp_size, default_micro_batch)
    given = " and ".join(used) or "the default"
    for name in BATCH_KEYS:
        used.setdefault(name, f"follows from {given}")
    return batch, used, notes


def _solve(known: Mapping[str, int], used: Mapping[str, str], dp_size: int, default_micro_batch: int) -> Batch:
    where = ", ".join(f"{name} from {source}" for name, source in used.items()) or None
    return solve_batch(known.get("global_batch"), known.get("micro_batch"), known.get("accumulation"), dp_size,
                       default_micro_batch=default_micro_batch, where=where)


def check_precision(precision: str | None, source: str, device: str | None) -> None:
    """Refuse a precision that does not exist, or not on this kind of device.

    Raises:
        UserError: names what does.
    """
    if precision is not None and precision not in PRECISIONS:
        raise unknown("precision", precision, ("auto", *PRECISIONS), where=source)
    if precision == "fp16" and device in DEVICES and not DEVICES[device].fp16:
        raise UserError(f"fp16 on a {device.upper()}: its matrix products are about a hundred times slower than "
                        "fp32 there", where=f"precision ({source})", instead="--precision bf16 or fp32")
    if precision == "tf32" and device in DEVICES and not DEVICES[device].tf32:
        raise UserError(f"tf32 on a {device.upper()}: its matrix products have no such form",
                        where=f"precision ({source})", instead="--precision bf16 or fp32")


def _for_deepspeed(rest: dict[str, Any], layout: Layout, batch: Batch, clip: float,
                   device: str | None) -> dict[str, Any]:
    """Exactly what DeepSpeed gets: the user's blocks and the run's numbers."""
    zero = {**rest.get("zero_optimization", {}), "stage": layout.zero.stage}
    if device in DEVICES and not DEVICES[device].overlaps:
        zero["overlap_comm"] = False
    return {
        # To DeepSpeed the ranks of a sequence are data-parallel ones with samples of their own.
        "train_batch_size": batch.global_batch * layout.sp,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        # Stage 0 is clipped by the engine itself, which needs the norm that DeepSpeed does not give there.
        "gradient_clipping": clip if layout.zero.stage else 0.0,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # else it synchronises the device twice a step
        **rest,
        "zero_optimization": zero,
    }
