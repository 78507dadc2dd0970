"""Training run of a target: module, batches, two epochs with an evaluation after each, and the recorded trajectory.

The single-process reference and the ranks of a layout use the same code.
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

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist import Dist, Heartbeat
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.engine.optimizer_state import Slice
from ezpz_llm.training.library.input_dtype import on_tensors
from ezpz_llm.training.library.run import Run
from ezpz_llm.training.library.target import Target
from ezpz_llm.training.library.wrapped import Wrapped
from ezpz_llm.training.library.wrapping import wrap_in
from ezpz_llm.training.observe import StepTimeline, WallClock
from ezpz_llm.verify.certify import recipe
from ezpz_llm.verify.certify.copies import whole_parameters
from ezpz_llm.verify.certify.reference import Trajectory
from ezpz_llm.verify.certify.target_file import ACCUMULATION, EPS_SHARE
from ezpz_llm.verify.certify.target_statistics import StatisticsByRank

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def fresh_module(target: Target, seed: int = recipe.SEED) -> tuple[nn.Module, bool]:
    """Return the module with initial weights and without dropout, and True if it had dropout.

    With dropout, ranks would draw different masks, and no layout would match a single process.
    """
    torch.manual_seed(seed)
    module = target.module()
    drops = False
    for part in module.modules():
        if isinstance(part, _DROPOUTS):
            drops, part.p = drops or part.p > 0, 0.0
        elif isinstance(getattr(part, "dropout", None), float):  # attention and recurrent layers
            drops, part.dropout = drops or part.dropout > 0, 0.0
    return module, drops


def wrap_target(target: Target, dist: Dist, ds_config: str | Path, accumulation: int, clip: float,
                seed: int = recipe.SEED) -> Wrapped:
    """Wrap the target's module in a layout, as `ezpz_llm.wrap` does. Collective.

    Raises:
        UserError: `wrap` rejects the module.
    """
    module, _ = fresh_module(target, seed)
    optimizer = make_optimizer(target, module, clip)
    run = Run(dist, StepTimeline(dist.device), Heartbeat(os.environ), WallClock())
    return wrap_in(run, module, optimizer, ds_config, 1, accumulation, clip, target.tp_plan)


def make_optimizer(target: Target, module: nn.Module, clip: float) -> torch.optim.Optimizer:
    """Create the target's optimizer, or the default AdamW."""
    if target.optimizer is not None:
        return target.optimizer(module)
    elements = sum(parameter.numel() for parameter in module.parameters())
    return torch.optim.AdamW(module.parameters(), lr=recipe.PEAK_LR, betas=recipe.BETAS,
                             eps=EPS_SHARE * clip / elements ** 0.5, weight_decay=recipe.WEIGHT_DECAY)


