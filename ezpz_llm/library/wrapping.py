"""User models under a layout: wrapping, and training steps with the user's optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.base import UserError
from ezpz_llm.engine import running_statistics
from ezpz_llm.engine.base import MicroStepEngine
from ezpz_llm.engine.build import put_in_engine
from ezpz_llm.engine.precision import parameter_dtype
from ezpz_llm.layout.resolve import Request, Resolved, resolve
from ezpz_llm.layout.value_source import DEFAULT
from ezpz_llm.library.initial_state import (
    broadcast_values,
    check_optimizer,
    check_parameters,
    convert_parameters,
)
from ezpz_llm.library.run import Run, current
from ezpz_llm.library.tensor_plan import shard_model
from ezpz_llm.model.tensor_parallel import Share


class Wrapped:
    """Model under a layout, created by `ezpz_llm.wrap`.

    For each micro-batch call `loss = …model(inputs)…; model.backward(loss); model.step()`. Gradients are averaged
    over ranks once per step.

    Attributes:
        module: the model in the layout's precision; its parameters may be sharded.
        optimizer: the optimizer passed to `wrap`. Its learning rates are used.
        grad_norm: global gradient norm of the last step before clipping, 0-d; None before the first step.
        accumulation: micro-batches per step.
    """

    def __init__(self, run: Run, engine: MicroStepEngine, optimizer: torch.optim.Optimizer,
                 dtype: torch.dtype) -> None:
        self.module, self.optimizer = engine.module, optimizer
        self.grad_norm: Tensor | None = None
        self.accumulation = engine.batch.accumulation
        self._run, self._engine, self._dtype = run, engine, dtype
        self._frozen = {name: parameter for name, parameter in engine.module.named_parameters()
                        if not parameter.requires_grad}
        self._micro_steps = 0

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the model, in training or, under `torch.no_grad()`, in evaluation. Collective.

        Raises:
            UserError: a parameter was unfrozen after `wrap`.
        """
        if self._dtype != torch.float32:
            inputs, keywords = _cast(inputs, self._dtype), _cast(keywords, self._dtype)
        if not torch.is_grad_enabled():
            return self.module(*inputs, **keywords)
        self._check_frozen()
        is_last = self._micro_steps == self.accumulation - 1
        with self._run.span("forward"):
            return self._engine.forward(*inputs, last_micro_step=is_last, **keywords)

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UserError(f"the parameter {name} was unfrozen after wrap, so the optimizer does not step it",
                                where="Wrapped", instead="unfreeze it before wrap, in a group of the optimizer "
                                                         "whose lr is 0 until it is trained")

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a micro-batch's loss (0-d), divided by the number of micro-batches per step.

        Raises:
            UserError: the step already has all its micro-batches, and `step` was not called.
        """
        if self._micro_steps == self.accumulation:
            raise UserError(f"too many backward passes in a step: accumulation is {self.accumulation}",
                            where="Wrapped.backward", instead="model.step() after each backward pass; "
                                                              "wrap(accumulation=N) for N passes per step")
        with self._run.span("backward"):
            self._engine.backward(loss.float())
        self._micro_steps += 1

    def step(self) -> Tensor | None:
        """After the last micro-batch, clip gradients, update parameters and zero gradients; otherwise do nothing.

        A step with a non-finite gradient norm is skipped.

        Returns:
            The global gradient norm before clipping, 0-d; None if more micro-batches follow in the step.
        """
        if self._micro_steps < self.accumulation:
            return None
        self._micro_steps = 0
        with self._run.span("optimizer"):
            self.grad_norm = self._engine.step(None)
            running_statistics.average(self.module, self._run.mesh)
        return self.grad_norm

    def train(self, mode: bool = True) -> Wrapped:
        """Set the model to training mode, or evaluation mode if `mode` is False."""
        self.module.train(mode)
        return self

    def eval(self) -> Wrapped:
        """Set the model to evaluation mode."""
        return self.train(False)

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer's first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def engine(self) -> MicroStepEngine:
        """Engine of the layout. Not part of the public API."""
        return self._engine


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a nested value to `dtype`."""
    return on_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def on_tensors(value: Any, action: Callable[[Tensor], Tensor]) -> Any:
    """Apply `action` to each tensor in a value, including those in lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return action(value)
    if isinstance(value, MutableMapping):
        mapped = copy(value)  # keep the type, such as a tokenizer's BatchEncoding
        mapped.update({name: on_tensors(member, action) for name, member in value.items()})
        return mapped
    if isinstance(value, list | tuple):
        members = [on_tensors(member, action) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    return value


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
    resolved = _accept_any_optimizer(resolve(Request(
        str(ds_config), run.world_size, micro_batch=micro_batch, accumulation=accumulation, clip=clip,
        precision="fp32", device=run.device.type, default_micro_batch=None, sources={"precision": DEFAULT})))
    plan = tp_plan or getattr(model, "tp_plan", None) or {}
    _check_layout(resolved, run, plan)
    check_optimizer(model, optimizer)
    check_parameters(model, resolved.layout)
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
        for user_group, group in zip(optimizer.param_groups, groups, strict=True):
            user_group["params"] = group["params"]
        return optimizer

    with run.clock.span("set-up"):
        engine = put_in_engine(model, resolved, run.dist,
                               [{"params": [parameter for parameter in group["params"] if parameter.requires_grad]}
                                for group in optimizer.param_groups],
                               make_optimizer)
    assert isinstance(engine, MicroStepEngine)
    engine.may_have_unused = True
    wrapped = Wrapped(run, engine, optimizer, parameter_dtype(resolved.precision))
    run.models.append(wrapped)
    run.begin_step()
    return wrapped


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
    if unsupported:
        raise UserError(f"layout {layout.name} has {', '.join(unsupported)}, which is supported only for the "
                        "trainer's models", where="ezpz_llm.wrap",
                        instead="ddp, fsdp2, zero0 to zero3, hpZ or offload")
    if layout.tp > 1 and not plan:
        raise UserError(f"layout {layout.name} has tp {layout.tp}, but this model has no plan for sharding its "
                        "layers", where="ezpz_llm.wrap",
                        instead="wrap(…, tp_plan={…}), or a Hugging Face model that has one")
    if run.models and layout.tp != run.mesh.tp_size:
        raise UserError(f"tp {layout.tp} differs from tp {run.mesh.tp_size} of another model of the run",
                        where="ezpz_llm.wrap", instead="the same tp for all models of a run")
