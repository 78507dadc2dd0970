"""What to try against a cause, in the terms of the run's own layout (imports no torch)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.engine.batch import Batch
from ezpz_llm.engine.eight_bit import Optimizer
from ezpz_llm.engine.layout import Layout
from ezpz_llm.engine.memory import cast_per_rank, memory_per_rank, total
from ezpz_llm.model.config import ModelConfig, parameter_count

_OF_ALL = 0.8
"""The share of a device's memory that a layout's states may take: activations and buffers need the rest."""


def against_communication(label: str, run: dict[str, Any], deepspeed: dict[str, Any]) -> list[str]:
    """Against exposed collectives of a kind and group.

    Args:
        label: such as "all_reduce (dp)".
        run: the run's record with what layout.json has, see account.py.
        deepspeed: what DeepSpeed was given, empty for other engines.
    """
    kind, _, group = label.partition(" (")
    axes = group.rstrip(")").split()
    layout: Layout = run["layout"]
    zero = deepspeed.get("zero_optimization") or {}
    if "tp" in axes and "dp" not in axes:
        return [f"--tp {layout.tp // 2}: fewer ranks share a layer" if layout.tp > 2 else "a layout without tp",
                "tensor-parallel ranks inside one node, where links are fastest"]
    if "pp" in axes:
        return [f"--accumulation {2 * run['batch'].accumulation}: more micro batches on their way at once"]
    if "sp" in axes and "dp" not in axes:
        return ["a smaller --sp, if sequences fit"]
    found = []
    if layout.zero_stage == 3 and kind == "all_gather":
        found += _instead_of_gathering(run)
        found.append("a larger --micro-batch: parameters are gathered once for more tokens")
    elif layout.engine == "fsdp2" and kind == "all_gather":
        found.append("--ds-config zero2 keeps whole parameters, and gathers them once a step")
    if layout.zero_stage is not None and kind in ("reduce_scatter", "all_reduce", "reduce"):
        size = zero.get("reduce_bucket_size")
        if _may_overlap(run["device"]) and not zero.get("overlap_comm", layout.zero_stage == 3):
            found.append('"overlap_comm": true in zero_optimization of the ds_config')
        if size and size < parameter_count(run["model"]):
            found.append(f'a larger "reduce_bucket_size" than {size:,}')
    if layout.zero_stage != 3:
        found.append(f"--accumulation {2 * run['batch'].accumulation}: gradients are reduced once a step, of more "
                     "tokens")
    return found


def _may_overlap(device: str | None) -> bool:
    """Whether DeepSpeed is let communicate beside the backward pass there."""
    return device is None or device not in DEVICES or DEVICES[device].overlaps


def _instead_of_gathering(run: dict[str, Any]) -> list[str]:
    """Whether ZeRO 2 would fit, by arithmetic."""
    layout: Layout = run["layout"]
    if layout.offload_optimizer or layout.offload_param or layout.tiled:
        return []
    model: ModelConfig = run["model"]
    optimizer: Optimizer = run["optimizer"]
    whole = replace(layout, zero_stage=2)
    # With the copies that autocast would keep then, and keeps none of in stage 3.
    cast = cast_per_rank(whole, model).bytes if run["precision"] in ("bf16", "fp16") else 0
    need = total(memory_per_rank(whole, model, run["world_size"], optimizer), "device") + cast
    more = need - total(memory_per_rank(layout, model, run["world_size"], optimizer), "device")
    there = run["memory_bytes"]
    if there is None:
        return [f"--ds-config zero2 gathers once a step; its states take {more / 1e9:.3g} GB more a rank"]
    if need > _OF_ALL * there:
        return [f"zero2 would not fit: its states take {need / 1e9:.3g} GB of {there / 1e9:.3g} GB"]
    return [f"--ds-config zero2 would fit: its states take {need / 1e9:.3g} GB of {there / 1e9:.3g} GB a rank"]


def against_optimizer(run: dict[str, Any]) -> list[str]:
    """Against a long optimizer phase."""
    layout: Layout = run["layout"]
    batch: Batch = run["batch"]
    found = []
    if not layout.zero_stage and batch.dp_size > 1 and layout.engine != "fsdp2":
        found.append(f"--ds-config zero1: each rank steps 1/{batch.dp_size} of the parameters")
    if run["optimizer"] == "adamw_unfused":
        found.append("--optimizer adamw, one fused kernel")
    if layout.offload_optimizer:
        found.append("a layout that keeps the optimizer on the device, if it fits")
    return [*found, f"--accumulation {2 * batch.accumulation}: fewer steps for as many tokens"]


def against_waiting(run: dict[str, Any]) -> list[str]:
    """Against ranks that wait for each other."""
    layout: Layout = run["layout"]
    if layout.pp > 1:
        return [f"--accumulation {2 * run['batch'].accumulation}: a smaller share of each step fills and drains "
                "the pipeline", '"partition": "time" in the ds_config\'s ezpz_llm block, if stages differ']
    return ["cores of its own for each rank (launch --explain shows the binding)",
            "a larger --micro-batch: steps of more equal length"]
