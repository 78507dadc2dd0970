"""Run by several ranks: collectives and memory of a training step, by layout and precision.

    mpiexec -n 2 python3 tests/helpers/recipe_ranks.py FOLDER bf16:fsdp2 bf16:zero2:bf16:fp32 …

A run may end in the dtypes for gradient accumulation and reduction. Rank 0 writes FOLDER/results.json: for each run
the collectives of a steady-state step and the bytes of each kind of state.
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from divided_ranks import make_engine
from rank_jobs import sequences

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.collectives import CollectiveCounter
from ezpz_llm.training.engine.live_memory import live_storages, live_tensor_memory
from ezpz_llm.training.layout.precision_recipes import GradientDtypes
from ezpz_llm.training.model.config import get_model_config

CONFIG = get_model_config("tiny-gpt2", n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=64, dropout=0.0)


def observed(dist: Dist, run: str) -> dict[str, Any]:
    """Return collectives and memory of the second step."""
    precision, layout, *gradients = run.split(":")
    gc.collect()
    before = live_storages()
    engine = make_engine(dist, layout, CONFIG, precision, gradients=GradientDtypes(*gradients))  # type: ignore[arg-type]
    losses = [engine.train_step(micro_batches(engine, dist), 1e-3, untimed)[0].item()]
    held: dict[str, int] = {}
    engine.step_skip.at_step = lambda: held.update(live_tensor_memory(engine, before))
    counter = CollectiveCounter()
    with counter:
        loss, norm = engine.train_step(micro_batches(engine, dist), 1e-3, untimed)
    with engine.evaluating():
        engine.loss_sum(*(sequences(0, 2, CONFIG.block_size) for _ in range(2)))
    evaluated = live_tensor_memory(engine, before)
    return {"collectives": counter.totals(), "held": held, "parameters at end": evaluated["parameters"],
            "master at end": evaluated["master"], "losses": [*losses, loss.item()], "norm": norm.item()}


def untimed(phase: str) -> AbstractContextManager[None]:
    return nullcontext()


def micro_batches(engine: Engine, dist: Dist) -> list[tuple[torch.Tensor, ...]]:
    """Return this rank's micro-batches of a step."""
    rows = sequences(0, 8, CONFIG.block_size + 1).chunk(engine.batch.dp_size)[dist.mesh.dp_rank]
    return [(part[:, :-1], part[:, 1:]) for part in rows.chunk(engine.batch.accumulation)]


if __name__ == "__main__":
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    with setup(device="cpu", run_dir=folder / "run") as dist:
        results = {run: observed(dist, run) for run in runs}
        if dist.is_main:
            (folder / "results.json").write_text(json.dumps(results))
