"""Training script for one of five models: data, schedule, clipping, evaluation, checkpoints, own state.

Usage: launch -n 2 --run-dir DIR python3 five_models.py MODEL LAYOUT [LAST], MODEL being a key of RECIPES. Continues
after the newest checkpoint of the run directory. Every rank kills itself after step LAST.
"""

from __future__ import annotations

import copy
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from library_models import TRAININGS, Batch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, StackDataset, default_collate

import ezpz_llm

STEPS, SAVE_EVERY, EVALUATE_EVERY = 20, 5, 2
BATCH, SAMPLES = 8, 40
"""Samples in a micro-batch over all ranks, and training samples: the runs have 4 epochs, or 8 with accumulation."""


@dataclass(frozen=True)
class Recipe:
    """Settings of a training that differ between the models.

    Attributes:
        schedule: function that creates the learning rate schedule.
        clip: maximum gradient norm.
        clips_with: function that clips: "wrap", "torch" or "model".
        draws: draw samples with a generator that is saved in checkpoints, instead of epochs with a sampler.
        averages: also keep a moving average of the weights.
        log_every: recorded steps that are written together.
    """

    schedule: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
    clip: float = 0.0
    clips_with: str = "wrap"
    accumulation: int = 1
    draws: bool = False
    averages: bool = False
    log_every: int = 10


def warm_up_and_decay(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Return a schedule with a linear warm-up, followed by half a cosine."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4)
                                 * 0.5 * (1.0 + math.cos(math.pi * step / STEPS)))


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Return a schedule that also changes the first beta of AdamW."""
    return lr_scheduler.OneCycleLR(optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=STEPS)


def reduced_on_plateau(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Return a schedule whose later learning rates depend on its state: the best loss, and evaluations since."""
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2, threshold=0.01)


RECIPES = {
    "gpt2": Recipe(warm_up_and_decay, clip=1.0, accumulation=2),
    "qwen3": Recipe(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS), clip=0.5,
                    clips_with="torch", log_every=4),
    "vit": Recipe(one_cycle, clip=0.5),
    "unet": Recipe(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.95), averages=True, log_every=1),
    "lstm": Recipe(reduced_on_plateau, clip=0.25, clips_with="model", draws=True),
}


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer, lr_scheduler.LRScheduler]:
    """Return a model, its AdamW with weight decay for matrices only, and the schedule."""
    training = TRAININGS[name]
    torch.manual_seed(0)
    model = training.module()
    optimizer = torch.optim.AdamW([
        {"params": [parameter for parameter in model.parameters() if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in model.parameters() if parameter.dim() < 2], "weight_decay": 0.0}],
        lr=training.lr, eps=training.eps)
    return model, optimizer, RECIPES[name].schedule(optimizer)


def data_of(name: str) -> tuple[StackDataset, Batch]:
    """Return the training data, and a batch for evaluation."""
    draw, generator = TRAININGS[name].batch, torch.Generator().manual_seed(1)
    return StackDataset(**draw(generator, SAMPLES)), draw(generator, BATCH)


