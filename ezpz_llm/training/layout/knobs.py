"""Table of ZeRO options: ds_config key, rules, memory term and traffic term of each (imports no torch).

To add an option, add a field to `ZeroOptions`, read it in `read_layout`, and add a row to `KNOBS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ezpz_llm.training.layout.batch import Batch
from ezpz_llm.training.layout.layout import Layout, ZeroOptions
from ezpz_llm.training.model.config import ModelConfig

_LINEAR_LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_gate", "mlp.c_proj")
"""Names of the linear layers within a block; only SwiGLU has mlp.c_gate."""

Kind = Literal["parameters", "gradients", "optimizer", "copy", "secondary", "cast"]
Where = Literal["device", "host", "files"]


@dataclass(frozen=True)
class LayoutCheck:
    """Input of every rule: a layout on a number of ranks.

    `model` is None for a model other than a GPT, whose shape is unknown. `batch` solves the batch for a
    data-parallel size or raises UserError; None if no batch is known. `shipped` is True if the ds_config comes with
    the package, so that it is selected by name, and False for a user's file, which can be edited.
    """

    layout: Layout
    world_size: int
    model: ModelConfig | None = None
    batch: Callable[[int], Batch] | None = None
    shipped: bool = True


@dataclass(frozen=True)
class Problem:
    """Reason why a case cannot run.

    `names` are the values that conflict, `knobs` the values to change to resolve the conflict.
    """

    message: str
    names: tuple[str, ...]
    knobs: tuple[str, ...]


@dataclass(frozen=True)
class Repair:
    """Layout to run instead of the requested one (may be the same), and the note about it."""

    layout: Layout
    note: str


RuleResults = Iterator[Problem | Repair]
Rule = Callable[[LayoutCheck], RuleResults]
"""Check of a case; only its first result is used."""


@dataclass(frozen=True)
class StoredState:
    """Location, mean bytes per element, and elements of one kind of state on a rank."""

    where: Where
    itemsize: float
    elements: int


MemoryTerm = Callable[[Mapping[Kind, StoredState], Layout, int, int], dict[Kind, StoredState]]
"""(state of a rank by kind, layout, the rank's parameters before sharding, ranks that share them) -> new state."""

TrafficTerm = Callable[[Mapping[str, int], Layout, int, int], dict[str, int]]
"""(bytes of a step by kind, the layout, micro-steps, ranks that share the parameters) -> bytes by kind.

A kind in a smaller group than these ranks has the group's size in its name: "all_gather (8 ranks)".
"""


@dataclass(frozen=True)
class Knob:
    """Option of a layout.

    `field` is the field of `ZeroOptions`, `key` the dotted key of a ds_config. The checks, the memory estimate and
    the textbook volume apply `rules`, `memory` and `traffic` in the order of the table; the three texts describe
    them in docs/reference/layouts.md. `certified` is True if a shipped layout with a certificate sets the option.
    """

    field: str
    key: str
    rule_text: str
    rules: tuple[Rule, ...]
    memory_text: str = ""
    memory: MemoryTerm | None = None
    traffic_text: str = ""
    traffic: TrafficTerm | None = None
    certified: bool = True

    @property
    def name(self) -> str:
        """Last part of the dotted key (of a block with "device", the block's name)."""
        parts = self.key.split(".")
        return parts[-2] if parts[-1] == "device" else parts[-1]

    def shown(self, layout: Layout) -> str:
        """Return the layout's value of the option as text."""
        value = getattr(layout.zero, self.field)
        return ", ".join(f"{name} {rows} x {columns}" for name, rows, columns in value) if self.field == "tiled" \
            else str(value)

    def is_set(self, layout: Layout) -> bool:
        """Return True if the layout's value differs from the default."""
        return getattr(layout.zero, self.field) != getattr(ZeroOptions(), self.field)


def check_zero_stage(case: LayoutCheck) -> RuleResults:
    """Reject ZeRO stages 1 to 3 in engines other than DeepSpeed."""
    layout = case.layout
    if layout.engine != "deepspeed" and layout.zero.stage:
        yield Problem(f"engine {layout.engine} does not support ZeRO stage {layout.zero.stage}",
                      ("engine", "stage"), ("engine", "stage"))


def check_offload_optimizer(case: LayoutCheck) -> RuleResults:
    """Require ZeRO stage 1 or more for optimizer offload, stage 3 for NVMe."""
    place = case.layout.zero.offload_optimizer
    # Below stage 3, DeepSpeed silently uses CPU memory for "nvme".
    return _check_offload(case.layout, "offload_optimizer", place, 3 if place == "nvme" else 1)


def check_offload_param(case: LayoutCheck) -> RuleResults:
    """Require ZeRO stage 3 for parameter offload."""
    return _check_offload(case.layout, "offload_param", case.layout.zero.offload_param, 3)


def _check_offload(layout: Layout, key: str, place: str | None, min_stage: int) -> RuleResults:
    if place is not None and layout.engine != "deepspeed":
        yield Problem(f"engine {layout.engine} does not support {key}; deepspeed does", ("engine", key),
                      ("offload", "engine"))
    if place is not None and (layout.zero.stage or 0) < min_stage:
        yield Problem(f"{key} {'to NVMe ' if place == 'nvme' else ''}needs ZeRO stage {min_stage}"
                      f"{' or more' if min_stage < 3 else ''}; this is stage {layout.zero.stage or 0}",
                      ("stage", key), ("stage", "offload"))


def check_tiled_stage(case: LayoutCheck) -> RuleResults:
    """Require ZeRO stage 3 without tensor parallelism for tiled layers."""
    layout = case.layout
    if layout.zero.tiled and (layout.engine != "deepspeed" or layout.zero.stage != 3):
        yield Problem("tiled layers need ZeRO stage 3, which gathers parameters layer by layer",
                      ("tiled", "stage"), ("stage", "tiled"))
    if layout.zero.tiled and layout.tp > 1:
        yield Problem("tiled layers do not support tensor parallelism", ("tiled", "tp"),
                      ("tp", "tiled"))


def check_tiled_names(case: LayoutCheck) -> RuleResults:
    """Check that the tiled layers exist in the model's blocks."""
    names = [name for name, *_ in case.layout.zero.tiled]
    for name in names:
        if name not in _LINEAR_LAYERS:
            yield Problem(f"tiled names {name!r}; the linear layers of a block are "
                          f"{', '.join(_LINEAR_LAYERS)}", ("tiled",), ("tiled",))
    if case.model is not None and names == ["mlp.c_gate"] and case.model.mlp != "swiglu":
        yield Problem("tiled names only mlp.c_gate, but this model's MLP has no gate", ("tiled",), ("tiled",))


def check_tiled_sizes(case: LayoutCheck) -> RuleResults:
    """Check that a layer has at most as many tiles as inputs and outputs."""
    model = case.model
    if model is None:
        return
    attention, mlp = model.q_width + 2 * model.kv_width, model.intermediate_size
    sizes = dict(zip(_LINEAR_LAYERS, ((model.n_embd, attention), (model.q_width, model.n_embd), (model.n_embd, mlp),
                                      (model.n_embd, mlp), (mlp, model.n_embd)), strict=True))
    for name, *parts in case.layout.zero.tiled:
        for number, size, side in zip(parts, sizes[name], ("in", "out"), strict=True):
            if number > size:
                yield Problem(f"{name} cannot be split into {number} tiles along its {side}put of {size}",
                              ("tiled",), ("tiled",))


def check_hpz(case: LayoutCheck) -> RuleResults:
    """Ignore hpZ below stage 3; reject it with tp, and sizes that do not divide the ranks."""
    layout, size = case.layout, case.layout.zero.hpz_partition_size
    if size == 1:
        return
    if layout.engine != "deepspeed" or layout.zero.stage != 3:
        yield Repair(layout.with_zero(hpz_partition_size=1),
                     f"zero_hpz_partition_size {size} is ignored: it requires ZeRO stage 3 of DeepSpeed's engine")
    if layout.tp > 1:
        # DeepSpeed groups neighboring ranks, which hold different weights under tensor parallelism.
        yield Problem(f"zero_hpz_partition_size {size} does not work with tp {layout.tp}: DeepSpeed would share "
                      "the second copy among neighboring ranks, which hold different weights",
                      ("zero_hpz_partition_size", "tp"), ("tp", "hpz"))
    peers = layout.dp_size(case.world_size) * layout.sp
    if peers % min(size, peers):
        yield Problem(f"zero_hpz_partition_size {size} does not divide the {peers} ranks that share the "
                      "parameters; use the number of ranks per node", ("zero_hpz_partition_size", "ranks"),
                      ("hpz", "ranks"))


def check_shard_within(case: LayoutCheck) -> RuleResults:
    """Require fsdp2 and a group size that divides the ranks for shard_within."""
    layout, size = case.layout, case.layout.zero.shard_within
    if size is None:
        return
    if layout.engine != "fsdp2":
        yield Problem(f"engine {layout.engine} does not support shard_within {size}; fsdp2 does",
                      ("engine", "shard_within"), ("shard_within", "engine"))
    peers = layout.dp_size(case.world_size) * layout.sp
    if peers % min(size, peers):
        yield Problem(f"shard_within {size} does not divide the {peers} ranks that share the parameters; use the "
                      "number of ranks per node", ("shard_within", "ranks"), ("shard_within", "ranks"))


def _shard(states: Mapping[Kind, StoredState], layout: Layout, total: int, peers: int) -> dict[Kind, StoredState]:
    stage, share = layout.shard_stage(), -(-total // peers)
    states = dict(states)
    sharded: tuple[tuple[Kind, int], ...] = (("parameters", 3), ("gradients", 2), ("optimizer", 1))
    for kind, since in sharded:
        if stage >= since:
            states[kind] = replace(states[kind], elements=share)
    # In every stage the optimizer steps a flat fp32 copy of the rank's shard; stage 3 keeps the shard as well.
    if layout.engine == "deepspeed" and stage:
        states["copy"] = StoredState("device", 4, share)
    return states


_OFFLOADED: Mapping[str, Where] = {"cpu": "host", "nvme": "files"}


def _offload_optimizer(states: Mapping[Kind, StoredState], layout: Layout, total: int,
                       peers: int) -> dict[Kind, StoredState]:
    if layout.zero.offload_optimizer is None:
        return dict(states)
    place = _OFFLOADED[layout.zero.offload_optimizer]
    moved: dict[Kind, StoredState] = {kind: replace(state, where=place) for kind, state in states.items()
                                      if kind in ("optimizer", "copy")}
    # DeepSpeed keeps offloaded gradients in CPU memory even if the optimizer state is in files.
    return {**states, "gradients": StoredState("host", 4, -(-total // peers)), **moved}


def _offload_param(states: Mapping[Kind, StoredState], layout: Layout, total: int, peers: int) -> dict[Kind,
                                                                                                       StoredState]:
    if layout.zero.offload_param is None:
        return dict(states)
    return {**states, "parameters": replace(states["parameters"], where=_OFFLOADED[layout.zero.offload_param])}


def _second_copy(states: Mapping[Kind, StoredState], layout: Layout, total: int, peers: int) -> dict[Kind,
                                                                                                     StoredState]:
    size = layout.zero.hpz_partition_size
    if size == 1:
        return dict(states)
    place: Where = "device" if layout.zero.offload_param is None else "host"
    # The copy has the parameters' dtype.
    return {**states, "secondary": StoredState(place, states["parameters"].itemsize, -(-total // min(size, peers)))}


def _shard_in_groups(states: Mapping[Kind, StoredState], layout: Layout, total: int,
                     peers: int) -> dict[Kind, StoredState]:
    size = layout.zero.shard_within
    if size is None:
        return dict(states)
    return {kind: replace(state, elements=-(-total // min(size, peers))) for kind, state in states.items()}


def _shard_traffic(volume: Mapping[str, int], layout: Layout, micro_steps: int, peers: int) -> dict[str, int]:
    stage, gradients, parameters = layout.shard_stage(), volume["all_reduce"], volume["all_gather"]
    if stage == 0:
        return {"all_reduce": gradients}
    if stage < 3:
        return {"reduce_scatter": gradients, "all_gather": parameters}
    return {"all_gather": 2 * parameters * micro_steps, "reduce_scatter": gradients * micro_steps}


def _gather_in_groups(volume: Mapping[str, int], layout: Layout, micro_steps: int, peers: int) -> dict[str, int]:
    size = layout.zero.hpz_partition_size
    if size == 1 or size >= peers:
        return dict(volume)
    # The first forward pass after an optimizer step creates the second copy, which is used until the next step.
    once = volume["all_gather"] // (2 * micro_steps)
    return {**volume, "all_gather": once, f"all_gather ({size} ranks)": volume["all_gather"] - once}


def _reduce_across(volume: Mapping[str, int], layout: Layout, micro_steps: int, peers: int) -> dict[str, int]:
    size = layout.zero.shard_within
    if size is None or size >= peers:
        return dict(volume)
    within = f" ({size} ranks)"
    return {f"all_gather{within}": volume["all_gather"], f"reduce_scatter{within}": volume["reduce_scatter"],
            f"all_reduce ({peers // size} ranks)": volume["reduce_scatter"] // size}


KNOBS: tuple[Knob, ...] = (
    Knob("stage", "zero_optimization.stage", "DeepSpeed's engine; pipelines require stage 1", (check_zero_stage,),
         "1 shards the optimizer's state, 2 also gradients, 3 also parameters", _shard,
         "1 and 2: reduce-scatter of gradients, all-gather of parameters; 3: an all-gather in each pass of each "
         "micro-batch", _shard_traffic),
    Knob("offload_optimizer", "zero_optimization.offload_optimizer.device", "from stage 1, `nvme` in stage 3",
         (check_offload_optimizer,), "optimizer state in CPU memory or files, gradients in CPU memory",
         _offload_optimizer),
    Knob("offload_param", "zero_optimization.offload_param.device", "stage 3", (check_offload_param,),
         "parameters in CPU memory or files", _offload_param),
    Knob("tiled", "ezpz_llm.tiled", 
         "stage 3, no tp; names layers of a block; a layer cannot have more tiles than rows or columns",
         (check_tiled_stage, check_tiled_names, check_tiled_sizes), "gathers one tile at a time"),
    Knob("hpz_partition_size", "zero_optimization.zero_hpz_partition_size",
         "divides the ranks that share the parameters, no tp; ignored below stage 3", (check_hpz,),
         "a second copy of the parameters, sharded over that many ranks", _second_copy,
         "after a step's first forward pass, all-gathers of parameters stay among that many neighboring ranks",
         _gather_in_groups),
    Knob("shard_within", "ezpz_llm.shard_within", "`fsdp2`; divides the ranks that share the parameters",
         (check_shard_within,), "shards over that many ranks instead of all", _shard_in_groups,
         "all-gathers and reduce-scatters among that many neighboring ranks, an all-reduce of the shard's gradient "
         "across groups", _reduce_across),
)
"""Rows for the options of `ZeroOptions`, in the order in which rules and terms apply."""

SIZES = frozenset({
    "reduce_bucket_size", "allgather_bucket_size", "reduce_scatter", "contiguous_gradients", "overlap_comm",
    "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save"})
"""Keys of "zero_optimization" that certified runs set but a layout does not contain: message sizes and overlap, and
DeepSpeed's own way to save, which no run uses."""


def uncertified_keys(values: Mapping[str, Any], layout: Layout) -> list[str]:
    """Return the keys of a ds_config's block "zero_optimization" that no certificate covers."""
    certified = {knob.key.split(".")[1] for knob in KNOBS} | SIZES | {"cpu_offload"}
    return [*(f"{knob.name} {knob.shown(layout)}" for knob in KNOBS
              if not knob.certified and knob.is_set(layout)),
            *(key for key, value in values.get("zero_optimization", {}).items()
              if key not in certified and value is not None)]


def knob_rows() -> list[tuple[str, ...]]:
    """Return the rows of the table in docs/reference/layouts.md: key, rule, memory, traffic, certified."""
    return [(f"`{knob.key}`", knob.rule_text, knob.memory_text, knob.traffic_text,
             "yes" if knob.certified else "no") for knob in KNOBS]

