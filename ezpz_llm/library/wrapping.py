"""A model of one's own under a layout: wrapped, stepped by its own optimizer, saved and loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm import checkpoint
from ezpz_llm.base import UserError
from ezpz_llm.checkpoint.manifest import complete
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import broadcast, together
from ezpz_llm.engine import running_statistics
from ezpz_llm.engine.base import MicroStepEngine
from ezpz_llm.engine.build import put_in_engine
from ezpz_llm.engine.precision import parameter_dtype
from ezpz_llm.layout.resolve import Request, Resolved, resolve
from ezpz_llm.layout.value_source import DEFAULT
from ezpz_llm.library.run import Run, current
from ezpz_llm.library.tensor_plan import divide
from ezpz_llm.model.tensor_parallel import Share


class Wrapped:
    """A model in training under a layout, made by `ezpz_llm.wrap`.

    A micro batch is `loss = …model(inputs)…; model.backward(loss); model.step()`. Gradients are averaged over ranks
    once a step.

    Attributes:
        module: the model itself, with the layout's precision; its parameters may be sharded.
        optimizer: the one that was given, whose learning rates count.
        grad_norm: the global norm of the last step's gradients before clipping, 0-d; None before the first.
        accumulation: micro batches of a step.
    """

    def __init__(self, run: Run, engine: MicroStepEngine, optimizer: torch.optim.Optimizer,
                 dtype: torch.dtype) -> None:
        self.module, self.optimizer = engine.module, optimizer
        self.grad_norm: Tensor | None = None
        self.accumulation = engine.batch.accumulation
        self._run, self._engine, self._dtype = run, engine, dtype
        self._micro_steps = 0

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the model gives, also for evaluation, inside `torch.no_grad()`; every rank makes the call."""
        if self._dtype != torch.float32:
            inputs, named = _cast(inputs, self._dtype), _cast(named, self._dtype)
        if not torch.is_grad_enabled():
            return self.module(*inputs, **named)
        is_last = self._micro_steps == self.accumulation - 1
        with self._run.span("forward"):
            return self._engine.forward(*inputs, last_micro_step=is_last, **named)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro batch's loss, 0-d, divided by the number of micro batches of a step.

        Raises:
            UserError: the step's micro batches are all there, and `step` was not called.
        """
        if self._micro_steps == self.accumulation:
            raise UserError(f"a backward pass more than the {self.accumulation} of a step",
                            where="Wrapped.backward", instead="model.step() after each backward pass; "
                                                              "wrap(accumulation=N) for N of them a step")
        with self._run.span("backward"):
            self._engine.backward(loss.float())
        self._micro_steps += 1

    def step(self) -> Tensor | None:
        """After the last micro batch of a step: clip, update, and forget the gradients; else nothing.

        A step whose gradient norm is NaN or Inf changes nothing.

        Returns:
            The global gradient norm before clipping, 0-d; None where more micro batches are to come.
        """
        if self._micro_steps < self.accumulation:
            return None
        self._micro_steps = 0
        with self._run.span("optimizer"):
            self.grad_norm = self._engine.step(None)
            running_statistics.average(self.module, self._run.mesh)
        return self.grad_norm

    def train(self, mode: bool = True) -> Wrapped:
        """Put the model into training mode, or evaluation mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Wrapped:
        """Put the model into evaluation mode."""
        return self.train(False)

    @property
    def lr(self) -> float:
        """The learning rate of the optimizer's first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def engine(self) -> MicroStepEngine:
        """The layout's engine, which is no part of the public interface."""
        return self._engine


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The same with floating-point tensors in `dtype`."""
    return on_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def on_tensors(value: Any, action: Callable[[Tensor], Tensor]) -> Any:
    """The same with each tensor as `action` gives it, also those inside of lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return action(value)
    if isinstance(value, MutableMapping):
        mapped = copy(value)  # of its own kind, such as a tokenizer's BatchEncoding
        mapped.update({name: on_tensors(member, action) for name, member in value.items()})
        return mapped
    if isinstance(value, list | tuple):
        members = [on_tensors(member, action) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    return value


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, ds_config: str | Path = "ddp", *,
         micro_batch: int | None = None, accumulation: int | None = None, clip: float | None = None,
         tp_plan: Mapping[str, str] | None = None) -> Wrapped:
    """Put a model and its optimizer under the layout of a ds_config. Collective.

    Initial weights are rank 0's. The optimizer stays the caller's own, with its groups and a schedule of its rates;
    its parameters become the layout's.

    Args:
        model: of any kind, on any device.
        optimizer: of torch, of all of the model's parameters, without a step made.
        ds_config: a name of ds_configs/ (ddp, fsdp2, zero0 to zero3, zero3_offload_all, …) or a file. Precision,
            batch and clipping are its own where it has them; without, fp32.
        micro_batch: samples of a rank that are taken at once, for DeepSpeed's records.
        accumulation: micro batches of a step.
        clip: the largest gradient norm; 0 for none.
        tp_plan: for a tensor-parallel layout, how layers are divided, by module name as in Hugging Face's models
            (`colwise`, `rowwise`, `replicated_with_grad_allreduce`); the model's own `tp_plan` by default. Ranks
            that share a model, `run.mesh.dp_rank` of which is the same, take the same samples.

    Raises:
        UserError: the layout divides layers and there is no plan, or it cannot run here; the optimizer has other
            parameters than the model, or has made steps.
    """
    return wrap_in(current("wrap"), model, optimizer, ds_config, micro_batch, accumulation, clip, tp_plan)


