"""State of a script's optimizer in checkpoints: per parameter, exactly what the optimizer has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather
from ezpz_llm.training.engine.optimizer_state import EngineState, groups_of
from ezpz_llm.training.library.optimizer_kind import OptimizerKind, is_number, is_per_element

Numbers = dict[str, float]
"""Single numbers in the state of a parameter, such as Adam's step, by name."""


class ScriptState:
    """Access to the state of a script's optimizer (`StateAccess` of the engine).

    A parameter that has not been stepped yet has no state. So the kinds of state of a parameter are known only
    after `collect` or `prepare`.
    """

    def __init__(self, kind: OptimizerKind) -> None:
        self._kind = kind
        self._per_element = {key for template in kind.templates for key, value in template.items()
                             if isinstance(value, Tensor) and value.is_meta}
        self._kinds: dict[str, tuple[str, ...]] = {}

    def state_of(self, name: str, shape: tuple[int, ...]) -> Mapping[str, int]:
        """Return the kinds of state that the parameter has, each of 4 bytes per element."""
        return dict.fromkeys(self._kinds.get(name, ()), 4)

    def init_state(self, optimizer: Any, group: dict[str, Any], parameter: Tensor) -> None:
        """Leave a parameter without state as it is."""

    def stored(self, optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter with a value per element."""
        return {key: value for key, value in optimizer.state.get(parameter, {}).items()
                if key in self._per_element and is_per_element(value, parameter)}

    def in_fp32(self, optimizer: Any, parameter: Tensor) -> AbstractContextManager[dict[str, Tensor]]:
        """Return a context with the state, which is in fp32."""
        return nullcontext(self.stored(optimizer, parameter))

    def check_supported(self) -> None:
        """Check that a checkpoint can hold the state.

        Raises:
            UserError: it cannot.
        """
        if self._kind.unsupported is not None:
            raise UserError(f"a checkpoint cannot hold the state {self._kind.unsupported} of {self._kind.name}",
                            where="ezpz_llm.save_checkpoint",
                            instead="an optimizer whose state has an fp32 value for each element, such as AdamW")

    def collect(self, state: EngineState, dist: Dist) -> dict[str, Numbers]:
        """Collect the kinds of all parameters from all ranks; return their single numbers by name. Collective."""
        own: dict[str, tuple[tuple[str, ...], Numbers]] = {}
        for tensor, (name,) in state.stepped():
            entries = state.optimizer.state.get(tensor, {})
            own[name] = (tuple(self.stored(state.optimizer, tensor)),
                         {key: float(value) for key, value in entries.items()
                          if key not in self._per_element and is_number(value)})
        merged: dict[str, tuple[tuple[str, ...], Numbers]] = {}
        for entry in all_gather(dist, own):
            merged |= entry
        self._kinds = {name: kinds for name, (kinds, _) in merged.items()}
        return {name: numbers for name, (_, numbers) in merged.items() if numbers}

    def prepare(self, state: EngineState, kinds: Mapping[str, Sequence[str]],
                numbers: Mapping[str, Numbers]) -> Callable[[], None]:
        """Check that the optimizer has the state that a checkpoint has for each parameter.

        Args:
            kinds: kinds of state with a value per element, by parameter.
            numbers: single numbers, by parameter.

        Returns:
            Function that creates this state, with zeros for each element, and removes other state.

        Raises:
            UserError: the optimizer does not have such state.
        """
        groups = {parameter: number for number, group in enumerate(groups_of(state.optimizer))
                  for parameter in group["params"]}
        created: dict[Tensor, dict[str, Any]] = {}
        for tensor, (name,) in state.stepped():
            template = self._kind.templates[groups[tensor]]
            has = {*kinds[name], *numbers.get(name, {})} if name in kinds else set()
            if differing := sorted(has ^ template.keys() if has else has):
                verb = "has" if differing[0] in has else "has no"
                raise UserError(f"the checkpoint {verb} {differing[0]} of {name}, unlike {self._kind.name} with "
                                "these settings", where="ezpz_llm.load_checkpoint",
                                instead="the optimizer of the run that saved it, with the same settings")
            created[tensor] = {key: _like(template[key], numbers[name][key], tensor) if key in numbers.get(name, {})
                               else torch.zeros_like(tensor.detach()) for key in template if key in has}
        self._kinds = {name: tuple(kinds[name]) for name in state.shapes if name in kinds}

        def create() -> None:
            """Replace the optimizer's state."""
            state.optimizer.state.clear()
            state.optimizer.state.update(created)

        return create


def _like(template: Any, value: float, tensor: Tensor) -> Any:
    """Return a number of the type of `template`, in which the optimizer stores it."""
    if not isinstance(template, Tensor):
        return type(template)(value)
    device = template.device if template.device.type == "cpu" else tensor.device
    return torch.full_like(template, value, device=device)
