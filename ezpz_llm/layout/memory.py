"""Memory estimate of a rank: parameters, gradients, optimizer state, activations, buffers (imports no torch).

4 bytes a parameter, 4 its gradient, 8 Adam's two moments; in bf16 and fp16 2 a parameter and 4 its master weight.
Under autocast the blocks' matrices have a copy in 2 bytes from forward to backward pass. Activations, buckets,
gathered layers and what libraries keep for themselves come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ezpz_llm.layout.knobs import KNOBS, Kind, State, Where
from ezpz_llm.layout.layout import Layout
from ezpz_llm.layout.optimizers import OPTIMIZERS, OptimizerName
from ezpz_llm.layout.precision_recipes import FP32_GRADIENTS, RECIPES, GradientDtypes, computed_as
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.parameters import AFTER, BEFORE, BLOCK, block_matrix_count, count
from ezpz_llm.model.partition import stage_bounds

_DEEPSPEEDS_BUCKET = 500_000_000
"""State, where the ds_config says nothing."""


@dataclass(frozen=True)
class Part:
    """`bytes` of one kind on the rank that has most. "copy" is of the parameters in fp32 for the optimizer to step:
    DeepSpeed's own, or master weights; "secondary" hpZ's second copy of the parameters, "cast" autocast's
    copies of matrices."""

    kind: Kind
    where: Where
    bytes: int


def memory_per_rank(layout: Layout, model: ModelConfig, world_size: int,
                    optimizer: OptimizerName = "adamw", precision: str = "fp32",
                    gradients: GradientDtypes = FP32_GRADIENTS) -> tuple[Part, ...]:
    """Parameters, gradients and optimizer state of the rank with most parameters, under a legal layout.

    Sequence-parallel ranks hold the same parameters, so ZeRO shards over them too. Moments in 8 bits are counted as
    if all had them; biases and norms, which keep theirs in fp32, are less than a thousandth.
    """
    layout = computed_as(layout, precision)
    whole = max(held_parameters(layout, model, stage) for stage in range(layout.pp))
    peers = layout.dp_size(world_size) * layout.sp
    kept: Mapping[Kind, State] = {"parameters": State("device", 4, whole), "gradients": State("device", 4, whole),
                                  "optimizer": State("device", OPTIMIZERS[optimizer].state_bytes, whole)}
    if RECIPES[precision].has_masters and layout.engine != "fsdp2":  # whose rows are master weights themselves
        kept = {**kept, "parameters": State("device", 2, whole), "copy": State("device", 4, whole)}
    if gradients.accumulated == "bf16":
        kept = {**kept, "gradients": State("device", 2, whole)}
    for knob in KNOBS:
        if knob.memory is not None:
            kept = knob.memory(kept, layout, whole, peers)
    return tuple(Part(kind, one.where, one.itemsize * one.elements) for kind, one in kept.items())


def cast_per_rank(layout: Layout, model: ModelConfig) -> Part:
    """Autocast's copies of the matrices on the rank that has most of them, where no block is recomputed.

    A pipeline's stage has as many micro batches on their way as stages are left, and copies for each.
    """
    bounds = stage_bounds(model, layout.pp, layout.partition)
    most = max((bounds[stage + 1] - bounds[stage]) * (layout.pp - stage) for stage in range(layout.pp))
    return Part("cast", "device", cast_bytes(layout, model, most))


def cast_bytes(layout: Layout, model: ModelConfig, blocks: int) -> int:
    """Autocast's copies of so many blocks' matrices, which autograd keeps from forward to backward pass.

    fully_shard frees the gathered fp32 weights, not these. Under stage 3 there are none: DeepSpeed's linear layer
    keeps the weight itself, and casts it again.
    """
    return 0 if layout.zero.stage == 3 else 2 * blocks * block_matrix_count(model) // layout.tp


def whole_bytes(layout: Layout, model: ModelConfig, precision: str, accumulation: int) -> int:
    """What fsdp2 holds whole on every rank for a part of a step, beside its shards and the block that computes.

    Embedding, last norm and head are gathered from forward to backward pass: fully_shard keeps the outermost unit,
    which the backward pass begins with. With fp32 parameters gradients are reduced by the last micro-step alone,
    and are whole until then.
    """
    if layout.engine != "fsdp2":
        return 0
    has_masters = RECIPES[precision].has_masters
    outermost = (2 if has_masters else 4) * (count(model, BEFORE) + count(model, AFTER))
    return outermost + (4 * held_parameters(layout, model, 0) if accumulation > 1 and not has_masters else 0)


def bucket_bytes(layout: Layout, model: ModelConfig, given: Mapping[str, Any], device: str) -> int:
    """What DeepSpeed takes to collect gradients in until it reduces them, on the rank that takes most.

    It allocates the whole of it whatever the model's size: once more where it collects on while one is being
    reduced, and once more in a pipeline, for nothing. On a CPU memory is not taken before it is written to. Without
    contiguous gradients stage 3 puts as many together when it reduces them, and no more than there are.
    State are of the model's dtype in stages 1 and 2, in stage 3 of the dtype that gradients travel in.

    Args:
        given: what DeepSpeed is given, empty for other engines.
        device: its kind, "cpu" or another.
    """
    zero = given.get("zero_optimization") or {}
    allocates = zero.get("contiguous_gradients", True)
    if not zero.get("stage") or (not allocates and zero["stage"] < 3):
        return 0
    if layout.pp > 1 and "bf16" in given:
        return 0  # gradients are reduced where they lie, see pipeline_engine.py
    table = model.padded_vocab_size * model.n_embd // layout.tp
    in_bf16 = given.get("communication_data_type") == "bf16" if zero["stage"] == 3 else "bf16" in given
    most = 0
    for stage in range(layout.pp):
        elements = int(zero.get("reduce_bucket_size", _DEEPSPEEDS_BUCKET))
        if layout.pp > 1 and model.tied and stage in (0, layout.pp - 1):
            elements = table  # see pipeline_engine.py
        if device == "cpu" or not allocates:
            elements = min(elements, held_parameters(layout, model, stage))
        elif zero["stage"] < 3:
            # DeepSpeed turns overlap off in a pipeline.
            elements *= 2 if layout.pp > 1 else 1 + bool(zero.get("overlap_comm"))
        most = max(most, (2 if in_bf16 else 4) * elements)
    return most


def total(parts: tuple[Part, ...], where: Where, *kinds: Kind) -> int:
    """Bytes in one place, of these kinds or of all."""
    return sum(part.bytes for part in parts if part.where == where and (not kinds or part.kind in kinds))


def held_parameters(layout: Layout, model: ModelConfig, stage: int) -> int:
    """Parameters of one tensor-parallel rank in a pipeline stage, before ZeRO divides them."""
    bounds = stage_bounds(model, layout.pp, layout.partition)
    found = (bounds[stage + 1] - bounds[stage]) * count(model, BLOCK, layout.tp)
    is_first, is_last = stage == 0, stage == layout.pp - 1
    if is_first:
        found += count(model, BEFORE, layout.tp)
    if is_last:
        found += count(model, AFTER, layout.tp)
        # The last of several stages has its own copy of a tied table.
        found += model.padded_vocab_size * model.n_embd // layout.tp if model.tied and not is_first else 0
    return found


# Activations: the part of a forward pass that is kept for the backward pass.
@dataclass(frozen=True)
class Pass:
    """One rank's forward pass.

    `recompute` is as in the trainer, `score_bytes` what attention keeps of a layer's scores
    (model/attention_kernels.py), `chunk` the tokens whose logits are there at once, 0 for all, `cpu` whether the
    device is one, `blockwise` whether attention is our own kernel for CPUs.
    """

    micro_batch: int
    accumulation: int
    precision: str
    recompute: int = 0
    score_bytes: int = 0
    chunk: int = 0
    cpu: bool = False
    blockwise: bool = False


def activation_bytes(layout: Layout, model: ModelConfig, work: Pass) -> int:
    """On the rank that keeps most. A pipeline's stage keeps the micro batches that are on their way after it."""
    bounds = stage_bounds(model, layout.pp, layout.partition)
    return max(_stage(layout, model, work, range(bounds[stage], bounds[stage + 1]), stage)
               for stage in range(layout.pp))


