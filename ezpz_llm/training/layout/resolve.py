"""Resolve a run's layout, batch sizes and precision, with the source of each value (imports no torch).

Precedence: command line > the user's ds_config > YAML > preset > default.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ezpz_llm.core.base import UserError, data_dir, unknown_name_error
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import RunDir, SideFiles
from ezpz_llm.core.rundir.layout_record import LayoutRecord
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.version_rules import OVERLAP
from ezpz_llm.training.layout import ds_defaults
from ezpz_llm.training.layout.batch import Batch, solve_batch
from ezpz_llm.training.layout.constraints import check_gradient_scaling
from ezpz_llm.training.layout.deepspeed_versions import reject_use, require_support
from ezpz_llm.training.layout.ds_config import DsConfig, load
from ezpz_llm.training.layout.ds_config_blocks import DynamicScale
from ezpz_llm.training.layout.ds_config_overrides import BATCH_KEYS, RunOverrides, split_ds_config
from ezpz_llm.training.layout.ds_defaults import default_sizes
from ezpz_llm.training.layout.knobs import KNOBS, LayoutCheck, uncertified_keys
from ezpz_llm.training.layout.layout import DEGREE_NAMES, Layout, read_layout
from ezpz_llm.training.layout.ops import needed_ops, reject_unbuilt_ops
from ezpz_llm.training.layout.optimizers import OPTIMIZERS, OptimizerName, check_optimizer
from ezpz_llm.training.layout.precision_recipes import (
    FP32_GRADIENTS,
    RECIPES,
    SCALED,
    GradientDtypes,
    check_engine,
    check_gradients,
    deepspeed_entries,
    deepspeed_layout,
)
from ezpz_llm.training.layout.suggestions import validate_or_suggest
from ezpz_llm.training.layout.value_source import COMMAND_LINE, DEFAULT, NOT_FROM_USER, Origin, ValueSource
from ezpz_llm.training.model.config import ModelConfig

DEFAULT_MICRO_BATCH = 4


@dataclass(frozen=True)
class Resolved:
    """A run's layout, batch and precision, with the source of each value.

    `precision` is "auto" until the device is known. `clip` is the maximum gradient norm, 0 for no clipping.
    `deepspeed` is DeepSpeed's configuration, None for other engines. `adam` holds settings of the optimizer and
    schedule (lr, beta1, beta2, eps, weight_decay, schedule, warmup_steps, …) that the user's ds_config sets and the
    command line does not, and `of_peak` those set as fractions of the peak learning rate. `recompute` is the
    ds_config's setting for --recompute, None if not set. `loss_scale` holds fp16's settings, `gradients` the dtypes
    of accumulation and reduction. `nvme_path` is the folder for offloaded files; None for the run directory.
    """

    layout: Layout
    batch: Batch
    precision: str
    clip: float
    deepspeed: dict[str, Any] | None
    adam: dict[str, Any] = field(default_factory=dict)
    of_peak: dict[str, float] = field(default_factory=dict)
    sources: dict[str, ValueSource] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    recompute: int | None = None
    optimizer: OptimizerName = "adamw"
    nvme_path: str | None = None
    loss_scale: DynamicScale = field(default_factory=DynamicScale)
    gradients: GradientDtypes = FP32_GRADIENTS

    def write(self, run_dir: RunDir, side: SideFiles | None = None) -> None:
        """Write layout.json and, if DeepSpeed is used, deepspeed.json."""
        side = side or SideFiles()
        side.write_json(run_dir.layout, as_plain(LayoutRecord(
            layout=self.layout.as_record(), batch=self.batch, precision=self.precision,
            clip=self.clip, optimizer=self.adam, notes=list(self.notes),
            sources={name: source.as_record() for name, source in self.sources.items()})))
        if self.deepspeed is not None:
            side.write_json(run_dir.deepspeed, self.for_deepspeed(run_dir))

    def for_deepspeed(self, run_dir: RunDir) -> dict[str, Any]:
        """Return the exact configuration for DeepSpeed.

        DeepSpeed's monitors write into the run directory if no path is set.
        """
        config = {**deepcopy(self.deepspeed or {}), **deepspeed_entries(self.precision, self.gradients)}
        if "zero_optimization" in config:
            config["zero_optimization"]["stage"] = deepspeed_layout(self.layout, self.precision).zero.stage
        for name in ("csv_monitor", "tensorboard"):
            if config.get(name, {}).get("enabled") and not config[name].get("output_path"):
                config[name]["output_path"] = str(run_dir.tracker(f"deepspeed-{name}"))
        return config

    def explain(self) -> str:
        """Return the resolved values with their sources, one per line, and the notes."""
        batch = self.batch
        world_size = batch.dp_size * self.layout.tp * self.layout.pp * self.layout.sp
        values = {"layout": self.layout.describe(world_size), "precision": self.precision,
                  "grad_accum_dtype": self.gradients.accumulated, "reduce_dtype": self.gradients.reduced,
                  "global_batch": batch.global_batch, "micro_batch": batch.micro_batch,
                  "accumulation": batch.accumulation, "clip": self.clip or "none",
                  **({"nvme_path": self.nvme_path} if self.nvme_path else {}), **self.adam}
        zero = (self.deepspeed or {}).get("zero_optimization", {})
        knobs = {knob.name: knob.shown(self.layout) for knob in KNOBS[1:] if knob.is_set(self.layout)}
        sizes = {name: str(value).lower() if isinstance(value, bool) else f"{value:,}"
                 for name, value in zero.items() if name in self.sources and name not in knobs}
        lines = [*self._table(values, 17), *self._table({**knobs, **sizes}, 36)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _table(self, values: Mapping[str, Any], column: int) -> list[str]:
        """Return name, value and source, one line per value."""
        width = max((len(str(value)) for value in values.values()), default=0)
        column = max([column, *(len(name) + 1 for name in values)])
        return [f"{name:<{column}}{value!s:<{width}}  {self.sources.get(name, '')}".rstrip()
                for name, value in values.items()]


@dataclass(frozen=True)
class Request:
    """Settings of a run; None if not set.

    Attributes:
        ds_config: a name in ds_configs/ or a path.
        world_size: number of ranks.
        global_batch, micro_batch, accumulation: in sequences.
        clip: maximum gradient norm, 0 for no clipping.
        precision: a name of `RECIPES`; "auto" or None to choose by the device.
        device: "cpu", "cuda", "xpu" or "mps"; "auto" or None if unknown.
        tp, pp, sp: degrees, which override the ds_config.
        shard_within: group size for fsdp2's shards, which overrides the ds_config.
        model: shape of the model; None for a model other than a GPT.
        optimizer: a name of `ezpz_llm.training.layout.optimizers`.
        nvme_path: folder on each node for state that a layout offloads to files.
        grad_accum_dtype, reduce_dtype: dtypes of gradient accumulation and reduction, "fp32" or "bf16".
        default_micro_batch: maximum micro-batch if the settings do not determine it; None for an accumulation of 1.
        sources: source of each value, by name, including lr and other hyperparameters. A value without an entry was
            typed on the command line.
    """

    ds_config: str
    world_size: int
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    clip: float | None = None
    precision: str | None = None
    device: str | None = None
    tp: int | None = None
    pp: int | None = None
    sp: int | None = None
    shard_within: int | None = None
    model: ModelConfig | None = None
    optimizer: OptimizerName = "adamw"
    nvme_path: str | None = None
    grad_accum_dtype: str | None = None
    reduce_dtype: str | None = None
    default_micro_batch: int | None = DEFAULT_MICRO_BATCH
    sources: Mapping[str, ValueSource] = field(default_factory=dict)


def resolve(request: Request) -> Resolved:
    """Resolve a ds_config and a run's own settings.

    Raises:
        UserError: an unknown name or key, contradicting numbers, a layout that cannot run here.
    """
    config = load(request.ds_config)
    return _Inputs(request, config, split_ds_config(config)).resolve()


class _Inputs:
    """Request and ds_config, from which each value and its source are chosen by precedence."""

    def __init__(self, request: Request, config: DsConfig, overrides: RunOverrides) -> None:
        self.request, self.config, self.overrides = request, config, overrides
        self.file = ValueSource(Origin.DS_CONFIG, str(config.path))
        self.not_set = ValueSource(Origin.DEEPSPEED_DEFAULT, str(config.path))
        self.is_shipped = config.path.parent == data_dir("ds_configs")
        self.sources = {name: COMMAND_LINE if source.is_typed else source
                        for name, source in request.sources.items()}

    def resolve(self) -> Resolved:
        """Choose every value, check the layout, and return both with the notes for the user."""
        request, config, overrides = self.request, self.config, self.overrides
        model, world_size, device = request.model, request.world_size, request.device
        requested = LayoutCheck(read_layout(config, tp=request.tp, pp=request.pp, sp=request.sp,
                                            shard_within=request.shard_within), world_size, model,
                                batch=lambda dp_size: self.batch(dp_size)[0], shipped=self.is_shipped)
        layout, notes = validate_or_suggest(requested, self.origins())
        batch, used, overridden = self.batch(layout.dp_size(world_size))
        notes = (*overrides.notes, *notes, *overridden)
        used["layout"] = self.sources.get("ds_config", COMMAND_LINE)
        used.update({knob.name: self.file for knob in KNOBS[1:] if knob.is_set(layout)})
        if request.shard_within is not None:
            used["shard_within"] = self.sources.get("shard_within", COMMAND_LINE)
        clip, used["clip"] = self.choose("clip", request.clip, overrides.clip)
        precision, used["precision"] = self.choose(
            "precision", None if request.precision == "auto" else request.precision, overrides.precision.name)
        check_precision(precision, used["precision"], device)
        check_engine(precision, layout, f"precision ({used['precision']})")
        gradients = self.gradients(precision, layout, used)
        notes += self.default_gradients_note(gradients, used)
        adam, of_peak, hyperparameter_notes = self.hyperparameters()
        notes += (*hyperparameter_notes, *self.missing_precision_note(precision, used["precision"]))
        used.update({name: source for name, (_, source) in adam.items()})
        recompute = overrides.recompute if self.sources.get("recompute") != COMMAND_LINE else None
        if recompute is not None:
            used["recompute"] = self.file
        deepspeed = None
        if keys := uncertified_keys(overrides.rest, layout):
            passed = ", which are passed to DeepSpeed unchanged" if layout.engine == "deepspeed" else ""
            notes += (f"uncertified: {', '.join(keys)} of {config.path.name}; no certificate covers these "
                      f"keys{passed}; run ezpz-llm certify --layouts {self.file} to test them",)
        if layout.engine == "deepspeed":
            require_support(layout)
            reject_unbuilt_ops(needed_ops(layout), needed_by=f"layout {layout.name}")
            check_gradient_scaling(overrides.rest, layout, str(self.file))
            deepspeed = _for_deepspeed(overrides.rest, layout, batch, clip or 0.0, device)
            zero = deepspeed["zero_optimization"] = ds_defaults.fill_defaults(
                deepspeed["zero_optimization"], layout, model, world_size, str(self.file))
            for key, (value, source) in default_sizes(zero, layout, model, device).items():
                zero[key], used[key] = value, ValueSource(Origin.FILE, source)
            if device in DEVICES and zero.get("overlap_comm") and layout.zero.stage in (1, 2) and layout.pp == 1:
                reject_use(OVERLAP, f"overlap_comm of {config.path.name}", 'set "overlap_comm": false')
            if not OPTIMIZERS[request.optimizer].is_known_to_deepspeed:
                deepspeed["zero_allow_untested_optimizer"] = True
        elif overrides.rest:
            notes += (f"engine {layout.engine} ignores {', '.join(overrides.rest)} of {config.path.name}",)
        check_optimizer(request.optimizer, layout)
        nvme_path, used["nvme_path"] = self.choose("nvme_path", request.nvme_path,
                                                   ds_defaults.requested_nvme_path(config))
        notes += ds_defaults.check_nvme_path(layout, nvme_path, str(used["nvme_path"]))
        notes += self.single_gpu_note(layout)
        return Resolved(layout, batch, precision or "auto", float(clip or 0), deepspeed,
                        {name: value for name, (value, _) in adam.items()}, of_peak, used, notes, config.warnings,
                        recompute, request.optimizer, nvme_path, overrides.precision.scale, gradients)

    def gradients(self, precision: str | None, layout: Layout, used: dict[str, ValueSource]) -> GradientDtypes:
        """Return the dtypes of gradient accumulation and reduction; add their sources to `used`."""
        dtypes: list[Any] = []
        from_file = dict(self.overrides.gradients)
        # DeepSpeed's default is the parameters' dtype, but pipelines and optimizer offload accumulate in fp32.
        implied = precision == self.overrides.precision.name == "bf16" and layout.engine == "deepspeed"
        for key in ("grad_accum_dtype", "reduce_dtype"):
            value, used[key] = self.choose(key, getattr(self.request, key), from_file.get(key))
            if implied and used[key].origin in NOT_FROM_USER and not (
                    key == "grad_accum_dtype" and (layout.zero.offload_optimizer or layout.pp > 1)):
                value, used[key] = "bf16", self.not_set
            dtypes.append(value or "fp32")
        gradients = GradientDtypes(*dtypes)
        check_gradients(gradients, precision, layout, {key: str(source) for key, source in used.items()})
        return gradients

    def default_gradients_note(self, gradients: GradientDtypes, used: Mapping[str, ValueSource]) -> tuple[str, ...]:
        """Return a note if DeepSpeed's default sets the dtypes of gradients."""
        options = [f"--{key.replace('_', '-')}" for key in ("grad_accum_dtype", "reduce_dtype")
                   if used[key] == self.not_set]
        if not options:
            return ()
        operations = {"fp32": "reduced", "bf16": "accumulated and reduced"}[gradients.accumulated]
        return (f"gradients are {operations} in bf16, DeepSpeed's default, because {self.config.path.name} "
                f"sets no dtype for them; pass "
                f"{' '.join(f'{option} fp32' for option in options)} for higher precision",)

    def single_gpu_note(self, layout: Layout) -> tuple[str, ...]:
        """Return a note if DeepSpeed saves no memory because the run has a single GPU."""
        is_single = self.request.world_size == 1 and self.request.device == "cuda"
        if layout.engine != "deepspeed" or layout.zero.has_offload_or_tiles or not is_single:
            return ()
        keys = f'"stage": 0 and "ezpz_llm": {{"engine": "ddp"}} in {self.config.path.name}'
        return (f"one GPU has nothing to shard; with {'--ds-config ddp' if self.is_shipped else keys}, steps have "
                "less overhead (GPT-2 124M on an H200: half the step time of zero1)",)

    def hyperparameters(self) -> tuple[dict[str, tuple[Any, ValueSource]], dict[str, float], list[str]]:
        """Return the optimizer and scheduler settings: values with sources, fractions of the peak rate, notes.

        A value in a YAML file overrides DeepSpeed's default for a missing key.
        """
        blocks, notes, sources = [self.overrides.optimizer], [], self.sources
        if self.overrides.scheduler.values and sources.get("schedule") == COMMAND_LINE:
            notes.append(f"scheduler of {self.config.path.name} is ignored: --schedule overrides it")
        else:
            blocks.append(self.overrides.scheduler)
        values: dict[str, tuple[Any, ValueSource]] = {}
        for block in blocks:
            values.update({name: (value, self.not_set) for name, value in block.defaults.items()
                          if sources.get(name, DEFAULT).origin in NOT_FROM_USER})
            values.update({name: (value, self.file) for name, value in block.values.items()})
        values = {name: values[name] for name in values if sources.get(name) != COMMAND_LINE}
        of_peak = {name: share for block in blocks for name, share in block.of_peak.items()
                   if sources.get(name) != COMMAND_LINE}
        filled_in = [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                     for name, (value, source) in values.items() if source == self.not_set]
        if filled_in:
            notes.append(f"not set in the optimizer or scheduler of {self.config.path.name}, using DeepSpeed's "
                         f"defaults: {', '.join(filled_in)}")
        return values, of_peak, notes

    def missing_precision_note(self, precision: str | None, source: ValueSource) -> tuple[str, ...]:
        """Return a note for a user's file without precision, which DeepSpeed would run in fp32."""
        if self.overrides.precision.has_blocks or self.is_shipped or self.config.ours or precision == "fp32":
            return ()
        chosen = precision or "auto (bf16 or bf16_autocast if the device supports bf16)"
        return (f"{self.config.path.name} has no bf16 or fp16 block, so DeepSpeed would compute in fp32, but this "
                f"run's precision is {chosen} ({source}); pass --precision fp32 for fp32",)

    def origins(self) -> dict[str, str]:
        """Return the source of each value of the layout."""
        return {**dict.fromkeys(("engine", *(knob.name for knob in KNOBS), *DEGREE_NAMES), str(self.file)),
                **{name: str(self.sources.get(name, COMMAND_LINE)) for name in (*DEGREE_NAMES, "shard_within")
                   if getattr(self.request, name) is not None}}

    def choose(self, name: str, requested: Any, from_file: Any) -> tuple[Any, ValueSource]:
        """Return the value of higher precedence, the request's or the ds_config's, with its source."""
        source = self.sources.get(name, COMMAND_LINE if requested is not None else DEFAULT)
        if from_file is not None and (requested is None or source != COMMAND_LINE):
            return from_file, self.file
        return requested, source

    def batch(self, dp_size: int) -> tuple[Batch, dict[str, ValueSource], list[str]]:
        """Return the batch, the source of each of its numbers, and a note for each overridden number.

        Two numbers override a third one of lower precedence that contradicts them.
        """
        levels: dict[ValueSource, dict[str, int]] = {COMMAND_LINE: {}, self.file: dict(self.overrides.batch)}
        numbers = {name: getattr(self.request, name) for name in BATCH_KEYS}
        for name, source in sorted(((name, self.sources.get(name, COMMAND_LINE)) for name in BATCH_KEYS),
                                   key=lambda pair: pair[1].origin.rank):
            if numbers[name] is not None:
                levels.setdefault(source, {})[name] = numbers[name]
        chosen: dict[str, int] = {}
        used: dict[str, ValueSource] = {}
        notes = []
        for source, level in levels.items():
            # Keep the micro-batch before the other numbers: it was chosen for the memory.
            for name in BATCH_KEYS:
                if name not in level or name in chosen:
                    continue
                if len(chosen) == 2 and set(used.values()) != {source}:
                    if getattr(self.solve_batch(chosen, used, dp_size), name) != level[name]:
                        winners = ", ".join(f"{other} {chosen[other]} ({used[other]})" for other in chosen)
                        notes.append(f"{name} {level[name]} of {source} is overridden by {winners}")
                    continue
                chosen[name], used[name] = level[name], source
        batch = self.solve_batch(chosen, used, dp_size)
        inputs = " and ".join(used) or "the default"
        return batch, {**dict.fromkeys(BATCH_KEYS, ValueSource(Origin.DERIVED, inputs)), **used}, notes

    def solve_batch(self, chosen: Mapping[str, int], used: Mapping[str, ValueSource], dp_size: int) -> Batch:
        where = ", ".join(f"{name} from {source}" for name, source in used.items()) or None
        return solve_batch(chosen.get("global_batch"), chosen.get("micro_batch"), chosen.get("accumulation"),
                           dp_size, default_micro_batch=self.request.default_micro_batch, where=where)


