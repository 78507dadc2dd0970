"""Run by several ranks: train a tied model under ZeRO 1 and 2, with and without overlapped gradient reduction.

    mpiexec -n 3 python3 tests/helpers/overlap_ranks.py FOLDER zero1+1000 zero1+1000+overlap …

The number is the bucket size in elements. Rank 0 writes FOLDER/results.json: for each run the losses, the gradient
norms, and for each parameter the sum of its elements' bit patterns.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from engine_ranks import BLOCK, CONFIGS, gathered
from rank_jobs import sequences, take_runs

from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.build import build_engine
from ezpz_llm.training.engine.deepspeed_engine import DeepSpeedEngine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_groups, init_weights

STEPS, ACCUMULATION, PER_MICRO_STEP = 5, 2, 2


def train(dist: Dist, run: str) -> dict[str, Any]:
    """Train a few steps of two micro-steps each, with clipping."""
    layout, bucket, *overlap = run.split("+")
    values = json.loads((data_dir("ds_configs") / f"{layout}.json").read_text())
    values["zero_optimization"].update(reduce_bucket_size=int(bucket), overlap_comm=bool(overlap))
    path = dist.run_dir.path / f"{run}.json"
    if dist.is_main:
        path.write_text(json.dumps(values))
    dist.barrier()
    batch = PER_MICRO_STEP * ACCUMULATION * dist.world_size
    # Without a device, since overlap is rejected on a CPU.
    resolved = resolve(Request(str(path), world_size=dist.world_size, clip=0.5, global_batch=batch,
                               accumulation=ACCUMULATION, precision="fp32"))
    config = CONFIGS["gpt2"]
    assert config.tied
    model = GPT(config)
    init_weights(model, config, 1337)
    engine = build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                          param_groups=decay_groups(model, 0.1))
    assert isinstance(engine, DeepSpeedEngine)
    assert engine._engine.optimizer.overlap_comm == bool(overlap)
    losses, norms = [], []
    for step in range(STEPS):
        mine = sequences(step, batch, BLOCK + 1).chunk(dist.world_size)[dist.rank].chunk(ACCUMULATION)
        total = torch.zeros(())
        for index, part in enumerate(mine):
            loss = engine.module(part[:, :-1], part[:, 1:])
            engine.backward(loss, is_last=index == ACCUMULATION - 1)
            total += loss.detach()
        norms.append(engine.step(1e-3).item())
        losses.append(gathered(total, dist.world_size))
    return {"losses": losses, "norms": norms,
            "bits": [parameter.detach().view(torch.int32).long().sum().item() for parameter in model.parameters()]}


if __name__ == "__main__":
    take_runs(train)
