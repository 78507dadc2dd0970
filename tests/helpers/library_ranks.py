"""Run by several ranks: wrap models written without layouts, and compare each run with a plain one-process loop.

Usage: mpiexec -n 2 python3 library_ranks.py FOLDER RUN…, a RUN being MODEL:LAYOUT, or MODEL:LAYOUT:LAYOUT, where
the second layout resumes from a checkpoint of the first after half of the steps. MODEL is a key of TRAININGS. A
layout is a name, or hpz; a suffix +bf16 or +bf16_autocast is the precision (default: fp32).
"""

from __future__ import annotations

import functools
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from library_models import TRAININGS as USUAL, Batch
from safetensors import safe_open
from torch import Tensor, nn
from unusual_models import UNUSUAL

import ezpz_llm
from ezpz_llm.training.checkpoint.index import read_index
from ezpz_llm.training.checkpoint.reader import fill
from ezpz_llm.training.model.parameters import whole_box

TRAININGS = {**USUAL, **UNUSUAL}
STEPS, ACCUMULATION, BATCH, CLIP = 6, 2, 4, 0.5
"""Steps, micro-batches in a step, samples in a micro-batch over all ranks, and the clipping threshold."""
AUTOCAST = "bf16_autocast"
AUTOCAST_LR = AUTOCAST_EPS = 10 * CLIP
"""Learning rate and epsilon of AdamW under autocast.

An element of a clipped gradient is at most a tenth of this epsilon. So AdamW divides it by epsilon up to a tenth,
and the relative error of an update is at most 1.1 times that of the gradients.
"""


def precision_of(layout: str) -> str:
    return layout.partition("+")[2] or "fp32"


def micro_batch(kind: str, step: int, number: int, part: int = 0, parts: int = 1) -> Batch:
    """Return a part of a micro-batch."""
    batch = TRAININGS[kind].batch(torch.Generator().manual_seed(100 * step + number), BATCH)
    return {name: tensor.chunk(parts)[part] for name, tensor in batch.items()}