def epochs(data: StackDataset, rank: int, ranks: int, done: int) -> Iterator[Batch]:
    """Yield a rank's parts of the batches of all epochs, after the first `done` batches."""
    sampler: DistributedSampler[Batch] = DistributedSampler(data, ranks, rank, seed=2)
    loader = DataLoader(data, BATCH // ranks, sampler=sampler)
    epoch, skipped = divmod(done, len(loader))
    while True:
        sampler.set_epoch(epoch)
        yield from islice(loader, skipped, None)
        epoch, skipped = epoch + 1, 0


def random_batches(data: StackDataset, rank: int, ranks: int, generator: torch.Generator) -> Iterator[Batch]:
    """Yield a rank's parts of random batches."""
    while True:
        samples = torch.randint(len(data), (BATCH,), generator=generator)
        yield default_collate([data[sample] for sample in samples[rank::ranks].tolist()])


def take_step(schedule: lr_scheduler.LRScheduler, val_loss: float | None) -> None:
    """Step the schedule, which may need the loss of an evaluation."""
    if not isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        schedule.step()
    elif val_loss is not None:
        schedule.step(val_loss)


@torch.no_grad()
def move_average(average: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, value in average.state_dict().items():
        value.lerp_(weights[name], 0.1)


@torch.no_grad()
def evaluate(loss_of: Callable[[Any, Batch], Tensor], held_out: Batch, model: Any,
             average: nn.Module | None) -> dict[str, float]:
    """Return the loss of the model, and of its average weights."""
    losses = {"val_loss": loss_of(model.eval(), held_out).item()}
    if average is not None:
        losses["average_loss"] = loss_of(average, held_out).item()
    model.train()
    return losses


def main(name: str, layout: str, last: int = 0) -> None:
    recipe, loss_of = RECIPES[name], TRAININGS[name].loss
    with ezpz_llm.setup(device="cpu", log_every=recipe.log_every) as run:
        data, held_out = data_of(name)
        module, optimizer, schedule = build(name)
        average = copy.deepcopy(module) if recipe.averages else None
        model = ezpz_llm.wrap(module, optimizer, layout, micro_batch=BATCH // run.world_size,
                              accumulation=recipe.accumulation,
                              clip=recipe.clip if recipe.clips_with == "wrap" else None)
        generator = torch.Generator().manual_seed(3)
        done, best = 0, math.inf
        if (state := ezpz_llm.load_checkpoint(model)) is not None:
            done, best = state["step"], state["best"]
            schedule.load_state_dict(state["schedule"])
            generator.set_state(state["generator"])
            if average is not None:
                average.load_state_dict(state["average"])
            if run.is_main:
                print(f"resuming after step {done}")
        batches = (random_batches(data, run.rank, run.world_size, generator) if recipe.draws
                   else epochs(data, run.rank, run.world_size, done * recipe.accumulation))
        for step in range(done + 1, STEPS + 1):
            loss_sum = torch.zeros(())
            for _ in range(recipe.accumulation):
                with ezpz_llm.phase("data"):
                    batch = next(batches)
                loss = loss_of(model, batch)
                model.backward(loss)
                if recipe.clips_with == "torch":
                    norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
                elif recipe.clips_with == "model":
                    norm = model.clip_grad_norm_(recipe.clip)
                else:
                    norm = None
                model.step()
                loss_sum += loss.detach() / recipe.accumulation
            if average is not None:
                move_average(average, model.state_dict())
            figures: dict[str, float] = {}
            if step % EVALUATE_EVERY == 0:
                with ezpz_llm.phase("evaluation"):
                    figures = evaluate(loss_of, held_out, model, average)
                figures["best"] = best = min(best, figures["val_loss"])
            take_step(schedule, figures.get("val_loss"))
            ezpz_llm.record(step, loss=loss_sum, tokens=BATCH * recipe.accumulation // run.world_size,
                            grad_norm=norm, **figures)
            if step % SAVE_EVERY == 0:
                ezpz_llm.save_checkpoint(model, step, best=best, schedule=schedule.state_dict(),
                                         generator=generator.get_state(),
                                         average=None if average is None else average.state_dict())
            if step == last:
                os.kill(os.getpid(), signal.SIGKILL)


def plain(name: str) -> tuple[list[dict[str, float]], nn.Module]:
    """Train in this process with plain torch, on whole batches; return the values of each step, and the model."""
    recipe, loss_of = RECIPES[name], TRAININGS[name].loss
    data, held_out = data_of(name)
    model, optimizer, schedule = build(name)
    average = copy.deepcopy(model) if recipe.averages else None
    batches = (random_batches(data, 0, 1, torch.Generator().manual_seed(3)) if recipe.draws
               else epochs(data, 0, 1, 0))
    curve, best = [], math.inf
    for step in range(1, STEPS + 1):
        values = {"step": step, "loss": 0.0}
        optimizer.zero_grad()
        for batch in islice(batches, recipe.accumulation):
            loss = loss_of(model, batch) / recipe.accumulation
            loss.backward()
            values["loss"] += loss.item()
        values["grad_norm"] = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip or math.inf).item()
        optimizer.step()
        if average is not None:
            move_average(average, model.state_dict())
        if step % EVALUATE_EVERY == 0:
            values |= evaluate(loss_of, held_out, model, average)
            values["best"] = best = min(best, values["val_loss"])
        take_step(schedule, values.get("val_loss"))
        curve.append({**values, "lr": optimizer.param_groups[0]["lr"]})
    return curve, model


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
