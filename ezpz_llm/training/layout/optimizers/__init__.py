"""Optimizers: bytes of state, supported layouts and construction (imports torch only inside methods).

To add one, define an `Optimizer` in a module of this folder, or name it in another package's entry points under
"ezpz_llm.optimizers".
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ezpz_llm.core.base import UserError, entry_points
from ezpz_llm.training.layout.layout import Layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Optimizer(ABC):
    """Properties, construction and state of an optimizer.

    Attributes:
        name: the value of `--optimizer`.
        printed: the name in the start-up text and in help.
        state: kinds of state, by the names that checkpoints use, and their bytes per element.
        can_offload: True if DeepSpeed's CPU Adam computes the same step in layouts that offload optimizer state.
        is_known_to_deepspeed: True if ZeRO accepts it without `zero_allow_untested_optimizer`.
        package, install: the imported module, and its requirement for pip.
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
        """Bytes of state per element. Small tensors may need more."""
        return sum(self.state.values())

    def state_of(self, name: str, shape: tuple[int, ...]) -> Mapping[str, int]:
        """Return the part of `state` that a parameter of the plain model has, by its name and whole shape."""
        return self.state

    def needs_whole(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True if a step needs the whole matrix of a parameter of the plain model.

        If there are such parameters, the engine sets the attribute `matrices` of the built optimizer to an
        `ezpz_llm.training.engine.whole_matrices.WholeMatrices` before the first step.
        """
        return False

    def mean_state_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """Return the mean bytes of state per element of a model's parameters."""
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        total = sum(sizes[name] * sum(self.state_of(name, shape).values()) for name, shape in shapes.items())
        return total / sum(sizes.values())

    def unsupported_reason(self, layout: Layout) -> str | None:
        """Return why `layout` does not support this optimizer, or None if it does."""
        return None

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], settings: dict[str, Any], fused: bool) -> torch.optim.Optimizer:
        """Build the torch optimizer.

        Args:
            groups: parameter groups, each with "params", their "names" in the model, and "weight_decay". Under
                ZeRO, DeepSpeed replaces the parameters of a group by its partition of them as one flat tensor.
            settings: lr, betas and eps.
            fused: True if a fused kernel may be used.

        Raises:
            UserError: the parameters' device is unsupported.
        """

    def init_state(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
        """Create zero-initialized state for `parameter`, as the optimizer would in its first step."""
        import torch

        state = optimizer.state[parameter]
        # torch counts steps in a tensor, which is on the device only for kernels that read it there. DeepSpeed's
        # optimizers (CPU Adam, fused Adam) use an int.
        if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            on_device = group.get("fused") or group.get("capturable")
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
        else:
            state["step"] = 0
        for kind in self.state:
            state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)

    def stored(self, optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter by kind as stored, each in the parameter's shape."""
        return {kind: optimizer.state[parameter][kind] for kind in self.state}

    def in_fp32(self, optimizer: Any, parameter: torch.Tensor) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Return a context with the state in fp32; changes to it are stored at exit."""
        return nullcontext(self.stored(optimizer, parameter))


def _built_in_optimizers() -> Iterator[Optimizer]:
    for module in pkgutil.iter_modules(__path__):
        values = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
        yield from (value for value in values if isinstance(value, Optimizer))


def _all_optimizers() -> dict[str, Optimizer]:
    known = {optimizer.name: optimizer for optimizer in _built_in_optimizers()}

    def find_problem(plugin: Any) -> str | None:
        """Add a plugin to the optimizers, or return the reason why it cannot be used."""
        if not isinstance(plugin, Optimizer):
            return f"it is a {type(plugin).__name__}, not an ezpz_llm.training.layout.optimizers.Optimizer"
        if not isinstance(plugin.name, str) or not re.fullmatch(r"[\w.-]{1,64}", plugin.name):
            return "its name must be 1 to 64 letters, digits, or _ . -"
        if not all(isinstance(text, str) for text in (plugin.printed, plugin.install, plugin.package or "")):
            return "its printed, package, and install must be strings"
        if not isinstance(plugin.state, Mapping) or not all(
                isinstance(kind, str) and isinstance(size, int) and size > 0
                for kind, size in plugin.state.items()):
            return "its state must map names to bytes per element"
        if known.setdefault(plugin.name, plugin) is not plugin:
            return f"optimizer {plugin.name} already exists"
        return None

    entry_points("ezpz_llm.optimizers", find_problem)
    return known


OPTIMIZERS: dict[str, Optimizer] = _all_optimizers()
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]
"""Names of all optimizers."""


def check_optimizer(name: OptimizerName, layout: Layout) -> None:
    """Check that a layout supports an optimizer and that the optimizer's package is installed.

    Raises:
        UserError: the layout does not support the optimizer, or the package is missing.
    """
    optimizer = OPTIMIZERS[name]
    where, instead = f"--optimizer {name}", "--optimizer adamw"
    if not optimizer.can_offload and layout.zero.offload_optimizer is not None:
        raise UserError(f"{name} is not supported with optimizer offload, where DeepSpeed uses its own CPU Adam",
                        where=where, instead=f"{instead}, or a layout without offload")
    if (why := optimizer.unsupported_reason(layout)) is not None:
        raise UserError(why, where=where, instead=instead)
    if optimizer.package is not None and importlib.util.find_spec(optimizer.package) is None:
        raise UserError(f"{optimizer.package} is not installed", where=where,
                        instead=f"pip install '{optimizer.install}', or use {instead}")
