"""Measure the cost of `ezpz_llm.wrap`: mpiexec -n 2 python3 benchmarks/wrap_cost.py [--out FILE.json]

Trains a stack of layers in each layout with `wrap`, and with DistributedDataParallel, DeepSpeed or fully_shard
directly, in random order. Prints and writes one JSON object: rank 0's median CPU times of a step, and their ratio.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import ezpz_llm
from ezpz_llm.core.rundir import write_json

LAYOUTS = ("ddp", "zero1", "zero2", "fsdp2")
BLOCKS, SAMPLES, CLIP = 48, 64, 1.0
Step = Callable[[], None]


def stack(width: int) -> nn.Module:
    """Return a model with four parameters per block."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
                           for _ in range(BLOCKS)))


def wrapped_step(width: int, x: Tensor, layout: str) -> Step:
    """Return a step of a wrapped model."""
    plain = stack(width)
    model = ezpz_llm.wrap(plain, torch.optim.AdamW(plain.parameters()), layout, clip=CLIP)

    def step() -> None:
        """Take a step."""
        model.backward(model(x).square().mean())
        model.step()
    return step


def torch_step(width: int, x: Tensor, layout: str) -> Step:
    """Return a step of DistributedDataParallel or fully_shard."""
    model = stack(width)
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        for part in (*model, model):
            fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        """Take a step."""
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return step


def deepspeed_step(width: int, x: Tensor, layout: str) -> Step:
    """Return a step of DeepSpeed's engine."""
    model = stack(width)
    config = {"train_micro_batch_size_per_gpu": SAMPLES, "gradient_clipping": CLIP,
              "zero_optimization": {"stage": int(layout[-1])}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)

    def step() -> None:
        """Take a step."""
        engine.backward(engine(x).square().mean())
        engine.step()
    return step


def measure(layout: str, width: int, steps: int) -> dict[str, float]:
    """Return the CPU times of a step without and with `wrap`, and their ratio."""
    x = torch.randn(SAMPLES, width)
    direct = deepspeed_step if layout.startswith("zero") else torch_step
    step_of = {"direct_s": direct(width, x, layout), "wrapped_s": wrapped_step(width, x, layout)}
    seconds: dict[str, list[float]] = {kind: [] for kind in step_of}
    shuffle = random.Random(1)
    for number in range(steps + 5):
        for kind in shuffle.sample(list(step_of), 2):
            began = time.process_time()
            step_of[kind]()
            if number >= 5:  # the first steps allocate, and compare ranks
                seconds[kind].append(time.process_time() - began)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {**medians, "ratio": medians["wrapped_s"] / medians["direct_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ezpz_llm.setup(device="cpu", run_dir=Path(folder) / "run") as run:
        result = {
            "command": "mpiexec -n 2 python3 benchmarks/wrap_cost.py", "date": datetime.date.today().isoformat(),
            "device": "cpu", "ranks": run.world_size, "threads": 1, "blocks": BLOCKS, "samples": SAMPLES,
            "versions": {"python": platform.python_version(), "torch": torch.__version__,
                         "deepspeed": deepspeed.__version__},
            "widths": {width: {layout: measure(layout, width, args.steps) for layout in LAYOUTS}
                       for width in args.widths},
        }
        if run.is_main:
            print(json.dumps(result, indent=2))
            if args.out:
                write_json(args.out, result)


if __name__ == "__main__":
    main()
