"""Types in the gradient reduction, the gradient norm, and the clipping of a rank of `type_program`.

Code of ezpz_llm runs with types. For reductions by torch and DeepSpeed, the groups and marks that ezpz_llm passes
to them are checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import P, R, SpmdTypeError, V
from torch.distributed import ProcessGroup
from type_program import DATA_AXES, Rank, assembled, training_inputs
from type_rules import axes_of, replaced, stamp

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.deepspeed_internals import is_marked_tensor_parallel
from ezpz_llm.training.dist.degrees import AXES
from ezpz_llm.training.dist.torch_internals import foreach_norm, viewed_tensor
from ezpz_llm.training.engine import deepspeed_groups, gradients
from ezpz_llm.training.engine.build import put_in_engine
from ezpz_llm.training.engine.deepspeed_engine import mark_sharded
from ezpz_llm.training.engine.gradients import norm_and_clip
from ezpz_llm.training.engine.pipeline_engine import PipelineEngine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model import tensor_parallel
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.parameters import placement_of, set_placement

_CLIP = 0.1


def check_reduction(rank: Rank) -> None:
    """Check what the layout's engine does with the gradients of the last backward pass.

    Raises:
        SpmdTypeError: a type, a group, or a mark is wrong.
    """
    check = {"ddp": _check_ddp, "fsdp2": _check_fsdp2}.get(rank.layout.engine, _check_deepspeed)
    # The rules type the norm of a whole gradient. On CPU, `tensor_norms` computes it from rows.
    with replaced(gradients, "tensor_norms", foreach_norm):
        check(rank)


class _NoOptimizer:
    """Optimizer that changes no parameters; torch's would import its compiler, which takes two seconds."""

    def __init__(self, groups: Any = ()) -> None:
        self.param_groups = groups

    def register_step_pre_hook(self, hook: Any) -> None:
        """Ignore a hook."""

    register_step_post_hook = register_step_pre_hook

    def step(self) -> None:
        """Do nothing."""


_NO_OPTIMIZER: Any = _NoOptimizer()


def _engine(rank: Rank, module: Any, precision: str) -> Any:
    """Put a module in the engine of the layout."""
    world = rank.mesh.size(*AXES)
    resolved = resolve(Request(rank.layout.name, world_size=world, micro_batch=1, accumulation=2, clip=_CLIP,
                               precision=precision, device="cpu", model=module.config))
    dist = Dist(RankInfo(rank.mesh.rank, world, 0, 1, 0, "certify"), torch.device("cpu"), "fake", rank.mesh,
                RunDir(Path()))
    return put_in_engine(module, resolved, dist, [{"params": list(module.parameters())}],
                         _NoOptimizer)  # type: ignore[arg-type]


def _check_ddp(rank: Rank) -> None:
    program, module = rank.program, rank.module
    program.where[:] = ["GradientReducer in fp32"]
    engine = _engine(rank, assembled(rank.layout, module.config, rank.mesh), "fp32")
    if engine._reducer is None:
        raise SpmdTypeError("no gradient is reduced")
    _require_axes(rank, engine._reducer._group, DATA_AXES)
    module.zero_grad()
    with program.checked():
        with spmd.no_typecheck():
            engine = _engine(rank, module, "bf16")
        for parameter, master in engine.masters.items():
            spmd.assert_type(master, dict(spmd.get_local_type(parameter)))
            # Gradients are accumulated in views of a bucket. Zeros are a sum of the ranks' zeros.
            gradient = engine._reducer.gradient(parameter)
            for tensor in (gradient, viewed_tensor(gradient)):
                spmd.assert_type(tensor, dict(program.gradient_types(parameter)))
        program.where[:] = ["GradientReducer in bf16"]
        inputs = [training_inputs(rank)[0] for _ in range(engine.batch.accumulation)]
        engine.train_step(inputs, 1e-3, lambda name: nullcontext())
    program.require("the gradient norm", engine.step_skip.norm)


def _check_fsdp2(rank: Rank) -> None:
    program = rank.program
    program.where[:] = ["fully_shard"]
    engine = _engine(rank, assembled(rank.layout, rank.module.config, rank.mesh), "fp32")
    device_mesh = next(iter(engine._sharded.values())).device_mesh
    found = {axis for group in device_mesh.get_all_groups() for axis in axes_of(program.axes, group)}
    _require_same(rank, found, DATA_AXES)
    for parameter in engine._sharded.values():
        parameter.grad = torch.zeros_like(parameter)
    program.where[:] = ["Fsdp2Engine._norm_and_clip"]
    with program.checked():  # the library takes the types of rows from the parameters' placements
        engine._move_gradients()
        norm = engine._norm_and_clip(1.0)
    program.require("the gradient norm", norm)


