"""User-defined training runs for `certify --target`: four correct ones, and common mistakes, each a function."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ezpz_llm import Target, Wrapped

SAMPLES, EPOCH = 8, 40
"""Samples in a micro-batch over all ranks, and micro-batches in an epoch."""


class TwoLosses(nn.Module):
    """MLP with two outputs: logits and a reconstruction."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 8))
                                   for _ in range(3))
        self.head, self.back = nn.Linear(8, 5), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.trunk:
            x = x + layer(x)
        return {"logits": self.head(x), "back": self.back(x)}


def convolutions() -> nn.Module:
    """Return convolutions with GroupNorm, for 1 x 8 x 8 images."""
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.GELU(),
                         nn.Conv2d(6, 9, 3, stride=2), nn.GroupNorm(3, 9), nn.GELU(),
                         nn.Flatten(), nn.Linear(81, 5))


def rows(seed: int, number: int, dp_rank: int, dp_size: int) -> tuple[Tensor, Tensor]:
    """Return inputs, and the index of the largest of their first five elements."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1000 * seed + number))
    return x.chunk(dp_size)[dp_rank], x[:, :5].argmax(-1).chunk(dp_size)[dp_rank]


def pictures(seed: int, number: int, dp_rank: int, dp_size: int) -> dict[str, Tensor]:
    """Return images, interleaved over ranks, and the index of the largest of their first five pixels."""
    x = torch.randn(SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(1000 * seed + number))
    return {"x": x[dp_rank::dp_size], "y": x.flatten(1)[:, :5].argmax(-1)[dp_rank::dp_size]}


def two_losses(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    given = model(x)
    return functional.cross_entropy(given["logits"].float(), y) + functional.mse_loss(given["back"].float(), x)


def classes(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"]).float(), batch["y"])


def mlp() -> Target:
    return Target(module=TwoLosses, batch=rows, loss=two_losses)


def groups(module: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                              {"params": others, "weight_decay": 0.0, "lr": 2e-3}], lr=1e-2, eps=1e-4)


def own_step(model: Wrapped, batches: list[dict[str, Tensor]]) -> Tensor:
    total = torch.zeros(())
    for batch in batches:
        loss = classes(model, batch)
        model.backward(loss)
        model.step()
        total += loss.detach() / len(batches)
    return total


@torch.no_grad()
def own_evaluation(model: Wrapped, batch: dict[str, Tensor]) -> float:
    model.eval()
    loss = classes(model, batch).item()
    model.train()
    return loss


def conv() -> Target:
    """Return a target with custom optimizer, step and evaluation."""
    return Target(module=convolutions, batch=pictures, loss=classes, optimizer=groups, step=own_step,
                  evaluate=own_evaluation, epoch_batches=EPOCH)


def momentum() -> Target:
    """Return `mlp` with an optimizer whose momentum has another name and factor than Adam's."""
    return dataclasses.replace(mlp(), optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.05, 0.9))


def plain_descent() -> Target:
    return dataclasses.replace(mlp(), optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.05))


def optimizer_with_closure() -> Target:
    return dataclasses.replace(mlp(), optimizer=lambda module: torch.optim.LBFGS(module.parameters()))


def decay_in_the_gradient() -> Target:
    return dataclasses.replace(mlp(), optimizer=lambda module: torch.optim.Adam(module.parameters(),
                                                                                weight_decay=0.1))


def normed() -> Target:
    """Return `conv` with running statistics, in a norm that is itself the module's first child."""
    return dataclasses.replace(conv(), module=lambda: nn.Sequential(nn.BatchNorm2d(1), *convolutions()))