def wrap_in(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, ds_config: str | Path,
            micro_batch: int | None, accumulation: int | None, clip: float | None,
            tp_plan: Mapping[str, str] | None = None) -> Wrapped:
    """`wrap` for a run that is not this process's own, such as a single process beside others."""
    resolved = _for_any_optimizer(resolve(Request(
        str(ds_config), run.world_size, micro_batch=micro_batch, accumulation=accumulation, clip=clip,
        precision="fp32", device=run.device.type, default_micro_batch=1, sources={"precision": DEFAULT})))
    plan = tp_plan or getattr(model, "tp_plan", None) or {}
    _check_layout(resolved, run, plan)
    _check_optimizer(model, optimizer)
    _begin_alike(model, run.dist)
    run.dist.arrange(tp=resolved.layout.tp)
    if resolved.layout.tp > 1:
        divide(model, plan, run.mesh.group("tp"), Share(run.mesh.tp_rank, run.mesh.tp_size))
    if run.is_main:
        for kind, remarks in (("note", resolved.notes), ("warning", resolved.warnings)):
            print(*(f"{kind}: {remark}\n" for remark in remarks), sep="", end="", file=sys.stderr, flush=True)
        resolved.write(run.dist.run_dir, run.dist.side)
        run.dist.side.update_record(run.dist.run_dir, precision=resolved.precision,
                                    parameters=sum(parameter.numel() for parameter in model.parameters()))

    def make(groups: list[dict[str, Any]], *, fused: bool = True) -> torch.optim.Optimizer:
        for own, group in zip(optimizer.param_groups, groups, strict=True):
            own["params"] = group["params"]
        return optimizer

    with run.clock.span("set-up"):
        engine = put_in_engine(model, resolved, run.dist,
                               [{"params": list(group["params"])} for group in optimizer.param_groups], make)
    assert isinstance(engine, MicroStepEngine)
    wrapped = Wrapped(run, engine, optimizer, parameter_dtype(resolved.precision))
    run.models.append(wrapped)
    run.begin_step()
    return wrapped


def _for_any_optimizer(resolved: Resolved) -> Resolved:
    """The same with DeepSpeed told to take the optimizer that it is given."""
    if resolved.deepspeed is None:
        return resolved
    return replace(resolved, deepspeed={**resolved.deepspeed, "zero_allow_untested_optimizer": True,
                                        "zero_force_ds_cpu_optimizer": False})