def _micro_batch_numbers(target: Target, steps: int) -> list[range]:
    """Return the micro-batch numbers of each step: the first micro-batches of each of two epochs.

    The first epoch has half of the steps, rounded up. Each rank computes a part of each micro-batch.

    Raises:
        UserError: an epoch has too few micro-batches.
    """
    per_epoch = first_epoch_steps(steps)
    epoch = target.epoch_batches or per_epoch * ACCUMULATION
    if epoch < per_epoch * ACCUMULATION:
        raise UserError(f"an epoch has {epoch} micro-batches, but certify needs {per_epoch * ACCUMULATION}",
                        where="Target.epoch_batches", instead="larger epochs, or fewer --steps")
    firsts = [step // per_epoch * epoch + step % per_epoch * ACCUMULATION for step in range(steps)]
    return [range(first, first + ACCUMULATION) for first in firsts]


@dataclass
class Batches:
    """Parts of micro-batches that one process computes: those of the data-parallel ranks `dp_ranks` out of `size`.

    Attributes:
        order: seed for shuffling the parts of a step; 0 for no shuffling.
        keeps_rank_order: keep the order of each rank's parts when shuffling, since its running statistics depend
            on the order.
        seen: sample hashes of each drawn micro-batch, by its number.
    """

    target: Target
    steps: int
    device: torch.device
    dp_ranks: Sequence[int] = (0,)
    size: int = 1
    order: int = 0
    keeps_rank_order: bool = False
    seen: dict[int, list[str]] = field(default_factory=dict)

    def of_step(self, step: int) -> list[tuple[int, Any]]:
        """Return the parts of a step's micro-batches, each with its data-parallel rank."""
        drawn: list[tuple[int, Any]] = []
        for number in _micro_batch_numbers(self.target, self.steps)[step]:
            parts = [self._part(number, dp_rank) for dp_rank in self.dp_ranks]
            self.seen[number] = [sample for part in parts for sample in samples(part)]
            drawn += zip(self.dp_ranks, parts, strict=True)
        if not self.order:
            return drawn
        shuffled = [drawn[index] for index in np.random.default_rng((self.order, step)).permutation(len(drawn))]
        if not self.keeps_rank_order:
            return shuffled
        turns = {dp_rank: iter([part for rank, part in drawn if rank == dp_rank]) for dp_rank in self.dp_ranks}
        return [(dp_rank, next(turns[dp_rank])) for dp_rank, _ in shuffled]

    def evaluation_parts(self) -> list[Any]:
        """Return this process's parts of the evaluation batch: the first micro-batch of the third epoch."""
        number = 2 * (self.target.epoch_batches or first_epoch_steps(self.steps) * ACCUMULATION)
        if len(self.dp_ranks) == 1 or self.keeps_rank_order:
            return [self._part(number, dp_rank) for dp_rank in self.dp_ranks]
        return [self._part(number, 0, 1)]

    def _part(self, number: int, dp_rank: int, size: int | None = None) -> Any:
        batch = self.target.batch(recipe.DATA_SEED, number, dp_rank, size or self.size)
        return on_tensors(batch, lambda tensor: tensor.to(self.device))


def first_epoch_steps(steps: int) -> int:
    """Return the number of steps in the first epoch: half of `steps`, rounded up."""
    return -(-steps // 2)


def samples(batch: Any) -> list[str]:
    """Hash each sample of a batch.

    Raises:
        UserError: the batch has no tensors.
    """
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        """Append a tensor to `tensors` unless it is a scalar; return it unchanged."""
        if tensor.dim():
            tensors.append(tensor.detach().cpu())
        return tensor

    on_tensors(batch, collect)
    if not tensors:
        raise UserError("the batch has no tensor", where="Target.batch",
                        instead="tensors, or tuples, lists and dicts of them, with samples along dimension 0")
    count = len(tensors[0])
    parts = [tensor for tensor in tensors if len(tensor) == count]
    return [_hash(b"".join(_bytes(part[place]) for part in parts)) for place in range(count)]


def _bytes(tensor: Tensor) -> bytes:
    # Copy first: FSDP2 cannot free storage that numpy has a view of.
    return tensor.detach().cpu().flatten().clone().view(torch.uint8).numpy().tobytes()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@dataclass
class Observations(Trajectory):
    """Trajectory of a run on one rank.

    Attributes:
        random: hash of the random state of the device (used by dropout) after each step.
        changed: names of the parts of the training state that an evaluation changed.
        rounded: True if a loss was computed in a two-byte dtype.
        buffers: hash of each buffer after the last step, by name.
    """

    random: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    rounded: bool = False
    buffers: dict[str, str] = field(default_factory=dict)


def train(model: Wrapped, batches: Batches, *, use_own_step: bool, first: int = 0,
          after: Callable[[int, Observations], None] = lambda step, trajectory: None) -> Observations:
    """Train for two epochs, with an evaluation after each. Collective.

    Args:
        use_own_step: True to use the target's own step function, if it has one. The reference uses certify's.
        first: the step to begin with, from 0.
        after: called after each step.

    Raises:
        UserError: the target's step function does not return a loss, or takes no optimizer step.
    """
    trajectory, target, steps = Observations(), batches.target, batches.steps
    statistics = StatisticsByRank(model.module, batches.dp_ranks)
    rates = [group["lr"] for group in model.optimizer.param_groups]
    for step in range(first, steps):
        for group, rate in zip(model.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * recipe.rate_factor(step, steps)
        previous_norm = model.grad_norm
        parts = batches.of_step(step)
        if use_own_step and target.step is not None:
            loss = target.step(model, [part for _, part in parts])
        else:
            loss = _step(target, model, parts, statistics, trajectory)
        if model.grad_norm is None or model.grad_norm is previous_norm:
            raise UserError(f"the step function took no optimizer step after {model.accumulation} micro-batches",
                            where="Target.step",
                            instead="call model.backward(loss) and model.step() for each of them")
        if not isinstance(loss, float | Tensor):
            raise UserError(f"the step function returns {type(loss).__name__}, not a loss", where="Target.step",
                            instead="return the mean loss of the step's micro-batches")
        trajectory.losses.append(float(loss))
        trajectory.norms.append(float(model.grad_norm))
        trajectory.random.append(_hash(_bytes(_random_state(batches.device))))
        after(step, trajectory)
        if step in (first_epoch_steps(steps) - 1, steps - 1):
            state = _state(model)
            evaluate = target.evaluate or _evaluate(target)
            losses = [float(evaluate(model, part)) for part in batches.evaluation_parts()]
            trajectory.held_out = sum(losses) / len(losses)
            state_after = _state(model)
            trajectory.changed += [part for part, content in state.items()
                                   if state_after.get(part, content) != content]
            model.train()
    trajectory.buffers = _buffers(model)
    return trajectory


def mean_losses(ranks: Sequence[Observations]) -> list[float]:
    """Return the losses of the steps, averaged over the ranks."""
    return [sum(losses) / len(ranks) for losses in zip(*(rank.losses for rank in ranks), strict=True)]


def mean_held_out(ranks: Sequence[Observations]) -> float:
    """Return the loss of the last evaluation, averaged over ranks."""
    return sum(rank.held_out for rank in ranks) / len(ranks)


def _step(target: Target, model: Wrapped, parts: list[tuple[int, Any]], statistics: StatisticsByRank,
          trajectory: Observations) -> Tensor:
    """Take a step, and return the mean loss of the micro-batches."""
    losses = []
    for dp_rank, batch in parts:
        with statistics.of(dp_rank):
            loss = target.loss(model, batch)
            model.backward(loss)
        model.step()
        trajectory.rounded |= loss.element_size() < 4
        losses.append(loss.detach().float())
    statistics.average()
    return torch.stack(losses).mean()


def _evaluate(target: Target) -> Callable[[Wrapped, Any], Tensor]:
    def evaluate(model: Wrapped, batch: Any) -> Tensor:
        """Compute the target's loss in evaluation mode."""
        model.eval()
        with torch.no_grad():
            loss = target.loss(model, batch)
        model.train()
        return loss
    return evaluate


def _random_state(device: torch.device) -> Tensor:
    has_own_generator = DEVICES[device.type].own
    return torch.get_device_module(device).get_rng_state() if has_own_generator else torch.get_rng_state()


def _state(model: Wrapped) -> dict[str, str]:
    """Return the training state on this rank by name: hashes of tensors and buffers, training mode of modules."""
    pieces: dict[str, Any] = defaultdict(hashlib.sha256)
    for piece in _pieces(model):
        for kind, tensor in piece.tensors.items():
            pieces[f"the {kind} of {piece.name}"].update(_bytes(tensor))
    return {**{label: content.hexdigest() for label, content in pieces.items()},
            **{f"the buffer {name}": content for name, content in _buffers(model).items()},
            **{f"the training mode of {name or 'the module'}": str(module.training)
               for name, module in model.module.named_modules()}}


def _buffers(model: Wrapped) -> dict[str, str]:
    return {name: _hash(_bytes(buffer)) for name, buffer in model.module.named_buffers()}


def _pieces(model: Wrapped) -> Iterator[Slice]:
    yield from model.engine.training_state().slices()
    yield from whole_parameters(model.engine)
