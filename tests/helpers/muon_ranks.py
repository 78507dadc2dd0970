"""Run by several ranks: train with Muon under each layout, and compare with a plain loop in one process.

Usage: mpiexec -n 2 python3 muon_ranks.py FOLDER RUN…, a RUN being LAYOUT, or LAYOUT:LAYOUT, where the second layout
resumes from a checkpoint of the first after half of the steps. A suffix +skip skips all steps because of their
gradient norms, +parts is an injected fault: each rank orthogonalizes only its parts of the matrices.
"""

from __future__ import annotations

import functools
import math
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from rank_jobs import sequences, take_runs
from safetensors import safe_open
from torch import Tensor, nn

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training import checkpoint
from ezpz_llm.training.checkpoint.index import read_index
from ezpz_llm.training.checkpoint.reader import fill
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_groups, init_weights
from ezpz_llm.training.model.parameters import whole_box

STEPS, GLOBAL_BATCH, ACCUMULATION, CLIP, BLOCK, DECAY, SEED = 6, 24, 2, 0.5, 32, 0.1, 1337
# Widths that partitions over ranks do not divide into whole rows.
CONFIG = get_model_config("tiny-llama", n_layer=2, n_head=4, n_kv_head=2, n_embd=24, intermediate_size=44,
                          block_size=BLOCK, vocab_size=64, tied=True)
BETAS, EPS = (0.9, 0.95), 1e-8


def rate(step: int) -> float:
    return 5e-3 * (1 + math.cos(math.pi * step / STEPS))


def make(dist: Dist, layout: str) -> Engine:
    resolved = resolve(Request(layout, world_size=dist.world_size, clip=CLIP, global_batch=GLOBAL_BATCH,
                               accumulation=ACCUMULATION, precision="fp32", optimizer="muon"))
    dist.arrange(tp=resolved.layout.tp, pp=resolved.layout.pp, sp=resolved.layout.sp)
    model = assemble(CONFIG, resolved.layout, dist.mesh, SEED)
    return build_engine(model, resolved, dist, lr=1e-3, betas=BETAS, eps=EPS,
                        param_groups=decay_groups(model, DECAY))


def train(engine: Engine, dist: Dist, first: int, stop: int) -> list[float]:
    """Train steps [first, stop). Return the gradient norms."""
    norms = []
    for step in range(first, stop):
        data = sequences(step, GLOBAL_BATCH, BLOCK + 1)
        mine = data.chunk(dist.mesh.dp_size)[dist.mesh.dp_rank].chunk(ACCUMULATION)
        batches = [(part[:, :-1], part[:, 1:]) for part in mine]
        norms.append(engine.train_step(batches, rate(step), lambda phase: nullcontext())[1].item())
    return norms


def orthogonalized(gradient: Tensor) -> Tensor:
    """Return Muon's direction by its definition, in fp64: an odd polynomial of the singular values, five times."""
    left, values, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (0.2 * max(gradient.shape) ** 0.5 * (left * values) @ right).float()


@functools.cache
def one_process() -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Return initial and final weights, and gradient norms, of a plain loop."""
    model = GPT(CONFIG)
    init_weights(model, CONFIG, SEED)
    named = dict(model.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in named.items()}
    matrices = {name: torch.zeros_like(p) for name, p in named.items() if ".h." in name and p.dim() == 2}
    others = [name for name in named if name not in matrices]
    adam = torch.optim.AdamW([{"params": [named[name] for name in others if named[name].dim() == 2]},
                              {"params": [named[name] for name in others if named[name].dim() == 1],
                               "weight_decay": 0.0}], betas=BETAS, eps=EPS, weight_decay=DECAY)
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        for part in sequences(step, GLOBAL_BATCH, BLOCK + 1).chunk(ACCUMULATION):
            (model(part[:, :-1], part[:, 1:]) / ACCUMULATION).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        for group in adam.param_groups:
            group["lr"] = rate(step)
        adam.step()
        with torch.no_grad():
            for name, momentum in matrices.items():
                gradient = named[name].grad
                momentum.mul_(0.95).add_(gradient, alpha=0.05)
                direction = orthogonalized(0.05 * gradient + 0.95 * momentum)
                named[name].mul_(1 - rate(step) * DECAY).sub_(rate(step) * direction)
    return start, {name: parameter.detach() for name, parameter in named.items()}, norms


def read(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return all tensors of a checkpoint by parameter and kind."""
    index, whole = read_index(folder), {}
    with ExitStack() as stack:
        open_file = functools.cache(lambda name: stack.enter_context(safe_open(folder / name, framework="pt")))
        for name, stored in index.parameters.items():
            size = math.prod(stored.shape)
            tensors = {kind: torch.zeros(size) for kind in index.kinds if kind not in stored.without}
            fill(tensors, (whole_box(stored.shape), 0, size), stored, open_file)
            whole[name] = {kind: tensor.view(stored.shape) for kind, tensor in tensors.items()}
    return whole


def save(engine: Engine, dist: Dist, name: str, step: int) -> Path:
    run_dir = RunDir(dist.run_dir.path / name.replace(":", "-"))
    checkpoint.save(engine, dist, run_dir, checkpoint.Progress(step=step))
    return checkpoint.find(run_dir.path)


def compare(dist: Dist, run: str) -> dict[str, Any]:
    """Return the largest differences of weights relative to the distance they moved, and of norms."""
    first, _, second = run.partition(":")
    first, _, option = first.partition("+")
    engine = make(dist, first)
    if option == "skip":
        engine.step_skip.limit = 0.0
    if option == "parts":
        matrices = engine.training_state().optimizer.matrices
        matrices._group, matrices._is_replicated = None, True
    norms = train(engine, dist, 0, STEPS // 2 if second else STEPS)
    if second:
        middle = save(engine, dist, f"{run}-middle", STEPS // 2)
        engine = make(dist, second)
        checkpoint.load(middle, engine, dist)
        norms += train(engine, dist, STEPS // 2, STEPS)
    stored = read(save(engine, dist, run, STEPS))
    start, expected, expected_norms = one_process()
    if option == "skip":
        return {"unchanged": all(stored[name]["weight"].equal(value) for name, value in start.items())}
    apart = {name: ((stored[name]["weight"] - value).norm() / (value - start[name]).norm()).item()
             for name, value in expected.items()}
    matrices = engine.training_state().optimizer.matrices._matrices
    owners = {matrix.owner for members in matrices.values() for matrix in members}
    return {"owners": len(owners), "weights": max(apart.values()),
            "worst": max(apart, key=lambda name: apart[name]),
            "norms": max(abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True)),
            "kinds": sorted({("matrix" if ".h." in name and value.dim() == 2 else "other", *stored[name])
                             for name, value in expected.items()})}


if __name__ == "__main__":
    take_runs(compare)
