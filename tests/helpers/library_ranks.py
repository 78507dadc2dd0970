"""Run by several ranks: wrap models written without layouts, and compare each run with a plain one-process loop.

Usage: mpiexec -n 2 python3 library_ranks.py FOLDER RUN…, a RUN being MODEL:LAYOUT, or MODEL:LAYOUT:LAYOUT, where
the second layout resumes from a checkpoint of the first after half of the steps. A layout is a name, or hpz; a
suffix +bf16 is the precision (default: fp32).
"""

from __future__ import annotations

import functools
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

import ezpz_llm
from ezpz_llm.checkpoint.index import read_index
from ezpz_llm.checkpoint.reader import fill
from ezpz_llm.model.parameters import whole_box

STEPS, ACCUMULATION, BATCH, CLIP = 6, 2, 4, 0.5
"""Steps, micro-batches in a step, samples in a micro-batch over all ranks, and the clipping threshold."""


class TwoLosses(nn.Module):
    """MLP with its trunk in a ModuleList, a keyword-only input, and two outputs: logits and a reconstruction."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(3))
        self.head, self.back = nn.Linear(8, 5), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        for layer in self.trunk:
            x = x + layer(x)
        return {"logits": self.head(x), "back": self.back(x)}


class Convolutions(nn.Module):
    """Convolutions with GroupNorm, for 1 x 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.GELU(),
                                    nn.Conv2d(6, 9, 3, stride=2), nn.GroupNorm(3, 9), nn.GELU(),
                                    nn.Flatten(), nn.Linear(81, 5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layers(x)}


class RunningStatistics(nn.Module):
    """Convolutions with BatchNorm (so without biases), for the same images, passed in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.GELU(),
                                    nn.Conv2d(6, 9, 3, stride=2, bias=False), nn.BatchNorm2d(9), nn.GELU(),
                                    nn.Flatten(), nn.Linear(81, 5))

    def forward(self, batch: dict[str, list[tuple[Tensor, int]]]) -> dict[str, Tensor]:
        ((pictures, _),) = batch["pictures"]
        return {"logits": self.layers(pictures)}


MODELS = {"mlp": (TwoLosses, (8,)), "conv": (Convolutions, (1, 8, 8)), "norm": (RunningStatistics, (1, 8, 8))}


def micro_batch(kind: str, step: int, number: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and classes of all ranks."""
    generator = torch.Generator().manual_seed(100 * step + number)
    x = torch.randn(BATCH, *MODELS[kind][1], generator=generator)
    return x, torch.randint(5, (BATCH,), generator=generator)


