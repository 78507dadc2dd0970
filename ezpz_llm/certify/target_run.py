"""A target in training: its module and batches, the steps of two epochs with an evaluation after each, and what was
seen of them. One process and the ranks of a layout run the same.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ezpz_llm.base import UserError
from ezpz_llm.certify import recipe
from ezpz_llm.certify.copies import whole_parameters
from ezpz_llm.certify.reference import Trajectory
from ezpz_llm.certify.target_file import ACCUMULATION, EPS_SHARE
from ezpz_llm.certify.target_statistics import StatisticsByPlace
from ezpz_llm.dist import Dist, Heartbeat
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.engine.optimizer_state import Slice
from ezpz_llm.library.run import Run
from ezpz_llm.library.target import Target
from ezpz_llm.library.wrapping import Wrapped, has_known_state, on_tensors, wrap_in
from ezpz_llm.observe import StepTimeline, WallClock

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def fresh_module(target: Target, seed: int = recipe.SEED) -> tuple[nn.Module, bool]:
    """The module with its initial weights and all dropout off, and whether it had any.

    Ranks draw masks of their own, as they must: with them no layout is one process.
    """
    torch.manual_seed(seed)
    module = target.module()
    drops = False
    for part in module.modules():
        if isinstance(part, _DROPOUTS):
            drops, part.p = drops or part.p > 0, 0.0
        elif isinstance(getattr(part, "dropout", None), float):  # attention and recurrent layers have a number
            drops, part.dropout = drops or part.dropout > 0, 0.0
    return module, drops


def wrapped(target: Target, dist: Dist, ds_config: str | Path, accumulation: int, clip: float,
            seed: int = recipe.SEED) -> Wrapped:
    """The module under a layout, by `ezpz_llm.wrap`. Collective.

    Raises:
        UserError: `wrap` refuses it, or the moments of its optimizer cannot be read.
    """
    module, _ = fresh_module(target, seed)
    optimizer = _optimizer(target, module, clip)
    run = Run(dist, StepTimeline(dist.device), Heartbeat(os.environ), WallClock())
    return wrap_in(run, module, optimizer, ds_config, 1, accumulation, clip, target.tp_plan)


def _optimizer(target: Target, module: nn.Module, clip: float) -> torch.optim.Optimizer:
    if target.optimizer is None:
        elements = sum(parameter.numel() for parameter in module.parameters())
        return torch.optim.AdamW(module.parameters(), lr=recipe.PEAK_LR, betas=recipe.BETAS,
                                 eps=EPS_SHARE * clip / elements ** 0.5, weight_decay=recipe.WEIGHT_DECAY)
    optimizer = target.optimizer(module)
    if not has_known_state(optimizer):
        raise UserError(f"the optimizer is a {type(optimizer).__name__}, whose state certify cannot read",
                        where="Target.optimizer", instead="torch.optim.AdamW or Adam, without amsgrad")
    return optimizer


# Batches. Their numbers count micro batches of one process: a rank has a part of each.
def numbers(target: Target, steps: int) -> list[range]:
    """The micro batches of each step: the first ones of two epochs, each of half of the steps.

    Raises:
        UserError: an epoch has fewer.
    """
    taken = half(steps)
    epoch = target.epoch_batches or taken * ACCUMULATION
    if epoch < taken * ACCUMULATION:
        raise UserError(f"an epoch has {epoch} micro batches, of which {taken * ACCUMULATION} are trained on",
                        where="Target.epoch_batches", instead="larger epochs, or fewer --steps")
    firsts = [step // taken * epoch + step % taken * ACCUMULATION for step in range(steps)]
    return [range(first, first + ACCUMULATION) for first in firsts]


@dataclass
class Batches:
    """The parts of micro batches that one process takes: those of `places` of `size` ranks.

    Attributes:
        order: of a step's parts, the usual one if 0.
        in_turn: a place's parts stay in their order, on which its running statistics depend.
        seen: by number the samples of each micro batch that was drawn.
    """

    target: Target
    steps: int
    device: torch.device
    places: Sequence[int] = (0,)
    size: int = 1
    order: int = 0
    in_turn: bool = False
    seen: dict[int, list[str]] = field(default_factory=dict)

    def of_step(self, step: int) -> list[tuple[int, Any]]:
        """All parts of a step's micro batches, each after its place."""
        found: list[tuple[int, Any]] = []
        for number in numbers(self.target, self.steps)[step]:
            parts = [self._part(number, place) for place in self.places]
            self.seen[number] = [sample for part in parts for sample in samples(part)]
            found += zip(self.places, parts, strict=True)
        if not self.order:
            return found
        mixed = [found[index] for index in np.random.default_rng((self.order, step)).permutation(len(found))]
        if not self.in_turn:
            return mixed
        turns = {place: iter([part for own, part in found if own == place]) for place in self.places}
        return [(place, next(turns[place])) for place, _ in mixed]

    def evaluated(self) -> list[Any]:
        """Equal parts of the batch that is evaluated, the first of the third epoch: a rank's, or all of it."""
        number = 2 * (self.target.epoch_batches or half(self.steps) * ACCUMULATION)
        if len(self.places) == 1 or self.in_turn:
            return [self._part(number, place) for place in self.places]
        return [self._part(number, 0, 1)]

    def _part(self, number: int, place: int, size: int | None = None) -> Any:
        batch = self.target.batch(recipe.DATA_SEED, number, place, size or self.size)
        return on_tensors(batch, lambda tensor: tensor.to(self.device))


