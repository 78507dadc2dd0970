"""Model under a layout: one protocol of forward passes, backward passes and steps for every layout."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.base import UserError
from ezpz_llm.engine import running_statistics
from ezpz_llm.engine.base import MicroStepEngine
from ezpz_llm.library.parameter_use import ParameterUse
from ezpz_llm.library.replicas import check_replicas
from ezpz_llm.library.run import Run
from ezpz_llm.library.visible_gradients import VisibleGradients, zero_in_place
from ezpz_llm.library.whole_parameters import require_all_ranks, whole_parameters

_LIVE: weakref.WeakSet[Wrapped] = weakref.WeakSet()
"""Wrapped models of this process, whose gradients are kept apart."""


_OF_FREED_VALUES = ("storage of size 0", "tensor a (0)", "tensor b (0)", "must be a matrix", "once_differentiable")
"""Parts of torch's errors for a second pass through parameters that fully_shard or ZeRO-3 has freed."""


class StepGuard:
    """Hook that rejects steps of an optimizer by the script. Create it before other hooks of the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_open = False
        optimizer.register_step_pre_hook(self._check)

    def _check(self, *_: Any) -> None:
        if not self._is_open:
            raise UserError("optimizer.step() of a wrapped model's optimizer", where="the training loop",
                            instead="model.step(), which averages gradients and steps the optimizer")

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow steps in this context."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False


class Wrapped:
    """Model under a layout, created by `ezpz_llm.wrap`.

    For each micro-batch call `loss = …model(inputs)…; model.backward(loss); model.step()`. Forward passes may come
    in any order, also without a backward pass, without gradients, or several for one loss. Gradients are averaged
    over ranks once per step. Other attributes, such as `generate` or `config`, are those of the module.

    Attributes:
        module: the model in the layout's precision; its parameters may be sharded.
        optimizer: the optimizer passed to `wrap`. Its learning rates are used.
        grad_norm: global gradient norm of the last step before clipping, 0-d; None before the first step.
        accumulation: micro-batches per step.
    """

    def __init__(self, run: Run, engine: MicroStepEngine, optimizer: torch.optim.Optimizer, guard: StepGuard,
                 dtype: torch.dtype) -> None:
        self.module, self.optimizer = engine.module, optimizer
        self.grad_norm: Tensor | None = None
        self.accumulation = engine.batch.accumulation
        self._run, self._engine = run, engine
        self._trained = {name: parameter for name, parameter in engine.module.named_parameters()
                         if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in engine.module.named_parameters()
                        if not parameter.requires_grad}
        self._dtypes = {name: parameter.dtype for name, parameter in self._trained.items()}
        self._group_sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._state = engine.training_state()
        # fully_shard has other parameters during a pass. A parameter that no rank uses has no gradient there, too.
        self._use = None if engine.layout.engine == "fsdp2" else ParameterUse(engine.module, run.mesh)
        self._gradients = VisibleGradients(engine, optimizer, run.mesh)
        self._micro_steps = self._steps_called = 0
        self._is_first_step = True
        self._is_cleared = False
        self._guard = guard
        self._is_whole = False
        if dtype != torch.float32:
            self.module.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
        self._guard_script()
        _LIVE.add(self)

    def _guard_script(self) -> None:
        """Make calls of plain torch that would have no effect raise an error or take effect."""
        this = weakref.ref(self)

        def clear(set_to_none: bool = True) -> None:
            """Discard gradients, as `zero_grad` of optimizers and modules does."""
            if (model := this()) is not None:
                model._clear_gradients(set_to_none)

        self.optimizer.zero_grad = self.module.zero_grad = clear
        if self._engine.layout.shard_stage() == 3 or self._run.mesh.tp_size > 1:
            name = self._engine.layout.name

            def check_reading(*_: Any) -> None:
                """Raise an error for a state dict of shards."""
                if (model := this()) is not None and not model._is_whole:
                    raise UserError(f"the state_dict of a module whose parameters are sharded by the layout {name}",
                                    where="model.module",
                                    instead="model.state_dict() on every rank, or with model.gathered(): … on "
                                            "every rank, for example around save_pretrained")

            def check_writing(*_: Any) -> None:
                """Raise an error for a whole state dict, which shards cannot load."""
                raise UserError(f"load_state_dict of a module whose parameters are sharded by the layout {name}",
                                where="model.module", instead="model.load_state_dict(…) on every rank")

            self.module.register_state_dict_pre_hook(check_reading)
            self.module.register_load_state_dict_pre_hook(check_writing)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the model, in training or, under `torch.no_grad()`, in evaluation. Collective.

        Raises:
            UserError: the call is inside of `gathered`.
        """
        if self._is_whole:
            raise UserError("a call of the model inside of model.gathered()", where="Wrapped",
                            instead="the call after the with block")
        if not torch.is_grad_enabled():
            outputs = self.module(*inputs, **keywords)
            self._run.leave_out("evaluation")
            return outputs
        with self._run.span("forward"):
            return self.module(*inputs, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "module":  # while the object is created or copied
            raise AttributeError(name)
        return getattr(self.module, name)

    def __deepcopy__(self, memo: Any) -> Wrapped:
        raise UserError("a wrapped model cannot be copied", where="Wrapped",
                        instead="copy.deepcopy of the module before wrap, and "
                                "copy.load_state_dict(model.state_dict())")

    def __reduce__(self) -> Any:
        raise UserError("a wrapped model cannot be pickled", where="Wrapped",
                        instead="ezpz_llm.save_checkpoint(model, step), or torch.save(model.state_dict(), file)")

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UserError(f"the parameter {name} was unfrozen after wrap, so the optimizer does not step it",
                                where="Wrapped", instead="unfreeze it before wrap, in a group of the optimizer "
                                                         "whose lr is 0 until it is trained")

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Accumulate the gradient of a micro-batch's loss (0-d), divided by the number of micro-batches per step.

        Gradients of other wrapped models, which the loss may depend on, are not computed.

        Args:
            retain_graph: keep the graph, for another backward pass through it.

        Raises:
            UserError: the step already has all its micro-batches, and `step` was not called; or the loss is not a
                single number that depends on a parameter.
        """
        if self._micro_steps == self.accumulation:
            raise UserError(f"too many backward passes in a step: accumulation is {self.accumulation}",
                            where="Wrapped.backward", instead="model.step() after each backward pass; "
                                                              "wrap(accumulation=N) for N passes per step")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            is_tensor = isinstance(loss, Tensor) and loss.numel() != 1
            found = f"the shape {tuple(loss.shape)}" if is_tensor else "no gradient"
            raise UserError(f"the loss has {found}", where="Wrapped.backward",
                            instead="a mean over samples, computed from the outputs of model(…) with gradients")
        self._check_frozen()
        if self._use is None and any(parameter.grad is not None for parameter in self._trained.values()) and (
                not self._micro_steps):
            raise UserError("a parameter has a gradient before the first backward pass of a step",
                            where="Wrapped.backward", instead="model.backward(loss) instead of loss.backward()")
        is_last = self._micro_steps == self.accumulation - 1
        self._gradients.clear(checks=True)
        with ExitStack() as stack:
            stack.enter_context(self._run.span("backward"))
            try:
                self._engine.backward(self._isolated(loss.float(), stack), is_last, retain_graph)
            except IndexError:  # of ZeRO, if there is no gradient to reduce
                if self._use is not None:
                    self._use.check_pass()
                raise
            except RuntimeError as error:
                if not any(text in str(error) for text in _OF_FREED_VALUES):
                    raise
                raise UserError("the backward pass needs values that the layout frees after the first one: the "
                                "loss has a gradient of a gradient, or shares outputs with an earlier loss",
                                where=f"layout {self._engine.layout.name}",
                                instead="ddp, zero1 or zero2; or the sum of the losses") from error
        if self._use is not None:
            self._use.check_pass()
        self._micro_steps += 1
        if is_last:
            self._engine.show_gradients()
            if self._use is not None:
                if self._engine.layout.zero.offload_optimizer is not None:
                    self._use.check_last_pass()
                self._engine.forget(self._use.unused(needs_all_ranks=self._engine.divides_gradients))
        self._gradients.show(is_last)

    def _isolated(self, loss: Tensor, stack: ExitStack) -> Tensor:
        """Return the loss for a backward pass that computes only gradients of this model.

        Args:
            stack: contexts of the backward pass.
        """
        if self._use is not None:
            stack.enter_context(self._use.open())
        others = [model for model in _LIVE if model is not self]
        if not others:
            return loss
        if self._use is None:  # gathered parameters are not those of the module
            for model in others:
                stack.enter_context(_kept_gradients(model))
            return loss
        inputs = [parameter for parameter in self._trained.values() if parameter.requires_grad]
        return loss.as_subclass(type("Loss", (_Loss,), {"inputs": inputs}))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients since the last step, and begin the step again. `step` discards them, too."""
        self._clear_gradients()
        self._micro_steps, self._steps_called, self._is_cleared = 0, 0, False

    def _clear_gradients(self, set_to_none: bool = True) -> None:
        if not self._micro_steps:
            return
        is_complete = self._micro_steps == self.accumulation
        if is_complete and not set_to_none:
            zero_in_place(list(self._trained.values()))
            return
        self._gradients.clear()
        self._engine.discard_gradients()
        if self._use is not None:
            self._use.clear()
        self._is_cleared = is_complete

    def clip_grad_norm_(self, limit: float) -> Tensor:
        """Clip the gradients to a global norm between the last `backward` and `step`. Collective.

        Returns:
            The global norm before clipping, 0-d.
        """
        return nn.utils.clip_grad_norm_(self._gradients.parameters(), limit)

    def step(self) -> Tensor | None:
        """After the last micro-batch, clip gradients, update parameters and zero gradients; otherwise do nothing.

        A step with a non-finite gradient norm is skipped. A parameter that the losses of all ranks did not depend
        on is not changed.

        Returns:
            The global gradient norm before clipping, 0-d; None if more micro-batches follow in the step.

        Raises:
            UserError: there was no `backward` since the last step, or the script has changed the optimizer's
                parameters or the dtype of the model.
        """
        if self._micro_steps < self.accumulation:
            if not self._micro_steps:
                raise UserError("step without a backward pass since the last step", where="Wrapped.step",
                                instead="model.backward(loss) instead of loss.backward()")
            self._steps_called += 1
            if self._steps_called != self._micro_steps:
                raise UserError(f"step after {self._micro_steps} of {self.accumulation} micro-batches",
                                where="Wrapped.step", instead="model.step() after each model.backward(loss); "
                                "only the last call of a step updates the weights")
            return None
        self._check_unchanged()
        self._engine.forget(self._gradients.hide())
        self._micro_steps = self._steps_called = 0
        if self._is_cleared:
            self._is_cleared = False
            return torch.zeros((), device=self._run.device)
        with self._guard.open(), self._run.span("optimizer"):
            self._state.adopt_parameters()
            self.grad_norm = self._engine.step(None)
            running_statistics.average(self.module, self._run.mesh)
        if self._is_first_step:
            self._is_first_step = False
            check_replicas(self.module, self._run.mesh)
        return self.grad_norm

    def _check_unchanged(self) -> None:
        if [len(group["params"]) for group in self.optimizer.param_groups] != self._group_sizes:
            raise UserError("the parameters of the optimizer's groups were changed after wrap",
                            where="Wrapped.step",
                            instead="all groups before wrap, with lr 0 until they are trained")
        for name, parameter in self._trained.items():
            if parameter.dtype != self._dtypes[name]:
                raise UserError(f"the dtype of {name} was changed to {parameter.dtype} after wrap",
                                where="Wrapped.step", instead='a ds_config with "bf16": {"enabled": true}')

    @contextmanager
    def gathered(self, part: nn.Module | None = None) -> Iterator[None]:
        """Make parameters whole and fp32 in a with block, to read and write them under any layout. Collective.

        Every rank must enter the block. Values that are written to the parameters of `model.module`, for example
        by `copy_` or `load_state_dict`, are kept. If the ranks write different values, those of rank 0 are kept.
        The block cannot call the model.

        Args:
            part: a module of `model.module` whose parameters are gathered; by default all, so that each rank needs
                memory for the whole model in fp32.

        Raises:
            UserError: another rank does not enter the block.
        """
        require_all_ranks(self._run.dist, "gathered()")
        with whole_parameters(self._engine, self._run.dist, self.module if part is None else part):
            self._is_whole = True
            try:
                yield
            finally:
                self._is_whole = False

    def state_dict(self) -> dict[str, Any]:
        """Return whole fp32 parameters, and buffers, by name, on the CPU of every rank. Collective.

        Raises:
            UserError: another rank does not call it.
        """
        with self.gathered():
            return {name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
                    for name, value in self.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Load whole parameters and buffers, as `torch.nn.Module.load_state_dict` does. Collective.

        Returns:
            The missing and the unexpected names.

        Raises:
            UserError: another rank does not call it, or a name or a shape differs.
        """
        with self.gathered(), torch.no_grad():
            own = self.module.state_dict()
            if differing := sorted(own.keys() ^ state.keys()) if strict else []:
                verb = "has no" if differing[0] in own else "has"
                raise UserError(f"the state dict {verb} {differing[0]}, unlike the model", where="load_state_dict",
                                instead="the state dict of such a model, or strict=False")
            for name in own.keys() & state.keys():
                if isinstance(own[name], Tensor):
                    if own[name].shape != state[name].shape:
                        raise UserError(f"{name} has the shape {tuple(state[name].shape)}, in the model "
                                        f"{tuple(own[name].shape)}", where="load_state_dict",
                                        instead="the state dict of such a model")
                    own[name].copy_(state[name])
        return sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())

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

    @property
    def is_accumulating(self) -> bool:
        """True between the first backward pass of a step and the step. Not part of the public API."""
        return self._micro_steps > 0


class _Loss(Tensor):
    """Loss whose backward pass computes gradients of `inputs` only. Results of operations are losses, too."""

    inputs: list[nn.Parameter]

    def backward(self, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False,
                 inputs: Any = None) -> None:
        """Compute the gradients of `inputs`; see `torch.Tensor.backward`."""
        try:
            torch.autograd.backward(self.as_subclass(Tensor), gradient, retain_graph, create_graph,
                                    inputs=self.inputs)
        except RuntimeError as error:
            if "compatible with .grad()" not in str(error):
                raise
            raise UserError("reentrant gradient checkpointing with several wrapped models",
                            where="Wrapped.backward",
                            instead="use_reentrant=False in torch.utils.checkpoint") from error


@contextmanager
def _kept_gradients(model: Wrapped) -> Iterator[None]:
    """Keep the gradients of a model as they are, and discard those of the backward pass in this context."""
    kept = {parameter: parameter.grad for parameter in model._trained.values()}
    for parameter in kept:
        parameter.grad = None
    with ExitStack() as stack:
        if model._use is not None:
            stack.enter_context(model._use.open())
        yield
    for parameter, gradient in kept.items():
        parameter.grad = gradient


def _cast_inputs(dtype: torch.dtype, module: nn.Module, inputs: Any, keywords: Any) -> Any:
    return _cast(inputs, dtype), _cast(keywords, dtype)


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
