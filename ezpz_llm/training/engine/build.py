"""Build the engine of a resolved layout: this rank's part of the model, tiled on request, and its optimizer."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.engine import running_statistics, sequence_parallel
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.deepspeed_import import import_deepspeed
from ezpz_llm.training.engine.masters import round_parameters
from ezpz_llm.training.engine.optimizer_state import MakeOptimizer, make_optimizer
from ezpz_llm.training.engine.precision import autocast_forward, set_tf32
from ezpz_llm.training.engine.whole_matrices import WholeMatrices
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.optimizers import OPTIMIZERS
from ezpz_llm.training.layout.resolve import Resolved, check_precision
from ezpz_llm.training.layout.value_source import DEFAULT
from ezpz_llm.training.model import tensor_parallel
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import Values, defer_values, has_values, initial_values, load_values
from ezpz_llm.training.model.parameters import Placement, check_parameters, placement_of, set_placement
from ezpz_llm.training.model.partition import stage_bounds
from ezpz_llm.training.model.pipeline import PipelineStage

_ENGINES = {"ddp": ("torch_engine", "TorchEngine"), "fsdp2": ("fsdp2_engine", "Fsdp2Engine"),
            "pipeline": ("pipeline_engine", "PipelineEngine"), "deepspeed": ("deepspeed_engine", "DeepSpeedEngine")}
"""Module and class, imported on use because fully_shard and DeepSpeed take a second to import."""


def build_engine(model: nn.Module, resolved: Resolved, dist: Dist, *, lr: float, betas: tuple[float, float],
                 eps: float, param_groups: Sequence[dict[str, Any]]) -> Engine:
    """Build the engine of a model with the optimizer of the run; see `put_in_engine`.

    Args:
        param_groups: optimizer groups with "params", "names" and "weight_decay" (`ezpz_llm.training.model.init`).
    """
    adam: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}

    def make(groups: list[dict[str, Any]], *, fused: bool = True) -> torch.optim.Optimizer:
        """Return the layout's optimizer for these groups."""
        if resolved.layout.zero.offload_optimizer is None:
            return make_optimizer(groups, adam, resolved.optimizer, fused)
        deepspeed = import_deepspeed(dist.device.type)
        return deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **adam)

    groups = [{**group, "params": list(group["params"])} for group in param_groups]
    engine = put_in_engine(model, resolved, dist, groups, make)
    state = engine.training_state()
    spec = OPTIMIZERS[resolved.optimizer]
    if whole := {name for name, shape in state.shapes.items() if spec.needs_whole(name, shape)}:
        state.optimizer.matrices = WholeMatrices(state, dist.mesh, whole)
    return engine


def put_in_engine(model: nn.Module, resolved: Resolved, dist: Dist, groups: list[dict[str, Any]],
                  make: MakeOptimizer) -> Engine:
    """Build the layout's engine with this model, on its device and in its precision. Collective.

    Args:
        model: a model with the same weights on every rank; the engine modifies it in place.
        groups: optimizer groups with "params".
        make: creates the optimizer for groups.

    Raises:
        UserError: the layout needs a compiled op that is not built, or the device does not support the precision.
    """
    check_precision(resolved.precision, resolved.sources.get("precision", DEFAULT), dist.device.type)
    if has_values(model) and resolved.layout.zero.offload_param is None:
        model.to(dist.device)
    elif has_values(model):
        # DeepSpeed moves parameters to the device one at a time.
        for buffer in model.buffers():
            buffer.data = buffer.data.to(dist.device)
    model.train()
    set_tf32(dist.device, resolved.precision)
    autocast_forward(model, dist.device, resolved.precision)
    running_statistics.compute_in_fp32(model, resolved.precision)
    round_parameters(model, resolved.precision)
    module, name = _ENGINES["pipeline" if resolved.layout.pp > 1 else resolved.layout.engine]
    engine = getattr(importlib.import_module(f"ezpz_llm.training.engine.{module}"), name)
    return engine(model, resolved, dist, groups, make)


