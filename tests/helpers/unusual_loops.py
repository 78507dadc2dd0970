"""Training loops that reach around the wrapped model: its parameters, its optimizer, autograd, or other models."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from training_loops import LOOPS, Net, Session, adamw, loop, made, sgd, train


class Experts(nn.Module):
    """Net whose blocks each process the samples of one sign of the first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for sign, expert in zip((1, -1), self.experts, strict=True):
            rows = x[:, 0] * sign > 0
            if rows.any():
                x = torch.where(rows[:, None], expert(x), x)
        return self.head(x)


class Reentrant(Net):
    """Net with reentrant gradient checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


def _halves(session: Session, number: int) -> tuple[Tensor, Tensor]:
    """Return a batch whose first half has a positive first feature, and whose second half a negative one."""
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 5, generator=generator)
    x[:4, 0], x[4:, 0] = x[:4, 0].abs() + 0.1, -x[4:, 0].abs() - 0.1
    return session.part(x), session.part(y)


__all__ = ["LOOPS"]


# Parameters

@loop(right=False)
def other_parameters_on_each_rank(session: Session) -> Any:
    net = made(Experts)
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, y = _halves(session, number)
        model.backward(mse_loss(model(x), y))
        model.step()
    return model


@loop(right=False)
def weight_norms_outside_of_gathered(session: Session) -> Any:
    """A learning rate relative to the norm of the weights, which a shard does not have."""
    net = made()
    model = session.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for number in range(4):
        norm = max(parameter.norm().item() for parameter in model.module.parameters())
        model.optimizer.param_groups[0]["lr"] = 0.1 * norm
        train(session, model, range(number, number + 1))
    return model


@loop(right=False)
def weight_norms_in_the_loss(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, y = session.batch(number)
        penalty = sum(parameter.square().sum() for parameter in model.module.parameters())
        model.backward(mse_loss(model(x), y) + 0.1 * penalty)
        model.step()
    return model


@loop(right=False)
def weights_replaced(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    train(session, model, range(3))
    for parameter in model.module.parameters():
        parameter.data = parameter.data * 0.9
    train(session, model, range(3, 6))
    return model


@loop(right=True)
def number_of_parameters(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    model.optimizer.param_groups[0]["lr"] = 1e-3 * sum(parameter.numel() for parameter in model.module.parameters())
    train(session, model, range(3))
    return model


@loop(right=False)
def gradient_hooks(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for parameter in model.module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    train(session, model, range(4))
    return model


@loop(right=False)
def gradient_hooks_before_wrap(session: Session) -> Any:
    net = made()
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model = session.wrap(net, sgd(net))
    train(session, model, range(4))
    return model


@loop(right=False)
def largest_gradient(session: Session) -> Any:
    """Gradients scaled by the largest element, which may be on another rank."""
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        nn.utils.clip_grad_norm_(model.module.parameters(), 0.05, norm_type=float("inf"))
        model.step()
    return model


# The optimizer

@loop(right=False)
def weight_decay_by_parameter_groups(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        train(session, model, range(number, number + 1))
        for group in model.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.95)
    return model


@loop(right=True)
def optimizer_restored(session: Session) -> Any:
    """Weights and optimizer of an earlier step, restored from memory."""
    net = made()
    model = session.wrap(net, adamw(net))
    train(session, model, range(3))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(model.optimizer.state_dict())
    train(session, model, range(3, 6))
    model.load_state_dict(weights)
    model.optimizer.load_state_dict(state)
    train(session, model, range(6, 9))
    return model


@loop(right=False)
def optimizer_after_wrap(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    late = sgd(model.module)
    for number in range(3):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        late.step()
        late.zero_grad()
    return model


# Autograd

@loop(right=False)
def gradients_by_autograd(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, y = session.batch(number)
        parameters = list(model.module.parameters())
        gradients = torch.autograd.grad(mse_loss(model(x), y), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(0.1 * gradient)
    return model


@loop(right=True)
def adversarial_inputs_with_two_models(session: Session) -> Any:
    """Samples moved along the gradient of the loss, while another wrapped model exists."""
    net, other = made(), made(seed=3)
    model, second = session.wrap(net, sgd(net)), session.wrap(other, sgd(other))
    for number in range(4):
        x, y = session.batch(number)
        x.requires_grad_(True)
        model.backward(mse_loss(model(x), y))
        x = (x + 0.1 * x.grad.sign()).detach()
        model.step()
        second.backward(mse_loss(second(x), y))
        second.step()
    return model, second


@loop(right=True)
def reentrant_checkpointing_in_folds(session: Session) -> Any:
    for fold in range(3):
        net = made(Reentrant, seed=fold)
        model = session.wrap(net, sgd(net))
        train(session, model, range(fold, fold + 3))
    return model


# Other models

@loop(right=False)
def plain_second_model(session: Session) -> Any:
    """A head that is not wrapped, with an optimizer of its own."""
    net, head = made(), nn.Linear(5, 5)
    with torch.no_grad():
        head.weight.fill_(0.1)
    optimizer = sgd(head)
    model = session.wrap(net, sgd(net))
    for number in range(3):
        x, y = session.batch(number)
        model.backward(mse_loss(head(model(x)), y))
        model.step()
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop(right=False)
def target_network(session: Session) -> Any:
    """A copy of the module, trained by itself at the end."""
    net = made()
    model = session.wrap(net, sgd(net))
    train(session, model, range(2))
    target = copy.deepcopy(model.module)
    x, y = session.batch(7)
    model.backward(mse_loss(model(x), y))
    target.zero_grad()  # must not discard the gradients of the model
    model.step()
    with torch.no_grad():
        y = target(x)
    model.backward(mse_loss(model(x), y))
    model.step()
    return model


@loop(right=True)
def state_read_in_gathered(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    train(session, model, range(2))
    with session.gathered(model):
        weights = copy.deepcopy(model.state_dict())
    train(session, model, range(2, 4))
    with session.gathered(model):
        model.load_state_dict(weights)
    train(session, model, range(4, 6))
    return model


@loop(right=False)
def wrapped_twice(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    train(session, model, range(2))
    model = session.wrap(net, torch.optim.SGD(net.parameters(), lr=0.05))
    train(session, model, range(2, 4))
    return model
