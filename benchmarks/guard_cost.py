"""Measure the cost of step guards and group norms: python3 benchmarks/guard_cost.py [--models M] [--out FILE.json]

Trains on random tokens in one process under layout ddp. Measures the CPU time of three kinds of optimizer step in
random order: without the check of gradients, with the check, and also with the norms of the decay groups. Prints
and writes one JSON object: the median of each, their differences, and the median of the whole step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from ezpz_llm.core.rundir import RunDir, write_json
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.engine.build import build_engine
from ezpz_llm.training.engine.torch_engine import TorchEngine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_groups, init_weights

KINDS = ("bare", "gate", "norms")


def measure(model: str, block_size: int, steps: int) -> dict[str, object]:
    """Return the median CPU seconds of each kind of step."""
    config = get_model_config(model, block_size=block_size)
    with tempfile.TemporaryDirectory() as folder:
        dist = Dist(RankInfo(0, 1, 0, 1, 0, "benchmark"), torch.device("cpu"), None, Mesh(Degrees(1), 0),
                    RunDir(Path(folder)))
        resolved = resolve(Request("ddp", world_size=1, clip=1.0, micro_batch=1, precision="fp32", device="cpu"))
        plain = GPT(config)
        init_weights(plain, config, 1337)
        engine = build_engine(plain, resolved, dist, lr=1e-4, betas=(0.9, 0.95), eps=1e-8,
                              param_groups=decay_groups(plain, 0.1))
        assert isinstance(engine, TorchEngine)
        optimizer = engine._optimizer
        hooks = dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)
        tokens = torch.randint(config.vocab_size, (1, block_size + 1))
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        whole, losses, shuffle = [], [], random.Random(1)
        for number in range(steps + 1):
            for kind in shuffle.sample(KINDS, len(KINDS)):
                optimizer._optimizer_step_pre_hooks.clear()
                optimizer._optimizer_step_post_hooks.clear()
                optimizer.__dict__.pop("found_inf", None)
                if kind != "bare":
                    optimizer._optimizer_step_pre_hooks.update(hooks[0])
                    optimizer._optimizer_step_post_hooks.update(hooks[1])
                began = time.process_time()
                loss = engine.module(tokens[:, :-1], tokens[:, 1:])
                engine.backward(loss, is_last=True)
                before = time.process_time()
                if kind == "norms":
                    engine.step_skip.measure(engine.training_state())
                engine.step(1e-4)
                engine.step_skip.measured()
                ended = time.process_time()
                losses.append(loss.item())
                if number:  # the first step allocates the moments
                    seconds[kind].append(ended - before)
                    whole.append(ended - began)
    if not losses[-1] < losses[0]:
        raise SystemExit(f"error: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {"optimizer_step_s": medians, "gate_s": medians["gate"] - medians["bare"],
            "norms_s": medians["norms"] - medians["gate"], "whole_step_s": statistics.median(whole)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-gpt2", "gpt2-124m"])
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 10], help="steps of each kind, by model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "command": "python3 benchmarks/guard_cost.py " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "precision": "fp32", "device": "cpu", "threads": 1, "block_size": args.block_size,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "models": {model: measure(model, args.block_size, steps)
                   for model, steps in zip(args.models, args.steps, strict=True)},
    }
    print(json.dumps(result, indent=2))
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