def loss_of(kind: str, given: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(given["logits"], y)
    return loss + nn.functional.mse_loss(given["back"], x) if kind == "mlp" else loss


def called(kind: str, model: object, x: Tensor) -> dict[str, Tensor]:
    assert callable(model)
    if kind == "norm":
        return model({"pictures": [(x, 0)]})
    return model(x=x) if kind == "mlp" else model(x)


def made(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build a model, an AdamW with two parameter groups, and a learning rate schedule."""
    torch.manual_seed(seed)
    model: nn.Module = MODELS[kind][0]()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": others, "weight_decay": 0.0, "lr": 2e-3}], lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def one_process(kind: str, ranks: int) -> tuple[nn.Module, list[float], list[float]]:
    """Return the model, losses and gradient norms of a plain loop over the whole batches.

    With BatchNorm, the batch is split as over ranks. Each part has its own running statistics, which are averaged
    after each step.
    """
    model, optimizer, schedule = made(kind, seed=0)
    parts = ranks if kind == "norm" else 1
    running = [statistics(model) for _ in range(parts)]
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number in range(ACCUMULATION):
            inputs, classes = micro_batch(kind, step, number)
            for part, (x, y) in enumerate(zip(inputs.chunk(parts), classes.chunk(parts), strict=True)):
                model.load_state_dict(running[part], strict=False)
                loss = loss_of(kind, called(kind, model, x), x, y) / ACCUMULATION / parts
                loss.backward()
                total += loss.item()
                running[part] = statistics(model)
        running = [{name: sum(buffers[name] for buffers in running) / parts for name in running[0]}] * parts
        losses.append(total)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        schedule.step()
    model.load_state_dict(running[0], strict=False)
    return model, losses, norms


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the running statistics of all norms."""
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}


def ds_config(folder: Path, name: str) -> str:
    """Return the name of a shipped ds_config, or write one and return its path."""
    base, _, precision = name.partition("+")
    if base != "hpz" and not precision:
        return base
    values: dict[str, object] = {}
    if precision:
        values = {precision: {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
                  "communication_data_type": "fp32"}
    if base in ("ddp", "fsdp2"):
        values = {precision: {"enabled": True}, "ezpz_llm": {"engine": base}}
    elif base == "hpz":
        values["zero_optimization"] = {"stage": 3, "zero_hpz_partition_size": 2}
    else:
        values["zero_optimization"] = {"stage": int(base.removeprefix("zero"))}
    path = folder / f"{name}.json"
    if ezpz_llm.setup().is_main:
        path.write_text(json.dumps(values))
    torch.distributed.barrier()
    return str(path)


def wrapped(run: ezpz_llm.Run, kind: str, layouts: list[str], tag: int) -> tuple[Path, list[float], list[float]]:
    """Train under one or two layouts. Return the last checkpoint, losses and gradient norms."""
    losses, norms, done, folder = [], [], 0, None
    ends = [STEPS // 2, STEPS] if len(layouts) == 2 else [STEPS]
    for layout, end in zip(layouts, ends, strict=True):
        # Rank 1 gets a different seed, to check that rank 0's initial weights are used.
        model, optimizer, schedule = made(kind, seed=0 if not done else 5 + run.rank)
        engine = ezpz_llm.wrap(model, optimizer, layout, micro_batch=BATCH // run.world_size,
                               accumulation=ACCUMULATION, clip=CLIP)
        if folder is not None:
            state = ezpz_llm.load_checkpoint(engine, folder)
            assert state is not None
            assert (state["mine"], state["layout"]) == ({"step": done}, "the script's")
            schedule.last_epoch = done
            for group, rate in zip(optimizer.param_groups, schedule.base_lrs, strict=True):
                group["lr"] = rate * 0.9**done
        for step in range(done, end):
            total = 0.0
            for number in range(ACCUMULATION):
                x, y = (part.chunk(run.world_size)[run.rank] for part in micro_batch(kind, step, number))
                loss = loss_of(kind, called(kind, engine, x), x, y)
                engine.backward(loss)
                assert (engine.step() is None) == (number < ACCUMULATION - 1)
                total += loss.item() / ACCUMULATION
            schedule.step()
            mean = torch.tensor(total, dtype=torch.float64)
            torch.distributed.all_reduce(mean)
            losses.append(mean.item() / run.world_size)
            assert engine.grad_norm is not None
            norms.append(float(engine.grad_norm))
        if kind == "mlp":
            assert isinstance(engine.module.seen, Tensor)
            engine.module.seen += 1
        done = end
        folder = ezpz_llm.save_checkpoint(engine, 100 * tag + done, mine={"step": done}, layout="the script's")
        with torch.no_grad():
            called(kind, engine.eval(), micro_batch(kind, 0, 0)[0])
        run.models.clear()
    assert folder is not None
    return folder, losses, norms


def saved(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the full weights and the buffers of a checkpoint, by name."""
    weights = {}
    with ExitStack() as stack:
        open_file = functools.cache(lambda name: stack.enter_context(safe_open(folder / name, framework="pt")))
        for name, stored in read_index(folder).parameters.items():
            flat = torch.full((math.prod(stored.shape),), math.nan)
            fill({"weight": flat}, (whole_box(stored.shape), 0, flat.numel()), stored, open_file)
            weights[name] = flat.view(stored.shape)
        first = open_file("rank-00000.safetensors")
        return weights, {name.removeprefix("buffer/"): first.get_tensor(name)
                         for name in first.keys() if name.startswith("buffer/")}  # noqa: SIM118


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the relative error in the 2-norm."""
    return ((found - expected).norm() / expected.norm()).item()


def main() -> None:
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    results = {}
    with ezpz_llm.setup(device="cpu", run_dir=folder / "run") as run:
        for tag, name in enumerate(runs, 1):
            kind, *layouts = name.split(":")
            first = dict(made(kind, seed=0)[0].named_parameters())
            model, losses, norms = one_process(kind, run.world_size)
            expected = {key: parameter.detach() for key, parameter in model.named_parameters()}
            end, our_losses, our_norms = wrapped(run, kind, [ds_config(folder, layout) for layout in layouts], tag)
            weights, buffers = saved(end)
            assert weights.keys() == expected.keys()
            results[name] = {
                "weights": max(apart(weights[key], value) for key, value in expected.items()),
                "moved": min(apart(value, expected[key]) for key, value in first.items()),
                "losses": max(abs(a - b) for a, b in zip(losses, our_losses, strict=True)),
                "norms": max(abs(a - b) / b for a, b in zip(our_norms, norms, strict=True)),
                "statistics": max((apart(buffers[key], value) for key, value in statistics(model).items()),
                                  default=0.0),
                "running": [[str(buffer.dtype), *buffer.tolist()] for key, buffer in sorted(buffers.items())
                            if "running" in key],
                "seen": buffers["seen"].tolist() if "seen" in buffers else None}
        if run.is_main:
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
