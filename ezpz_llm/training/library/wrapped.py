"""Model under a layout: one protocol of forward passes, backward passes and steps for every layout."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.core.base import UserError
from ezpz_llm.training.engine import running_statistics
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.library.call_order import CallOrder
from ezpz_llm.training.library.forward_writes import ForwardWrites
from ezpz_llm.training.library.input_dtype import cast_inputs, explained_dtypes
from ezpz_llm.training.library.loss_graph import kept_gradients, leaves, restricted
from ezpz_llm.training.library.module_methods import WholeState, guard_methods
from ezpz_llm.training.library.new_parameters import reject_new_parameters
from ezpz_llm.training.library.optimizer_groups import OptimizerGroups
from ezpz_llm.training.library.parameter_hooks import ParameterHooks
from ezpz_llm.training.library.parameter_use import ParameterUse
from ezpz_llm.training.library.pass_errors import explained_pass
from ezpz_llm.training.library.replicas import check_data_parallel, check_tensor_parallel, is_compared
from ezpz_llm.training.library.run import Run
from ezpz_llm.training.library.sharded_parameter import unguarded
from ezpz_llm.training.library.visible_gradients import VisibleGradients, zero_in_place
from ezpz_llm.training.library.whole_parameters import require_all_ranks, whole_parameters

_LIVE: weakref.WeakSet[Wrapped] = weakref.WeakSet()
"""Wrapped models of this process, whose gradients are kept apart."""


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

    def __init__(self, run: Run, engine: MicroStepEngine, optimizer: torch.optim.Optimizer,
                 groups: OptimizerGroups, dtype: torch.dtype) -> None:
        self.module, self.optimizer = engine.module, optimizer
        self.grad_norm: Tensor | None = None
        self.accumulation = engine.batch.accumulation
        self._run, self._engine, self._groups, self._dtype = run, engine, groups, dtype
        self._trained = {name: parameter for name, parameter in engine.module.named_parameters()
                         if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in engine.module.named_parameters()
                        if not parameter.requires_grad}
        self._dtypes = {name: parameter.dtype for name, parameter in self._trained.items()}
        self._state = engine.training_state()
        self._ranks = run.mesh.size("dp", "sp")
        # fully_shard has other parameters during a pass, so that hooks of the sharded ones do not run.
        self._has_hooks = engine.layout.engine != "fsdp2"
        self._use = ParameterUse(engine.module, run.mesh, has_hooks=self._has_hooks)
        self._hooks = ParameterHooks(engine, self._ranks)
        self._gradients = VisibleGradients(engine, run.mesh)
        gathers = engine.layout.shard_stage() == 3
        self._order = CallOrder(engine.module, run.mesh, gathers, reduces=bool(engine.gradient_groups))
        self._forward_writes = ForwardWrites(engine.module) if gathers else None
        self._steps = self._micro_steps = self._steps_called = 0
        self._keeps_zeros = False
        self._is_first_step = True
        self._is_cleared = False
        self._whole = WholeState()
        reject_new_parameters(self.module)
        cast_inputs(self.module, dtype)
        guard_methods(self, engine.layout.name, self._whole, is_sharded=gathers or run.mesh.tp_size > 1)
        _LIVE.add(self)

    def __del__(self) -> None:
        # Not weakref.finalize, which would keep the engine, and so objects of the script that refer to this one.
        if "_engine" in self.__dict__ and not sys.is_finalizing():
            self._engine.release()

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the model, in training or, under `torch.no_grad()`, in evaluation. Collective.

        Raises:
            UserError: the call is inside of `gathered`.
        """
        if self._whole.is_open:
            raise UserError("a call of the model inside of model.gathered()", where="Wrapped",
                            instead="the call after the with block")
        with explained_dtypes(self._dtype):
            if torch.is_grad_enabled():
                with self._run.span("forward"):
                    return self.module(*inputs, **keywords)
            outputs = self.module(*inputs, **keywords)
            self._run.leave_out("evaluation")
            return outputs

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

    def backward(self, loss: Tensor, *, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Accumulate the gradient of a micro-batch's loss (0-d), divided by the number of micro-batches per step.

        Gradients of other wrapped models, which the loss may depend on, are not computed.

        Args:
            retain_graph: keep the graph, for another backward pass through it.
            create_graph: not supported; an argument because scripts pass it to torch's `backward`.

        Raises:
            UserError: the step already has all its micro-batches, and `step` was not called; or the loss is not a
                single number that depends on the parameters of wrapped models.
        """
        if create_graph:
            raise UserError("create_graph=True", where="Wrapped.backward",
                            instead="torch.autograd.grad of the model's inputs, and its result in the loss")
        self._check_before_backward(loss)
        self._order.add_backward([group["lr"] for group in self.optimizer.param_groups])
        if self._forward_writes is not None:
            self._forward_writes.check()
        is_last = self._micro_steps == self.accumulation - 1
        self._gradients.clear(checks=True)
        with ExitStack() as stack:
            stack.enter_context(self._run.span("backward"))
            stack.enter_context(self._use.open())
            stack.enter_context(explained_pass(self._engine.layout.name))
            try:
                self._engine.backward(self._isolated(loss.float(), stack), is_last, retain_graph)
            except IndexError:  # of ZeRO, if there is no gradient to reduce
                self._use.check_pass()
                raise
        if self._has_hooks:
            self._use.check_pass()
        self._micro_steps += 1
        if is_last:
            self._finish_last_backward()
        self._gradients.show(is_last)

    def _check_before_backward(self, loss: Tensor) -> None:
        if self._whole.is_open:
            raise UserError("backward inside of model.gathered()", where="Wrapped",
                            instead="the call after the with block")
        if self._micro_steps == self.accumulation:
            raise UserError(f"too many backward passes in a step: accumulation is {self.accumulation}",
                            where="Wrapped.backward", instead="model.step() after each backward pass; "
                                                              "wrap(accumulation=N) for N passes per step, whose "
                                                              "losses are divided by N")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            is_tensor = isinstance(loss, Tensor) and loss.numel() != 1
            found = f"the shape {tuple(loss.shape)}" if is_tensor else "no gradient"
            raise UserError(f"the loss has {found}", where="Wrapped.backward",
                            instead="a mean over samples, computed from the outputs of model(…) with gradients")
        self._check_frozen()
        self._hooks.check()
        if not self._has_hooks and any(parameter.grad is not None for parameter in self._trained.values()) and (
                not self._micro_steps):
            raise UserError("a parameter has a gradient before the first backward pass of a step",
                            where="Wrapped.backward", instead="model.backward(loss) instead of loss.backward()")

    def _finish_last_backward(self) -> None:
        """Make the gradients of the step available, after the last backward pass."""
        self._engine.show_gradients()
        if not self._has_hooks:
            self._use.add(parameter for parameter, _ in self._engine.local_gradients())
            self._use.check_pass()
        if self._engine.layout.zero.offload_optimizer is not None:
            self._use.check_last_pass()
        unused = self._use.unused(needs_all_ranks=bool(self._engine.gradient_groups))
        if self._keeps_zeros and self._steps and unused:
            raise UserError("zero_grad(set_to_none=False), after which torch would step parameters that the loss "
                            "does not depend on", where="Wrapped.backward", instead="zero_grad()")
        self._engine.forget(unused)

    def _isolated(self, loss: Tensor, stack: ExitStack) -> Tensor:
        """Return the loss for a backward pass that does not compute gradients of other wrapped models.

        Args:
            stack: contexts of the backward pass.

        Raises:
            UserError: the loss depends on a parameter of a model that is not wrapped.
        """
        others = [model for model in _LIVE if model is not self]
        if not others and not self._is_first_step:
            return loss
        found = leaves(loss)
        theirs = {parameter for model in others for parameter in model.module.parameters()}
        wrapped = theirs.union(self.module.parameters())
        # What fully_shard has gathered, and freed, is not among the parameters of its module.
        not_wrapped = [leaf for leaf in found if leaf not in wrapped and leaf.untyped_storage().size()]
        for leaf in not_wrapped:
            if isinstance(leaf, nn.Parameter) and self._ranks > 1:
                raise UserError(f"the loss depends on a parameter of shape {tuple(leaf.shape)} that is not in a "
                                "wrapped model, so that its gradient would not be averaged over ranks",
                                where="Wrapped.backward", instead="a module with both models in wrap, or detach()")
        if not self._has_hooks:
            for model in others:
                stack.enter_context(kept_gradients(list(model._trained.values())))
                stack.enter_context(model._use.open())
            return loss
        if theirs.isdisjoint(found):
            return loss
        return restricted(loss, [parameter for parameter in self._trained.values() if parameter.requires_grad]
                          + not_wrapped)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients since the last step, and begin the step again. `step` discards them, too."""
        self._clear_gradients()
        self._micro_steps, self._steps_called, self._is_cleared = 0, 0, False

    def _clear_gradients(self, set_to_none: bool = True) -> None:
        self._keeps_zeros = not set_to_none
        if not self._micro_steps:
            return
        is_complete = self._micro_steps == self.accumulation
        if is_complete and not set_to_none:
            zero_in_place(list(self._trained.values()))
            return
        self._gradients.clear()
        self._engine.discard_gradients()
        self._use.clear()
        self._is_cleared = is_complete

    def clip_grad_norm_(self, limit: float) -> Tensor:
        """Clip the gradients to a global norm between the last `backward` and `step`. Collective.

        Returns:
            The global norm before clipping, 0-d.
        """
        return nn.utils.clip_grad_norm_(self._gradients.parameters(), limit)

    def step(self, closure: Any = None) -> Tensor | None:
        """After the last micro-batch, clip gradients, update parameters and zero gradients; otherwise do nothing.

        A step with a non-finite gradient norm is skipped. A parameter that the losses of all ranks did not depend
        on is not changed.

        Args:
            closure: not supported; an argument because scripts pass it to the `step` of optimizers.

        Returns:
            The global gradient norm before clipping, 0-d; None if more micro-batches follow in the step.

        Raises:
            UserError: there was no `backward` since the last step, or the script has changed the optimizer's
                parameters or the dtype of the model.
        """
        if closure is not None:
            raise UserError("a closure", where="Wrapped.step", instead="model.backward(loss) before model.step()")
        if self._micro_steps < self.accumulation:
            if not self._micro_steps:
                raise UserError("step without a backward pass since the last step", where="Wrapped.step",
                                instead="model.backward(loss) instead of loss.backward(); write other gradients "
                                        "between model.backward(loss) and model.step()")
            self._steps_called += 1
            if self._steps_called != self._micro_steps:
                raise UserError(f"step after {self._micro_steps} of {self.accumulation} micro-batches",
                                where="Wrapped.step", instead="model.step() after each model.backward(loss); "
                                "only the last call of a step updates the weights")
            return None
        self._groups.check()
        self._check_dtypes()
        self._steps += 1
        if is_compared(self._steps):
            self.check_ranks()
        self._engine.forget(self._gradients.hide())
        self._micro_steps = self._steps_called = 0
        if self._is_cleared:
            self._is_cleared = False
            return torch.zeros((), device=self._run.device)
        with self._groups.stepping(), unguarded(self._trained.values()), self._run.span("optimizer"):
            self._state.adopt_parameters()
            self.grad_norm = self._engine.step(None)
            running_statistics.average(self.module, self._run.mesh)
        if self._is_first_step:
            self._is_first_step = False
            check_tensor_parallel(self.module, self._run.mesh)
        return self.grad_norm

    def check_ranks(self) -> None:
        """Compare learning rates and copies of parameters over ranks. Collective. Not part of the public API.

        Raises:
            UserError: ranks have different values.
        """
        check_data_parallel(self.module, [group["lr"] for group in self.optimizer.param_groups], self._run.mesh,
                            has_copies=self._engine.layout.shard_stage() < 3)

    def _check_dtypes(self) -> None:
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
            UserError: another rank does not enter the block, or it is inside of `gathered(part)`.
        """
        with self._all_whole(part, "gathered()"):
            yield

    @contextmanager
    def _all_whole(self, part: nn.Module | None, call: str) -> Iterator[None]:
        """Make parameters whole, as `gathered` does, for a call of the script."""
        if self._whole.is_open:
            if self._whole.part is not None:
                raise UserError(f"model.{call} inside of model.gathered(part)", where="Wrapped",
                                instead="a single with block")
            yield
            return
        require_all_ranks(self._run.dist, call)
        with (whole_parameters(self._engine, self._run.dist, self.module if part is None else part) as shown,
              self._whole.open(part), self._gradients.lent(shown)):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return whole fp32 parameters, and buffers, by name, on the CPU of every rank. Collective.

        Raises:
            UserError: another rank does not call it.
        """
        with self._all_whole(None, "state_dict()"):
            return {name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
                    for name, value in self.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Load whole parameters and buffers, as `torch.nn.Module.load_state_dict` does. Collective.

        Returns:
            The missing and the unexpected names.

        Raises:
            UserError: another rank does not call it, or a name or a shape differs.
        """
        with self._all_whole(None, "load_state_dict()"), torch.no_grad():
            own = self.module.state_dict()
            if differing := sorted(own.keys() ^ state.keys()) if strict else []:
                verb = "has no" if differing[0] in own else "has"
                raise UserError(f"the state dict {verb} {differing[0]}, unlike the model", where="load_state_dict",
                                instead="the state dict of such a model, or strict=False")
            for name in own.keys() & state.keys():
                if isinstance(own[name], Tensor) and own[name].shape != state[name].shape:
                    raise UserError(f"{name} has the shape {tuple(state[name].shape)}, in the model "
                                    f"{tuple(own[name].shape)}", where="load_state_dict",
                                    instead="the state dict of such a model")
            for name in own.keys() & state.keys():
                module, _, leaf = name.rpartition(".")
                if leaf == "_extra_state":
                    self.module.get_submodule(module).set_extra_state(state[name])
                else:  # not load_state_dict of the module, since fully_shard's hooks expect shards
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
