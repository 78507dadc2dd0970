"""The table of ZeRO knobs: for each option of a layout its ds_config key, rules, memory term and traffic term.

A new knob is a field of `ZeroOptions`, read in `read_layout`, and one row of `KNOBS`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ezpz_llm.layout.batch import Batch
from ezpz_llm.layout.layout import Layout, ZeroOptions
from ezpz_llm.model.config import ModelConfig

LINEAR_LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_gate", "mlp.c_proj")
"""The linear layers of a block, by name within it; mlp.c_gate is SwiGLU's."""

Kind = Literal["parameters", "gradients", "optimizer", "copy", "secondary", "cast"]
Where = Literal["device", "host", "files"]


@dataclass(frozen=True)
class Case:
    """The input of every rule: a layout on a number of ranks.

    `model` is None for a model that is not a GPT, whose shape is unknown. `batch` solves the batch for a
    data-parallel size, or raises UserError; None if no batch is known. `shipped`: whether the ds_config is one of
    ours, and so is chosen by name; otherwise it is a file that its owner can edit.
    """

    layout: Layout
    world_size: int
    model: ModelConfig | None = None
    batch: Callable[[int], Batch] | None = None
    shipped: bool = True


@dataclass(frozen=True)
class Problem:
    """Why a case cannot run. `names` are the values that clash, `knobs` those that can be changed to fix it."""

    message: str
    names: tuple[str, ...]
    knobs: tuple[str, ...]


@dataclass(frozen=True)
class Repair:
    """The layout to run instead of the one that was asked for (it may be the same), and the note about it."""

    layout: Layout
    note: str


Found = Iterator[Problem | Repair]
Rule = Callable[[Case], Found]
"""What it finds wrong with a case; the first counts."""


@dataclass(frozen=True)
class State:
    """One kind of state that a rank keeps: its place, bytes an element, and elements."""

    where: Where
    itemsize: int
    elements: int


MemoryTerm = Callable[[Mapping[Kind, State], Layout, int, int], dict[Kind, State]]
"""(what a rank holds by kind, layout, its parameters before sharding, ranks that share them) -> what it holds."""

TrafficTerm = Callable[[Mapping[str, int], Layout, int, int], dict[str, int]]
"""(bytes of a step by kind, the layout, micro-steps, ranks that share the parameters) -> bytes by kind.

A kind whose group is not all of these ranks has its size in its name: "all_gather (8 ranks)".
"""


@dataclass(frozen=True)
class Knob:
    """One option of a layout.

    `field` is that of `ZeroOptions`, `key` the dotted key of a ds_config. `rules`, `memory` and `traffic` are the
    terms that the checks, the memory estimate and the textbook volume apply in the order of the table; the three
    texts say the same on the page. `certified`: whether a shipped layout with a certificate sets it.
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
        """The key's own name, without the blocks around it."""
        parts = self.key.split(".")
        return parts[-2] if parts[-1] == "device" else parts[-1]

    def shown(self, layout: Layout) -> str:
        """A layout's value as one word or a list."""
        value = getattr(layout.zero, self.field)
        return ", ".join(f"{name} {rows} x {columns}" for name, rows, columns in value) if self.field == "tiled" \
            else str(value)

    def is_set(self, layout: Layout) -> bool:
        """True if a layout has another value than the default."""
        return getattr(layout.zero, self.field) != getattr(ZeroOptions(), self.field)


# Rules.
def check_zero_stage(case: Case) -> Found:
    """Only DeepSpeed's engine has ZeRO stages."""
    layout = case.layout
    if layout.engine != "deepspeed" and layout.zero.stage:
        yield Problem(f"engine {layout.engine} has no ZeRO stage {layout.zero.stage}", ("engine", "stage"),
                      ("engine", "stage"))


def check_offload_optimizer(case: Case) -> Found:
    """Offload of the optimizer needs ZeRO stage 1, to NVMe stage 3."""
    place = case.layout.zero.offload_optimizer
    # Below stage 3 DeepSpeed uses host memory for "nvme" and does not say so.
    return _check_offload(case.layout, "offload_optimizer", place, 3 if place == "nvme" else 1)


def check_offload_param(case: Case) -> Found:
    """Offload of parameters needs ZeRO stage 3."""
    return _check_offload(case.layout, "offload_param", case.layout.zero.offload_param, 3)


def _check_offload(layout: Layout, what: str, place: str | None, least: int) -> Found:
    if place is not None and layout.engine != "deepspeed":
        yield Problem(f"engine {layout.engine} offloads nothing, {what} is DeepSpeed's", ("engine", what),
                      ("offload", "engine"))
    if place is not None and (layout.zero.stage or 0) < least:
        yield Problem(f"{what} {'to NVMe ' if place == 'nvme' else ''}needs ZeRO stage {least}"
                      f"{' or more' if least < 3 else ''}; this is stage {layout.zero.stage or 0}",
                      ("stage", what), ("stage", "offload"))


