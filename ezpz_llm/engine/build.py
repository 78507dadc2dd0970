"""From a resolved layout to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ezpz_llm.engine.base import Engine
from ezpz_llm.engine.precision import autocast_forward, set_products
from ezpz_llm.engine.resolve import Resolved, check_precision

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist


def build_engine(model: nn.Module, resolved: Resolved, dist: Dist, *, lr: float, betas: tuple[float, float],
                 eps: float, param_groups: Sequence[dict[str, Any]]) -> Engine:
    """Put a model under AdamW in its layout's engine, on its device and in its precision. Collective.

    Args:
        model: initialised alike on every rank; the engine keeps and changes it.
        param_groups: optimizer groups with "params" and "weight_decay" (see `ezpz_llm.model.decay`).

    Raises:
        UserError: the layout needs a compiled op that is not built, or a device the precision does not work on.
    """
    check_precision(resolved.precision, resolved.sources.get("precision", "the run"), dist.device.type)
    if resolved.layout.offload_param is None:
        model.to(dist.device)
    else:
        # DeepSpeed brings parameters to the device one at a time.
        for buffer in model.buffers():
            buffer.data = buffer.data.to(dist.device)
    model.train()
    set_products(dist.device, resolved.precision)
    autocast_forward(model, dist.device, resolved.precision)
    groups = [{"params": list(group["params"]), "weight_decay": group["weight_decay"]} for group in param_groups]
    adam: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
    if resolved.optimizer != "adamw":
        adam["kind"] = resolved.optimizer
    if resolved.layout.engine == "ddp":
        from ezpz_llm.engine.torch_engine import TorchEngine

        return TorchEngine(model, resolved, dist, groups, adam)
    if resolved.layout.engine == "fsdp2":
        from ezpz_llm.engine.fsdp2_engine import Fsdp2Engine

        return Fsdp2Engine(model, resolved, dist, groups, adam)
    if resolved.layout.pp > 1:
        from ezpz_llm.engine.pipeline_engine import PipelineEngine

        return PipelineEngine(model, resolved, dist, groups, adam)
    from ezpz_llm.engine.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(model, resolved, dist, groups, adam)