def check_precision(precision: str | None, source: ValueSource, device: str | None) -> None:
    """Check that a precision exists and that this kind of device supports it.

    Raises:
        UserError: the precision is unknown or unsupported. The message names supported precisions.
    """
    if precision is not None and precision not in RECIPES:
        raise unknown_name_error("precision", precision, ("auto", *RECIPES), where=str(source))
    if precision in SCALED and device in DEVICES and not DEVICES[device].fp16:
        raise UserError(f"{precision} is unsupported on a {device.upper()}: its matmuls are about 100 times slower "
                        "than in fp32", where=f"precision ({source})",
                        instead="--precision bf16_autocast or fp32")
    if precision == "tf32" and device in DEVICES and not DEVICES[device].tf32:
        raise UserError(f"a {device.upper()} does not support tf32",
                        where=f"precision ({source})", instead="--precision bf16_autocast or fp32")


def _for_deepspeed(keys: dict[str, Any], layout: Layout, batch: Batch, clip: float,
                   device: str | None) -> dict[str, Any]:
    """Return DeepSpeed's configuration: the user's blocks and the run's numbers."""
    zero = {**keys.get("zero_optimization", {}), "stage": layout.zero.stage}
    if device in DEVICES and not DEVICES[device].overlaps:
        zero["overlap_comm"] = False
    return {
        # DeepSpeed counts sequence-parallel ranks as data-parallel ranks with their own samples.
        "train_batch_size": batch.global_batch * layout.sp,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        # In stage 0, ezpz_llm's engine clips gradients itself, because DeepSpeed does not return the gradient norm.
        "gradient_clipping": clip if layout.zero.stage else 0.0,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # enabled, it synchronizes the device twice per step
        **keys,
        "zero_optimization": zero,
    }
