"""What makes a layout illegal here, and why (imports no torch). The nearest legal choice is found in nearest.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ezpz_llm.base.errors import UserError
from ezpz_llm.layout.batch import Batch
from ezpz_llm.layout.layout import Layout
from ezpz_llm.model.config import ModelConfig

LINEAR_LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_gate", "mlp.c_proj")
"""The linear layers of a block, by name within it; mlp.c_gate is SwiGLU's."""


@dataclass(frozen=True)
class Case:
    """All that legality depends on.

    `model` is None where what is trained is no GPT: nothing is known of its shape then. `batch` solves the batch
    for a data-parallel size, or raises UserError; None where no batch is known. `shipped`: whether the ds_config is
    one of ours, and so is chosen by name; else it is a file that its owner can edit.
    """

    layout: Layout
    world_size: int
    model: ModelConfig | None = None
    batch: Callable[[int], Batch] | None = None
    shipped: bool = True


@dataclass(frozen=True)
class Problem:
    """Why a case cannot run. `names` are the values that clash, `knobs` those that can be turned to mend it."""

    found: str
    names: tuple[str, ...]
    knobs: tuple[str, ...]


@dataclass(frozen=True)
class Repair:
    """What to run in place of a layout that was asked for (it may be the same), and what to say about it."""

    layout: Layout
    note: str


def examine(case: Case) -> tuple[Layout, tuple[str, ...], Problem | None]:
    """The layout to run, what to say about it, and what is wrong with it if it cannot run.

    Raises:
        UserError: the batch does not work out.
    """
    notes: list[str] = []
    for rule in RULES:
        found = rule(case)
        if isinstance(found, Problem):
            return case.layout, tuple(notes), found
        if found is not None:
            case = replace(case, layout=found.layout)
            notes.append(found.note)
    return case.layout, tuple(notes), None


def degrees_divide_the_ranks(case: Case) -> Problem | None:
    layout = case.layout
    others = layout.tp * layout.pp * layout.sp
    if case.world_size % others == 0:
        return None
    return Problem(f"{case.world_size} ranks cannot be divided into groups of tp {layout.tp} x pp {layout.pp} x "
                   f"sp {layout.sp} = {others}", ("ranks", *_above_one(layout)), ("ranks", "tp", "pp", "sp"))


def torchs_engines_have_no_stages(case: Case) -> Problem | None:
    layout = case.layout
    if layout.engine == "deepspeed" or not layout.zero_stage:
        return None
    return Problem(f"engine {layout.engine} has no ZeRO stage {layout.zero_stage}", ("engine", "stage"),
                   ("engine", "stage"))


def pipelines_and_tensor_parallel_need_an_engine_for_it(case: Case) -> Problem | None:
    layout = case.layout
    if layout.pp > 1 and layout.engine != "deepspeed":
        return Problem(f"engine {layout.engine} has no pipeline: DeepSpeed's runs the stages", ("engine", "pp"),
                       ("engine", "pp"))
    if layout.tp > 1 and layout.engine == "fsdp2":
        return Problem("fsdp2 divides whole layers over all ranks, and tensor parallel divides each layer: the two "
                       "are not combined here", ("engine", "tp"), ("engine", "tp"))
    return None


def offload_needs_deepspeeds_stages(case: Case) -> Problem | None:
    layout = case.layout
    # Below stage 3 DeepSpeed takes "nvme" for host memory, without a word.
    for what, place, least in (("offload_optimizer", layout.offload_optimizer,
                                3 if layout.offload_optimizer == "nvme" else 1),
                               ("offload_param", layout.offload_param, 3)):
        if place is None:
            continue
        if layout.engine != "deepspeed":
            return Problem(f"engine {layout.engine} offloads nothing, {what} is DeepSpeed's", ("engine", what),
                           ("offload", "engine"))
        if (layout.zero_stage or 0) < least:
            return Problem(f"{what} {'to NVMe ' if place == 'nvme' else ''}needs ZeRO stage {least}"
                           f"{' or more' if least < 3 else ''}; this is stage {layout.zero_stage or 0}",
                           ("stage", what), ("stage", "offload"))
    return None