def _check_layout(resolved: Resolved, run: Run, plan: Mapping[str, str]) -> None:
    layout = resolved.layout
    named = [f"{name} {degree}" for name in ("pp", "sp") if (degree := getattr(layout, name)) > 1]
    if layout.zero.tiled:
        named.append("tiled")
    if named:
        raise UserError(f"layout {layout.name} has {', '.join(named)}, which cuts layers of "
                        "the trainer's own models", where="ezpz_llm.wrap",
                        instead="ddp, fsdp2, zero0 to zero3, hpZ or offload")
    if layout.tp > 1 and not plan:
        raise UserError(f"layout {layout.name} has tp {layout.tp}, and nothing says how the layers of "
                        "this model are divided", where="ezpz_llm.wrap",
                        instead="wrap(…, tp_plan={…}), or a Hugging Face model that has one")
    if run.models and layout.tp != run.mesh.tp_size:
        raise UserError(f"tp {layout.tp}, beside a model with tp {run.mesh.tp_size}", where="ezpz_llm.wrap",
                        instead="models of one run with the same tp")


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        UserError: a parameter of one of them is not the other's, or there is state.
    """
    where = "ezpz_llm.wrap"
    optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise UserError(f"the parameter {name} is frozen (requires_grad is False)", where=where,
                            instead="a parameter group of its own with lr 0, which changes nothing either")
        if parameter not in optimized:
            raise UserError(f"the optimizer does not have the parameter {name}, which would never change",
                            where=where, instead="an optimizer of model.parameters()")
    if optimized - set(model.parameters()):
        raise UserError("the optimizer has parameters that are not the model's", where=where,
                        instead="a model and an optimizer for each call of wrap")
    if optimizer.state:
        raise UserError("the optimizer has made steps already", where=where,
                        instead="wrap before the first step; load_checkpoint brings state back")


def _begin_alike(model: nn.Module, dist: Dist) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    if dist.world_size == 1:
        return
    for tensor in _tensors(model):
        there = tensor.to(dist.device)
        torch.distributed.broadcast(there, src=0)
        if there is not tensor:
            tensor.copy_(there)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from (parameter.detach() for parameter in model.parameters())
    yield from model.buffers()


# Checkpoints, in the trainer's format.
def save_checkpoint(model: Wrapped, step: int, **state: Any) -> Path:
    """Write a checkpoint, complete or not at all, into the run directory. Collective.

    It holds fp32 weights, the optimizer's state and the model's buffers (rank 0's), random states of each rank, and
    `state`; any layout loads it, on any number of ranks.

    Args:
        step: the last finished one.
        state: what the script needs to go on, such as an epoch, in JSON's types; rank 0's is kept.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: no run, an optimizer whose state is not known, or it could not be written. The same on all ranks.
    """
    run = current("save_checkpoint")
    _require_known_state(model.optimizer)
    with run.phase("checkpoints"):
        return checkpoint.save(model.engine, run.dist, run.dist.run_dir, {**state, "step": step})


def load_checkpoint(model: Wrapped, where: str | Path | None = None) -> dict[str, Any] | None:
    """Load the newest undamaged checkpoint of a run directory, or the one that `where` names. Collective.

    `record` goes on after its step.

    Args:
        where: a run directory or a checkpoint's folder; by default this run's directory, which may have none.

    Returns:
        What `save_checkpoint` was given, with "step" and facts of the saving run; None where there is none.

    Raises:
        UserError: there is none at `where`, or of another model, or all are damaged. The same on all ranks.
    """
    run = current("load_checkpoint")
    _require_known_state(model.optimizer)
    if where is None:
        if not broadcast(run.dist, bool(complete(run.dist.run_dir.checkpoints))):
            return None
        where = run.run_dir
    together(run.dist, lambda: _check_place(Path(where)), on_main=True)
    found = checkpoint.load_newest(where, model.engine, run.dist, lambda folder, state: None)
    run.step = found.state["step"]
    run.begin_step()
    return found.state


def _check_place(where: Path) -> None:
    if not where.is_dir():
        raise UserError(f"no run directory or checkpoint at {where}", where="ezpz_llm.load_checkpoint",
                        instead="a run directory, or a checkpoints/step-… folder in one")


def has_known_state(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer's state is two moments of the gradient."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group.get("amsgrad") for group in optimizer.param_groups)


def _require_known_state(optimizer: torch.optim.Optimizer) -> None:
    if not has_known_state(optimizer):
        raise UserError(f"the state of {type(optimizer).__name__} has no place in a checkpoint",
                        where="ezpz_llm.save_checkpoint", instead="torch.optim.AdamW or Adam, without amsgrad")
