"""Program of one rank of a large world: its part of the model, built on a fake process group and run with types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import I, P, R, SpmdTypeError, V
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from type_functions import RankProgram
from type_rules import replaced, stamp

from ezpz_llm.training.dist.degrees import AXES, Axis
from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.dist.torch_internals import make_fake_store
from ezpz_llm.training.engine.build import assemble, give_storage
from ezpz_llm.training.engine.sharded_start import partition
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.loss import configure_head
from ezpz_llm.training.model.parameters import Box, parameter_named, placement_of
from ezpz_llm.training.model.pipeline import PipelineStage

_SEQUENCES, _TOKENS, _Z_LOSS = 2, 32, 1e-4
_SETTINGS = ((24, False), (0, True))
"""Tokens per chunk of the loss (0 for all logits at once), and activation checkpointing, of each training pass."""
_DATA = {"dp": V, "across": V, "within": V}
"""Types of a micro-batch over the data-parallel ranks, which fsdp2 may split into two axes."""
DATA_AXES = (*_DATA, "sp")
"""Axes over which gradients are reduced."""
_SPMD_AXES: tuple[Axis, ...] = ("dp", "sp", "tp")
"""Axes along which all ranks run the same program. Pipeline stages run different ones."""


@dataclass(frozen=True)
class Rank:
    """A rank of the fake world, with its part of the model."""

    layout: Layout
    mesh: Mesh
    module: Any
    program: RankProgram


@contextmanager
def fake_rank(layout: Layout, config: ModelConfig, stage: int, world: int) -> Iterator[Rank]:
    """Build a rank's part of the model in pipeline stage `stage`.

    The rank's indices in its groups differ, so that an index in another group is noticed.
    """
    degrees = layout.degrees(world)
    rank = 0
    for axis in AXES:
        length = getattr(degrees, axis)
        rank = rank * length + (stage if axis == "pp" else length // 2 if axis == "dp" else length - 1)
    store = make_fake_store()
    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=world)
    try:
        mesh = Mesh(degrees, rank)
        program = RankProgram(_axes(layout, mesh))
        _type_shares(program, mesh)
        with program.checked(), replaced(GPT, "forward", _typed_forward(program, GPT.forward)):
            module = assembled(layout, config, mesh)
            with spmd.no_typecheck():
                if layout.engine == "fsdp2":
                    give_storage(module)
                elif layout.zero.stage == 3:
                    partition(module, _WHOLE_PARAMETERS, {}, None, mesh, torch.float32)
        yield Rank(layout, mesh, module, program)
    finally:
        torch.distributed.destroy_process_group()


def _axes(layout: Layout, mesh: Mesh) -> dict[str, spmd.MeshAxis]:
    """Return the axes of the mesh by name; shards within a group of ranks split the data-parallel axis."""
    groups: dict[str, ProcessGroup] = {axis: mesh.real_group(axis) for axis in _SPMD_AXES if mesh.size(axis) > 1}
    if layout.zero.shard_within is not None:
        groups = dict(zip(("across", "within"), mesh.divided(layout.zero.shard_within), strict=True))
    return {name: spmd.MeshAxis.of(group) for name, group in groups.items()}


def assembled(layout: Layout, config: ModelConfig, mesh: Mesh) -> nn.Module:
    """Return this rank's part of the model, for an engine."""
    with spmd.no_typecheck():
        return assemble(config, layout, mesh, 0, weights=_zeros)


def _zeros(name: str, box: Box) -> Tensor:
    return torch.zeros([stop - start for start, stop in box])


def _convert(parameter: Any) -> None:
    vars(parameter).update(ds_numel=parameter.numel(), partition=lambda: None, ds_secondary_tensor=None)


_WHOLE_PARAMETERS = SimpleNamespace(
    init_distributed=lambda **options: None,
    zero=SimpleNamespace(Init=lambda **options: SimpleNamespace(local_device="cpu",
                                                                _convert_to_deepspeed_param=_convert)))
"""Replacement for DeepSpeed that leaves parameters whole, as they are while a module computes."""


def run_program(rank: Rank) -> None:
    """Run the forward and backward passes of training, validation, and sampling with types.

    Raises:
        SpmdTypeError: a type is wrong; `program.where` has the module or the parameter.
    """
    module, program = rank.module, rank.program
    _type_parameters(module, program)
    program.track(module)
    with program.checked():
        _train(rank)
        if rank.layout.pp == 1:
            tokens, targets = training_inputs(rank)[0]
            with torch.no_grad():
                program.where[:] = ["validation"]
                losses = module(tokens, targets, reduction="rows")
                program.require("the losses of sequences", losses, **_DATA, sp=V)
                program.where[:] = ["sampling"]
                program.require("the logits", module(tokens, last_only=True), **_DATA)