def pipelines_need_stage_1(case: Case) -> Problem | Repair | None:
    layout = case.layout
    if layout.pp == 1:
        return None
    if layout.zero_stage in (2, 3):
        return Problem(f"a pipeline keeps whole gradients until its last micro batch: ZeRO stage "
                       f"{layout.zero_stage}, which divides them, is refused by DeepSpeed",
                       ("stage", "pp"), ("stage", "pp"))
    if layout.offload_optimizer is not None:
        return Problem("a pipeline's optimizer steps on the device: it is not offloaded here",
                       ("offload_optimizer", "pp"), ("offload", "pp"))
    if layout.zero_stage == 0:
        return Repair(replace(layout, zero_stage=1),
                      "ZeRO stage 1 in place of 0: under a pipeline DeepSpeed's stage 0 clips each stage by a norm "
                      "of its own")
    return None


def pipelines_take_whole_sequences(case: Case) -> Problem | None:
    if case.layout.pp == 1 or case.layout.sp == 1:
        return None
    return Problem("pipeline stages pass on whole sequences: pipeline and sequence parallel are not combined here",
                   ("pp", "sp"), ("sp", "pp"))


def tiles_are_stage_3s(case: Case) -> Problem | None:
    layout = case.layout
    if not layout.tiled:
        return None
    if layout.engine != "deepspeed" or layout.zero_stage != 3:
        return Problem("tiles save memory where parameters are gathered layer by layer: they need ZeRO stage 3",
                       ("tiled", "stage"), ("stage", "tiled"))
    if layout.tp > 1:
        return Problem("tiled layers are not divided over tensor-parallel ranks as well", ("tiled", "tp"),
                       ("tp", "tiled"))
    return None


def tiles_name_layers(case: Case) -> Problem | None:
    names = [name for name, *_ in case.layout.tiled]
    for name in names:
        if name not in LINEAR_LAYERS:
            return Problem(f"tiled names {name!r}, and the linear layers of a block are "
                           f"{', '.join(LINEAR_LAYERS)}", ("tiled",), ("tiled",))
    if case.model is not None and names == ["mlp.c_gate"] and case.model.mlp != "swiglu":
        return Problem("tiled names only mlp.c_gate, which this model has not: its MLP has no gate", ("tiled",),
                       ("tiled",))
    return None


def tiles_fit(case: Case) -> Problem | None:
    model = case.model
    if model is None:
        return None
    attention, mlp = model.n_embd + 2 * model.kv_width, model.intermediate_size
    sizes = dict(zip(LINEAR_LAYERS, ((model.n_embd, attention), (model.n_embd, model.n_embd), (model.n_embd, mlp),
                                     (model.n_embd, mlp), (mlp, model.n_embd)), strict=True))
    for name, *parts in case.layout.tiled:
        for number, size, side in zip(parts, sizes[name], ("in", "out"), strict=True):
            if number > size:
                return Problem(f"{name} cannot be cut into {number} tiles along its {side}put of {size}",
                               ("tiled",), ("tiled",))
    return None


def heads_divide(case: Case) -> Problem | None:
    layout, model = case.layout, case.model
    parts = layout.tp * layout.sp
    if model is None or parts == 1:
        return None
    by = " x ".join(f"{name} {getattr(layout, name)}" for name in ("tp", "sp") if getattr(layout, name) > 1)
    for kind, count in (("attention heads", model.n_head), ("key/value heads", model.n_kv_head)):
        if count % parts:
            return Problem(f"{count} {kind} cannot be divided by {by}{f' = {parts}' if 'x' in by else ''}",
                           _above_one(layout, "tp", "sp"), ("tp", "sp"))
    return None


