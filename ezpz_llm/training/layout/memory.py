"""Memory estimate of a rank: parameters, gradients, optimizer state, activations, buffers (imports no torch).

Per parameter: 4 bytes for the value, 4 for its gradient, 8 for Adam's two moments; in bf16 and fp16, 2 bytes for
the value and 4 for its master weight. Autocast keeps 2-byte copies of the blocks' matrices from forward to
backward pass. Activations, buckets, gathered layers and the libraries' own memory come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ezpz_llm.training.layout.knobs import KNOBS, Kind, StoredState, Where
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.optimizers import OPTIMIZERS, OptimizerName
from ezpz_llm.training.layout.precision_recipes import FP32_GRADIENTS, RECIPES, GradientDtypes, deepspeed_layout
from ezpz_llm.training.model.config import AFTER, BEFORE, BLOCK, ModelConfig, Recompute
from ezpz_llm.training.model.parameters import block_matrix_count, count, parameter_shapes
from ezpz_llm.training.model.partition import stage_bounds

_DEFAULT_BUCKET = 500_000_000
"""DeepSpeed's default reduce_bucket_size, in elements."""


@dataclass(frozen=True)
class Part:
    """Bytes of one kind of state on the rank that has most.

    "copy" is the fp32 copy of the parameters that the optimizer steps (DeepSpeed's flat copy or master weights),
    "secondary" hpZ's second copy of the parameters, "cast" autocast's copies of matrices.
    """

    kind: Kind
    where: Where
    bytes: int


def memory_per_rank(layout: Layout, model: ModelConfig, world_size: int,
                    optimizer: OptimizerName = "adamw", precision: str = "fp32",
                    gradients: GradientDtypes = FP32_GRADIENTS) -> tuple[Part, ...]:
    """Return the bytes of state on the rank with most parameters, for a legal layout.

    ZeRO also shards over sequence-parallel ranks, which have the same parameters. With adamw_8bit all moments
    count as 8-bit; biases and norms, whose moments are fp32, are less than 0.1 % of the parameters.
    """
    layout = deepspeed_layout(layout, precision)
    whole = max(held_parameters(layout, model, stage) for stage in range(layout.pp))
    peers = layout.dp_size(world_size) * layout.sp
    state_bytes = OPTIMIZERS[optimizer].mean_state_bytes(parameter_shapes(model))
    states: Mapping[Kind, StoredState] = {"parameters": StoredState("device", 4, whole),
                                          "gradients": StoredState("device", 4, whole),
                                          "optimizer": StoredState("device", state_bytes, whole)}
    if RECIPES[precision].has_masters and layout.engine != "fsdp2":  # its shards are the master weights
        states = {**states, "parameters": StoredState("device", 2, whole), "copy": StoredState("device", 4, whole)}
    if gradients.accumulated == "bf16":
        states = {**states, "gradients": StoredState("device", 2, whole)}
    for knob in KNOBS:
        if knob.memory is not None:
            states = knob.memory(states, layout, whole, peers)
    return tuple(Part(kind, state.where, int(state.itemsize * state.elements)) for kind, state in states.items())


def cast_per_rank(layout: Layout, model: ModelConfig) -> Part:
    """Return autocast's copies on the rank that has most, if no block is recomputed.

    A pipeline stage keeps copies for each micro-batch in flight, as many as there are stages from it to the last.
    """
    bounds = stage_bounds(model, layout.pp, layout.partition)
    max_blocks = max((bounds[stage + 1] - bounds[stage]) * (layout.pp - stage) for stage in range(layout.pp))
    return Part("cast", "device", _cast_bytes(layout, model, max_blocks))


def _cast_bytes(layout: Layout, model: ModelConfig, blocks: int) -> int:
    """Return the bytes of autocast's copies of the matrices of `blocks` blocks.

    Autograd keeps them from forward to backward pass. fully_shard frees the gathered fp32 weights but not these
    copies. Stage 3 has none: DeepSpeed's linear layer keeps the weight itself and casts it again.
    """
    return 0 if layout.zero.stage == 3 else 2 * blocks * block_matrix_count(model) // layout.tp


def unsharded_bytes(layout: Layout, model: ModelConfig, precision: str, accumulation: int) -> int:
    """Return the bytes of unsharded state in fsdp2 besides the block that computes.

    Embedding, final norm and head stay gathered from forward to backward pass, because fully_shard keeps the
    outermost unit, with which the backward pass begins. With fp32 parameters only the last micro-step reduces
    gradients, which are unsharded until then.
    """
    if layout.engine != "fsdp2":
        return 0
    has_masters = RECIPES[precision].has_masters
    outermost = (2 if has_masters else 4) * (count(model, BEFORE) + count(model, AFTER))
    return outermost + (4 * held_parameters(layout, model, 0) if accumulation > 1 and not has_masters else 0)


