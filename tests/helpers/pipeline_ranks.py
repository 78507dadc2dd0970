"""Run by several ranks: train tiny models under pipeline parallelism and write the results of every step.

    mpiexec -n 2 python3 tests/helpers/pipeline_ranks.py DIR gpt2:fp32:ddp gpt2:fp32:pp2 …

A run is a shape, a precision and a layout with options. `ddp` runs in one process, the others on all ranks, `ppN`
and `ppN_tpN` with these degrees. Rank 0 writes FOLDER/<run>.json, with dashes for colons.
"""

from __future__ import annotations

import gc
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_jobs import sequences

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training import checkpoint
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine import build
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.engine.collectives import CollectiveCounter
from ezpz_llm.training.engine.pipeline_engine import PipelineEngine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.init import decay_groups
from ezpz_llm.training.model.recomputation import recompute_blocks

STEPS, GLOBAL_BATCH, ACCUMULATION, CLIP, BLOCK = 8, 8, 4, 0.5, 32


def config_of(shape: str, options: list[str]) -> ModelConfig:
    """Return a model of four blocks.

    gpt2 has tied embeddings, the others do not; slowed has Llama 3.2's RoPE.

    gpt2_normed has QK norm.
    """
    small: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_kv_head": 4 if shape == "gpt2" else 2, "n_embd": 32,
                             "block_size": BLOCK}
    if shape == "gpt2_normed":
        shape, small = "gpt2", {**small, "qk_norm": "head"}
    if shape == "slowed":
        shape, small = "llama", {**small, "rope_theta": 50.0, "rope_factor": 8.0, "rope_context": 16}
    dropout = 0.2 if "dropout" in options else 0.0
    # Large enough for collectives whose order of summation depends on an element's position.
    vocab_size = 3000 if "wide" in options else 64
    return replace(get_model_config(f"tiny-{shape}", **small), vocab_size=vocab_size, tied=shape == "gpt2",
                   dropout=dropout)


