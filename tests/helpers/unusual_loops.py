"""Training loops that reach around the wrapped model: its parameters, its optimizer, autograd, or other models."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from training_loops import LOOPS, Branches, Net, PlainModel, Session, adamw, loop, made, sgd, train


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
        nn.utils.clip_grad_norm_(model.module.parameters(), 0.2, norm_type=float("inf"))
        model.step()
    return model


@loop(right=False)
def sharpness_aware_minimization(session: Session) -> Any:
    """Two backward passes per step, the second one at weights moved along the gradient of the first."""
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(3):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        moves = {}
        with torch.no_grad():
            for parameter in model.module.parameters():
                moves[parameter] = 0.05 * parameter.grad / (parameter.grad.norm() + 1e-12)
                parameter.add_(moves[parameter])
        model.zero_grad()
        model.backward(mse_loss(model(x), y))
        with torch.no_grad():
            for parameter, move in moves.items():
                parameter.sub_(move)
        model.step()
    return model


@loop(right=False)
def gradients_read_in_gathered(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(3):
        x, y = session.batch(number)
        model.backward(mse_loss(model(x), y))
        with torch.no_grad(), session.gathered(model):
            for parameter in model.module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
        model.step()
    return model


@loop(right=False)
def embedding_with_max_norm(session: Session) -> Any:
    """An embedding whose forward pass limits the norm of the rows that it reads, on each rank other rows."""
    net = made(lambda: nn.Sequential(nn.Embedding(16, 6, max_norm=0.5), Net()))
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, y = session.batch(number)
        model.backward(mse_loss(model((x[:, 0] * 100).long() % 16), y))
        model.step()
    return model


@loop(right=False)
def head_replaced(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    train(session, model, range(2))
    torch.manual_seed(4)
    model.module.head = nn.Linear(6, 5).requires_grad_(False)
    train(session, model, range(2, 4))
    return model


# Modules

class Scaled(nn.Module):
    """Net whose forward pass limits a parameter, and computes an embedding in fp32."""

    def __init__(self, *, limits: bool) -> None:
        super().__init__()
        self.net, self.scale, self.time = Net(), nn.Parameter(torch.ones(6)), nn.Linear(2, 6)
        self._limits = limits

    def forward(self, x: Tensor) -> Tensor:
        if self._limits:
            with torch.no_grad():
                self.scale.clamp_(0.5, 0.99)
        angles = torch.arange(len(x), device=x.device)[:, None] * torch.tensor([0.1, 0.2])
        return self.net(x * self.scale + self.time(torch.sin(angles * 0)))


@loop(right=False)
def weights_limited_in_forward(session: Session) -> Any:
    net = made(lambda: Scaled(limits=True))
    model = session.wrap(net, sgd(net))
    train(session, model, range(4))
    return model


@loop(right=True)
def embedding_in_fp32(session: Session) -> Any:
    net = made(lambda: Scaled(limits=False))
    model = session.wrap(net, sgd(net))
    train(session, model, range(4))
    return model


@loop(right=True)
def layers_called_before_the_model(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))
    x = session.batch(0)[0]
    model.backward(model.module.blocks[0](x).float().square().mean())
    model.step()
    train(session, model, range(1, 4))
    return model


@loop(right=False)
def low_rank_adapters(session: Session) -> Any:
    """Adapters beside frozen layers, added before wrap."""
    net = made()
    net.requires_grad_(False)
    net.blocks[0].up = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 14, bias=False))
    model = session.wrap(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.3))
    train(session, model, range(4))
    return model


# The optimizer

@loop(right=True)
def weights_limited_in_a_step_hook(session: Session) -> Any:
    net = made()
    model = session.wrap(net, sgd(net))

    def limit(*_: Any) -> None:
        with torch.no_grad(), session.gathered(model):
            for parameter in model.module.parameters():
                parameter.clamp_(-0.2, 0.2)

    model.optimizer.register_step_post_hook(limit)
    train(session, model, range(4))
    return model


@loop(right=False)
def learning_rate_of_each_rank(session: Session) -> Any:
    """A learning rate from the loss of a rank, as by ReduceLROnPlateau without an average over ranks."""
    net = made()
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, y = session.batch(number)
        loss = mse_loss(model(x), y)
        model.optimizer.param_groups[0]["lr"] = 0.1 * float(loss)
        model.backward(loss)
        model.step()
    return model


@loop(right=False)
def gradients_of_zero_instead_of_none(session: Session) -> Any:
    """Gradients cleared to zero, so that the momentum of unused parameters moves them."""
    net = made(Branches)
    model = session.wrap(net, sgd(net))
    for number in range(4):
        x, y = session.batch(number)
        model.optimizer.zero_grad(set_to_none=False)
        model.backward(mse_loss(model(x, "right" if number else "left"), y))
        if isinstance(model, PlainModel):
            model.optimizer.step()
        else:
            model.step()
    return model


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
    """Models of all folds are kept, for an ensemble."""
    models = []
    for fold in range(3):
        net = made(Reentrant, seed=fold)
        model = session.wrap(net, sgd(net))
        train(session, model, range(fold, fold + 3))
        models.append(model)
    return tuple(models)


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
        model.backward(mse_loss(head(model(x).float()), y))
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