def _train(rank: Rank) -> None:
    module, program = rank.module, rank.program
    for chunk, recomputes in _SETTINGS:
        configure_head(module, chunk, _Z_LOSS)
        for block in module.transformer["h"]:
            block.checkpointing = {} if recomputes else None
        inputs, named = training_inputs(rank)
        program.where[:] = ["the model"]
        output = module(*inputs, **named)
        if output.dim():  # of a stage before the last one
            program.require("the stage's output", output, **_DATA, tp=I)
            output.backward(stamp(torch.ones_like(output), program.types(**_DATA, tp=I)))
        else:
            output.backward()
        _require_gradients(module, program)


def training_inputs(rank: Rank) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the inputs of the module, with types: equal along all axes but the data-parallel one."""
    module, program = rank.module, rank.program
    with spmd.no_typecheck():
        tokens, targets = torch.zeros(2, _SEQUENCES, _TOKENS, dtype=torch.long)
        hidden = torch.zeros(_SEQUENCES, _TOKENS, module.config.n_embd, requires_grad=True)
    for tensor in (tokens, targets, hidden):
        spmd.assert_type(tensor, program.types(**_DATA, sp=I, tp=I))
    if not isinstance(module, PipelineStage):
        return [tokens, targets], {}
    first = tokens if module.is_first else hidden
    return [first, targets] if module.is_last else [first], {"sequences": tokens}


def _type_parameters(module: nn.Module, program: RankProgram) -> None:
    """Give parameters the types that the table of parameters states.

    They are equal on data-parallel ranks, and their gradients there are terms of a sum.
    """
    for name, parameter in module.named_parameters():
        program.where[:] = [name]
        at = placement_of(name, parameter)
        row = parameter_named(at.name)
        is_whole = parameter.numel() == math.prod(at.shape)
        if "tp" in program.axes and is_whole == row.is_sharded:
            raise SpmdTypeError(f"the parameter is {'not ' * is_whole}sharded, but its rule is {row.tp}")
        spmd.assert_type(parameter, program.types(tp=V if row.is_sharded else R if row.tp == "summed" else I))


def _require_gradients(module: nn.Module, program: RankProgram) -> None:
    """Check that gradients are terms of a sum over data- and sequence-parallel ranks, and over no others."""
    for name, parameter in module.named_parameters():
        program.where[:] = [name]
        if parameter.grad is None:
            raise SpmdTypeError("the parameter has no gradient")
        types = program.gradient_types(parameter)
        for axis, mesh_axis in program.axes.items():
            if types[mesh_axis] is not P and axis != "tp":
                raise SpmdTypeError(f"the gradient is {types[mesh_axis]} over {mesh_axis}, but is reduced again")
            if types[mesh_axis] is P and axis == "tp":
                raise SpmdTypeError(f"the gradient is P over {mesh_axis}, and nothing reduces it")


def _type_shares(program: RankProgram, mesh: Mesh) -> None:
    """Give this rank's share of sequences a type, since the library does not see that it depends on the rank.

    Slicing another rank's share raises SpmdTypeError.
    """
    index, ranks = mesh.place("sp")

    def type_share(whole: Tensor, part: Tensor) -> None:
        """Mark a share of whole sequences as different on each rank."""
        if part.dim() == whole.dim() == 2 and whole.shape == (_SEQUENCES, _TOKENS) and part.shape != whole.shape:
            types = spmd.get_local_type(part)
            if part.shape[1] * ranks != _TOKENS or part.storage_offset() % _TOKENS != index * part.shape[1]:
                raise SpmdTypeError("the tokens are not the share of this rank's index in its sp group")
            types[program.axes["sp"]] = V

    if ranks > 1:
        program.on_slice = type_share


def _typed_forward(program: RankProgram, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap GPT's forward pass: a loss summed over a share of a sequence is a term of the sum over the sequence."""
    def forward(model: GPT, tokens: Tensor, targets: Tensor | None = None, reduction: Any = "mean",
                **named: Any) -> Tensor:
        result = original(model, tokens, targets, reduction, **named)
        if "sp" in program.axes and targets is not None and reduction == "sum":
            spmd.assert_type(result, {program.axes["sp"]: P})
        return result

    return forward