def assemble(config: ModelConfig, layout: Layout, mesh: Mesh, seed: int, device_type: str = "cpu",
             weights: Values | None = None) -> nn.Module:
    """Build the part of the model that this rank computes under its layout, with initial weights.

    The plain model is built on the meta device, so a rank never allocates more than its part. If the engine shards
    parameters, they stay on the meta device until then; see `ezpz_llm.training.engine.sharded_start`. The initial
    weights are exactly those of a single process in every layout.

    Args:
        device_type: type of the device for training; the model itself is built on CPU.
        weights: initial weights, instead of those from the seed. Keep them readable until the engine is built.

    Raises:
        UserError: the model's parameters differ from the table in `ezpz_llm.training.model.config`, or the layout
            does not support them.
    """
    with torch.device("meta"):
        model: nn.Module = GPT(config)
    check_parameters(config, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    if layout.tp > 1:
        tensor_parallel.apply(model, mesh.group("tp"), mesh.tp_rank, mesh.tp_size)
    if layout.sp > 1:
        sequence_parallel.apply(model, mesh, device_type)
    if layout.zero.tiled:
        _tile_layers(model, layout.zero.tiled, device_type)
    if layout.pp > 1:
        model = PipelineStage(model, stage_bounds(config, layout.pp, layout.partition), mesh.pp_rank)
        if layout.tp > 1 and model.is_last:
            tensor_parallel.gather_logits(model, mesh.group("tp"), mesh.tp_size)
    values = initial_values(config, seed) if weights is None else weights
    if layout.shard_stage() == 3:
        defer_values(model, values)
        return model
    give_storage(model)
    if layout.tp > 1:
        tensor_parallel.sum_gradients(model, mesh.group("tp"))
    load_values(model, values)
    return model


def give_storage(model: nn.Module) -> None:
    """Allocate uninitialized CPU parameters for a model on the meta device, and keep their placements."""
    placed = {name: placement_of(name, parameter) for name, parameter in model.named_parameters()}
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        set_placement(parameter, placed[name])


def _tile_layers(model: GPT, tiled: tuple[tuple[str, int, int], ...], device_type: str) -> None:
    """Split linear layers of a model on the meta device into tiles, for layers that are too large to gather whole.

    This is memory-centric tiling (Rajbhandari et al. 2021, arXiv:2104.07857). Each tile has a placement in the
    untiled layer.

    Args:
        tiled: (name within a block, tiles along the input, tiles along the output). Names that a block does not
            have, such as the gate of an ungated MLP, are ignored.
        device_type: device type to import DeepSpeed for.
    """
    import_deepspeed(device_type)
    for (number, block), (name, across, down) in itertools.product(model.transformer["h"].named_children(), tiled):
        parent, _, child = name.rpartition(".")
        layer = getattr(block.get_submodule(parent), child, None)
        if layer is not None:
            block.set_submodule(name, _tile_layer(f"transformer.h.{number}.{name}", layer, across, down))


def _tile_layer(name: str, layer: nn.Linear, across: int, down: int) -> nn.Module:
    from deepspeed.runtime.zero.tiling import TiledLinear

    rows, columns = layer.weight.shape
    with layer.weight.device:
        tiles = TiledLinear(columns, rows, layer.bias is not None, in_splits=across, out_splits=down)
    for row, column in itertools.product(range(down), range(across)):
        tile = tiles.linears[row][column]
        outputs = (tiles.out_parts[row], tiles.out_parts[row + 1])
        inputs = (tiles.in_parts[column], tiles.in_parts[column + 1])
        set_placement(tile.weight, Placement(f"{name}.weight", (rows, columns), ((outputs, inputs),)))
        if tile.bias is not None:
            set_placement(tile.bias, Placement(f"{name}.bias", (rows,), ((outputs,),)))
    return tiles