def _check_deepspeed(rank: Rank) -> None:
    layout, mesh, program = rank.layout, rank.mesh, rank.program
    make_unit: Any = (deepspeed_groups.ModelParallelUnit if layout.pp == 1
                      else lambda mesh: deepspeed_groups.PipelineGrid(mesh, mesh.real_group("pp"), None))
    unit = make_unit(mesh)
    uses_unit = layout.pp * layout.tp > 1
    program.where[:] = ["DeepSpeed's data-parallel group"]
    _require_axes(rank, unit.get_data_parallel_group() if uses_unit else None, DATA_AXES)
    if layout.tp > 1:
        program.where[:] = ["DeepSpeed's tensor-parallel group"]
        _require_axes(rank, unit.get_tensor_model_parallel_group()
                      if layout.pp == 1 else unit.get_slice_parallel_group(), ("tp",))
    mark_sharded(rank.module)
    for name, parameter in rank.module.named_parameters() if layout.tp > 1 else ():
        program.where[:] = [name]
        is_sharded = V in spmd.get_local_type(parameter).values()
        if is_marked_tensor_parallel(parameter) != is_sharded:
            raise SpmdTypeError("the parameter is " + ("sharded over tp, but DeepSpeed's norm counts it on the "
                                "first rank only" if is_sharded else "equal over tp, but DeepSpeed's norm counts "
                                "it on every rank"))
    if layout.pp > 1:
        _check_pipeline_average(rank)
    elif layout.zero.stage == 0:
        _check_norm(rank)


def _check_pipeline_average(rank: Rank) -> None:
    """Check the reduction of a pipeline's flat bf16 gradients."""
    program, mesh = rank.program, rank.mesh
    program.where[:] = ["PipelineEngine._average_gradients"]
    flat = torch.zeros(8)
    spmd.assert_type(flat, program.types(dp=P, sp=P, tp=V))
    engine: Any = SimpleNamespace(
        _replica=mesh.place("dp", "sp"), _reduced=torch.bfloat16, _bucket=len(flat), _mesh=mesh,
        _engine=SimpleNamespace(optimizer=SimpleNamespace(non_expert_gradients=[flat])))
    with program.checked():
        PipelineEngine._average_gradients(engine)
    program.require("the average", flat, tp=V)


def _check_norm(rank: Rank) -> None:
    """Check that the norm has each gradient once: a shard on its rank, and an equal one on one rank."""
    module, program, ranks = rank.module, rank.program, rank.mesh.tp_size
    named = dict(module.named_parameters())
    for parameter in named.values():
        types = {axis: V if kind is V else R for axis, kind in program.gradient_types(parameter).items()}
        parameter.grad = stamp(torch.zeros_like(parameter), types)
    counted = dict.fromkeys(named, 0)
    for index in range(ranks):
        if ranks > 1:
            with torch.device("meta"):
                peer = GPT(module.config)
                tensor_parallel.apply(peer, None, index, ranks)
            for name, parameter in peer.named_parameters():
                set_placement(named[name], placement_of(name, parameter))
        program.normed.clear()
        program.where[:] = ["norm_and_clip"]
        with program.checked():
            norm = norm_and_clip(module, rank.mesh, _NO_OPTIMIZER, _CLIP)
        program.require("the gradient norm", norm)
        for name, parameter in named.items():
            counted[name] += sum(tensor is parameter.grad for tensor in program.normed)
    for name, parameter in named.items():
        program.where[:] = [name]
        expected = ranks if V in spmd.get_local_type(parameter.grad).values() else 1
        if counted[name] != expected:
            raise SpmdTypeError(f"{counted[name]} of {ranks} tensor-parallel ranks add the gradient to the norm, "
                                f"not {expected}")


def _require_axes(rank: Rank, group: ProcessGroup | None, names: Iterable[str]) -> None:
    _require_same(rank, set(axes_of(rank.program.axes, group)), names)


def _require_same(rank: Rank, found: set[Any], names: Iterable[str]) -> None:
    """Check that the axes of a group are those with these names."""
    expected = {axis for name, axis in rank.program.axes.items() if name in names}
    if found != expected:
        raise SpmdTypeError(f"the group is along {', '.join(map(str, found))}, not "
                            f"{', '.join(map(str, expected))}")
