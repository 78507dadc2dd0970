"""Run by one or more ranks: train a tiny model under each given layout and write the results of every step.

    mpiexec -n 2 python3 tests/helpers/engine_ranks.py FOLDER fp32:reference bf16_autocast:ddp+early-sync …

A plus after the layout adds an injected fault or a setting. `reference` is one process in the same precision.
Rank 0 writes FOLDER/<precision>-<layout>.json.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_jobs import sequences

from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine import build
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.engine.build import build_engine
from ezpz_llm.training.engine.deepspeed_engine import DeepSpeedEngine
from ezpz_llm.training.engine.torch_engine import TorchEngine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_groups, init_weights

STEPS, GLOBAL_BATCH, ACCUMULATION, CLIP = 20, 8, 2, 0.5
BLOCK = 32
CONFIGS = {shape: replace(get_model_config(f"tiny-{shape}", n_layer=2, n_head=2, n_kv_head=1 + (shape == "gpt2"),
                                           n_embd=32, block_size=BLOCK), vocab_size=64)
           for shape in ("gpt2", "llama")}


def make_engine(dist: Dist, layout: str, precision: str, options: list[str]) -> MicroStepEngine:
    """Build the engine of a layout, with the same initial model for all layouts."""
    source = "ddp" if layout == "reference" else layout
    if "buckets" in options:
        path = dist.run_dir.path / f"{layout}-buckets.json"
        values = json.loads((data_dir("ds_configs") / f"{layout}.json").read_text())
        values["zero_optimization"].update(reduce_bucket_size=1000, allgather_bucket_size=1000, overlap_comm=True,
                                           stage3_param_persistence_threshold=0)
        path.write_text(json.dumps(values))
        source = str(path)
    resolved = resolve(Request(source, world_size=dist.world_size, clip=CLIP, global_batch=GLOBAL_BATCH,
                               accumulation=ACCUMULATION, precision=precision))
    model = GPT(CONFIGS["llama" if "llama" in options else "gpt2"])
    init_weights(model, model.config, 1337)
    engine = build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                          param_groups=decay_groups(model, 0.1))
    if "undivided" in options:
        engine.batch = replace(engine.batch, accumulation=1)
    if "overflow" in options:
        engine.loss_scale.scale = 2.0 ** 22
    assert isinstance(engine, MicroStepEngine)
    return engine


def train(dist: Dist, name: str, precision: str) -> dict:
    """Train STEPS steps with accumulation, clipping, decay and a varying learning rate; return losses and norms."""
    layout, *options = name.split("+")
    engine = make_engine(dist, layout, precision, options)
    dp_size = engine.batch.dp_size
    rounds = count_rounds(engine)
    losses, norms = [], []
    for step in range(STEPS):
        data = sequences(step, GLOBAL_BATCH, BLOCK + 1)
        mine = data.chunk(dp_size)[dist.mesh.dp_rank].chunk(ACCUMULATION)
        total = torch.zeros(())
        for index, part in enumerate(mine):
            last = index == (0 if "early-sync" in options else ACCUMULATION - 1)
            loss = engine.module(part[:, :-1], part[:, 1:])
            engine.backward(loss, is_last=last)
            total += loss.detach() / ACCUMULATION
        norms.append(gathered(engine.step(2e-3 * (1 + math.cos(math.pi * step / STEPS))), dp_size))
        losses.append(sum(gathered(total, dp_size)) / dp_size)
    held_out = sequences(STEPS, GLOBAL_BATCH, BLOCK + 1)
    with engine.evaluating():
        modes = [engine.module.training]
        evaluated = gathered(engine.module(held_out[:, :-1], held_out[:, 1:]), dp_size)
    return {"losses": losses, "norms": [norm[0] for norm in norms], "evaluated": evaluated[0],
            "norms_agree": all(len(set(norm)) == 1 for norm in norms), "ranks_agree": len(set(evaluated)) == 1,
            "rounds": rounds[0], "training": [*modes, engine.module.training], "skipped": engine.skipped_steps,
            "keys": list(engine.module.state_dict()),
            "optimizer_is_models": optimizer_parameters(engine) == {id(p) for p in engine.module.parameters()}}


def gathered(value: torch.Tensor, dp_size: int) -> list[float]:
    """Return the 0-d value of every rank."""
    if dp_size == 1:
        return [value.item()]
    values = [torch.zeros(()) for _ in range(dp_size)]
    torch.distributed.all_gather(values, value.detach().float().clone())
    return [entry.item() for entry in values]


def count_rounds(engine: MicroStepEngine) -> list[int]:
    """Count the buckets that ddp reduces. The model fits one bucket, so one bucket is one reduction round."""
    count = [0]
    for bucket in [] if (reducer := getattr(engine, "_reducer", None)) is None else reducer._buckets:
        def counted(group: Any, reduce: Callable[[Any], None] = bucket.reduce) -> None:
            count[0] += 1
            reduce(group)
        bucket.reduce = counted
    return count


def optimizer_parameters(engine: MicroStepEngine) -> set[int] | None:
    """Return the ids of the parameters in torch's AdamW; None for other optimizers."""
    assert isinstance(engine, DeepSpeedEngine | TorchEngine)
    optimizer = engine._engine.optimizer if isinstance(engine, DeepSpeedEngine) else engine._optimizer
    if not isinstance(optimizer, torch.optim.AdamW):
        return None
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def main() -> None:
    build.check_precision = lambda *args: None  # fp16 is supported on CPUs, but slow
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    with setup(device="cpu", run_dir=folder / "run") as dist:
        alone = Dist(RankInfo(0, 1, 0, 1, 0, "test"), dist.device, None, Mesh(Degrees(1), 0), dist.run_dir)
        for run in runs:
            precision, name = run.split(":")
            result = train(alone if name.startswith("reference") else dist, name, precision)
            if dist.is_main:
                (folder / f"{precision}-{name}.json").write_text(json.dumps(result))
                print(run, result["losses"][-1], flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