def _stage(layout: Layout, model: ModelConfig, work: Pass, blocks: range, stage: int) -> int:
    tokens = work.micro_batch * model.block_size // layout.sp
    whole = tokens * block_bytes(model, layout.tp, work) + work.score_bytes // layout.tp
    again = sum(work.recompute > 0 and (number + 1) % work.recompute == 0 for number in blocks)
    kept = (len(blocks) - again) * whole + again * _stream_itemsize(work) * model.n_embd * tokens
    if RECIPES[work.precision].autocast:
        kept += cast_bytes(layout, model, len(blocks) - again)
    kept *= min(layout.pp - stage, work.accumulation)
    if again:
        kept += whole  # the block that is being computed again
    return int(kept) + (head_bytes(model, layout.tp, work, tokens) if stage == layout.pp - 1 else 0)


def block_bytes(model: ModelConfig, tp: int, work: Pass) -> float:
    """What one block keeps of one token."""
    width, queries, kv, inside = model.n_embd, model.q_width, model.kv_width, model.intermediate_size
    e = _itemsize(work.precision)
    norms = 2 * _norm_bytes(model, work)
    attention = e * width + (e * (queries + 2 * kv) + e * queries) / tp
    if not work.blockwise:  # which keeps queries, keys and values as it takes them, and nothing else
        attention += 4 * model.n_head / tp
        if work.cpu and model.n_kv_head != model.n_head:
            attention += e * queries / tp  # its kernel's output lies in another order than the next layer wants
        if model.position == "rope":
            attention += e * (queries + kv) / tp  # turned queries and keys, beside the product they came from
    if model.qk_norm != "none":
        # Their norms' input where it is an fp32 copy, and without a fused kernel the normalised values.
        copy = 4 if e < 4 and (work.cpu or RECIPES[work.precision].autocast) else 0
        attention += (copy + (4 if work.cpu else 0)) * (queries + kv) / tp
    if model.mlp == "swiglu":
        # Autocast casts the input for each of the two layers that take it.
        mlp = e * width * (2 if RECIPES[work.precision].autocast else 1) + 4 * e * inside / tp
    else:
        mlp = e * width + 2 * e * inside / tp
    return norms + attention + mlp + (2 * width if model.dropout else 0)