def bucket_bytes(layout: Layout, model: ModelConfig, given: Mapping[str, Any], device: str) -> int:
    """Return the bytes of DeepSpeed's buckets for gradients, on the rank that needs most.

    DeepSpeed allocates a whole bucket for any model size, a second one if it fills one while it reduces the
    other, and an unused second one in pipelines. On CPUs, memory is used only once it is written. Without
    contiguous gradients, stage 3 concatenates up to a bucket of existing gradients when it reduces them. Buckets
    have the model's dtype in stages 1 and 2, and the reduction's dtype in stage 3.

    Args:
        given: DeepSpeed's configuration, empty for other engines.
        device: kind of the device, such as "cpu".
    """
    zero = given.get("zero_optimization") or {}
    allocates = zero.get("contiguous_gradients", True)
    if not zero.get("stage") or (not allocates and zero["stage"] < 3):
        return 0
    if layout.pp > 1 and "bf16" in given:
        return 0  # gradients are reduced in place, see pipeline_engine.py
    table = model.padded_vocab_size * model.n_embd // layout.tp
    in_bf16 = given.get("communication_data_type") == "bf16" if zero["stage"] == 3 else "bf16" in given
    maximum = 0
    for stage in range(layout.pp):
        elements = int(zero.get("reduce_bucket_size", _DEFAULT_BUCKET))
        if layout.pp > 1 and model.tied and stage in (0, layout.pp - 1):
            elements = table  # see pipeline_engine.py
        if device == "cpu" or not allocates:
            elements = min(elements, held_parameters(layout, model, stage))
        elif zero["stage"] < 3:
            # DeepSpeed turns overlap off in a pipeline.
            elements *= 2 if layout.pp > 1 else 1 + bool(zero.get("overlap_comm"))
        maximum = max(maximum, (2 if in_bf16 else 4) * elements)
    return maximum


def total(parts: tuple[Part, ...], where: Where, *kinds: Kind) -> int:
    """Return the bytes in one location, of the given kinds or of all kinds."""
    return sum(part.bytes for part in parts if part.where == where and (not kinds or part.kind in kinds))


def held_parameters(layout: Layout, model: ModelConfig, stage: int) -> int:
    """Return a tensor-parallel rank's parameters in a pipeline stage, before ZeRO shards them."""
    bounds = stage_bounds(model, layout.pp, layout.partition)
    parameters = (bounds[stage + 1] - bounds[stage]) * count(model, BLOCK, layout.tp)
    is_first, is_last = stage == 0, stage == layout.pp - 1
    if is_first:
        parameters += count(model, BEFORE, layout.tp)
    if is_last:
        parameters += count(model, AFTER, layout.tp)
        # The last of several stages has its own copy of a tied embedding table.
        parameters += model.padded_vocab_size * model.n_embd // layout.tp if model.tied and not is_first else 0
    return parameters


@dataclass(frozen=True)
class Pass:
    """Forward pass of a rank.

    `recompute` is the trainer's setting, `score_bytes` the bytes of attention scores kept per layer
    (model/attention_kernels.py), `chunk` the number of tokens whose logits exist at the same time (0: all).
    `cpu` is True if the model runs on CPUs, `blockwise` if attention uses the blockwise kernel, and `masked` with
    masks between documents.
    """

    micro_batch: int
    accumulation: int
    precision: str
    recompute: Recompute = 0
    score_bytes: int = 0
    chunk: int = 0
    cpu: bool = False
    blockwise: bool = False
    masked: bool = False


def activation_bytes(layout: Layout, model: ModelConfig, work: Pass) -> int:
    """Return the bytes of activations on the rank that keeps most.

    A pipeline stage keeps the activations of the micro-batches in flight after it.
    """
    bounds = stage_bounds(model, layout.pp, layout.partition)
    return max(_stage_bytes(layout, model, work, range(bounds[stage], bounds[stage + 1]), stage)
               for stage in range(layout.pp))


