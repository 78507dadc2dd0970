"""DeepSpeed's buckets and thresholds by the model and its layout, for keys that a ds_config leaves out (no torch).

DeepSpeed's own defaults are for models of many billions: a stage 1 or 2 engine allocates its bucket of gradients in
full in every step, however small the model is. And they copy gradients more often than a host needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.engine.layout import Layout
from ezpz_llm.engine.memory import held_parameters
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.shapes import parameter_shapes

_MOST = 50_000_000
"""Elements of a bucket: 200 MB in fp32, long enough on every network that a message's latency does not count."""
_PERSISTS = 100_000
"""Elements up to which DeepSpeed's stage 3 keeps a parameter whole on each rank: its own default."""


def sized(zero: Mapping[str, Any], layout: Layout, model: ModelConfig | None,
          device: str | None = None) -> dict[str, tuple[int | bool, str]]:
    """Key of the block "zero_optimization" to its value and the reason, for what is not in the block.

    Sizes are in elements. Empty where there is nothing to partition. Without a model only what holds for all.

    Args:
        device: its kind, None where it is not known.
    """
    if not layout.zero_stage:
        return {}
    found: dict[str, tuple[int | bool, str]] = {**_sizes(layout, model)}
    if device in DEVICES and not DEVICES[device].overlaps:
        # Elsewhere copies are made beside the backward pass; what they cost there was not measured.
        found |= _spared_copy(zero, layout)
    return {key: value for key, value in found.items() if key not in zero}


def _spared_copy(zero: Mapping[str, Any], layout: Layout) -> dict[str, tuple[bool, str]]:
    """Turn off what copies all gradients once more in each step, unless the user chose how to reduce."""
    if layout.zero_stage == 3:
        # From its bucket they are copied again into what is scattered.
        key, chosen_by = "contiguous_gradients", "reduce_scatter"
    else:
        # With it they are flattened into a copy, which is all-reduced: nothing is scattered.
        key, chosen_by = "reduce_scatter", "use_multi_rank_bucket_allreduce"
    return {} if chosen_by in zero else {key: (False, "spares a host one copy of all gradients a step")}


def _sizes(layout: Layout, model: ModelConfig | None) -> dict[str, tuple[int, str]]:
    found = dict.fromkeys(("reduce_bucket_size",) if layout.zero_stage == 3 else
                          ("reduce_bucket_size", "allgather_bucket_size"), (_MOST, "200 MB of fp32"))
    if model is not None:
        shapes = parameter_shapes(model)
        held = max(held_parameters(layout, model, stage) for stage in range(layout.pp))
        if held < _MOST:
            found = dict.fromkeys(found, (held, "all of a rank's model in one"))
        if layout.zero_stage == 3:
            block = sum(prod(shape) for name, shape in shapes.items() if name.startswith("transformer.h.0."))
            found["stage3_prefetch_bucket_size"] = (
                min(_MOST, -(-block // layout.tp)), "one block, gathered while the one before it computes")
            vectors = max((prod(shape) for shape in shapes.values() if len(shape) == 1), default=0)
            found["stage3_param_persistence_threshold"] = (
                max(_PERSISTS, vectors), "norms and biases stay whole: gathering them costs a message each")
    return found
