"""Run by two ranks: train models under layouts with offload and write the results of every step.

    mpiexec -n 2 python3 tests/helpers/offload_ranks.py FOLDER gpt2:fp32:ddp llama:bf16_autocast:zero2+offload …

A run is a shape, a precision and a layout; pluses add settings to its ds_config. `ddp` runs in one process.
Parameters are large enough for DeepSpeed to move them into files. Rank 0 writes FOLDER/<run>.json, with dashes for
colons. Two runs joined by an arrow train half of the steps each, with a checkpoint in between.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_jobs import sequences

from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training import checkpoint
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.engine.deepspeed_engine import DeepSpeedEngine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.init import decay_groups

STEPS, GLOBAL_BATCH, ACCUMULATION, CLIP, BLOCK = 6, 8, 2, 0.5, 32
SETTINGS: dict[str, dict[str, Any]] = {
    "offload": {"offload_optimizer": {"device": "cpu"}},
    "unpinned": {"offload_optimizer": {"pin_memory": False}, "offload_param": {"pin_memory": False}},
    "pieces": {"sub_group_size": 300_000, "stage3_param_persistence_threshold": 0},
    "overlap": {"offload_optimizer": {"pipeline_read": True, "pipeline_write": True}},
    "some_in_memory": {"offload_param": {"max_in_cpu": 1_000_000}},
    "only_optimizer": {"offload_param": {"device": "none"}},
    "only_parameters": {"offload_optimizer": {"device": "none"}},
    "optimizer_in_memory": {"offload_optimizer": {"device": "cpu"}},
    "parameters_in_memory": {"offload_param": {"device": "cpu"}},
}


def config_of(shape: str) -> ModelConfig:
    return replace(get_model_config(f"tiny-{shape}", n_layer=1, n_head=4, n_kv_head=4 if shape == "gpt2" else 2,
                                    n_embd=512, block_size=BLOCK), vocab_size=64, tied=shape == "gpt2")


class Run:
    """A run: its layout, engine, and training steps."""

    def __init__(self, dist: Dist, name: str) -> None:
        self.shape, self.precision, layout = name.split(":")
        self.layout, *settings = layout.split("+")
        alone = Dist(RankInfo(0, 1, 0, 1, 0, "test"), dist.device, None, Mesh(Degrees(1), 0), dist.run_dir)
        self.dist = alone if self.layout == "ddp" else dist
        source = self._own_config(settings) if settings else self.layout
        self.resolved = resolve(Request(source, world_size=self.dist.world_size, clip=CLIP,
                                        accumulation=ACCUMULATION, global_batch=GLOBAL_BATCH,
                                        precision=self.precision, model=config_of(self.shape)))
        self.engine = self.make()

    def _own_config(self, settings: list[str]) -> str:
        values = json.loads((data_dir("ds_configs") / f"{self.layout}.json").read_text())
        zero = values["zero_optimization"]
        for setting in settings:
            for key, value in SETTINGS[setting].items():
                zero[key] = {**zero.get(key, {}), **value} if isinstance(value, dict) else value
        path = self.dist.run_dir.path / f"{'+'.join([self.layout, *settings])}.json"
        if self.dist.is_main:
            path.write_text(json.dumps(values))
        self.dist.barrier()
        return str(path)

    def make(self) -> Engine:
        model = assemble(config_of(self.shape), self.resolved.layout, self.dist.mesh, 1337)
        return build_engine(model, self.resolved, self.dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                            param_groups=decay_groups(model, 0.1))

    def train(self, first: int, stop: int) -> tuple[list[float], list[float]]:
        """Train steps [first, stop) with clipping, decay and a varying learning rate. Return losses and norms."""
        losses, norms = [], []
        for step in range(first, stop):
            parts = sequences(step, GLOBAL_BATCH, BLOCK + 1).chunk(self.dist.world_size)
            mine = parts[self.dist.rank % self.dist.world_size]
            rate = 1e-4 * (1 + math.cos(math.pi * step / STEPS))
            loss, norm = self.engine.train_step(((part[:, :-1], part[:, 1:]) for part in mine.chunk(ACCUMULATION)),
                                                rate, lambda phase: nullcontext())
            losses.append(sum(self.gathered(loss)) / self.dist.world_size)
            norms += set(self.gathered(norm))  # a single value if all ranks agree
            if step == 2:
                self.evaluate()
        return losses, norms

    def evaluate(self) -> list[float]:
        data = sequences(STEPS, GLOBAL_BATCH, BLOCK + 1)
        with self.engine.evaluating():
            return self.gathered(self.engine.loss_sum(data[:, :-1], data[:, 1:]))

    def gathered(self, value: torch.Tensor) -> list[float]:
        """Return the 0-d value of every rank."""
        if self.dist.world_size == 1:
            return [value.item()]
        values = [torch.zeros(()) for _ in range(self.dist.world_size)]
        torch.distributed.all_gather(values, value.detach().float().clone())
        return [entry.item() for entry in values]

    def files(self) -> dict[str, int]:
        """Return the sizes of this rank's offload files, by file name."""
        zero = self.engine._engine._config.zero_config if isinstance(self.engine, DeepSpeedEngine) else None
        folders = {Path(block.nvme_path) for block in (zero.offload_optimizer, zero.offload_param)
                   if block is not None and block.nvme_path is not None} if zero else set()
        return {path.name: path.stat().st_size for folder in folders for path in sorted(folder.rglob("*.swp"))}


def result_of(dist: Dist, name: str) -> dict[str, Any]:
    """Train STEPS steps and evaluate the model."""
    began = time.monotonic()
    run = Run(dist, name)
    losses, norms = run.train(0, STEPS)
    return {"losses": losses, "norms": norms, "evaluated": run.evaluate(), "files": run.files(),
            "seconds": time.monotonic() - began}


def resumed(dist: Dist, pair: str) -> dict[str, Any]:
    """Train half of the steps under one layout, and the rest from its checkpoint under the other."""
    first, second = pair.split("->")
    run = Run(dist, first)
    begun = run.train(0, STEPS // 2)[0]
    saved = RunDir(dist.run_dir.path / pair.replace(":", "-"))
    folder = checkpoint.save(run.engine, dist, saved, checkpoint.Progress(step=STEPS // 2))
    straight = run.train(STEPS // 2, STEPS)[0]
    del run
    gc.collect()
    run = Run(dist, second)
    run.train(0, 1)  # loading must overwrite state that has been stepped
    checkpoint.load(folder, run.engine, dist)
    return {"begun": begun, "straight": straight, "losses": run.train(STEPS // 2, STEPS)[0]}


def work(dist: Dist, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        yield name, resumed(dist, name) if "->" in name else result_of(dist, name)
        gc.collect()


def main() -> None:
    folder = Path(sys.argv[1])
    with setup(device="cpu", run_dir=folder / "run") as dist:
        for name, result in work(dist, sys.argv[2:]):
            if dist.is_main:
                (folder / f"{name.replace(':', '-')}.json").write_text(json.dumps(result))
                print(name, result["losses"][-1], flush=True)
    gc.collect()


if __name__ == "__main__":
    main()