def widths_divide(case: Case) -> Problem | None:
    tp, model = case.layout.tp, case.model
    if model is None or tp == 1:
        return None
    if model.intermediate_size % tp:
        return Problem(f"the MLP's width of {model.intermediate_size} cannot be divided by tp {tp}", ("tp",),
                       ("tp",))
    if model.padded_vocab_size % tp:
        # Not padded in silence: more rows are another model, to its softmax and to its checkpoints.
        return Problem(f"the vocabulary of {model.padded_vocab_size} rows cannot be divided by tp {tp}", ("tp",),
                       ("tp", "vocab_multiple"))
    return None


def each_stage_has_a_block(case: Case) -> Problem | None:
    if case.model is None or case.layout.pp <= case.model.n_layer:
        return None
    return Problem(f"{case.model.n_layer} blocks cannot be divided among {case.layout.pp} pipeline stages", ("pp",),
                   ("pp", "n_layer"))


def sequences_divide(case: Case) -> Problem | None:
    sp, model = case.layout.sp, case.model
    if model is None or model.block_size % sp == 0:
        return None
    return Problem(f"sequences of {model.block_size} tokens cannot be divided by sp {sp}", ("sp",),
                   ("sp", "block_size"))


def pipelines_want_micro_batches(case: Case) -> Repair | None:
    stages = case.layout.pp
    if stages == 1 or case.batch is None:
        return None
    micro_batches = case.batch(case.layout.dp_size(case.world_size)).accumulation
    if micro_batches >= stages:
        return None
    bubble = (stages - 1) / (micro_batches + stages - 1)
    return Repair(case.layout, f"{stages} pipeline stages idle {bubble:.0%} of the time with {micro_batches} micro "
                               f"batch(es) a step: (p - 1)/(m + p - 1); --accumulation {4 * stages} would make it "
                               f"{(stages - 1) / (5 * stages - 1):.0%}")


RULES: tuple[Callable[[Case], Problem | Repair | None], ...] = (
    degrees_divide_the_ranks,
    torchs_engines_have_no_stages,
    offload_needs_deepspeeds_stages,
    pipelines_and_tensor_parallel_need_an_engine_for_it,
    pipelines_need_stage_1,
    pipelines_take_whole_sequences,
    tiles_are_stage_3s,
    tiles_name_layers,
    tiles_fit,
    heads_divide,
    widths_divide,
    each_stage_has_a_block,
    sequences_divide,
    pipelines_want_micro_batches,
)


def check_zero(values: Mapping[str, Any], layout: Layout, world_size: int, where: str) -> None:
    """Refuse what DeepSpeed would refuse on every rank, once they have started, or compute wrongly.

    Args:
        values: a ds_config's keys that are DeepSpeed's to read.

    Raises:
        UserError: names the key and what to write instead.
    """
    zero = values.get("zero_optimization", {})
    group = zero.get("zero_hpz_partition_size") or 1
    if layout.zero_stage == 3 and group > 1:
        if layout.tp > 1:
            raise UserError(f"zero_hpz_partition_size is {group}, with tp {layout.tp}: DeepSpeed's second "
                            "partition is over neighbouring ranks, which hold parts of other weights then",
                            where=where, instead="--tp 1, or no zero_hpz_partition_size")
        if world_size % min(group, world_size):
            fitting = [str(size) for size in range(2, world_size + 1) if world_size % size == 0]
            raise UserError(f"zero_hpz_partition_size {group} does not divide the {world_size} ranks", where=where,
                            instead=f"zero_hpz_partition_size {' or '.join(fitting)}, the ranks of a node")
    # Stage 1 all-reduces; a scatter cannot scale before it reduces.
    if (layout.zero_stage or 0) >= 2 and zero.get("reduce_scatter", True):
        for key, neutral in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            if values.get(key, neutral) != neutral:
                raise UserError(f"{key} is {json.dumps(values[key])}, and ZeRO stage {layout.zero_stage} reduces "
                                "by scattering: DeepSpeed does not scale gradients before that", where=where,
                                instead=f"no {key}, or \"reduce_scatter\": false in \"zero_optimization\"")


def _above_one(layout: Layout, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names or ("tp", "pp", "sp") if getattr(layout, name) > 1)
