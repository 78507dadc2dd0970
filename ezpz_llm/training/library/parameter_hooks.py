"""Hooks of a script on parameters, which would see gradients before their average over ranks, or none at all."""

from __future__ import annotations

from torch import nn

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.torch_internals import ACCUMULATION_HOOKS, BACKWARD_HOOKS
from ezpz_llm.training.engine.base import MicroStepEngine


class ParameterHooks:
    """Check that a script has registered no hook on a parameter where it would differ from plain torch.

    On one rank, a hook on a gradient runs as in plain torch, except under fully_shard. A hook after the
    accumulation of a gradient also needs a layout that leaves gradients in `grad`.
    """

    def __init__(self, engine: MicroStepEngine, ranks: int) -> None:
        """Count the hooks of the layout. Create it when all of them are registered.

        Args:
            ranks: number of ranks over which gradients are averaged.
        """
        is_plain = ranks == 1 and engine.layout.engine != "fsdp2"
        self._kinds = [kind for kind, works in ((BACKWARD_HOOKS, is_plain),
                                                (ACCUMULATION_HOOKS, is_plain and not engine.hides_gradients))
                       if not works]
        self._own = {(parameter, kind): _count(parameter, kind)
                     for parameter in engine.module.parameters() for kind in self._kinds}
        self._names = {parameter: name for name, parameter in engine.module.named_parameters()}

    def check(self) -> None:
        """Check the hooks.

        Raises:
            UserError: the script has registered a hook.
        """
        for (parameter, kind), count in self._own.items():
            if _count(parameter, kind) > count:
                raise _unsupported(self._names[parameter])


def check_no_hooks(model: nn.Module) -> None:
    """Check that no parameter has a hook before `wrap`.

    Raises:
        UserError: one has.
    """
    for name, parameter in model.named_parameters():
        if _count(parameter, BACKWARD_HOOKS) or _count(parameter, ACCUMULATION_HOOKS):
            raise _unsupported(name)


def _count(parameter: nn.Parameter, kind: str) -> int:
    return len(getattr(parameter, kind) or ())


def _unsupported(name: str) -> UserError:
    return UserError(f"a hook on the gradient of {name}, which would get it before the average over ranks",
                     where="a wrapped model",
                     instead="a change of parameter.grad between the last model.backward(loss) and model.step()")
