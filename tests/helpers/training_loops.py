"""Training loops as scripts write them, each for plain torch in one process and for `ezpz_llm.wrap` on ranks.

A loop gets a `Session`. With `PlainSession`, models are plain modules that see the whole batch; with `RankSession`
they are wrapped, and see this rank's part of it. A loop returns the models whose final weights are compared.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import ezpz_llm

BATCH = 8
"""Samples in a micro-batch over all ranks."""


class Session(ABC):
    """Access of a loop to data, models and checkpoints."""

    @abstractmethod
    def part(self, tensor: Tensor) -> Tensor:
        """Return the part of a batch that this process trains on."""

    @abstractmethod
    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, accumulation: int = 1,
             clip: float = 0.0) -> Any:
        """Return an object with the interface of `ezpz_llm.Wrapped`."""

    @abstractmethod
    def gathered(self, model: Any) -> Any:
        """Return a context in which the parameters of `model.module` are whole and may be written."""

    @abstractmethod
    def save(self, step: int, *models: Any) -> None:
        """Save a checkpoint."""

    @abstractmethod
    def load(self, *models: Any) -> int:
        """Load the last checkpoint, and return its step."""

    def batch(self, number: int, width: int = 6) -> tuple[Tensor, Tensor]:
        """Return this process's part of inputs and targets of micro-batch `number`."""
        generator = torch.Generator().manual_seed(number)
        return (self.part(torch.randn(BATCH, width, generator=generator)),
                self.part(torch.randn(BATCH, 5, generator=generator)))