def _stage_bytes(layout: Layout, model: ModelConfig, work: Pass, blocks: range, stage: int) -> int:
    tokens = work.micro_batch * model.block_size // layout.sp
    whole = tokens * block_bytes(model, layout.tp, work) + work.score_bytes // layout.tp
    products = 0.0
    if work.recompute == "selective":
        recomputed, products = len(blocks), product_bytes(model, layout.tp, work)
    else:
        recomputed = sum(work.recompute > 0 and (number + 1) % work.recompute == 0 for number in blocks)
    kept = tokens * (_stream_itemsize(work) * model.n_embd + products)
    size = (len(blocks) - recomputed) * whole + recomputed * kept
    if RECIPES[work.precision].autocast:
        size += _cast_bytes(layout, model, len(blocks) - recomputed)
    if work.masked:  # a number for each pair of tokens in whole sequences, which all blocks share
        size += work.micro_batch * model.block_size ** 2 * _itemsize(work.precision)
    size *= min(layout.pp - stage, work.accumulation)
    if recomputed:
        size += whole - tokens * products  # the block that is being recomputed
    return int(size) + (_head_bytes(model, layout.tp, work, tokens) if stage == layout.pp - 1 else 0)


def block_bytes(model: ModelConfig, tp: int, work: Pass) -> float:
    """Return the bytes that one block keeps per token."""
    width, queries, kv, inside = model.n_embd, model.q_width, model.kv_width, model.intermediate_size
    e = _itemsize(work.precision)
    norms = 2 * _norm_bytes(model, work)
    attention = e * width + (e * (queries + 2 * kv) + e * queries) / tp
    if not work.blockwise:  # its kernel keeps only queries, keys and values
        attention += 4 * model.n_head / tp
        if work.cpu and model.n_kv_head != model.n_head:
            attention += e * queries / tp  # the kernel's output is copied into the layout of the next layer
        if model.position == "rope":
            attention += e * (queries + kv) / tp  # rotated queries and keys, besides the matmul output
        if work.masked and queries != kv:
            attention += e * _repeated_heads(model) / tp
    # Norms within attention: the input if it is an fp32 copy, and without a fused kernel the normalized values.
    copy = 4 if e < 4 and (work.cpu or RECIPES[work.precision].autocast) else 0
    attention += (copy + (4 if work.cpu else 0)) * model.normalized_width / tp
    if model.mlp == "swiglu":
        # Autocast casts the input separately for the two layers that use it.
        mlp = e * width * (2 if RECIPES[work.precision].autocast else 1) + 4 * e * inside / tp
    else:
        mlp = e * width + 2 * e * inside / tp
    return norms + attention + mlp + (2 * width if model.dropout else 0)


def product_bytes(model: ModelConfig, tp: int, work: Pass) -> float:
    """Return the bytes per token that selective recomputation keeps of a block besides its input."""
    queries, kv, width = model.q_width, model.kv_width, model.n_embd
    inside = model.intermediate_size * (2 if model.mlp == "swiglu" else 1)
    elements = (queries + 2 * kv + inside) / tp + width * (2 if model.norm_order == "after" else 1)
    if model.dropout or work.score_bytes:  # attention is recomputed, see recomputation.py
        return _itemsize(work.precision) * elements
    sums = 0 if work.blockwise else 4 * model.n_head / tp
    return _itemsize(work.precision) * (elements + queries / tp) + sums


def _repeated_heads(model: ModelConfig) -> int:
    """Return the additional elements per token if a kernel with a mask keeps repeated keys and values.

    With rotary positions, repeated keys replace the rotated keys. The matmul output is then kept only by norms.
    """
    if model.position != "rope":
        return 2 * model.q_width
    matmul_output = 0 if model.normalized_width else model.q_width + 2 * model.kv_width
    return 2 * model.q_width - model.kv_width - matmul_output


def _head_bytes(model: ModelConfig, tp: int, work: Pass, tokens: int) -> int:
    """Return the bytes for the final norm, head and loss at the start of the backward pass."""
    width, columns, e = model.n_embd, model.padded_vocab_size // tp, _itemsize(work.precision)
    norm = tokens * _norm_bytes(model, work)
    if work.chunk:
        # Gradients of the hidden states and of the weight, and two copies of a chunk's logits.
        logits = min(work.chunk, tokens) * columns * (4 + e)
        return norm + tokens * _stream_itemsize(work) * width + 4 * columns * width + logits
    return norm + tokens * (e * width + 8 * columns)


def _norm_bytes(model: ModelConfig, work: Pass) -> int:
    """Return the bytes that a norm keeps per token.

    It keeps its input and, without a fused kernel, the normalized values. On CPUs, norms compute on an fp32 copy
    of the input, the residual stream.
    """
    itemsize = 4 if work.cpu else _stream_itemsize(work)
    return itemsize * model.n_embd * (2 if model.norm == "rmsnorm" and work.cpu else 1)


def _stream_itemsize(work: Pass) -> int:
    """Return the bytes per element of the residual stream, which autocast keeps in fp32."""
    return 2 if RECIPES[work.precision].has_masters else 4


def _itemsize(precision: str) -> int:
    return 2 if RECIPES[precision].is_half else 4