def made(kind: str, seed: int,
         precision: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build a model, an AdamW with two parameter groups, and a learning rate schedule."""
    torch.manual_seed(seed)
    model = TRAININGS[kind].module()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    lr, eps = (AUTOCAST_LR, AUTOCAST_EPS) if precision == AUTOCAST else (TRAININGS[kind].lr, TRAININGS[kind].eps)
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 1e-3 / lr},
                                   {"params": others, "weight_decay": 0.0, "lr": lr / 5}], lr=lr, eps=eps)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def one_process(kind: str, ranks: int, precision: str) -> tuple[nn.Module, list[float], list[float]]:
    """Return the model, losses and gradient norms of a plain loop over the whole batches.

    If the model mixes samples, the batch is split as over ranks. Each part has its own running statistics, which
    are averaged after each step.
    """
    model, optimizer, schedule = made(kind, 0, precision)
    parts = ranks if TRAININGS[kind].mixes_samples else 1
    running = [statistics(model) for _ in range(parts)]
    losses, norms = [], []

    def autocast_model(*inputs: Any, **named: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == AUTOCAST):
            return model(*inputs, **named)

    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number in range(ACCUMULATION):
            for part in range(parts):
                model.load_state_dict(running[part], strict=False)
                batch = micro_batch(kind, step, number, part, parts)
                loss = TRAININGS[kind].loss(autocast_model, batch) / ACCUMULATION / parts
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
    if precision == "bf16":
        values = {precision: {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
                  "communication_data_type": "fp32"}
    elif precision:
        values = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    if base in ("ddp", "fsdp2"):
        values = {key: values[key] for key in ("bf16", "torch_autocast") if key in values}
        values["ezpz_llm"] = {"engine": base}
    elif base == "hpz":
        values["zero_optimization"] = {"stage": 3, "zero_hpz_partition_size": 2}
    else:
        values["zero_optimization"] = {"stage": int(base.removeprefix("zero"))}
    path = folder / f"{name}.json"
    if ezpz_llm.setup().is_main:
        path.write_text(json.dumps(values))
    torch.distributed.barrier()
    return str(path)


def wrapped(run: ezpz_llm.Run, kind: str, layouts: list[str], folder: Path,
            tag: int) -> tuple[Path, list[float], list[float]]:
    """Train under one or two layouts. Return the last checkpoint, losses and gradient norms."""
    losses, norms, done, saved_in = [], [], 0, None
    ends = [STEPS // 2, STEPS] if len(layouts) == 2 else [STEPS]
    for layout, end in zip(layouts, ends, strict=True):
        # Rank 1 gets a different seed, to check that rank 0's initial weights are used.
        model, optimizer, schedule = made(kind, 0 if not done else 5 + run.rank, precision_of(layout))
        engine = ezpz_llm.wrap(model, optimizer, ds_config(folder, layout), micro_batch=BATCH // run.world_size,
                               accumulation=ACCUMULATION, clip=CLIP)
        if saved_in is not None:
            state = ezpz_llm.load_checkpoint(engine, saved_in)
            assert state is not None
            assert (state["mine"], state["layout"]) == ({"step": done}, "the script's")
            schedule.last_epoch = done
            for group, rate in zip(optimizer.param_groups, schedule.base_lrs, strict=True):
                group["lr"] = rate * 0.9**done
        for step in range(done, end):
            total = 0.0
            for number in range(ACCUMULATION):
                loss = TRAININGS[kind].loss(engine, micro_batch(kind, step, number, run.rank, run.world_size))
                engine.backward(loss)
                assert (engine.step() is None) == (number < ACCUMULATION - 1)
                total += loss.item() / ACCUMULATION
            schedule.step()
            mean = torch.tensor(total, dtype=torch.float64)
            torch.distributed.all_reduce(mean)
            losses.append(mean.item() / run.world_size)
            assert engine.grad_norm is not None
            norms.append(float(engine.grad_norm))
        if hasattr(engine.module, "seen"):
            assert isinstance(engine.module.seen, Tensor)
            engine.module.seen += 1
        done = end
        engine.module.requires_grad_(False)  # freezing after wrap does not change a checkpoint
        saved_in = ezpz_llm.save_checkpoint(engine, 100 * tag + done, mine={"step": done}, layout="the script's")
        with torch.no_grad():
            TRAININGS[kind].loss(engine.eval(), micro_batch(kind, 0, 0))
        run.models.clear()
    assert saved_in is not None
    return saved_in, losses, norms


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


def apart(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the error in the 2-norm relative to `expected`, or to elements of `least` if their norm is larger."""
    return ((found - expected).norm() / expected.norm().clamp(min=least * math.sqrt(found.numel()))).item()


def rounded(weight: Tensor, layout: str) -> Tensor:
    """Return a weight as stored in the layout's precision."""
    return weight.detach().to(torch.bfloat16 if precision_of(layout) == "bf16" else torch.float32).float()


def flat(tensors: dict[str, Tensor], order: list[str]) -> Tensor:
    return torch.cat([tensors[name].detach().flatten() for name in order])


def main() -> None:
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    results = {}
    with ezpz_llm.setup(device="cpu", run_dir=folder / "run") as run:
        for tag, name in enumerate(runs, 1):
            kind, *layouts = name.split(":")
            precision = AUTOCAST if precision_of(layouts[0]) == AUTOCAST else "fp32"
            first = dict(made(kind, 0, precision)[0].named_parameters())
            model, losses, norms = one_process(kind, run.world_size, precision)
            expected = {key: parameter.detach() for key, parameter in model.named_parameters()}
            end, our_losses, our_norms = wrapped(run, kind, layouts, folder, tag)
            weights, buffers = saved(end)
            assert weights.keys() == expected.keys()
            # A bias that starts at zero has only the digits of its steps: measure it relative to a full step.
            least = {key: TRAININGS[kind].lr / (1 if value.dim() > 1 else 5) for key, value in expected.items()}
            before, after, ours = (flat(tensors, list(expected)) for tensors in (first, expected, weights))
            results[name] = {
                "weights": max(apart(weights[key], value, least[key]) for key, value in expected.items()),
                "moved": min(apart(value, expected[key]) for key, value in first.items() if value.requires_grad),
                "change": apart(ours - before, after - before),
                "frozen": max((apart(weights[key], rounded(value, layouts[0])) for key, value in first.items()
                               if not value.requires_grad), default=None),
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