def head_bytes(model: ModelConfig, tp: int, work: Pass, tokens: int) -> int:
    """The last norm, the head and the loss, with what they need at the turn from forward to backward."""
    width, columns, e = model.n_embd, model.padded_vocab_size // tp, _itemsize(work.precision)
    norm = tokens * _norm_bytes(model, work)
    if work.chunk:
        # The gradients of the hidden states and of the weight, and one chunk's logits twice.
        logits = min(work.chunk, tokens) * columns * (4 + e)
        return norm + tokens * _stream_itemsize(work) * width + 4 * columns * width + logits
    return norm + tokens * (e * width + 8 * columns)


def _norm_bytes(model: ModelConfig, work: Pass) -> int:
    """A norm's input, which is the residual stream; without a fused kernel the normalised values as well.

    On CPU norms compute on an fp32 copy of it.
    """
    itemsize = 4 if work.cpu else _stream_itemsize(work)
    return itemsize * model.n_embd * (2 if model.norm == "rmsnorm" and work.cpu else 1)


def _stream_itemsize(work: Pass) -> int:
    """Bytes an element of the residual stream, which autocast keeps in fp32."""
    return 2 if RECIPES[work.precision].has_masters else 4


def _itemsize(precision: str) -> int:
    return 2 if RECIPES[precision].is_half else 4
