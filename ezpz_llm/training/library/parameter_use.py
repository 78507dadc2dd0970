"""Parameters without a gradient in a step, which torch's optimizers do not step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.mesh import Mesh


class ParameterUse:
    """Record of the parameters that have a gradient on any rank since the last step."""

    def __init__(self, model: nn.Module, mesh: Mesh, *, has_hooks: bool) -> None:
        """Record uses from now on.

        Args:
            has_hooks: False if the layout has other parameters during a pass, so that hooks do not run.
        """
        self._names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._mesh = mesh
        self._used: set[Tensor] = set()
        self._earlier: set[Tensor] = set()
        self._is_open = False
        self._pending: tuple[torch_dist.Work, Tensor] | None = None
        for parameter in self._names if has_hooks else ():
            hook = partial(_record, weakref.ref(self), weakref.ref(parameter))
            if mesh.size("dp", "sp") == 1:
                parameter.register_post_accumulate_grad_hook(hook)
            else:  # also torch.autograd.grad, which returns the gradient of this rank
                parameter.register_hook(hook)

    def _record(self, parameter: nn.Parameter) -> None:
        if not self._is_open:
            raise UserError(f"the gradient of {self._names[parameter]} was computed outside of its model's "
                            "backward", where="Wrapped",
                            instead="model.backward(loss) instead of loss.backward() and torch.autograd.grad; for "
                                    "another model's loss, requires_grad_(False) before the forward pass")
        self._used.add(parameter)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record uses of parameters, without hooks."""
        self._used.update(parameters)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow a backward pass of the model in this context."""
        self._is_open = True
        self._earlier |= self._used
        self._used.clear()
        try:
            yield
        finally:
            self._is_open = False

    def clear(self) -> None:
        """Forget the gradients since the last step."""
        self._used.clear()
        self._earlier.clear()

    def check_pass(self) -> None:
        """Check that the last backward pass reached a parameter.

        Raises:
            UserError: it did not.
        """
        if not self._used:
            raise UserError("the loss depends on no parameter of the model", where="Wrapped.backward",
                            instead="backward of the model that the loss is of")

    def check_last_pass(self) -> None:
        """Check that the last backward pass used all parameters that earlier ones of the step have used.

        Raises:
            UserError: it did not.
        """
        if missing := [name for parameter, name in self._names.items() if parameter in self._earlier - self._used]:
            raise UserError(f"the loss of the last micro-batch of a step does not depend on {missing[0]}, whose "
                            "gradient DeepSpeed's optimizer offload would lose", where="Wrapped.backward",
                            instead="a layout without offload, or accumulation=1")

    def unused(self, needs_all_ranks: bool) -> list[nn.Parameter]:
        """Return the parameters that no rank has used since the last call. Collective.

        A rank that has used all parameters does not wait for the others.

        Args:
            needs_all_ranks: True if all ranks must use the same parameters.

        Raises:
            UserError: only other ranks have used a parameter that all ranks must use.
        """
        used = self._used | self._earlier
        flags = torch.tensor([parameter in used for parameter in self._names], dtype=torch.uint8)
        self.clear()
        unused = [parameter for parameter, is_used in zip(self._names, flags.tolist(), strict=True) if not is_used]
        if self._mesh.size("dp", "sp") == 1:
            return unused
        flags = flags.to(next(iter(self._names)).device)
        work = torch_dist.all_reduce(flags, torch_dist.ReduceOp.MAX, group=self._mesh.group("dp", "sp"),
                                     async_op=True)
        self._pending = work, flags  # gloo writes to the flags after this function has returned
        if not unused:
            return []
        work.wait()
        never = [parameter for parameter, is_used in zip(self._names, flags.tolist(), strict=True) if not is_used]
        if needs_all_ranks and (elsewhere := [self._names[parameter] for parameter in unused
                                              if parameter not in set(never)]):
            raise UserError(f"the losses of other ranks depend on {elsewhere[0]}, that of this rank does not",
                            where="Wrapped.backward",
                            instead="ddp, or 0 * output.sum() of unused modules in the loss")
        return never


def _record(owner: weakref.ref[ParameterUse], parameter: weakref.ref[nn.Parameter], _: Tensor) -> None:
    """Record a use. A hook with a strong reference would make a cycle through torch that is never freed."""
    if (use := owner()) is not None and (found := parameter()) is not None:
        use._record(found)
