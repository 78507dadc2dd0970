"""The part of a model that a rank computes under its layout, with its first values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.engine import sequence_parallel, tiled
from ezpz_llm.engine.layout import Layout
from ezpz_llm.model import tensor_parallel
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.gpt import GPT
from ezpz_llm.model.init import init_weights, load_values
from ezpz_llm.model.partition import stage_bounds
from ezpz_llm.model.pipeline import PipelineStage
from ezpz_llm.model.placement import Box, place, placement_of


def assemble(config: ModelConfig, layout: Layout, mesh: Mesh, seed: int, device_type: str = "cpu",
             weights: Callable[[str, Box], Tensor] | None = None) -> nn.Module:
    """Build the plain model, cut it as the layout says, and give what is left its first values.

    Until then nothing has storage: a rank never holds more than its own part, and one whole parameter at a time.
    Every layout starts from exactly the single-process values.

    Args:
        device_type: of the device that will compute; the model itself is built on the host.
        weights: what to begin with in place of first values from the seed; see `load_values`.
    """
    with torch.device("meta"):
        model: nn.Module = GPT(config)
    if layout.tp > 1:
        tensor_parallel.apply(model, mesh.group("tp"), mesh.tp_rank, mesh.tp_size)
    if layout.sp > 1:
        sequence_parallel.apply(model, mesh, device_type)
    if layout.tiled:
        tiled.apply(model, layout.tiled, device_type)
    if layout.pp > 1:
        model = PipelineStage(model, stage_bounds(config, layout.pp, layout.partition), mesh.pp_rank)
        if layout.tp > 1 and model.is_last:
            tensor_parallel.gather_logits(model, mesh.group("tp"), mesh.tp_size)
    give_storage(model)
    if weights is None:
        init_weights(model, config, seed)
    else:
        load_values(model, weights)
    return model


def give_storage(model: nn.Module) -> None:
    """Move a model from the meta device to the host; its parameters, new ones then, lie where the old ones did."""
    placed = {name: placement_of(name, parameter) for name, parameter in model.named_parameters()}
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        place(parameter, placed[name])