class Run:
    """A run: its layout, engine, and training steps."""

    def __init__(self, dist: Dist, name: str) -> None:
        self.shape, self.precision, layout = name.split(":")
        self.layout, *self.options = layout.split("+")
        alone = Dist(RankInfo(0, 1, 0, 1, 0, "test"), dist.device, None, Mesh(Degrees(1), 0), dist.run_dir)
        self.dist = alone if self.layout == "ddp" else dist
        degrees = {axis: int(size) for axis, size in re.findall(r"(pp|tp)(\d)", self.layout)}
        self.dist.arrange(**degrees)
        self.accumulation = ACCUMULATION * 2 ** self.options.count("small")
        source = "pp2" if degrees else self.layout
        self.resolved = resolve(Request(source, world_size=self.dist.world_size, clip=CLIP,
                                        accumulation=self.accumulation,
                                        global_batch=GLOBAL_BATCH * (3 if "wide" in self.options else 1),
                                        precision=self.precision, **degrees))
        self.spans: Counter[str] = Counter()
        self.engine = self._engine()

    def _engine(self) -> Engine:
        resolved = self.resolved
        if "time" in self.options:
            resolved = replace(resolved, layout=replace(resolved.layout, partition="time"))
        model = assemble(config_of(self.shape, self.options), resolved.layout, self.dist.mesh, 1337)
        recompute_blocks(model, 1 if "recompute" in self.options else 2 if "recompute-half" in self.options else 0)
        engine = build_engine(model, resolved, self.dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                              param_groups=decay_groups(model, 0.1))
        if "overflow" in self.options:
            engine.loss_scale.scale = 2.0 ** 22
        if "untied" in self.options:
            assert isinstance(engine, PipelineEngine)
            engine._engine.module.tied_comms.clear()
        if "uneven" in self.options:  # elements are at different positions in each stage's buckets
            assert isinstance(engine, PipelineEngine)
            engine._engine.optimizer.reduce_bucket_size = 10 ** 6
        torch.manual_seed(self.dist.mesh.place("pp", "dp")[0])
        return engine

    @contextmanager
    def _span(self, phase: str) -> Iterator[None]:
        self.spans[phase] += 1
        yield

    def train(self, first: int, stop: int) -> tuple[list[float], list[float]]:
        """Train steps [first, stop) with clipping, decay and a varying learning rate. Return losses and norms."""
        mesh, losses, norms = self.dist.mesh, [], []
        for step in range(first, stop):
            data = sequences(step, self.resolved.batch.global_batch, BLOCK + 1)
            mine = data.chunk(mesh.dp_size)[mesh.dp_rank].chunk(self.accumulation)
            rate = 1e-3 * (1 + math.cos(math.pi * step / STEPS))
            loss, norm = self.engine.train_step(((part[:, :-1], part[:, 1:]) for part in mine), rate, self._span)
            losses.append(sum(self.gathered(loss)) / self.dist.world_size)
            norms += set(self.gathered(norm))  # a single value if all ranks agree
        return losses, norms

    def gathered(self, value: torch.Tensor) -> list[float]:
        """Return the 0-d value of every rank."""
        if self.dist.world_size == 1:
            return [value.item()]
        values = [torch.zeros(()) for _ in range(self.dist.world_size)]
        torch.distributed.all_gather(values, value.detach().float().clone())
        return [entry.item() for entry in values]

    def result(self) -> dict[str, Any]:
        """Train STEPS steps and evaluate the model."""
        with CollectiveCounter() as counter:
            losses, norms = self.train(0, STEPS)
        held_out, mesh = sequences(STEPS, 4, BLOCK + 1), self.dist.mesh
        with self.engine.evaluating():
            parts = self.gathered(self.engine.loss_sum(held_out[:, :-1], held_out[:, 1:]))
            logits = self.engine.next_logits(held_out[:, :9])
        holders = mesh.size("dp", "tp")  # every rank of the last stage has the whole sum
        return {"losses": losses, "norms": norms, "loss_sum": sum(parts) / holders, "logits": logits.tolist(),
                "logits_agree": len(set(self.gathered(logits.sum()))) == 1, "table_differs": self.table_differs(),
                "skipped": self.engine.skipped_steps, "spans": self.spans,
                "sends": sorted(counter.found["send"])}

    def table_differs(self) -> int | None:
        """Count the elements that differ between a tied embedding's copies, over stages and data-parallel ranks."""
        mesh, config = self.dist.mesh, config_of(self.shape, self.options)
        if not config.tied or not isinstance(self.engine, PipelineEngine) or mesh.tp_size > 1:
            return None
        table = self.engine.module.table
        mine = (torch.zeros(config.padded_vocab_size, config.n_embd) if table is None
                else table.weight.detach().clone())
        tables = [torch.zeros_like(mine) for _ in range(self.dist.world_size)]
        torch.distributed.all_gather(tables, mine)
        return sum(int((tables[0] != other).sum()) for other in tables if other.any())


def resume(dist: Dist, source: str, target: str) -> dict[str, Any]:
    """Train half of the steps under one layout, and the rest from its checkpoint under another."""
    before = Run(dist, source)
    losses, norms = before.train(0, STEPS // 2)
    run_dir = RunDir(dist.run_dir.path / source.replace(":", "-"))
    if dist.is_main:
        run_dir.create()
    if before.dist is dist or dist.is_main:
        checkpoint.save(before.engine, before.dist, run_dir, checkpoint.Progress(step=STEPS // 2))
    dist.barrier()
    after = Run(dist, target)
    checkpoint.load(checkpoint.find(run_dir.path), after.engine, after.dist)
    more_losses, more_norms = after.train(STEPS // 2, STEPS)
    return {"losses": losses + more_losses, "norms": norms + more_norms, "table_differs": after.table_differs()}


def main() -> None:
    build.check_precision = lambda *args: None  # fp16 is supported on CPUs, but slow
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    with setup(device="cpu", run_dir=folder / "run") as dist:
        for name in runs:
            source, _, target = name.partition("=>")
            result = resume(dist, source, target) if target else Run(dist, source).result()
            if dist.is_main:
                (folder / f"{name.replace(':', '-')}.json").write_text(json.dumps(result))
            gc.collect()


if __name__ == "__main__":
    main()