class PlainModel:
    """Plain torch with the interface of `Wrapped`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, accumulation: int, clip: float,
                 others: list[PlainModel]) -> None:
        self.module, self.optimizer, self._others = model, optimizer, others
        self._accumulation, self._clip, self._micro_steps = accumulation, clip, 0

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        kept = [(parameter, parameter.grad) for other in self._others if other is not self
                for parameter in other.module.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        (loss / self._accumulation).backward(retain_graph=retain_graph)
        for parameter, gradient in kept:
            parameter.grad = gradient
        self._micro_steps += 1

    def step(self) -> None:
        if 0 < self._micro_steps < self._accumulation:
            return
        if self._clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), self._clip)
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self._micro_steps = 0

    def train(self, mode: bool = True) -> PlainModel:
        self.module.train(mode)
        return self

    def eval(self) -> PlainModel:
        return self.train(False)

    def state_dict(self) -> dict[str, Tensor]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.module.load_state_dict(state)

    def clip_grad_norm_(self, limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), limit)


class PlainSession(Session):
    """Session of plain torch in one process."""

    def __init__(self) -> None:
        self._saved: tuple[int, list[Any]] = 0, []
        self._models: list[PlainModel] = []

    def part(self, tensor: Tensor) -> Tensor:
        return tensor

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, accumulation: int = 1,
             clip: float = 0.0) -> PlainModel:
        self._models.append(PlainModel(model, optimizer, accumulation, clip, self._models))
        return self._models[-1]

    def gathered(self, model: PlainModel) -> Any:
        return nullcontext()

    def save(self, step: int, *models: PlainModel) -> None:
        self._saved = step, copy.deepcopy([(model.module.state_dict(), model.optimizer.state_dict())
                                           for model in models])

    def load(self, *models: PlainModel) -> int:
        step, states = copy.deepcopy(self._saved)
        for model, (weights, state) in zip(models, states, strict=True):
            model.module.load_state_dict(weights)
            model.optimizer.load_state_dict(state)
        return step


@dataclass
class RankSession(Session):
    """Session of a rank.

    Attributes:
        ds_config: layout of the models.
        tp_plan: plan of the models for tensor-parallel layouts.
        first_step: offset of checkpoint steps, different for each loop.
    """

    run: ezpz_llm.Run
    ds_config: str
    tp_plan: dict[str, str] | None = None
    first_step: int = 0
    _folder: Any = field(default=None, init=False)

    def part(self, tensor: Tensor) -> Tensor:
        mesh = self.run.mesh
        return tensor.chunk(mesh.dp_size)[mesh.dp_rank]

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, accumulation: int = 1,
             clip: float = 0.0) -> ezpz_llm.Wrapped:
        return ezpz_llm.wrap(model, optimizer, self.ds_config, accumulation=accumulation, clip=clip,
                             tp_plan=self.tp_plan)

    def gathered(self, model: ezpz_llm.Wrapped) -> Any:
        return model.gathered()

    def save(self, step: int, *models: ezpz_llm.Wrapped) -> None:
        self._folder = ezpz_llm.save_checkpoint(_named(models), self.first_step + step)

    def load(self, *models: ezpz_llm.Wrapped) -> int:
        state = ezpz_llm.load_checkpoint(_named(models), self._folder)
        assert state is not None
        return state["step"] - self.first_step


def _named(models: tuple[Any, ...]) -> Any:
    return models[0] if len(models) == 1 else {f"model{number}": model for number, model in enumerate(models)}


class Block(nn.Module):
    """Residual MLP whose hidden layer a tensor-parallel layout splits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 14), nn.Linear(14, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks in a ModuleList, a norm, and a head, with sizes that ranks do not divide evenly."""

    def __init__(self, width: int = 6, outputs: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recomputed(Net):
    """Net with gradient checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Branches(nn.Module):
    """Net with two heads, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.left, self.right = Net(outputs=6), nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor, side: str) -> Tensor:
        return getattr(self, side)(self.net(x))


class PartlyUsed(nn.Module):
    """Net with a frozen head, one that some calls use, one that none uses, and a factor that one rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.factor = Net(outputs=6), nn.Parameter(torch.ones(1))
        self.frozen, self.sometimes, self.never = (nn.Linear(6, 5) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, uses_both: bool) -> Tensor:
        hidden = self.net(x)
        return self.factor * (self.frozen(hidden) + (self.sometimes(hidden) if uses_both else 0.0))


class Normalized(nn.Module):
    """Net with a BatchNorm, which a script keeps in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.net = nn.BatchNorm1d(6), Net()
        with torch.no_grad():
            self.bn.running_mean.add_(0.5)
            self.bn.running_var.mul_(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.bn(x))


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise",
        "net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"}
"""Tensor-parallel plan of these models."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum, whose updates are proportional to gradients, so that wrong scales are seen."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW whose epsilon exceeds the rounding errors of gradients."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)


@dataclass(frozen=True)
class Loop:
    """Training loop.

    Attributes:
        must_be_right: True if every layout must be equal to plain torch; otherwise an error is also accepted.
    """

    run: Callable[[Session], Any]
    must_be_right: bool


LOOPS: dict[str, Loop] = {}


def loop(*, right: bool) -> Callable[[Callable[[Session], Any]], Callable[[Session], Any]]:
    """Register a loop; `right` if an error is not accepted."""
    def register(function: Callable[[Session], Any]) -> Callable[[Session], Any]:
        LOOPS[function.__name__] = Loop(function, right)
        return function

    return register


def made(kind: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    """Return a model with the weights of a seed."""
    torch.manual_seed(seed)
    return kind()


def train(session: Session, model: Any, numbers: range) -> None:
    """Train a step per micro-batch."""
    for number in numbers:
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        model.step()


# Orders of calls

@loop(right=True)
def plain_loop(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    train(session, model, range(5))
    return model


@loop(right=True)
def accumulation(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net), accumulation=2)
    train(session, model, range(6))
    return model


@loop(right=True)
def accumulation_carried_over(session: Session) -> Any:
    """An epoch of five micro-batches, with steps of two."""
    net = made()
    model = session.wrap(net, sgd(net), accumulation=2)
    for _ in range(2):
        train(session, model, range(5))
    return model


@loop(right=True)
def two_forwards_then_two_backwards(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net), accumulation=2)
    for number in range(0, 6, 2):
        losses = []
        for part in (number, number + 1):
            x, y = session.batch(part)
            losses.append(mse_loss(model(x), y))
        for loss in losses:
            model.backward(loss)
            model.step()
    return model


@loop(right=False)
def loss_backward_of_torch(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(3):
        x, y = session.batch(number)
        loss = mse_loss(model(x), y)
        loss.backward()
        model.step()
    return model


@loop(right=False)
def optimizer_step_of_torch(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(3):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        model.optimizer.step()
        model.zero_grad()
    return model


@loop(right=True)
def forward_without_gradients_before_step(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        with torch.no_grad():
            model(x)
        model.step()
        with torch.no_grad():
            model(x)
    return model


@loop(right=True)
def evaluation_between_micro_steps(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net), accumulation=2)
    for number in range(6):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        model.step()
    return model


@loop(right=True)
def evaluation_in_inference_mode(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        train(session, model, range(number, number + 1))
        with torch.inference_mode():
            model.eval()(session.batch(9)[0])
        model.train()
    return model


@loop(right=True)
def two_forwards_in_one_loss(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, y = session.batch(number)
        other, _ = session.batch(number + 50)
        model.backward(mse_loss(model(x), y) + mse_loss(model(other), model(x).detach()))
        model.step()
    return model


@loop(right=True)
def forward_without_backward(session: Session) -> Any:
    """Skipped batches: a forward pass in training mode, and no backward pass."""
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(5):
        x, y = session.batch(number)
        loss = mse_loss(model(x), y)
        if number % 2:
            continue
        model.backward(loss)
        model.step()
    return model


@loop(right=True)
def call_of_module(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, y = session.batch(number)
        model.backward(mse_loss(model.module(x), y))
        model.step()
    return model


@loop(right=True)
def gradient_checkpointing(session: Session) -> Any:
    net = made(Recomputed)
    model = session.wrap(net, sgd(net), accumulation=2)
    train(session, model, range(6))
    return model


@loop(right=True)
def two_losses_of_one_forward(session: Session) -> Any:
    net = made(Branches)
    model = session.wrap(net, sgd(net), accumulation=2)
    for number in range(4):
        x, y = session.batch(number)
        trunk = model(x, "left")
        model.backward(mse_loss(trunk, y), retain_graph=True)
        model.step()
        model.backward(trunk.square().mean())
        model.step()
    return model


@loop(right=False)
def gradient_penalty(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(3):
        x, y = session.batch(number)
        x.requires_grad_()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        model.backward(mse_loss(outputs, y) + 0.1 * slope.square().mean())
        model.step()
    return model


@loop(right=True)
def gradients_cleared_at_start(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        model.zero_grad()
        model.optimizer.zero_grad()
        train(session, model, range(number, number + 1))
    return model


@loop(right=True)
def gradients_discarded(session: Session) -> Any:
    """A backward pass whose gradients are discarded, before the next step."""
    net = made()
    model = session.wrap(net, sgd(net), accumulation=2)
    for number in range(3):
        train(session, model, range(number, number + 1))
        model.zero_grad()
        train(session, model, range(number + 10, number + 12))
    return model


@loop(right=True)
def clipping_after_evaluation(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        with torch.no_grad():
            model(x)
        nn.utils.clip_grad_norm_(model.module.parameters(), 0.5)
        model.step()
    return model


@loop(right=False)
def clipping_by_parameter_groups(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(3):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        nn.utils.clip_grad_norm_([parameter for group in model.optimizer.param_groups
                                  for parameter in group["params"]], 0.5)
        model.step()
    return model


@loop(right=False)
def step_after_a_part_of_an_accumulation(session: Session) -> Any:
    """An epoch of three micro-batches, with steps of two: at each second one and at the end of the epoch."""
    net = made()
    model = session.wrap(net, sgd(net), accumulation=4)
    for number in range(6):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        if number == 3:
            model.step()
    model._micro_steps = model._accumulation if isinstance(model, PlainModel) else model._micro_steps
    model.step()
    return model


@loop(right=False)
def gradients_removed_between_micro_steps(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net), accumulation=2)
    for number in range(4):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        if number % 2 == 0:
            for parameter in model.module.blocks[0].parameters():
                parameter.grad = None
        model.step()
    return model


# Two models

def _discriminator() -> nn.Module:
    return Net(width=5, outputs=1)


def _gan(session: Session, *, freezes: bool, clears: bool) -> Any:
    first, second = made(), made(_discriminator, 1)
    generator, critic = session.wrap(first, sgd(first)), session.wrap(second, sgd(second))
    for number in range(3):
        x, y = session.batch(number)
        if clears:
            critic.zero_grad()
        critic.backward(critic(generator(x).detach()).mean() - critic(y).tanh().mean())
        critic.step()
        if freezes:
            critic.module.requires_grad_(False)
        if clears:
            generator.zero_grad()
        generator.backward(-critic(generator(x)).mean())
        generator.step()
        if freezes:
            critic.module.requires_grad_(True)
    return generator, critic


@loop(right=False)
def gan(session: Session) -> Any:
    return _gan(session, freezes=False, clears=True)


@loop(right=True)
def gan_with_frozen_critic(session: Session) -> Any:
    return _gan(session, freezes=True, clears=False)


@loop(right=False)
def backward_of_the_wrong_model(session: Session) -> Any:
    first, second = made(), made(seed=1)
    models = session.wrap(first, sgd(first)), session.wrap(second, sgd(second))
    x, y = session.batch(0)
    models[0].backward(mse_loss(models[1](x), y))
    models[0].step()
    return models


@loop(right=True)
def distillation(session: Session) -> Any:
    net, teacher = made(), made(seed=3)
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, _ = session.batch(number)
        with torch.no_grad():
            wanted = teacher(x)
        model.backward(mse_loss(model(x), wanted))
        model.step()
    return model


@loop(right=True)
def k_fold(session: Session) -> Any:
    models = []
    for fold in range(3):
        net = made(seed=fold)
        model = session.wrap(net, sgd(net))
        train(session, model, range(fold, fold + 3))
        models.append(model)
    return tuple(models)


# Writes of the script

@loop(right=True)
def ema(session: Session) -> Any:
    net = made()
    average = copy.deepcopy(net)
    model = session.wrap(net, sgd(net))
    for number in range(4):
        train(session, model, range(number, number + 1))
        with torch.no_grad(), session.gathered(model):
            for mean, parameter in zip(average.parameters(), model.module.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
    with torch.no_grad(), session.gathered(model):
        for mean, parameter in zip(average.parameters(), model.module.parameters(), strict=True):
            parameter.copy_(mean)
    train(session, model, range(9, 11))
    return model


@loop(right=False)
def weight_clipping(session: Session) -> Any:
    """Weights clipped through `.data`, as in WGAN."""
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        train(session, model, range(number, number + 1))
        for parameter in model.module.parameters():
            parameter.data.clamp_(-0.2, 0.2)
    train(session, model, range(8, 9))
    return model


@loop(right=False)
def weight_clipping_after_evaluation(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        train(session, model, range(number, number + 1))
        with torch.no_grad():
            model(session.batch(9)[0])
        for parameter in model.module.parameters():
            parameter.data.clamp_(-0.2, 0.2)
    train(session, model, range(8, 9))
    return model


@loop(right=False)
def own_step_on_weights(session: Session) -> Any:
    """A step of SGD by hand, on weights and gradients of the module."""
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(3):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        for parameter in model.module.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
        model.zero_grad()
    return model


@loop(right=True)
def gathered_weight_clipping(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        train(session, model, range(number, number + 1))
        with torch.no_grad(), session.gathered(model):
            for parameter in model.module.parameters():
                parameter.clamp_(-0.2, 0.2)
    train(session, model, range(8, 9))
    return model


@loop(right=True)
def weights_loaded_after_wrap(session: Session) -> Any:
    net, late = made(), made(seed=5).state_dict()
    model = session.wrap(net, sgd(net))
    model.load_state_dict(late)
    train(session, model, range(3))
    return model


@loop(right=False)
def weights_loaded_into_module(session: Session) -> Any:
    net, late = made(), made(seed=5).state_dict()
    model = session.wrap(net, sgd(net))
    model.module.load_state_dict(late)
    train(session, model, range(3))
    return model


@loop(right=True)
def reload_best(session: Session) -> Any:
    """Early stopping: the best weights are kept in memory, and loaded again."""
    net = made()
    model = session.wrap(net, sgd(net))
    train(session, model, range(3))
    best = {name: value.clone() for name, value in model.state_dict().items()}
    train(session, model, range(3, 6))
    model.load_state_dict(best)
    train(session, model, range(6, 8))
    return model


@loop(right=True)
def clipping_by_wrap(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net), accumulation=2, clip=0.5)
    train(session, model, range(6))
    return model


@loop(right=True)
def clipping_by_torch(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        nn.utils.clip_grad_norm_(model.module.parameters(), 0.5)
        model.step()
    return model


@loop(right=False)
def gradients_edited(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(3):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        for parameter in model.module.parameters():
            parameter.grad += 0.01 * parameter.grad.sign()
        model.step()
    return model


@loop(right=True)
def frozen_after_wrap(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    train(session, model, range(2))
    model.module.blocks[0].requires_grad_(False)
    train(session, model, range(2, 5))
    model.module.blocks[0].requires_grad_(True)
    train(session, model, range(5, 7))
    return model


@loop(right=False)
def unfrozen_after_wrap(session: Session) -> Any:
    net = made()
    net.blocks.requires_grad_(False)
    model = session.wrap(net, sgd(net))
    train(session, model, range(2))
    model.module.blocks.requires_grad_(True)
    train(session, model, range(2, 4))
    return model


@loop(right=False)
def unfrozen_and_called_by_module(session: Session) -> Any:
    net = made()
    net.blocks.requires_grad_(False)
    model = session.wrap(net, sgd(net))
    model.module.blocks.requires_grad_(True)
    for number in range(3):
        x, y = session.batch(number)
        model.backward(mse_loss(model.module(x), y))
        model.step()
    return model


@loop(right=True)
def batch_norm_in_evaluation_mode(session: Session) -> Any:
    net = made(Normalized)
    net.bn.eval()
    model = session.wrap(net, sgd(net))
    train(session, model, range(4))
    return model


# Parameters without a gradient

@loop(right=True)
def sometimes_unused(session: Session) -> Any:
    net = made(Branches)
    model = session.wrap(net, adamw(net))
    for number in range(6):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x, "left" if number % 3 else "right"), y))
        model.step()
    return model


@loop(right=True)
def unused_in_one_micro_step(session: Session) -> Any:
    net = made(Branches)
    model = session.wrap(net, adamw(net), accumulation=2)
    for number in range(6):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x, "left" if number % 2 else "right"), y))
        model.step()
    return model


@loop(right=True)
def parameters_without_gradients(session: Session) -> Any:
    """Weight decay of 10 % per step, which would change parameters that are stepped with a gradient of zero."""
    def start(seed: int) -> Any:
        net = made(PartlyUsed, seed)
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        return session.wrap(net, torch.optim.AdamW(trained, lr=0.02, eps=1e-3, weight_decay=5.0), accumulation=2)

    model = start(seed=0)
    # Both micro-steps of a step, none, the first, none, the last.
    for number, uses_both in enumerate((True, True, False, False, True, False, False, False, False, True)):
        if number == 4:
            session.save(2, model)
            model = start(seed=7)
            session.load(model)
        x, y = session.batch(number)
        model.backward(mse_loss(model(x, uses_both), y))
        model.step()
    return model


# Optimizers and schedules

@loop(right=True)
def one_cycle(session: Session) -> Any:
    net = made()
    optimizer = sgd(net)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
    model = session.wrap(net, optimizer)
    for number in range(6):
        train(session, model, range(number, number + 1))
        schedule.step()
    return model


@loop(right=True)
def adagrad(session: Session) -> Any:
    net = made()
    model = session.wrap(net, torch.optim.Adagrad(net.parameters(), lr=0.05, eps=1e-3))
    train(session, model, range(4))
    return model


@loop(right=False)
def adafactor(session: Session) -> Any:
    net = made()
    model = session.wrap(net, torch.optim.Adafactor(net.parameters(), lr=0.05))
    train(session, model, range(4))
    return model


@loop(right=False)
def lbfgs(session: Session) -> Any:
    net = made()
    model = session.wrap(net, torch.optim.LBFGS(net.parameters()))
    train(session, model, range(2))
    return model


@loop(right=False)
def sparse_gradients(session: Session) -> Any:
    net = nn.Sequential(nn.Embedding(6, 5, sparse=True))
    model = session.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for number in range(2):
        _, y = session.batch(number)
        model.backward(mse_loss(model(torch.arange(6).repeat(2)[:len(y)]), y))
        model.step()
    return model


# Checkpoints

def _resumed(session: Session, make: Callable[[nn.Module], torch.optim.Optimizer]) -> Any:
    net = made(Branches)
    model = session.wrap(net, make(net))
    for number in range(3):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x, "left" if number else "right"), y))
        model.step()
    session.save(3, model)
    net = made(Branches, seed=7)
    model = session.wrap(net, make(net))
    for number in range(session.load(model), 6):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x, "right" if number % 2 else "left"), y))
        model.step()
    return model


@loop(right=True)
def resume_with_unused_parameters(session: Session) -> Any:
    return _resumed(session, adamw)


@loop(right=True)
def resume_of_sgd(session: Session) -> Any:
    return _resumed(session, sgd)


@loop(right=True)
def resume_of_two_models(session: Session) -> Any:
    first, second = made(), made(seed=1)
    models = session.wrap(first, adamw(first)), session.wrap(second, sgd(second))
    for model in models:
        train(session, model, range(2))
    session.save(2, *models)
    for model in models:
        train(session, model, range(5, 7))
    session.load(*models)
    for model in models:
        train(session, model, range(2, 4))
    return models


@loop(right=False)
def save_in_an_accumulation(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net), accumulation=2)
    train(session, model, range(3))
    session.save(1, model)
    train(session, model, range(3, 4))
    return model
