"""Defaults of a ds_config by the model and its layout: NVMe files and buffers, bucket sizes (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ezpz_llm.base import UserError
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.layout.ds_config import DsConfig
from ezpz_llm.layout.layout import Layout
from ezpz_llm.layout.memory import held_parameters
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.parameters import parameter_shapes

SWAPPED_FROM = 1 << 20
"""Bytes from which on DeepSpeed moves a rank's part of a parameter, or a sub-group's state, into a file."""

_READ_AHEAD = ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance")
_OVERLAP = ("pipeline_read", "pipeline_write")
_BLOCKS = ("offload_optimizer", "offload_param")


def uses_nvme(layout: Layout) -> bool:
    """True if parameters or the optimizer's state lie in files."""
    return "nvme" in (layout.zero.offload_optimizer, layout.zero.offload_param)


def wished_path(config: DsConfig) -> str | None:
    """The folder for files that a ds_config names.

    Raises:
        UserError: it names two.
    """
    zero = config.values.get("zero_optimization", {})
    paths = {str(path) for block in _BLOCKS
             if zero.get(block, {}).get("device") == "nvme" and (path := zero[block].get("nvme_path")) is not None}
    if len(paths) > 1:
        raise UserError(f"two folders for offloaded files: {' and '.join(sorted(paths))}",
                        where=f"nvme_path in {config.path}", instead="one of them, in both blocks")
    return next(iter(paths - {"auto"}), None)


def place(layout: Layout, path: str | None, source: str) -> tuple[str, ...]:
    """What to say about the place of a layout's files.

    Raises:
        UserError: a folder is named, and nothing is kept in files.
    """
    if not uses_nvme(layout) and path is not None:
        raise UserError(f"nvme_path is {path}, and layout {layout.name} keeps nothing in files", where=source,
                        instead="--ds-config zero3_nvme, or no nvme_path")
    if not uses_nvme(layout) or path is not None:
        return ()
    return ("offloaded state lies in files in the run directory, removed at the end; a node's own disk is faster: "
            "--nvme-path DIR",)


