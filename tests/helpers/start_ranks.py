"""Run by several ranks: build engines from the meta device, and check the initial weights and the memory used.

    mpiexec -n 2 python3 tests/helpers/start_ranks.py FOLDER gpt2:fsdp2 llama:zero3+hpz2 big:zero3 …

A run is a shape and a layout; `+hpzN` adds hpZ's secondary partition over N ranks. Rank 0 writes
FOLDER/results.json.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_groups, init_weights
from ezpz_llm.training.model.parameters import Box

sys.path.append(str(data_dir("benchmarks")))
from start_memory import MODEL, Allocated

SEED = 11
SHAPES = {
    # Matrices with several tiles, so that shards begin and end inside a tile.
    "gpt2": get_model_config("tiny-gpt2", n_layer=2, n_head=4, n_kv_head=4, n_embd=144, block_size=32,
                             vocab_size=332, vocab_multiple=4),
    "llama": get_model_config("tiny-llama", n_layer=2, n_head=4, n_kv_head=2, n_embd=144, block_size=32,
                              vocab_size=332, vocab_multiple=4, intermediate_size=532, tied=False),
    "big": MODEL}


def resident_peak() -> int:
    """Return the peak resident memory in bytes since the last call, and reset it."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def source_of(layout: str, dist: Dist) -> str:
    """Return the ds_config's name, or the path of one with hpZ's secondary partition if the layout has it."""
    name, _, group = layout.partition("+hpz")
    if not group:
        return name
    values = json.loads((data_dir("ds_configs") / f"{name}.json").read_text())
    values["zero_optimization"]["zero_hpz_partition_size"] = int(group)
    path = dist.run_dir.path / f"rank{dist.rank}.json"
    path.write_text(json.dumps(values))
    return str(path)


def build(dist: Dist, layout: str, config: ModelConfig) -> Engine:
    resolved = resolve(Request(source_of(layout, dist), world_size=dist.world_size, clip=1.0, micro_batch=2,
                               model=config, precision="fp32", device="cpu"))
    dist.arrange(tp=resolved.layout.tp, pp=resolved.layout.pp, sp=resolved.layout.sp)
    model = assemble(config, resolved.layout, dist.mesh, SEED)
    return build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                        param_groups=decay_groups(model, 0.1))


@functools.lru_cache(maxsize=1)
def values_of_one_process(shape: str) -> dict[str, torch.Tensor]:
    model = GPT(SHAPES[shape])
    init_weights(model, model.config, SEED)
    return {name: value.detach() for name, value in model.named_parameters()}


def wrong_values(engine: Engine, plain: dict[str, torch.Tensor]) -> tuple[list[str], dict[str, int]]:
    """Return the slices that differ from one process's weights, and this rank's elements of each parameter."""
    wrong: list[str] = []
    held: dict[str, int] = {}
    for piece in engine.training_state().slices():
        expected = part(plain[piece.name], piece.box)[piece.start:piece.stop]
        if not torch.equal(piece.tensors["weight"].cpu(), expected):
            wrong.append(f"{piece.name} {piece.box} {piece.start}:{piece.stop}")
        if piece.primary and piece.replica == 0:
            held[piece.name] = held.get(piece.name, 0) + piece.numel
    if engine.layout.zero.hpz_partition_size > 1:
        tokens = torch.arange(64).view(2, 32)  # a forward pass creates the secondary partition
        with engine.evaluating():
            engine.loss_sum(tokens, tokens)
    for name, parameter in engine.module.named_parameters():
        copy = getattr(parameter, "ds_secondary_tensor", None)
        if copy is not None:
            size, rank = copy.numel(), torch.distributed.get_rank(parameter.ds_zero_param_process_group)
            expected = plain[name].flatten()[size * rank:size * (rank + 1)]
            if not torch.equal(copy[:len(expected)], expected):
                wrong.append(f"{name}: second copy")
            held["second copy"] = held.get("second copy", 0) + size
    return wrong, held


def part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(*side) for side in box)].flatten()


def result_of(dist: Dist, shape: str, layout: str) -> dict[str, Any]:
    config = SHAPES[shape]
    gc.collect()
    resident_peak()
    before = resident_peak()
    with Allocated() as allocated:
        engine = build(dist, layout, config)
        gc.collect()
    resident = resident_peak() - before
    plain = values_of_one_process(shape)
    wrong, held = wrong_values(engine, plain)
    everyone: list[Any] = [None] * dist.world_size
    torch.distributed.all_gather_object(everyone, (wrong, held, allocated.peak, allocated.now, resident))
    return {"wrong": [entry for rank in everyone for entry in rank[0]], "held": [rank[1] for rank in everyone],
            "peak": [rank[2] for rank in everyone], "after": [rank[3] for rank in everyone],
            "resident": [rank[4] for rank in everyone],
            "parameters": {name: value.numel() for name, value in plain.items()}}


def main() -> None:
    folder, results = Path(sys.argv[1]), {}
    with setup(device="cpu", run_dir=folder / "run") as dist:
        dist.ensure_group()
        for run in sys.argv[2:]:
            results[run] = result_of(dist, *run.split(":"))
            gc.collect()
        if dist.is_main:
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
