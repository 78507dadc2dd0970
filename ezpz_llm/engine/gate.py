"""What stands between a gradient and the optimizer's step: a limit on its norm, and a look at both on some steps.

All of it hangs on the optimizer's own step hooks, so that it is the same in every engine: DeepSpeed steps our
optimizer on its flat partitions, one group or sub-group at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ezpz_llm.engine.group_norms import GroupNorms

if TYPE_CHECKING:
    from ezpz_llm.engine.checkpoint.slices import EngineState


class StepGate:
    """Lets the optimizer step only where the global gradient norm is a number and at most `limit`.

    Every rank has the same norm and the same limit, and so comes to the same answer without asking. On a device it
    is given there, to torch's fused optimizers by the flag that gradient scalers use: the host waits for nothing.
    Other optimizers, and those on the host, are asked on the host.

    A step that is not let through leaves parameters, moments and the optimizer's count of steps as they were.

    Attributes:
        limit: of the norm before clipping; infinity refuses only what is not a number.
        norm: of the step that is about to be made, for engines that find it themselves.
        at_step: called once, before the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self.limit = math.inf
        self.norm: Tensor | None = None
        self.at_step: Callable[[], None] | None = None
        self._measuring: GroupNorms | None = None
        self._device = device
        self._ask: Callable[[], Tensor | float] | None = None
        self._aside: list[tuple[Tensor, Tensor]] = []

    def guard(self, optimizer: torch.optim.Optimizer, ask: Callable[[], Tensor | float] | None = None) -> None:
        """Stand before this optimizer's steps.

        Args:
            ask: gives the global gradient norm of the step that is about to be made, in place of `norm`.
        """
        self._ask = ask
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def measure(self, state: EngineState) -> None:
        """Measure the next step by decay group.

        Args:
            state: the engine's, not kept in files.
        """
        self._measuring = GroupNorms(state, self._device)

    def measured(self) -> GroupNorms | None:
        """What was found since `measure`, which ends here; None where nothing was asked for."""
        found, self._measuring = self._measuring, None
        if found is not None:
            found.close()
        return found

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.at_step is not None:
            self.at_step()
            self.at_step = None
        norm = self.norm if self._ask is None else self._ask()
        refused = ~(torch.as_tensor(norm, device=self._device) <= self.limit)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = refused.float()
        elif bool(refused):
            self._take_gradients(optimizer)
        if self._measuring is not None:
            self._measuring.before(optimizer)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []
        if self._measuring is not None:
            self._measuring.after()

    def _take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """A parameter without a gradient is left alone by every optimizer."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._aside.append((parameter, parameter.grad))
                    parameter.grad = None
