"""Training state of a rank as slices of the plain model's parameters, and that of torch's optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from ezpz_llm.engine.masters import MasterWeights
from ezpz_llm.engine.precision import LossScale
from ezpz_llm.layout.optimizers import OPTIMIZERS, Optimizer
from ezpz_llm.model.parameters import Box, Placement, placement_of


@dataclass(frozen=True)
class Slice:
    """The part of one parameter that this rank holds, as live storage.

    Flatten the box of the parameter in row-major order: the slice is its elements [start, stop). `tensors` has one
    1-D fp32 tensor of stop - start elements for each of `EngineState.kinds`. They are views of the engine's own
    storage, so that reading them saves and writing them loads. The same slice is held by `replicas` data-parallel
    ranks, of which this is number `replica`; a slice that is not `primary` is a copy that another rank of the model
    answers for.
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
        """How many values it has."""
        return self.stop - self.start

    def part(self, begin: int, end: int) -> Slice:
        """Elements [begin, end) of this slice."""
        return replace(self, start=self.start + begin, stop=self.start + end,
                       tensors={kind: tensor[begin:end] for kind, tensor in self.tensors.items()})


def cut(at: Placement, start: int, stop: int, tensors: dict[str, torch.Tensor], replica: int = 0,
        replicas: int = 1) -> Iterator[Slice]:
    """The slices that elements [start, stop) of a rank's flattened parameter are.

    Args:
        at: where the parameter lies in the whole model.
        tensors: by kind, the stop - start elements as 1-D views of the engine's storage.
    """
    offset = 0
    for box, first, last in at.pieces(start, stop):
        end = offset + last - first
        part = {kind: tensor[offset:end] for kind, tensor in tensors.items()}
        yield Slice(at.name, at.shape, box, first, last, part, replica, replicas, at.primary)
        offset = end


class EngineState(ABC):
    """The training state of a wrapped engine on this rank. What has a name has the plain model's name for it.

    Args:
        optimizer: the one that steps the tensors: the innermost, where an engine wraps another's.
        scale: the loss scale of fp16, if there is one.
    """

    shapes: dict[str, tuple[int, ...]]
    """The global shape of every parameter, tied ones once, the same on all ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer, scale: LossScale | None) -> None:
        self.optimizer, self.scale = optimizer, scale

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that each slice has: the fp32 master weight and the optimizer's state."""
        return ("weight", *spec_of(self.optimizer).state)

    def slices(self) -> Iterable[Slice]:
        """Everything this rank holds. Moments that do not exist before the first step are made (zero).

        Asked for between steps. Where state lies in files or has fewer bits than fp32, the tensors of a slice are
        there only until the next one is asked for; what was written to them by then is kept.
        """
        return self._slices(materialized)

    def raw_slices(self) -> Iterable[Slice]:
        """The same slices, without tensors where they would have to be read, nor copies of what has fewer bits."""
        return self._slices(raw)

    @abstractmethod
    def _slices(self, tensors_of: Access) -> Iterable[Slice]:
        """The slices, each with the tensors that `tensors_of` gives."""

    @property
    def optimizer_step(self) -> int:
        """The optimizer's own count of the steps it has made, which Adam's bias correction uses."""
        return get_step(self.optimizer)

    def loaded(self, optimizer_step: int) -> None:
        """Make the rest of the engine follow slices that were just written. Collective: every rank calls it."""
        set_step(self.optimizer, optimizer_step)


def owned(slices: Iterable[Slice], raw_slices: Iterable[Slice]) -> Iterator[tuple[Slice, Slice | None]]:
    """Each slice with the part of it that this rank answers for, and writes; None where another rank does.

    Every element has one such rank, and all answer for about equally much. Ranks that hold replicas of the same
    slices must list them in the same order. Slices are taken one at a time, as `EngineState.slices` wants it.

    Args:
        slices, raw_slices: of one state; `raw_slices` twice where tensors are not needed.
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


# The state of an optimizer, whether or not a step was made yet.
Access = Callable[[torch.optim.Optimizer, dict[str, Any], torch.Tensor],
                  AbstractContextManager[dict[str, torch.Tensor]]]
"""`materialized` or `raw`."""


class MakeOptimizer(Protocol):
    """Makes the optimizer of parameter groups, each with "params" that an engine has put in the model's place."""

    def __call__(self, groups: list[dict[str, Any]], *, fused: bool = True) -> torch.optim.Optimizer:
        """`fused`: False where a fused kernel must not be used."""


