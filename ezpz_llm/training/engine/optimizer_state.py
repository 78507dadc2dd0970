"""Training state of a rank as slices of the plain model's parameters; state of torch's optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn

from ezpz_llm.training.dist.deepspeed_internals import is_cpu_adam, step_cpu_adam
from ezpz_llm.training.engine.masters import MasterWeights
from ezpz_llm.training.engine.precision import LossScale
from ezpz_llm.training.layout.optimizers import OPTIMIZERS
from ezpz_llm.training.model.parameters import Box, Placement, placement_of


@dataclass(frozen=True)
class Slice:
    """Part of a parameter that this rank holds, as views of the engine's storage.

    The slice is elements [start, stop) of the parameter's box, flattened in row-major order.

    Attributes:
        tensors: a 1-D fp32 tensor with stop - start elements for each of its parameter's `EngineState.kinds`.
            Saving reads these views, loading writes them.
        replica: index of this rank among the `replicas` data-parallel ranks with the same slice.
        primary: False for a copy that another rank of the model owns.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]
    replica: int = 0
    replicas: int = 1
    primary: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def part(self, begin: int, end: int) -> Slice:
        """Return elements [begin, end) of this slice."""
        return replace(self, start=self.start + begin, stop=self.start + end,
                       tensors={kind: tensor[begin:end] for kind, tensor in self.tensors.items()})


def slice_placement(at: Placement, start: int, stop: int, tensors: dict[str, torch.Tensor], replica: int = 0,
                    replicas: int = 1) -> Iterator[Slice]:
    """Yield the slices for elements [start, stop) of a rank's flattened parameter.

    Args:
        at: placement of the parameter in the whole model.
        tensors: the stop - start elements by kind, as 1-D views of the engine's storage.
    """
    offset = 0
    for box, first, last in at.pieces(start, stop):
        end = offset + last - first
        part = {kind: tensor[offset:end] for kind, tensor in tensors.items()}
        yield Slice(at.name, at.shape, box, first, last, part, replica, replicas, at.primary)
        offset = end


@dataclass(frozen=True)
class Frozen:
    """Part of a frozen parameter that this rank holds: elements from `start` of its box, in any dtype.

    Attributes:
        replica, replicas: as in `Slice`.
    """

    at: Placement
    tensor: torch.Tensor
    start: int
    replica: int
    replicas: int


class EngineState(ABC):
    """Training state of an engine on this rank, with the plain model's parameter names.

    Args:
        optimizer: the optimizer that steps the tensors; the innermost one if optimizers are nested.
        scale: the loss scale of fp16, if any.
        frozen: parameters that the optimizer does not step. A parameter whose `requires_grad` changes after the
            engine is built is not added or removed.
    """

    shapes: dict[str, tuple[int, ...]]
    """Global shape of every parameter, tied parameters once, the same on all ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer, scale: LossScale | None,
                 frozen: Sequence[Frozen] = ()) -> None:
        self.optimizer, self.scale, self._frozen = optimizer, scale, frozen

    @property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """Kinds of tensors in the slices of each parameter: its weight and, unless frozen, optimizer state."""
        access, frozen = _access_of(self.optimizer), set(self.frozen)
        return {name: ("weight",) if name in frozen else ("weight", *access.state_of(name, shape))
                for name, shape in self.shapes.items()}

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters that the optimizer does not step."""
        return [part.at.name for part in self._frozen]

    def slices(self) -> Iterable[Slice]:
        """Yield all slices of this rank. Call it only between steps.

        Moments that do not exist before the first step are created (zero). If state is in files or has fewer bits
        than fp32, the tensors of a slice are valid only until the next slice is requested; data written to them by
        then is kept.
        """
        return chain(self._slices(_materialized), self._frozen_slices(in_fp32=True))

    def raw_slices(self) -> Iterable[Slice]:
        """Yield the same slices with tensors as stored: none for state in files, no fp32 copies of 8-bit state."""
        return chain(self._slices(raw), self._frozen_slices(in_fp32=False))

    def _frozen_slices(self, in_fp32: bool) -> Iterator[Slice]:
        for part in self._frozen:
            stored = part.tensor.detach().view(-1)
            values = stored.float() if in_fp32 else stored
            yield from slice_placement(part.at, part.start, part.start + stored.numel(), {"weight": values},
                                       part.replica, part.replicas)
            if values is not stored:
                stored.copy_(values)

    @abstractmethod
    def _slices(self, tensors_of: Access) -> Iterable[Slice]:
        """Yield the slices, each with the tensors from `tensors_of`."""

    @abstractmethod
    def stepped(self) -> Iterable[tuple[torch.Tensor, list[str]]]:
        """Yield each tensor that the optimizer steps, with the names of the parameters in it.

        Ranks with the same pipeline stage have the same names in the same order, also where a rank's tensor has no
        element of a parameter.
        """

    @property
    def optimizer_step(self) -> int:
        """The optimizer's step count, which Adam's bias correction uses."""
        return get_step(self.optimizer)

    def loaded(self, optimizer_step: int) -> None:
        """Update the rest of the engine after slices were loaded. Collective."""
        _set_step(self.optimizer, optimizer_step)
        self.refresh()

    def refresh(self) -> None:  # noqa: B027 (nothing to do where parameters and weights share storage)
        """Update the parameters of the model after weights in slices were written. Collective."""

    def adopt_parameters(self) -> None:  # noqa: B027
        """Copy what a script has written to parameters to the weights that the optimizer steps."""