def check_tiled_stage(case: Case) -> Found:
    """Tiled layers need ZeRO stage 3 without tensor parallel."""
    layout = case.layout
    if layout.zero.tiled and (layout.engine != "deepspeed" or layout.zero.stage != 3):
        yield Problem("tiles save memory where parameters are gathered layer by layer: they need ZeRO stage 3",
                      ("tiled", "stage"), ("stage", "tiled"))
    if layout.zero.tiled and layout.tp > 1:
        yield Problem("tiled layers are not divided over tensor-parallel ranks as well", ("tiled", "tp"),
                      ("tp", "tiled"))


def check_tiled_names(case: Case) -> Found:
    """Only the linear layers that a block has can be tiled."""
    names = [name for name, *_ in case.layout.zero.tiled]
    for name in names:
        if name not in LINEAR_LAYERS:
            yield Problem(f"tiled names {name!r}, and the linear layers of a block are "
                          f"{', '.join(LINEAR_LAYERS)}", ("tiled",), ("tiled",))
    if case.model is not None and names == ["mlp.c_gate"] and case.model.mlp != "swiglu":
        yield Problem("tiled names only mlp.c_gate, and the MLP of this model has no gate", ("tiled",), ("tiled",))


def check_tiled_sizes(case: Case) -> Found:
    """A layer has at most one tile for each of its inputs and outputs."""
    model = case.model
    if model is None:
        return
    attention, mlp = model.q_width + 2 * model.kv_width, model.intermediate_size
    sizes = dict(zip(LINEAR_LAYERS, ((model.n_embd, attention), (model.q_width, model.n_embd), (model.n_embd, mlp),
                                     (model.n_embd, mlp), (mlp, model.n_embd)), strict=True))
    for name, *parts in case.layout.zero.tiled:
        for number, size, side in zip(parts, sizes[name], ("in", "out"), strict=True):
            if number > size:
                yield Problem(f"{name} cannot be cut into {number} tiles along its {side}put of {size}",
                              ("tiled",), ("tiled",))


def check_hpz(case: Case) -> Found:
    """hpZ needs ZeRO stage 3 without tensor parallel, and a partition that divides the ranks."""
    layout, size = case.layout, case.layout.zero.hpz_partition_size
    if size == 1:
        return
    if layout.engine != "deepspeed" or layout.zero.stage != 3:
        yield Repair(layout.with_zero(hpz_partition_size=1),
                     f"zero_hpz_partition_size {size} does nothing here: it partitions the second copy of the "
                     "parameters that ZeRO stage 3 of DeepSpeed's engine makes")
    if layout.tp > 1:
        # DeepSpeed forms the groups of neighbouring ranks, which hold parts of other weights under tp.
        yield Problem(f"zero_hpz_partition_size is {size}, with tp {layout.tp}: DeepSpeed's second partition is "
                      "over neighbouring ranks, which hold parts of other weights then",
                      ("zero_hpz_partition_size", "tp"), ("tp", "hpz"))
    peers = layout.dp_size(case.world_size) * layout.sp
    if peers % min(size, peers):
        yield Problem(f"zero_hpz_partition_size {size} does not divide the {peers} ranks that share the "
                      "parameters; it is the number of ranks of a node", ("zero_hpz_partition_size", "ranks"),
                      ("hpz", "ranks"))


def check_shard_within(case: Case) -> Found:
    """FSDP2 shards within groups that divide the ranks."""
    layout, size = case.layout, case.layout.zero.shard_within
    if size is None:
        return
    if layout.engine != "fsdp2":
        yield Problem(f"engine {layout.engine} does not shard within groups of {size} ranks: fsdp2 does",
                      ("engine", "shard_within"), ("shard_within", "engine"))
    peers = layout.dp_size(case.world_size) * layout.sp
    if peers % min(size, peers):
        yield Problem(f"shard_within {size} does not divide the {peers} ranks that share the parameters; it is the "
                      "number of ranks of a node", ("shard_within", "ranks"), ("shard_within", "ranks"))