def make_optimizer(groups: list[dict[str, Any]], settings: dict[str, Any], name: str = "adamw",
                   fused: bool = True) -> torch.optim.Optimizer:
    """Build the optimizer of a name, as `Optimizer.build` describes it.

    Raises:
        UserError: it does not run on the device of the parameters.
    """
    optimizer = OPTIMIZERS[name].build(groups, settings, fused)
    optimizer.ezpz_name = name
    return optimizer


def spec_of(optimizer: torch.optim.Optimizer) -> Optimizer:
    """What is known of an optimizer; AdamW for one that was not made here, such as DeepSpeed's on the CPU."""
    return OPTIMIZERS[getattr(optimizer, "ezpz_name", "adamw")]


def set_lr(optimizer: torch.optim.Optimizer, lr: float | None) -> None:
    """Set the learning rate of the next step, for all groups; None leaves each its own."""
    if lr is None:
        return
    for group in optimizer.param_groups:
        group["lr"] = lr


def _begun(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> Optimizer:
    """What is known of the optimizer, with the state of `parameter` made (zero), which changes nothing.

    `parameter` is the tensor that the optimizer steps (a flat partition under ZeRO), `group` the parameter group
    whose settings it has.
    """
    spec = spec_of(optimizer)
    if not optimizer.state[parameter]:
        spec.begin(optimizer, group, parameter)
    return spec


def raw(optimizer: torch.optim.Optimizer, group: dict[str, Any],
        parameter: torch.Tensor) -> AbstractContextManager[dict[str, torch.Tensor]]:
    """The tensors of `parameter` by kind as they are stored, each in its shape, to be measured and not read."""
    spec = _begun(optimizer, group, parameter)
    return nullcontext({"weight": parameter.detach(), **spec.stored(optimizer, parameter)})


@contextmanager
def materialized(optimizer: torch.optim.Optimizer, group: dict[str, Any],
                 parameter: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    """The same in fp32 for as long as one works on it: moments in 8 bits are copied, and rounded if written to."""
    with _begun(optimizer, group, parameter).in_fp32(optimizer, parameter) as state:
        yield {"weight": parameter.detach(), **state}


def get_step(optimizer: torch.optim.Optimizer) -> int:
    """Steps made so far. DeepSpeed's fused Adam counts on one parameter of a group only, hence the largest."""
    return max((int(state["step"]) for state in _states(optimizer)), default=0)


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the count on every parameter that has a state."""
    for state in _states(optimizer):
        if isinstance(state["step"], torch.Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = step
    if hasattr(optimizer, "ds_opt_adam"):
        _replay_cpu_adam(optimizer, step)


def _replay_cpu_adam(optimizer: Any, step: int) -> None:
    """Bring DeepSpeed's C++ Adam to `step`.

    It keeps the powers of the betas by multiplying once a step, and takes std::pow after a jump, which rounds
    differently; so the steps are made, on a tensor of one element. 100,000 of them take 0.2 s.
    """
    group = optimizer.param_groups[0]
    scratch = [torch.zeros(1) for _ in range(4)]
    for number in range(step + 1):  # 0 is a jump back to the start, should it have made steps already
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, number, 0.0, *group["betas"], group["eps"], 0.0,
                                          group["bias_correction"], *scratch)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    return (state for state in optimizer.state.values() if "step" in state)


class TorchState(EngineState):
    """Every data-parallel rank holds every parameter of its part of the model whole.

    Args:
        module: the plain model, below any wrapper.
        optimizer: the optimizer whose parameters are the module's.
        rank, world_size: among the data-parallel ranks, which share the writing.
        scale: the loss scale of fp16, if there is one.
        masters: where the optimizer steps these in the place of the module's parameters.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int,
                 scale: LossScale | None, masters: MasterWeights | None = None) -> None:
        super().__init__(optimizer, scale)
        self.masters = masters
        self.placed = [(parameter if masters is None else masters[parameter], placement_of(name, parameter))
                       for name, parameter in module.named_parameters()]
        self.shapes = {at.name: at.shape for _, at in self.placed}
        self.rank, self.world_size = rank, world_size

    def _slices(self, tensors_of: Access) -> Iterator[Slice]:
        groups = {parameter: group for group in self.optimizer.param_groups for parameter in group["params"]}
        for parameter, at in self.placed:
            with tensors_of(self.optimizer, groups[parameter], parameter) as tensors:
                flat = {kind: tensor.view(-1) for kind, tensor in tensors.items()}
                yield from cut(at, 0, parameter.numel(), flat, replica=self.rank, replicas=self.world_size)

    def loaded(self, optimizer_step: int) -> None:
        """Round the loaded fp32 masters into the parameters that compute."""
        super().loaded(optimizer_step)
        if self.masters is not None:
            self.masters.round()
