"""Wrapping of a script's model and optimizer in a layout."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ezpz_llm.core.base import UserError
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.engine.build import put_in_engine
from ezpz_llm.training.engine.precision import parameter_dtype
from ezpz_llm.training.engine.sliced_optimizer import SlicedOptimizer
from ezpz_llm.training.layout import ds_config as ds_config_files
from ezpz_llm.training.layout.ds_defaults import uses_nvme
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.resolve import Request, Resolved, resolve
from ezpz_llm.training.layout.value_source import DEFAULT
from ezpz_llm.training.library.initial_state import (
    broadcast_values,
    check_optimizer,
    check_parameters,
    convert_parameters,
)
from ezpz_llm.training.library.module_methods import check_not_wrapped
from ezpz_llm.training.library.optimizer_groups import OptimizerGroups
from ezpz_llm.training.library.optimizer_kind import check_sharding, initial_state_for, initial_states, try_steps
from ezpz_llm.training.library.parameter_hooks import check_no_hooks
from ezpz_llm.training.library.run import Run, current
from ezpz_llm.training.library.script_state import ScriptState
from ezpz_llm.training.library.sharded_parameter import guard as guard_shards
from ezpz_llm.training.library.tensor_plan import shard_model
from ezpz_llm.training.library.wrapped import Wrapped
from ezpz_llm.training.model.tensor_parallel import Share

_WHERE = "ezpz_llm.wrap"


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, ds_config: str | Path = "ddp", *,
         micro_batch: int | None = None, accumulation: int | None = None, clip: float | None = None,
         tp_plan: Mapping[str, str] | None = None) -> Wrapped:
    """Wrap a model and its optimizer in the layout of a ds_config. Collective.

    All ranks start with rank 0's weights. The optimizer keeps its groups, so learning rate schedules continue to
    work; its parameters are replaced by the layout's.

    Args:
        model: any module, on any device.
        optimizer: a torch optimizer of all parameters of the model that are not frozen, before its first step.
        ds_config: name from ds_configs/ (ddp, fsdp2, zero0 to zero3, zero3_offload_all, …) or a file. Precision,
            batch and clipping are taken from it; the default precision is fp32.
        micro_batch: samples in a micro-batch of a rank, for DeepSpeed's records.
        accumulation: micro-batches per step.
        clip: maximum gradient norm; 0 disables clipping.
        tp_plan: styles of the layers for a tensor-parallel layout, by module name as in Hugging Face models
            (`colwise`, `rowwise`, `replicated_with_grad_allreduce`); by default the model's `tp_plan`. Ranks with
            the same `run.mesh.dp_rank` must get the same samples.

    Raises:
        UserError: the layout cannot run here, or is tensor-parallel without a plan; the parameters of model and
            optimizer differ; or the optimizer has already taken a step.
    """
    return wrap_in(current("wrap"), model, optimizer, ds_config, micro_batch, accumulation, clip, tp_plan)


def wrap_in(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, ds_config: str | Path,
            micro_batch: int | None, accumulation: int | None, clip: float | None,
            tp_plan: Mapping[str, str] | None = None) -> Wrapped:
    """Wrap a model as in `wrap`, but in a given run, such as certify's single-process reference run."""
    check_not_wrapped(model)
    gc.collect()  # frees earlier models that the script has dropped, whose hooks make cycles
    _check_ds_config(ds_config)
    resolved = _accept_any_optimizer(resolve(Request(
        str(ds_config), run.world_size, micro_batch=micro_batch, accumulation=accumulation, clip=clip,
        precision="fp32", device=run.device.type, default_micro_batch=None, sources={"precision": DEFAULT})))
    plan = tp_plan or getattr(model, "tp_plan", None) or {}
    _check_layout(resolved, run, plan)
    check_optimizer(model, optimizer)
    check_parameters(model, resolved.layout, run.world_size)
    check_no_hooks(model)
    initial = _take_over(optimizer, model, resolved.layout, run)
    convert_parameters(model)
    broadcast_values(model, run.dist)
    run.dist.arrange(tp=resolved.layout.tp)
    if resolved.layout.tp > 1:
        shard_model(model, plan, run.mesh.group("tp"), Share(run.mesh.tp_rank, run.mesh.tp_size))
    if run.is_main:
        for kind, remarks in (("note", resolved.notes), ("warning", resolved.warnings)):
            print(*(f"{kind}: {remark}\n" for remark in remarks), sep="", end="", file=sys.stderr, flush=True)
        resolved.write(run.dist.run_dir, run.dist.side)
        run.dist.side.update_record(run.dist.run_dir, precision=resolved.precision,
                                    parameters=sum(parameter.numel() for parameter in model.parameters()))

    def make_optimizer(groups: list[dict[str, Any]], *, fused: bool = True) -> torch.optim.Optimizer:
        """Give the script's optimizer the layout's parameters."""
        for user_group, group in zip(optimizer.param_groups, groups, strict=True):
            user_group["params"] = group["params"]
        return SlicedOptimizer(optimizer, groups) if resolved.layout.zero.stage else optimizer

    groups = OptimizerGroups(optimizer)
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    names = [[name_of[parameter] for parameter in group["params"] if parameter.requires_grad]
             for group in optimizer.param_groups]
    modes = {module: module.training for module in model.modules()}
    with run.clock.span("set-up"):
        engine = put_in_engine(model, resolved, run.dist,
                               [{"params": [parameter for parameter in group["params"] if parameter.requires_grad]}
                                for group in optimizer.param_groups],
                               make_optimizer)
    assert isinstance(engine, MicroStepEngine)
    for module, is_training in modes.items():
        module.training = is_training
    engine.may_have_unused = True
    if initial:
        for tensor, (name,) in engine.training_state().stepped():
            optimizer.state[tensor] = initial_state_for(tensor, initial[name])
    named = dict(model.named_parameters())
    groups.show([[named[name] for name in group] for group in names],
                part=[resolved.layout.name, run.rank, run.world_size])
    if resolved.layout.shard_stage() == 3 or resolved.layout.tp > 1:
        guard_shards(model, resolved.layout.name)
    wrapped = Wrapped(run, engine, optimizer, groups, parameter_dtype(resolved.precision))
    run.models.add(wrapped)
    run.begin_step()
    return wrapped