class Divisible(nn.Module):
    """Two blocks that a tensor-parallel plan shards: 16 hidden units, with one norm for each half of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 16), "norm": nn.LayerNorm(8),
                                                   "down": nn.Linear(16, 8)}) for _ in range(2))
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer["up"](x).unflatten(-1, (-1, 8))
            x = x + layer["down"](functional.gelu(layer["norm"](hidden)).flatten(-2))
        return self.head(x)


def divisible() -> Target:
    plan = {"layers.*.up": "colwise", "layers.*.norm": "replicated_with_grad_allreduce", "layers.*.down": "rowwise",
            "head": "colwise_gather_output"}
    return Target(module=Divisible, tp_plan=plan, batch=lambda *place: dict(zip("xy", rows(*place), strict=True)),
                  loss=classes)


def summed_too_little() -> Target:
    """Omit the norm from the plan: each rank applies it to its hidden units, so its gradient must be summed."""
    plan = {name: style for name, style in (divisible().tp_plan or {}).items() if "norm" not in name}
    return dataclasses.replace(divisible(), tp_plan=plan)


def running_statistics_differ() -> Target:
    """Compute the accuracy in a step without leaving training mode."""
    def step(model: Wrapped, batches: list[dict[str, Tensor]]) -> Tensor:
        loss = own_step(model, batches)
        with torch.no_grad():
            model(batches[-1]["x"]).argmax(-1)
        return loss
    return dataclasses.replace(normed(), step=step)


def statistics_of_a_rank() -> Target:
    """Use a custom norm whose running mean is not synchronized between ranks."""
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(1, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean += 0.1 * (x.detach().float().mean(0) - self.mean)
            return x
    return dataclasses.replace(conv(), module=lambda: nn.Sequential(Centred(), *convolutions()))


def loss_averaged_twice() -> Target:
    def step(model: Wrapped, batches: list[Any]) -> Tensor:
        losses = []
        for batch in batches:
            losses.append(two_losses(model, batch))
            model.backward(losses[-1] / torch.distributed.get_world_size())
            model.step()
        return torch.stack(losses).mean().detach()
    return dataclasses.replace(mlp(), step=step)


def accumulation_not_divided() -> Target:
    def step(model: Wrapped, batches: list[Any]) -> float:
        total = 0.0
        for batch in batches:
            loss = two_losses(model, batch)
            model.backward(loss * len(batches))
            model.step()
            total += loss.item()
        return total / len(batches)
    return dataclasses.replace(mlp(), step=step)


def equal_masks() -> Target:
    def step(model: Wrapped, batches: list[Any]) -> float:
        torch.manual_seed(17)
        total = 0.0
        for batch in batches:
            loss = two_losses(model, batch)
            model.backward(loss)
            model.step()
            total += loss.item()
        return total / len(batches)
    return dataclasses.replace(mlp(), step=step)


def no_step() -> Target:
    return dataclasses.replace(mlp(), step=lambda model, batches: two_losses(model, batches[0]))


def parameter_left_out() -> Target:
    return dataclasses.replace(mlp(), optimizer=lambda module: torch.optim.AdamW(list(module.parameters())[:-1]))


def sampler_not_advanced() -> Target:
    return dataclasses.replace(mlp(), batch=lambda seed, number, *ranks: rows(seed, number // 3, *ranks))


def epoch_not_set() -> Target:
    return dataclasses.replace(mlp(), epoch_batches=EPOCH,
                               batch=lambda seed, number, *ranks: rows(seed, number % EPOCH, *ranks))


def same_samples_on_all_ranks() -> Target:
    return dataclasses.replace(mlp(), batch=lambda seed, number, rank, size: rows(seed, number, 0, size))


def evaluation_that_changes_state() -> Target:
    def module() -> nn.Module:
        made = TwoLosses()
        made.register_buffer("seen", torch.zeros(()))
        return made

    def evaluate(model: Wrapped, batch: tuple[Tensor, Tensor]) -> float:
        model.eval()
        with torch.no_grad():
            model.module.get_buffer("seen").add_(1)
            return two_losses(model, batch).item()
    return dataclasses.replace(mlp(), module=module, evaluate=evaluate)


def state_that_no_checkpoint_has() -> Target:
    """Use a factor, lowered by an optimizer hook after each step, in a non-persistent buffer."""
    class Cooling(TwoLosses):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.ones(()), persistent=False)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return super().forward(x * self.factor)

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
        made.register_step_post_hook(lambda *_: module.get_buffer("factor").mul_(0.9))
        return made
    return dataclasses.replace(mlp(), module=Cooling, optimizer=optimizer)


def unused_parameter() -> Target:
    def module() -> nn.Module:
        made = TwoLosses()
        made.spare = nn.Linear(8, 8)
        return made
    return dataclasses.replace(mlp(), module=module)


def frozen_part() -> Target:
    def module() -> nn.Module:
        made = TwoLosses()
        made.head.requires_grad_(False)
        return made
    return dataclasses.replace(mlp(), module=module)


def statistics_of_the_batch() -> Target:
    """Use a custom norm that mixes samples, of a class that certify does not know."""
    class Normed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) / x.std(0)
    return dataclasses.replace(conv(), module=lambda: nn.Sequential(Normed(), *convolutions()))


def tied_weight_copied() -> Target:
    def module() -> nn.Module:
        table = nn.Embedding(5, 8)
        made = nn.Sequential(table, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5, bias=False))
        made[3].weight = nn.Parameter(table.weight.detach().clone())
        return made
    return Target(module=module, batch=symbols, loss=classes)


def symbols(seed: int, number: int, dp_rank: int, dp_size: int) -> dict[str, Tensor]:
    x = torch.randint(5, (SAMPLES,), generator=torch.Generator().manual_seed(1000 * seed + number))
    return {"x": x.chunk(dp_size)[dp_rank], "y": (2 * x % 5).chunk(dp_size)[dp_rank]}


def not_a_target() -> dict[str, Any]:
    return {"module": TwoLosses}
