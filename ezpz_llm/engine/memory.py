"""What parameters, gradients and optimizer take on a rank, by arithmetic (imports no torch).

In fp32, as every precision keeps them: 4 bytes a parameter, 4 its gradient, 8 Adam's two moments. Under autocast
the blocks' matrices have a copy in 2 bytes from forward to backward pass. Activations, buckets, gathered layers and
what libraries keep for themselves come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ezpz_llm.engine.eight_bit import Optimizer
from ezpz_llm.engine.layout import Layout
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.partition import stage_bounds

Kind = Literal["parameters", "gradients", "optimizer", "copy", "cast"]
Where = Literal["device", "host", "files"]

_DEEPSPEEDS_BUCKET = 500_000_000
"""Elements, where the ds_config says nothing."""


@dataclass(frozen=True)
class Part:
    """`bytes` of one kind on the rank that has most. "copy" is DeepSpeed's own of the parameters that it steps,
    "cast" autocast's of matrices."""

    kind: Kind
    where: Where
    bytes: int


def memory_per_rank(layout: Layout, model: ModelConfig, world_size: int,
                    optimizer: Optimizer = "adamw") -> tuple[Part, ...]:
    """What the rank with most parameters holds under a legal layout.

    Sequence-parallel ranks hold the same parameters, so that ZeRO divides over them as well. Moments in 8 bits are
    counted as if all had them; biases and norms, which keep theirs in fp32, are less than a thousandth.
    """
    held = max(held_parameters(layout, model, stage) for stage in range(layout.pp))
    stage = 3 if layout.engine == "fsdp2" else layout.zero_stage or 0
    peers = layout.dp_size(world_size) * layout.sp

    def share(divided_from: int) -> int:
        return -(-held // peers) if stage >= divided_from else held

    offload = {None: "device", "cpu": "host", "nvme": "files"}
    moments: Where = offload[layout.offload_optimizer]
    # DeepSpeed collects offloaded gradients in host memory, also those whose optimizer's state lies in files.
    gradients: Where = "device" if layout.offload_optimizer is None else "host"
    offloaded_share = -(-held // peers) if layout.offload_optimizer else share(2)
    parts = [Part("parameters", offload[layout.offload_param], 4 * share(3)),
             Part("gradients", gradients, 4 * offloaded_share),
             Part("optimizer", moments, (2 if optimizer == "adamw_8bit" else 8) * share(1))]
    # Every stage that divides the optimizer steps a flat copy of the rank's share, stage 3 too, beside the share.
    if layout.engine == "deepspeed" and stage:
        parts.append(Part("copy", moments, 4 * share(1)))
    return tuple(parts)


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
    return 0 if layout.zero_stage == 3 else 2 * blocks * matrix_elements(model) // layout.tp


def matrix_elements(model: ModelConfig) -> int:
    """Elements of a block's weight matrices."""
    width = model.n_embd
    ways = 3 if model.mlp == "swiglu" else 2
    return width * (2 * width + 2 * model.kv_width) + ways * width * model.intermediate_size


def bucket_bytes(layout: Layout, model: ModelConfig, zero: Mapping[str, Any], device: str) -> int:
    """What DeepSpeed takes to collect gradients in until it reduces them, on the rank that takes most.

    It allocates the whole of it whatever the model's size: once more where it collects on while one is being
    reduced, and once more in a pipeline, for nothing. On a CPU memory is not taken before it is written to. Without
    contiguous gradients stage 3 puts as many together when it reduces them, and no more than there are.

    Args:
        zero: "zero_optimization" of what DeepSpeed is given.
        device: its kind, "cpu" or another.
    """
    allocates = zero.get("contiguous_gradients", True)
    if not zero.get("stage") or (not allocates and zero["stage"] < 3):
        return 0
    table = model.padded_vocab_size * model.n_embd // layout.tp
    most = 0
    for stage in range(layout.pp):
        elements = int(zero.get("reduce_bucket_size", _DEEPSPEEDS_BUCKET))
        if layout.pp > 1 and model.tied and stage in (0, layout.pp - 1):
            elements = table  # see pipeline_engine.py
        if device == "cpu" or not allocates:
            elements = min(elements, held_parameters(layout, model, stage))
        elif zero["stage"] < 3:
            elements *= 1 + bool(zero.get("overlap_comm")) + (layout.pp > 1)
        most = max(most, 4 * elements)
    return most


def total(parts: tuple[Part, ...], where: Where, *kinds: Kind) -> int:
    """Bytes in one place, of these kinds or of all."""
    return sum(part.bytes for part in parts if part.where == where and (not kinds or part.kind in kinds))


def held_parameters(layout: Layout, model: ModelConfig, stage: int) -> int:
    """Parameters of one tensor-parallel rank in a pipeline stage, before ZeRO divides them."""
    bounds = stage_bounds(model, layout.pp, layout.partition)
    count = (bounds[stage + 1] - bounds[stage]) * _block(model, layout.tp)
    table = model.padded_vocab_size * model.n_embd // layout.tp
    is_first, is_last = stage == 0, stage == layout.pp - 1
    if is_first:
        count += table + (model.block_size * model.n_embd if model.position == "learned" else 0)
    if is_last:
        count += _norm(model)
        # The last of several stages has its own copy of a tied table.
        count += table if not model.tied or not is_first else 0
    return count


def _block(model: ModelConfig, tp: int) -> int:
    """Column-parallel layers divide weight and bias, row-parallel ones the weight alone; norms stay whole."""
    width, hidden = model.n_embd, model.intermediate_size
    rows = width + 2 * model.kv_width + hidden * (2 if model.mlp == "swiglu" else 1)
    divided = rows * (width + model.bias) + width * width + hidden * width
    return divided // tp + (2 * width if model.bias else 0) + 2 * _norm(model)


def _norm(model: ModelConfig) -> int:
    return model.n_embd * (2 if model.norm == "layernorm" and model.bias else 1)
