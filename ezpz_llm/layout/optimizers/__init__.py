"""Optimizers, a file each: its state in bytes, the layouts it supports and how it is built (imports no torch).

Every `Optimizer` of a module of this folder can be chosen, and those that other packages name in their entry points
under "ezpz_llm.optimizers"; nothing else has to know of one. Torch is imported inside the methods.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ezpz_llm.base import UserError, entry_points
from ezpz_llm.layout.layout import Layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Optimizer(ABC):
    """One optimizer: what is known of it without torch, how it is built, and where its state lies.

    Attributes:
        name: the value of `--optimizer`.
        printed: its name in the start-up text and in help.
        state: kinds of state, by the names that checkpoints use, and their bytes an element.
        can_offload: whether DeepSpeed's CPU Adam makes the same step where a layout offloads optimizer state.
        is_known_to_deepspeed: whether ZeRO takes it without being told to.
        package, install: the module that it is imported from, and what pip is given to install it.
    """

    name: str
    printed: str
    state: Mapping[str, int]
    can_offload: bool = False
    is_known_to_deepspeed: bool = False
    package: str | None = None
    install: str = ""

    @property
    def state_bytes(self) -> int:
        """Bytes of state an element. Small tensors may take more."""
        return sum(self.state.values())

    def unsupported(self, layout: Layout) -> str | None:
        """Why a layout cannot have it; None where it can."""
        return None

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], settings: dict[str, Any], fused: bool) -> torch.optim.Optimizer:
        """Build it.

        Args:
            groups: parameter groups, each with "params" and "weight_decay".
            settings: lr, betas and eps.
            fused: False where a fused kernel must not be used.

        Raises:
            UserError: it does not run on the device of the parameters.
        """

    def begin(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
        """Make the state of a parameter that has none as its first step would, zero."""
        import torch

        state = optimizer.state[parameter]
        # torch counts steps in a tensor, on the device only where its kernel reads it there; DeepSpeed's own
        # optimizers (CPU Adam, fused Adam) count in an int.
        if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            on_device = group.get("fused") or group.get("capturable")
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
        else:
            state["step"] = 0
        for kind in self.state:
            state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)

    def stored(self, optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter by kind as it is stored, each in the parameter's shape."""
        return {kind: optimizer.state[parameter][kind] for kind in self.state}

    def in_fp32(self, optimizer: Any, parameter: torch.Tensor) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """The same in fp32 for as long as one works on it; what was written to it by then is kept."""
        return nullcontext(self.stored(optimizer, parameter))


def _built_in() -> Iterator[Optimizer]:
    for module in pkgutil.iter_modules(__path__):
        values = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
        yield from (value for value in values if isinstance(value, Optimizer))


def _all() -> dict[str, Optimizer]:
    known = {optimizer.name: optimizer for optimizer in _built_in()}

    def wrong(plugin: Any) -> str | None:
        if not isinstance(plugin, Optimizer):
            return f"it is a {type(plugin).__name__}, not an ezpz_llm.layout.optimizers.Optimizer"
        if not isinstance(plugin.name, str) or not re.fullmatch(r"[\w.-]{1,64}", plugin.name):
            return "its name is not a word of at most 64 characters"
        if known.setdefault(plugin.name, plugin) is not plugin:
            return f"there is an optimizer {plugin.name} already"
        return None

    entry_points("ezpz_llm.optimizers", wrong)
    return known


OPTIMIZERS: dict[str, Optimizer] = _all()
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]
"""The names of all of them."""


def check_optimizer(name: OptimizerName, layout: Layout) -> None:
    """Refuse an optimizer that a layout cannot have, or that is not installed.

    Raises:
        UserError: says why.
    """
    optimizer = OPTIMIZERS[name]
    where, instead = f"--optimizer {name}", "--optimizer adamw"
    if not optimizer.can_offload and layout.zero.offload_optimizer is not None:
        raise UserError("offloaded state is stepped by DeepSpeed's own AdamW on the CPU", where=where,
                        instead=f"{instead}, or a layout without offload")
    if (why := optimizer.unsupported(layout)) is not None:
        raise UserError(why, where=where, instead=instead)
    if optimizer.package is not None and importlib.util.find_spec(optimizer.package) is None:
        raise UserError(f"{optimizer.package} is not installed", where=where,
                        instead=f"pip install '{optimizer.install}', or {instead}")