def owned_parts(slices: Iterable[Slice], raw_slices: Iterable[Slice]) -> Iterator[tuple[Slice, Slice | None]]:
    """Yield each slice with the part of it that this rank owns and writes; None if other ranks own it.

    Each element has exactly one owner, and all ranks own about the same number of elements. Ranks with replicas of
    the same slices must list them in the same order. Slices are requested one at a time, as `EngineState.slices`
    requires.

    Args:
        slices, raw_slices: results of `EngineState.slices` and `raw_slices` for the same state; pass `raw_slices`
            for both if tensors are not needed.
    """
    totals: Counter[int] = Counter()
    for piece in raw_slices:
        totals[piece.replicas] += piece.numel * piece.primary
    passed: Counter[int] = Counter()
    for piece in slices:
        if not piece.primary:
            yield piece, None
            continue
        total, offset = totals[piece.replicas], passed[piece.replicas]
        passed[piece.replicas] += piece.numel
        begin = max(total * piece.replica // piece.replicas - offset, 0)
        end = min(total * (piece.replica + 1) // piece.replicas - offset, piece.numel)
        yield piece, piece.part(begin, end) if begin < end else None


Access = Callable[[torch.optim.Optimizer, dict[str, Any], torch.Tensor],
                  AbstractContextManager[dict[str, torch.Tensor]]]
"""Type of `_materialized` and `raw`, which provide the tensors of a parameter by kind."""


class MakeOptimizer(Protocol):
    """Factory of an optimizer for parameter groups, whose "params" may be an engine's tensors."""

    def __call__(self, groups: list[dict[str, Any]], *, fused: bool = True) -> torch.optim.Optimizer:
        """Create the optimizer; `fused=False` forbids a fused kernel."""


def make_optimizer(groups: list[dict[str, Any]], settings: dict[str, Any], name: str = "adamw",
                   fused: bool = True) -> torch.optim.Optimizer:
    """Build the optimizer `name`; see `Optimizer.build`.

    Raises:
        UserError: the optimizer does not support the device of the parameters.
    """
    optimizer = OPTIMIZERS[name].build(groups, settings, fused)
    optimizer.ezpz_state = OPTIMIZERS[name]
    return optimizer


class StateAccess(Protocol):
    """Access to an optimizer's state; see the methods of `ezpz_llm.training.layout.optimizers.Optimizer`."""

    def state_of(self, name: str, shape: tuple[int, ...]) -> Mapping[str, int]:
        """Return the kinds of state of a parameter, and their bytes per element."""

    def init_state(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
        """Create the state of a parameter that has none."""

    def stored(self, optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter by kind, as stored."""

    def in_fp32(self, optimizer: Any, parameter: torch.Tensor) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Return a context with the state in fp32."""


def _access_of(optimizer: torch.optim.Optimizer) -> StateAccess:
    """Return the access to the state of an optimizer; AdamW's for others, such as DeepSpeed's CPU Adam."""
    return getattr(optimizer, "ezpz_state", OPTIMIZERS["adamw"])


def set_lr(optimizer: torch.optim.Optimizer, lr: float | None) -> None:
    """Set the learning rate of all groups for the next step; None keeps each group's learning rate."""
    if lr is None:
        return
    for group in optimizer.param_groups:
        group["lr"] = lr


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups of an optimizer with the tensors that it steps.

    Between steps, the groups of a script's optimizer may have the model's parameters instead; its attribute
    `ezpz_stepped` then has the tensors of each group.
    """
    stepped = getattr(optimizer, "ezpz_stepped", None)
    if stepped is None:
        return optimizer.param_groups
    return [{**group, "params": tensors} for group, tensors in zip(optimizer.param_groups, stepped, strict=True)]


def stepped_by(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    """Return the tensors that the optimizer steps."""
    return {tensor for group in groups_of(optimizer) for tensor in group["params"]}


def _ensure_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> StateAccess:
    """Create the state of `parameter` (zero) if missing, and return the access to it.

    Args:
        group: the parameter group of `parameter`.
        parameter: the tensor that the optimizer steps (a flat partition under ZeRO).
    """
    access = _access_of(optimizer)
    if not optimizer.state[parameter]:
        access.init_state(optimizer, group, parameter)
    return access


def raw(optimizer: torch.optim.Optimizer, group: dict[str, Any],
        parameter: torch.Tensor) -> AbstractContextManager[dict[str, torch.Tensor]]:
    """Provide the stored tensors of `parameter` by kind, in their stored shape and dtype."""
    access = _ensure_state(optimizer, group, parameter)
    return nullcontext({"weight": parameter.detach(), **access.stored(optimizer, parameter)})


@contextmanager
def _materialized(optimizer: torch.optim.Optimizer, group: dict[str, Any],
                  parameter: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    """Provide the tensors of `parameter` by kind in fp32; 8-bit moments are copied, and written back rounded."""
    with _ensure_state(optimizer, group, parameter).in_fp32(optimizer, parameter) as state:
        yield {"weight": parameter.detach(), **state}


def get_step(optimizer: torch.optim.Optimizer) -> int:
    """Return the step count: the maximum, since DeepSpeed's fused Adam counts on one parameter per group only."""
    return max((int(state["step"]) for state in _states(optimizer)), default=0)


def _set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the step count of every parameter that has a state."""
    for state in _states(optimizer):
        if isinstance(state["step"], torch.Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = step
    if is_cpu_adam(optimizer):
        _replay_cpu_adam(optimizer, step)


def _replay_cpu_adam(optimizer: Any, step: int) -> None:
    """Advance the step count of DeepSpeed's C++ Adam to `step`.

    The kernel updates the powers of the betas by one multiplication per step, and uses std::pow after a jump, which
    rounds differently. Therefore this function performs all steps, on a tensor with one element; 100,000
    steps take 0.2 s.
    """
    group = optimizer.param_groups[0]
    scratch = [torch.zeros(1) for _ in range(4)]
    for number in range(step + 1):  # 0 resets an optimizer that has performed steps
        step_cpu_adam(optimizer, number, group, scratch)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    return (state for state in optimizer.state.values() if "step" in state)


@torch.no_grad()
def adopt(parameter: torch.Tensor, weight: torch.Tensor) -> None:
    """Copy elements of a parameter that are not the rounded elements of its fp32 weight to the weight.

    A script may have written them through `.data`, which torch does not count in `_version`.
    """
    if parameter.dtype == weight.dtype:
        weight.copy_(parameter)
        return
    torch.where(parameter == weight.to(parameter.dtype), weight, parameter.to(weight.dtype), out=weight)


class TorchState(EngineState):
    """State of parameters that are replicated on all data-parallel ranks.

    Args:
        module: the plain model, without wrappers.
        optimizer: the optimizer of the module's parameters.
        rank, world_size: this rank's index among the data-parallel ranks, which share the writing, and their
            number.
        scale: the loss scale of fp16, if any.
        masters: master weights, if the optimizer steps these instead of the module's parameters.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int,
                 scale: LossScale | None, masters: MasterWeights | None = None) -> None:
        trained = stepped_by(optimizer)
        master_of = {} if masters is None else masters
        placed = [(master_of.get(parameter, parameter), placement_of(name, parameter))
                  for name, parameter in module.named_parameters()]
        super().__init__(optimizer, scale, [Frozen(at, tensor, 0, rank, world_size)
                                            for tensor, at in placed if tensor not in trained])
        self.masters = masters
        self.placed = [(tensor, at) for tensor, at in placed if tensor in trained]
        self.shapes = {at.name: at.shape for _, at in placed}
        self.rank, self.world_size = rank, world_size

    def _slices(self, tensors_of: Access) -> Iterator[Slice]:
        groups = {parameter: group for group in groups_of(self.optimizer) for parameter in group["params"]}
        for parameter, at in self.placed:
            with tensors_of(self.optimizer, groups[parameter], parameter) as tensors:
                flat = {kind: tensor.view(-1) for kind, tensor in tensors.items()}
                yield from slice_placement(at, 0, parameter.numel(), flat, replica=self.rank,
                                           replicas=self.world_size)

    def stepped(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """Yield each parameter, or its master weight."""
        return ((parameter, [at.name]) for parameter, at in self.placed)

    def refresh(self) -> None:
        """Copy the master weights, rounded, to the module's parameters."""
        if self.masters is not None:
            self.masters.round()

    def adopt_parameters(self) -> None:
        """Copy changed parameters to their master weights."""
        for parameter, master in ({} if self.masters is None else self.masters).items():
            adopt(parameter, master)