# Memory terms.
def _shard(kept: Mapping[Kind, State], layout: Layout, whole: int, peers: int) -> dict[Kind, State]:
    stage, share = layout.shard_stage(), -(-whole // peers)
    found = dict(kept)
    sharded: tuple[tuple[Kind, int], ...] = (("parameters", 3), ("gradients", 2), ("optimizer", 1))
    for kind, since in sharded:
        if stage >= since:
            found[kind] = replace(found[kind], elements=share)
    # Every stage that shards the optimizer steps a flat fp32 copy of the rank's share; stage 3 also has the share.
    if layout.engine == "deepspeed" and stage:
        found["copy"] = State("device", 4, share)
    return found


_OFFLOADED: Mapping[str, Where] = {"cpu": "host", "nvme": "files"}


def _offload_optimizer(kept: Mapping[Kind, State], layout: Layout, whole: int, peers: int) -> dict[Kind, State]:
    if layout.zero.offload_optimizer is None:
        return dict(kept)
    place = _OFFLOADED[layout.zero.offload_optimizer]
    moved: dict[Kind, State] = {kind: replace(one, where=place) for kind, one in kept.items()
                                if kind in ("optimizer", "copy")}
    # DeepSpeed collects offloaded gradients in host memory, also those whose optimizer's state is in files.
    return {**kept, "gradients": State("host", 4, -(-whole // peers)), **moved}


def _offload_param(kept: Mapping[Kind, State], layout: Layout, whole: int, peers: int) -> dict[Kind, State]:
    if layout.zero.offload_param is None:
        return dict(kept)
    return {**kept, "parameters": replace(kept["parameters"], where=_OFFLOADED[layout.zero.offload_param])}


def _second_copy(kept: Mapping[Kind, State], layout: Layout, whole: int, peers: int) -> dict[Kind, State]:
    size = layout.zero.hpz_partition_size
    if size == 1:
        return dict(kept)
    place: Where = "device" if layout.zero.offload_param is None else "host"
    # DeepSpeed makes it of the parameters' dtype.
    return {**kept, "secondary": State(place, kept["parameters"].itemsize, -(-whole // min(size, peers)))}


def _shard_in_groups(kept: Mapping[Kind, State], layout: Layout, whole: int, peers: int) -> dict[Kind, State]:
    size = layout.zero.shard_within
    if size is None:
        return dict(kept)
    return {kind: replace(one, elements=-(-whole // min(size, peers))) for kind, one in kept.items()}


# Traffic terms.
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
    # The second copy is made by the first forward pass after an optimizer step and used until the next step.
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
    Knob("stage", "zero_optimization.stage", "DeepSpeed's engine; a pipeline has stage 1", (check_zero_stage,),
         "1 shards the optimizer's state, 2 also gradients, 3 also parameters", _shard,
         "1 and 2: reduce-scatter of gradients, all-gather of parameters; 3: an all-gather in each pass of each "
         "micro-step", _shard_traffic),
    Knob("offload_optimizer", "zero_optimization.offload_optimizer.device", "from stage 1, `nvme` in stage 3",
         (check_offload_optimizer,), "optimizer's state in host memory or files, gradients in host memory",
         _offload_optimizer),
    Knob("offload_param", "zero_optimization.offload_param.device", "stage 3", (check_offload_param,),
         "parameters in host memory or files", _offload_param),
    Knob("tiled", "ezpz_llm.tiled", "stage 3, no tp; names that a block has, no more tiles than rows or columns",
         (check_tiled_stage, check_tiled_names, check_tiled_sizes), "less of a layer is gathered at a time"),
    Knob("hpz_partition_size", "zero_optimization.zero_hpz_partition_size",
         "divides the ranks that share the parameters, no tp; without effect below stage 3", (check_hpz,),
         "a second copy of the parameters over that many ranks", _second_copy,
         "after a step's first forward pass, all-gathers of parameters stay among that many neighbouring ranks",
         _gather_in_groups, certified=False),
    Knob("shard_within", "ezpz_llm.shard_within", "`fsdp2`; divides the ranks that share the parameters",
         (check_shard_within,), "shards over that many ranks, not over all", _shard_in_groups,
         "all-gathers and reduce-scatters among that many neighbours, an all-reduce of the shard's gradient "
         "across them", _reduce_across, certified=False),
)
"""One row an option of `ZeroOptions`, in the order in which rules and terms apply."""

SIZES = frozenset({
    "reduce_bucket_size", "allgather_bucket_size", "reduce_scatter", "contiguous_gradients", "overlap_comm",
    "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_reuse_distance"})
"""Keys of "zero_optimization" outside a layout's value, set in certified runs: how much moves at once, and when."""


def uncertified(values: Mapping[str, Any], layout: Layout) -> list[str]:
    """The keys of a ds_config's block "zero_optimization" that no certificate covers."""
    known = {knob.key.split(".")[1] for knob in KNOBS} | SIZES | {"cpu_offload"}
    return [*(f"{knob.name} {knob.shown(layout)}" for knob in KNOBS
              if not knob.certified and knob.is_set(layout)),
            *(key for key, value in values.get("zero_optimization", {}).items()
              if key not in known and value is not None)]


def knob_rows() -> list[tuple[str, ...]]:
    """The table as docs/reference/layouts.md prints it: key, rule, memory, traffic, certified."""
    return [(f"`{knob.key}`", knob.rule_text, knob.memory_text, knob.traffic_text,
             "yes" if knob.certified else "no") for knob in KNOBS]