def _check_ds_config(ds_config: str | Path) -> None:
    """Check that a ds_config has no blocks that would have no effect.

    Raises:
        UserError: it has the block "optimizer" or "scheduler".
    """
    config = ds_config_files.load(str(ds_config))
    if found := [name for name in ("optimizer", "scheduler") if name in config.values]:
        raise UserError(f'the block "{found[0]}" of {config.path.name} has no effect in wrap, which uses the '
                        f"{found[0]} of the script", where=_WHERE, instead=f'delete "{found[0]}" from the file')


def _take_over(optimizer: torch.optim.Optimizer, model: nn.Module, layout: Layout,
               run: Run) -> dict[str, dict[str, Any]]:
    """Check the kind of an optimizer, and return its initial state by parameter.

    Raises:
        UserError: the optimizer cannot be used with the layout.
    """
    kind, states = try_steps(optimizer), initial_states(optimizer)
    if layout.tp > 1 or (layout.shard_stage() and run.world_size > 1):
        check_sharding(optimizer, layout.name, keeps_rows=not layout.zero.stage)
    optimizer.ezpz_state = ScriptState(kind)
    optimizer.state.clear()
    return {name: states[parameter] for name, parameter in model.named_parameters() if parameter in states}


def _accept_any_optimizer(resolved: Resolved) -> Resolved:
    """Configure DeepSpeed to accept any optimizer."""
    if resolved.deepspeed is None:
        return resolved
    return replace(resolved, deepspeed={**resolved.deepspeed, "zero_allow_untested_optimizer": True,
                                        "zero_force_ds_cpu_optimizer": False})


def _check_layout(resolved: Resolved, run: Run, plan: Mapping[str, str]) -> None:
    layout = resolved.layout
    unsupported = [f"{name} {degree}" for name in ("pp", "sp") if (degree := getattr(layout, name)) > 1]
    if layout.zero.tiled:
        unsupported.append("tiled")
    if uses_nvme(layout):  # the optimizer steps slices of partitions, which must stay in memory
        unsupported.append("offload to files")
    if unsupported:
        raise UserError(f"layout {layout.name} has {', '.join(unsupported)}, which is supported only for the "
                        "trainer's models", where=_WHERE,
                        instead="ddp, fsdp2, zero0 to zero3, hpZ or offload to CPU memory")
    if layout.tp > 1 and not plan:
        raise UserError(f"layout {layout.name} has tp {layout.tp}, but this model has no plan for sharding its "
                        "layers", where=_WHERE,
                        instead="wrap(…, tp_plan={…}), or a Hugging Face model that has one")
    if run.models and layout.tp != run.mesh.tp_size:
        raise UserError(f"tp {layout.tp} differs from tp {run.mesh.tp_size} of another model of the run",
                        where=_WHERE, instead="the same tp for all models of a run")
