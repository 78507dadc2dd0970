"""Measure the stall of training by a checkpoint: python3 benchmarks/checkpoint_stall.py [--out FILE.json]

Trains a GPT of the given width and depth in one process, and saves every few steps, alternating between synchronous
and background saves. Prints and writes one JSON object: the seconds that a save blocks the loop, the seconds until
the checkpoint is complete, the memory of the copy, and the step time with and without a save in progress.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from ezpz_llm.core.rundir import write_json
from ezpz_llm.training import checkpoint
from ezpz_llm.training.checkpoint.cpu_copy import cpu_bytes
from ezpz_llm.training.checkpoint.writer import read_shard
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.init import decay_groups
from ezpz_llm.training.model.parameters import parameter_count

BLOCK = 128


class Loop:
    """Training loop of timed steps and saves."""

    def __init__(self, engine: Engine, saver: checkpoint.Saver, vocabulary: int, device: torch.device) -> None:
        self.engine, self.saver, self.device = engine, saver, device
        self.generator = torch.Generator().manual_seed(1)
        self.vocabulary = vocabulary
        self.step = 0
        self.losses: list[float] = []
        self.steps_s: dict[bool, list[float]] = {True: [], False: []}
        """Step times with (True) and without (False) a save in progress."""

    def train(self) -> None:
        tokens = torch.randint(32, (4, BLOCK), generator=self.generator).to(self.device)
        targets = (3 * tokens + 1) % self.vocabulary
        writing, began = self.saver.is_busy, time.perf_counter()
        loss, _ = self.engine.train_step([(tokens, targets)], 1e-3, lambda phase: nullcontext())
        self.losses.append(loss.item())
        self.steps_s[writing].append(time.perf_counter() - began)
        self.step += 1

    def save(self, at_once: bool) -> dict[str, float]:
        """Save once, and take steps until the save is complete."""
        began = time.perf_counter()
        self.saver.start(self.engine, checkpoint.Progress(step=self.step), at_once=at_once)
        saved = self.saver.finish() if at_once else None
        stall = time.perf_counter() - began
        while saved is None:
            self.train()
            if not self.saver.is_busy:
                called = time.perf_counter()
                saved = self.saver.advance()
                stall += time.perf_counter() - called
        return {"stall_s": stall, "complete_after_s": saved.seconds, "bytes": saved.size}


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Run the benchmark and return its results.

    Raises:
        SystemExit: the loss did not decrease, so the timings are not of training.
    """
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, setup(device=args.device,
                                                                       run_dir=Path(folder) / "run") as dist:
        config = get_model_config("tiny-gpt2", n_layer=args.layers, n_embd=args.width, n_head=args.width // 64,
                                  n_kv_head=args.width // 64, block_size=BLOCK, vocab_size=args.vocabulary)
        resolved = resolve(Request("ddp", world_size=1, global_batch=4, micro_batch=4, precision=args.precision,
                                   clip=1.0))
        model = assemble(config, resolved.layout, dist.mesh, 1, dist.device.type)
        engine = build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                              param_groups=decay_groups(model, 0.1))
        saver = checkpoint.Saver(dist, dist.run_dir, checkpoint.Keep(1), in_background=True)
        loop = Loop(engine, saver, args.vocabulary, dist.device)
        saves: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for _ in range(args.saves + 1):
            for at_once in (True, False):
                for _ in range(3):
                    loop.train()
                saves[at_once].append(loop.save(at_once))
        memory = cpu_bytes(read_shard(engine.training_state(), 0, dist.device), dist.device)
    if not loop.losses[-1] < loop.losses[0]:
        raise SystemExit(f"error: the loss went from {loop.losses[0]:.3f} to {loop.losses[-1]:.3f}")

    def median(at_once: bool, name: str) -> float:
        # Skip the first save of each kind, which allocates memory or writes to cold files.
        return statistics.median(save[name] for save in saves[at_once][1:])

    return {
        "parameters": parameter_count(config), "checkpoint_bytes": saves[True][-1]["bytes"],
        "host_memory_for_the_copy_bytes": memory,
        "at_once": {"stall_s": median(True, "stall_s")},
        "in_background": {"stall_s": median(False, "stall_s"), "first_stall_s": saves[False][0]["stall_s"],
                          "complete_after_s": median(False, "complete_after_s")},
        "stall_ratio": median(True, "stall_s") / median(False, "stall_s"),
        "step_s": {"while_none_is_written": statistics.median(loop.steps_s[False]),
                   "while_one_is_written": statistics.median(loop.steps_s[True] or [float("nan")])},
        "first_loss": loop.losses[0], "last_loss": loop.losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--saves", type=int, default=5, help="saves of each kind, after a first one")
    parser.add_argument("--folder", type=Path, help="folder for checkpoints (default: the temporary folder)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {
        "command": "python3 benchmarks/checkpoint_stall.py " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(), "device": args.device, "cores": os.cpu_count(),
        "threads": torch.get_num_threads(), "precision": args.precision,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        **measure(args),
    }
    print(json.dumps(result, indent=2))
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