def half(steps: int) -> int:
    """Steps of the first epoch, the longer one."""
    return -(-steps // 2)


def samples(batch: Any) -> list[str]:
    """A hash of each sample of a batch, in order.

    Raises:
        UserError: there are no tensors in it.
    """
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        """Take down a tensor that has dimensions."""
        if tensor.dim():
            tensors.append(tensor.detach().cpu())
        return tensor

    on_tensors(batch, take)
    if not tensors:
        raise UserError("there is no tensor in a batch", where="Target.batch",
                        instead="tensors, or tuples, lists and dicts of them, whose first dimension counts samples")
    count = len(tensors[0])
    parts = [tensor for tensor in tensors if len(tensor) == count]
    return [_hash(b"".join(_bytes(part[place]) for part in parts)) for place in range(count)]


def _bytes(tensor: Tensor) -> bytes:
    # A copy: storage that numpy has seen can no longer be freed by fsdp2.
    return tensor.detach().cpu().flatten().clone().view(torch.uint8).numpy().tobytes()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# The steps.
@dataclass
class Seen(Trajectory):
    """What one rank saw of a run.

    Attributes:
        random: after each step, the state of the random numbers that dropout masks come from.
        changed: what an evaluation changed, in words.
        rounded: some loss had two bytes.
        buffers: by name the hash of each after the last step.
    """

    random: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    rounded: bool = False
    buffers: dict[str, str] = field(default_factory=dict)


def train(model: Wrapped, batches: Batches, *, own: bool, first: int = 0,
          after: Callable[[int, Seen], None] = lambda step, seen: None) -> Seen:
    """Two epochs, an evaluation after each. Collective.

    Args:
        own: by the target's own step function, where it has one; one process steps as it is defined.
        first: the step to begin with, from 0.
        after: called with each step when it is made.

    Raises:
        UserError: a step function that gives no loss, or makes no step.
    """
    seen, target, steps = Seen(), batches.target, batches.steps
    statistics = StatisticsByPlace(model.module, batches.places)
    rates = [group["lr"] for group in model.optimizer.param_groups]
    for step in range(first, steps):
        for group, rate in zip(model.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * recipe.rate_factor(step, steps)
        before = model.grad_norm
        parts = batches.of_step(step)
        if own and target.step is not None:
            loss = target.step(model, [part for _, part in parts])
        else:
            loss = _step(target, model, parts, statistics, seen)
        if model.grad_norm is None or model.grad_norm is before:
            raise UserError(f"the step function made no optimizer step of its {model.accumulation} micro batches",
                            where="Target.step", instead="model.backward(loss) and model.step() for each of them")
        if not isinstance(loss, float | Tensor):
            raise UserError(f"the step function gives {type(loss).__name__}", where="Target.step",
                            instead="the mean loss of the step's micro batches")
        seen.losses.append(float(loss))
        seen.norms.append(float(model.grad_norm))
        seen.random.append(_hash(_bytes(_random_state(batches.device))))
        after(step, seen)
        if step in (half(steps) - 1, steps - 1):
            state = _state(model)
            losses = [float((target.evaluate or _evaluate(target))(model, part)) for part in batches.evaluated()]
            seen.held_out = sum(losses) / len(losses)
            now = _state(model)
            seen.changed += [what for what, content in state.items() if now.get(what, content) != content]
            model.train()
    seen.buffers = _buffers(model)
    return seen


def mean_losses(ranks: Sequence[Seen]) -> list[float]:
    """The losses of the steps, of which each rank has a part."""
    return [sum(losses) / len(ranks) for losses in zip(*(one.losses for one in ranks), strict=True)]


def mean_held_out(ranks: Sequence[Seen]) -> float:
    """The loss of the last evaluation."""
    return sum(one.held_out for one in ranks) / len(ranks)


def _step(target: Target, model: Wrapped, parts: list[tuple[int, Any]], statistics: StatisticsByPlace,
          seen: Seen) -> Tensor:
    """The step as it is defined: the mean of the micro batches' losses."""
    losses = []
    for place, batch in parts:
        with statistics.of(place):
            loss = target.loss(model, batch)
            model.backward(loss)
        model.step()
        seen.rounded |= loss.element_size() < 4
        losses.append(loss.detach().float())
    statistics.average()
    return torch.stack(losses).mean()


def _evaluate(target: Target) -> Callable[[Wrapped, Any], Tensor]:
    def evaluate(model: Wrapped, batch: Any) -> Tensor:
        """The target's loss in evaluation mode."""
        model.eval()
        with torch.no_grad():
            loss = target.loss(model, batch)
        model.train()
        return loss
    return evaluate


def _random_state(device: torch.device) -> Tensor:
    own = DEVICES[device.type].own
    return torch.get_device_module(device).get_rng_state() if own else torch.get_rng_state()


def _state(model: Wrapped) -> dict[str, str]:
    """Hashes of what this rank holds of the training: parameters, moments, buffers, modes."""
    pieces: dict[str, Any] = defaultdict(hashlib.sha256)
    for piece in _pieces(model):
        for kind, tensor in piece.tensors.items():
            pieces[f"the {kind} of {piece.name}"].update(_bytes(tensor))
    return {**{what: content.hexdigest() for what, content in pieces.items()},
            **{f"the buffer {name}": content for name, content in _buffers(model).items()},
            **{f"the training mode of {name or 'the module'}": str(module.training)
               for name, module in model.module.named_modules()}}


def _buffers(model: Wrapped) -> dict[str, str]:
    return {name: _hash(_bytes(buffer)) for name, buffer in model.module.named_buffers()}


def _pieces(model: Wrapped) -> Iterator[Slice]:
    yield from model.engine.training_state().slices()
    yield from whole_parameters(model.engine)
