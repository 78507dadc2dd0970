"""Model-dependent defaults of a ds_config: NVMe buffers, bucket sizes, overlap (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.version_rules import OVERLAP
from ezpz_llm.training.layout.deepspeed_versions import is_correct
from ezpz_llm.training.layout.ds_config import DsConfig
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.memory import held_parameters
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.model.parameters import parameter_shapes

_MIN_SWAPPED_BYTES = 1 << 20
"""Size in bytes from which DeepSpeed moves a parameter's shard or a sub-group's state to a file."""

_READ_AHEAD = ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance")
_OVERLAP = ("pipeline_read", "pipeline_write")
_BLOCKS = ("offload_optimizer", "offload_param")


def uses_nvme(layout: Layout) -> bool:
    """Return True if parameters or optimizer state are offloaded to files."""
    return "nvme" in (layout.zero.offload_optimizer, layout.zero.offload_param)


def requested_nvme_path(config: DsConfig) -> str | None:
    """Return the nvme_path of a ds_config.

    Raises:
        UserError: the two offload blocks have different values.
    """
    zero = config.values.get("zero_optimization", {})
    paths = {str(path) for block in _BLOCKS
             if zero.get(block, {}).get("device") == "nvme" and (path := zero[block].get("nvme_path")) is not None}
    if len(paths) > 1:
        raise UserError(f"the two offload blocks have different values of nvme_path: "
                        f"{' and '.join(sorted(paths))}", where=f"nvme_path in {config.path}",
                        instead="the same value in both blocks")
    return next(iter(paths - {"auto"}), None)


def check_nvme_path(layout: Layout, path: str | None, source: str) -> tuple[str, ...]:
    """Check the folder for offloaded files; return a note if they are stored in the run directory.

    Raises:
        UserError: `path` is set, but the layout offloads nothing to files.
    """
    if not uses_nvme(layout) and path is not None:
        raise UserError(f"nvme_path is {path}, but layout {layout.name} offloads nothing to files", where=source,
                        instead="use --ds-config zero3_nvme, or remove nvme_path")
    if not uses_nvme(layout) or path is not None:
        return ()
    return ("offloaded state is stored in the run directory and removed at the end; pass --nvme-path DIR to use a "
            "faster local disk of the node",)


def fill_defaults(zero: dict[str, Any], layout: Layout, model: ModelConfig | None, world_size: int,
                  where: str) -> dict[str, Any]:
    """Return the block "zero_optimization" with large enough buffers for offload to NVMe.

    Omits nvme_path, which each rank sets itself.

    Raises:
        UserError: a value with which DeepSpeed would fail in the middle of a step.
    """
    zero = {**zero, **{block: {key: value for key, value in zero[block].items() if key != "nvme_path"}
                       for block in _BLOCKS if block in zero}}
    if layout.zero.offload_optimizer == "nvme":
        block = zero["offload_optimizer"]
        # Buffers for the sub-group in memory, the sub-group being read ahead, and the sub-group being written.
        _set_minimum(block, "buffer_count", 4 + 4 * sum(bool(block.get(key)) for key in _OVERLAP), where,
                     "a sub-group has weights, gradients and two moments")
    if layout.zero.offload_param == "nvme":
        for key in _READ_AHEAD:
            if zero.setdefault(key, 0) != 0:
                raise UserError(f"{key} is {zero[key]}, but parameters are offloaded to files", where=where,
                                instead="delete the key: DeepSpeed runs out of buffers if it prefetches parameters "
                                        "or keeps them for reuse")
        # A layer's weight and bias, and a tied embedding table.
        _set_minimum(zero["offload_param"], "buffer_count", 5, where, "a layer's parameters are read together")
        if model is not None:
            largest = -(-_largest_parameter(model, layout.tp) // (layout.dp_size(world_size) * layout.sp))
            _set_minimum(zero["offload_param"], "buffer_size", max(largest, _MIN_SWAPPED_BYTES // 4), where,
                         "a buffer holds a rank's shard of the largest parameter")
    return zero


def _set_minimum(block: dict[str, Any], key: str, minimum: int, where: str, reason: str) -> None:
    """Set a missing value to the minimum, and reject a smaller one."""
    if block.setdefault(key, minimum) < minimum:
        raise UserError(f"{key} is {block[key]:.0f}, but must be at least {minimum}: {reason}", where=where,
                        instead="delete the key to use the computed value")


def _largest_parameter(model: ModelConfig, tp: int) -> int:
    """Return the elements of a tensor-parallel rank's largest parameter; position embeddings are replicated."""
    rows = max(model.padded_vocab_size, model.q_width + 2 * model.kv_width, model.intermediate_size)
    return max(-(-rows // tp), model.block_size if model.position == "learned" else 0) * model.n_embd


_MAX_BUCKET = 50_000_000
"""Elements of a bucket: 200 MB in fp32, where latency is negligible on every network."""
_MAX_OVERLAPPED, _MIN_OVERLAPPED = 25_000_000, 1_000_000
"""Maximum and minimum elements of a bucket that is reduced during the backward pass: 100 MB and 4 MB in fp32.

Nothing overlaps the reduction of the last bucket, so it should be small, but below 4 MB latency dominates.
"""
_BUCKETS_PER_PASS = 8
"""Number of buckets per backward pass: the first reduction begins after an eighth of the gradients."""
_PERSISTENCE_THRESHOLD = 100_000
"""Elements up to which stage 3 keeps a parameter replicated on every rank: DeepSpeed's default."""


def default_sizes(zero: Mapping[str, Any], layout: Layout, model: ModelConfig | None,
                  device: str | None = None) -> dict[str, tuple[int | bool, str]]:
    """Return values and reasons for missing keys of the block "zero_optimization".

    Sizes are in elements. In stage 0 the result is empty. Without a model, only defaults that suit every model
    are returned.

    Args:
        device: kind of the device, None if unknown.
    """
    if not layout.zero.stage:
        return {}
    defaults: dict[str, tuple[int | bool, str]] = {**_bucket_sizes(layout, model)}
    if device in DEVICES and not DEVICES[device].overlaps:
        # Other devices overlap this copy with the backward pass; its cost there was not measured.
        defaults |= _copy_saving_default(zero, layout)
    elif device in DEVICES and _benefits_from_overlap(zero, layout) and is_correct(OVERLAP):
        defaults["overlap_comm"] = True, "reduces gradients during the backward pass"
        if zero.get("overlap_comm", True):
            defaults |= _smaller_buckets(layout, model)
    return {key: value for key, value in defaults.items() if key not in zero}


def _benefits_from_overlap(zero: Mapping[str, Any], layout: Layout) -> bool:
    """Return True if overlap_comm helps: DeepSpeed's stages 1 and 2 can then reduce during the backward pass.

    Stage 3 overlaps by default, and pipelines turn overlap off. With optimizer offload gradients leave the
    device, so DeepSpeed's default is kept. Without contiguous gradients, or if each part of a bucket is reduced
    only to its owner, DeepSpeed synchronizes the device before each overlapped reduction.
    """
    return (layout.zero.stage in (1, 2) and layout.pp == 1 and layout.zero.offload_optimizer is None
            and bool(zero.get("contiguous_gradients", True) and zero.get("use_multi_rank_bucket_allreduce", True)))


def _smaller_buckets(layout: Layout, model: ModelConfig | None) -> dict[str, tuple[int, str]]:
    """Return a bucket size small enough for reductions to begin early in the backward pass."""
    if model is None:
        return {"reduce_bucket_size": (_MAX_OVERLAPPED, "100 MB of fp32, reduced during the backward pass")}
    count = held_parameters(layout, model, 0)
    size = min(count, max(_MIN_OVERLAPPED, min(_MAX_OVERLAPPED, count // _BUCKETS_PER_PASS)))
    reason = (f"{4 * size / 1e6:.3g} MB of fp32" if size != count // _BUCKETS_PER_PASS else
              "an eighth of a rank's model")
    return {"reduce_bucket_size": (size, f"{reason}, reduced during the backward pass")}


def _copy_saving_default(zero: Mapping[str, Any], layout: Layout) -> dict[str, tuple[bool, str]]:
    """Return a default that saves a copy of all gradients per step, unless the user chose how to reduce."""
    if layout.zero.stage == 3:
        # Stage 3 copies gradients from the contiguous bucket into the reduce-scatter input.
        key, chosen_by = "contiguous_gradients", "reduce_scatter"
    else:
        # In stages 1 and 2, reduce_scatter flattens gradients into a copy and all-reduces it: nothing is scattered.
        key, chosen_by = "reduce_scatter", "use_multi_rank_bucket_allreduce"
    return {} if chosen_by in zero else {key: (False, "avoids one copy of all gradients per step")}


def _bucket_sizes(layout: Layout, model: ModelConfig | None) -> dict[str, tuple[int, str]]:
    sizes = dict.fromkeys(("reduce_bucket_size",) if layout.zero.stage == 3 else
                          ("reduce_bucket_size", "allgather_bucket_size"), (_MAX_BUCKET, "200 MB of fp32"))
    if model is not None:
        shapes = parameter_shapes(model)
        elements = max(held_parameters(layout, model, stage) for stage in range(layout.pp))
        if elements < _MAX_BUCKET:
            sizes = dict.fromkeys(sizes, (elements, "a rank's whole model"))
        if layout.zero.stage == 3:
            block = sum(prod(shape) for name, shape in shapes.items() if name.startswith("transformer.h.0."))
            part = -(-block // layout.tp)
            sizes["stage3_prefetch_bucket_size"] = (
                (part, "one block, prefetched while the previous block computes") if part <= _MAX_BUCKET else
                (_MAX_BUCKET, "200 MB of fp32"))
            vectors = max((prod(shape) for shape in shapes.values() if len(shape) == 1), default=0)
            sizes["stage3_param_persistence_threshold"] = (
                max(_PERSISTENCE_THRESHOLD, vectors),
                "norms and biases stay replicated, because gathering each of them takes a message")
    return sizes