def complete(zero: dict[str, Any], layout: Layout, model: ModelConfig | None, world_size: int,
             where: str) -> dict[str, Any]:
    """The block "zero_optimization" without paths, which each rank fills in, and with buffers that suffice.

    Raises:
        UserError: a value of the user's that DeepSpeed would fail with in the middle of a step.
    """
    zero = {**zero, **{block: {key: value for key, value in zero[block].items() if key != "nvme_path"}
                       for block in _BLOCKS if block in zero}}
    if layout.zero.offload_optimizer == "nvme":
        block = zero["offload_optimizer"]
        # For the sub-group in memory, the one that is read ahead, and the one that is still being written.
        _at_least(block, "buffer_count", 4 + 4 * sum(bool(block.get(key)) for key in _OVERLAP), where,
                  "a sub-group has weights, gradients and two moments")
    if layout.zero.offload_param == "nvme":
        for key in _READ_AHEAD:
            if zero.setdefault(key, 0) != 0:
                raise UserError(f"{key} is {zero[key]} and parameters lie in files", where=where,
                                instead="delete the key: DeepSpeed runs out of buffers where it reads parameters "
                                        "ahead of the layer that it computes, or keeps them")
        # A layer's weight and bias, and a table's that is used twice.
        _at_least(zero["offload_param"], "buffer_count", 5, where, "a layer's parameters are read together")
        if model is not None:
            largest = -(-_largest_parameter(model, layout.tp) // (layout.dp_size(world_size) * layout.sp))
            _at_least(zero["offload_param"], "buffer_size", max(largest, SWAPPED_FROM // 4), where,
                      "a buffer holds a rank's part of the largest parameter")
    return zero


def _at_least(block: dict[str, Any], key: str, least: int, where: str, why: str) -> None:
    """Set what is not given to the least that works, and refuse less."""
    if block.setdefault(key, least) < least:
        raise UserError(f"{key} is {block[key]:.0f} and must be at least {least}: {why}", where=where,
                        instead="delete the key: it then follows from the rest")


def _largest_parameter(model: ModelConfig, tp: int) -> int:
    """Elements of a tensor-parallel rank's largest table or linear layer; positions are whole on each."""
    rows = max(model.padded_vocab_size, model.q_width + 2 * model.kv_width, model.intermediate_size)
    return max(-(-rows // tp), model.block_size if model.position == "learned" else 0) * model.n_embd


# DeepSpeed's buckets and thresholds by the model and its layout, for keys that a ds_config leaves out.
_MOST = 50_000_000
"""Elements of a bucket: 200 MB in fp32, long enough on every network that a message's latency does not count."""
_MOST_BESIDE, _LEAST_BESIDE = 25_000_000, 1_000_000
"""Elements of a bucket that is reduced beside the backward pass: 100 MB and 4 MB in fp32. The reduction of the last
one is beside nothing, and below 4 MB its latency counts."""
_BUCKETS_BESIDE = 8
"""The first bucket is full, and its reduction begins, after so many parts of the backward pass's gradients."""
_PERSISTS = 100_000
"""Elements up to which DeepSpeed's stage 3 keeps a parameter whole on each rank: its own default."""


def sized(zero: Mapping[str, Any], layout: Layout, model: ModelConfig | None,
          device: str | None = None) -> dict[str, tuple[int | bool, str]]:
    """Key of the block "zero_optimization" to its value and the reason, for what is not in the block.

    Sizes are in elements. Empty where there is nothing to partition. Without a model only what holds for all.

    Args:
        device: its kind, None where it is not known.
    """
    if not layout.zero.stage:
        return {}
    found: dict[str, tuple[int | bool, str]] = {**_sizes(layout, model)}
    if device in DEVICES and not DEVICES[device].overlaps:
        # Elsewhere copies are made beside the backward pass; what they cost there was not measured.
        found |= _spared_copy(zero, layout)
    elif device in DEVICES and _overlaps_gradients(zero, layout):
        found["overlap_comm"] = True, "gradients are reduced beside the backward pass"
        if zero.get("overlap_comm", True):
            found |= _smaller_buckets(layout, model)
    return {key: value for key, value in found.items() if key not in zero}


def _overlaps_gradients(zero: Mapping[str, Any], layout: Layout) -> bool:
    """True if stages 1 and 2 of DeepSpeed reduce gradients beside the backward pass here, if told to.

    Stage 3 does untold. In a pipeline DeepSpeed turns overlap off. With the optimizer in host memory gradients
    leave the device, and DeepSpeed's default is kept. Without contiguous gradients, or where each part of a bucket
    is reduced to its owner alone, DeepSpeed synchronises the device before each reduction that it overlaps.
    """
    return (layout.zero.stage in (1, 2) and layout.pp == 1 and layout.zero.offload_optimizer is None
            and bool(zero.get("contiguous_gradients", True) and zero.get("use_multi_rank_bucket_allreduce", True)))


def _smaller_buckets(layout: Layout, model: ModelConfig | None) -> dict[str, tuple[int, str]]:
    """Buckets that begin to be reduced early in the backward pass."""
    if model is None:
        return {"reduce_bucket_size": (_MOST_BESIDE, "100 MB of fp32, reduced beside the backward pass")}
    kept = held_parameters(layout, model, 0)
    size = min(kept, max(_LEAST_BESIDE, min(_MOST_BESIDE, kept // _BUCKETS_BESIDE)))
    why = "an eighth of a rank's model" if size == kept // _BUCKETS_BESIDE else f"{4 * size / 1e6:.3g} MB of fp32"
    return {"reduce_bucket_size": (size, f"{why}, reduced beside the backward pass")}


def _spared_copy(zero: Mapping[str, Any], layout: Layout) -> dict[str, tuple[bool, str]]:
    """Turn off what copies all gradients once more in each step, unless the user chose how to reduce."""
    if layout.zero.stage == 3:
        # From its bucket they are copied again into what is scattered.
        key, chosen_by = "contiguous_gradients", "reduce_scatter"
    else:
        # With it they are flattened into a copy, which is all-reduced: nothing is scattered.
        key, chosen_by = "reduce_scatter", "use_multi_rank_bucket_allreduce"
    return {} if chosen_by in zero else {key: (False, "spares CPUs one copy of all gradients a step")}


def _sizes(layout: Layout, model: ModelConfig | None) -> dict[str, tuple[int, str]]:
    found = dict.fromkeys(("reduce_bucket_size",) if layout.zero.stage == 3 else
                          ("reduce_bucket_size", "allgather_bucket_size"), (_MOST, "200 MB of fp32"))
    if model is not None:
        shapes = parameter_shapes(model)
        kept = max(held_parameters(layout, model, stage) for stage in range(layout.pp))
        if kept < _MOST:
            found = dict.fromkeys(found, (kept, "all of a rank's model in one"))
        if layout.zero.stage == 3:
            block = sum(prod(shape) for name, shape in shapes.items() if name.startswith("transformer.h.0."))
            found["stage3_prefetch_bucket_size"] = (
                min(_MOST, -(-block // layout.tp)), "one block, gathered while the one before it computes")
            vectors = max((prod(shape) for shape in shapes.values() if len(shape) == 1), default=0)
            found["stage3_param_persistence_threshold"] = (
                max(_PERSISTS, vectors), "norms and biases stay whole: gathering them costs a message each")
    return found
