"""What offload to NVMe adds to a ds_config: where the files lie, and buffers that fit (imports no torch)."""

from __future__ import annotations

from typing import Any

from ezpz_llm.engine.ds_config import DsConfig
from ezpz_llm.engine.layout import Layout
from ezpz_llm.errors import UserError
from ezpz_llm.model.config import ModelConfig

SWAPPED_FROM = 1 << 20
"""Bytes from which on DeepSpeed moves a rank's part of a parameter, or a sub-group's state, into a file."""

_READ_AHEAD = ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance")
_BLOCKS = ("offload_optimizer", "offload_param")


def uses_nvme(layout: Layout) -> bool:
    return "nvme" in (layout.offload_optimizer, layout.offload_param)


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
    if not uses_nvme(layout):
        if path is not None:
            raise UserError(f"nvme_path is {path}, and layout {layout.name} keeps nothing in files", where=source,
                            instead="--ds-config zero3_nvme, or no nvme_path")
        return ()
    if path is not None:
        return (f"offloaded state lies in files in {path} of each node, removed at the end",)
    return ("offloaded state lies in files in the run directory, removed at the end; a node's own disk is faster: "
            "--nvme-path DIR",)


def complete(zero: dict[str, Any], layout: Layout, model: ModelConfig | None, world_size: int,
             where: str) -> dict[str, Any]:
    """The block "zero_optimization" without paths, which each rank fills in, and with buffers that hold the model.

    Raises:
        UserError: a buffer_size of the user's that the largest parameter does not fit in.
    """
    zero = {**zero, **{block: {key: value for key, value in zero[block].items() if key != "nvme_path"}
                       for block in _BLOCKS if block in zero}}
    if layout.offload_param != "nvme":
        return zero
    for key in _READ_AHEAD:
        if zero.setdefault(key, 0) != 0:
            raise UserError(f"{key} is {zero[key]} and parameters lie in files", where=where,
                            instead="delete the key: DeepSpeed runs out of buffers where it reads parameters ahead, "
                                    "or keeps them, beyond the layer that it computes")
    if model is None:
        return zero
    ranks = world_size // (layout.tp * layout.pp)
    needed = max(-(-_largest_parameter(model) // (layout.tp * ranks)), SWAPPED_FROM // 4)
    given = zero["offload_param"].setdefault("buffer_size", needed)
    if given < needed:
        raise UserError(f"offload_param.buffer_size is {given:.0f} elements; a rank's part of the largest "
                        f"parameter has {needed}", where=where,
                        instead="delete the key: it then follows from the model")
    return zero


def _largest_parameter(model: ModelConfig) -> int:
    """Elements of the largest of the tables and linear layers."""
    rows = (model.padded_vocab_size, model.n_embd + 2 * model.kv_width, model.intermediate_size,
            model.block_size if model.position == "learned" else 0)
    return max(rows) * model.n_embd
