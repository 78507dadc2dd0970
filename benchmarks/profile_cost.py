"""Measure the cost of the default Python profile: python3 benchmarks/profile_cost.py [--pairs N] [--out FILE.json]

Trains tiny-gpt2 on the bytes of a standard library module in one process. Blocks of steps with and without the
profile alternate in random order, in pairs, so that drift of the machine affects both equally. Prints and writes
one JSON object: median step times, the ratios of wall time and of CPU time (which other programs disturb less)
with bootstrap intervals, the seconds to start and write a profile of the default length, and the resulting cost
for a run.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
import typing
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from ezpz_llm.core.rundir import RunDir, write_json
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_groups, init_weights
from ezpz_llm.training.observe import PythonProfile, StepTimeline, Window
from ezpz_llm.training.observe.profile_windows import PROFILE_STEPS

BYTES = 256


class Block(NamedTuple):
    """Block of steps: median wall and mean CPU seconds per step, and seconds of the profile between steps."""

    step_s: float
    cpu_s: float
    outside_s: float


class Trainer:
    """Small training run whose steps are timed by the timeline."""

    def __init__(self, micro_batch: int) -> None:
        config = get_model_config("tiny-gpt2", vocab_size=BYTES)
        self.model = GPT(config)
        init_weights(self.model, config, 1)
        groups = [{"params": group["params"], "weight_decay": group["weight_decay"]}
                  for group in decay_groups(self.model, 0.1)]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
        self.timeline = StepTimeline(torch.device("cpu"))
        self.text = torch.frombuffer(bytearray(Path(typing.__file__).read_bytes()), dtype=torch.uint8).long()
        self.generator = torch.Generator().manual_seed(1)
        self.shape = (micro_batch, config.block_size)
        self.losses: list[float] = []

    def step(self) -> None:
        """Take an optimizer step on random windows."""
        count, length = self.shape
        self.timeline.begin_step()
        with self.timeline.span("data"):
            starts = torch.randint(len(self.text) - length, (count, 1), generator=self.generator)
            windows = self.text[starts + torch.arange(length + 1)]
        with self.timeline.span("forward"), torch.autocast("cpu", torch.bfloat16):
            loss = self.model(windows[:, :-1], windows[:, 1:])
        with self.timeline.span("backward"):
            loss.backward()
        with self.timeline.span("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.timeline.end_step()
        self.losses.append(loss.item())

    def block(self, profile: PythonProfile | None, steps: int) -> Block:
        """Take `steps` steps, inside `profile` if there is one."""
        cpu_s = outside_s = 0.0
        for step in range(steps):
            outside_s += self._outside(profile, "before_step", step)
            began = time.process_time()
            self.step()
            cpu_s += time.process_time() - began
            outside_s += self._outside(profile, "after_step", step)
        wall_s = statistics.median(times.step_time_s for times in self.timeline.drain())
        return Block(wall_s, cpu_s / steps, outside_s)

    def _outside(self, profile: PythonProfile | None, action: str, step: int) -> float:
        began = time.perf_counter()
        if profile is not None:
            getattr(profile, action)(step)
        return time.perf_counter() - began


def interval(ratios: list[float], shuffle: random.Random) -> dict[str, object]:
    """Return the median of ratios, with the 2.5 % and 97.5 % points of the bootstrap."""
    resampled = sorted(statistics.median(shuffle.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {"median": statistics.median(ratios), "95_percent": [resampled[50], resampled[-51]]}


def measure(pairs: int, steps: int, micro_batch: int) -> dict[str, object]:
    """Run the pairs and summarize them.

    Raises:
        SystemExit: the loss did not decrease, so the timings are not of training.
    """
    trainer, shuffle = Trainer(micro_batch), random.Random(1)
    trainer.block(None, PROFILE_STEPS)  # warm-up
    blocks: dict[bool, list[Block]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder)).create()
        for _ in range(pairs):
            for profiled in shuffle.sample((True, False), 2):
                profile = PythonProfile(run_dir, Window(0, steps)) if profiled else None
                blocks[profiled].append(trainer.block(profile, steps))
        whole = trainer.block(PythonProfile(run_dir, Window(0, PROFILE_STEPS)), PROFILE_STEPS)
    if not trainer.losses[-1] < trainer.losses[0]:
        raise SystemExit(f"error: the loss went from {trainer.losses[0]:.3f} to {trainer.losses[-1]:.3f}")
    on, off = blocks[True], blocks[False]
    wall = interval([a.step_s / b.step_s for a, b in zip(on, off, strict=True)], shuffle)
    step_s = statistics.median(block.step_s for block in off)
    return {
        "step_s_off": step_s,
        "step_s_on": statistics.median(block.step_s for block in on),
        "wall_ratio": wall,
        "cpu_ratio": interval([a.cpu_s / b.cpu_s for a, b in zip(on, off, strict=True)], shuffle),
        "start_and_write_s": whole.outside_s,
        "run_pays_s": PROFILE_STEPS * (wall["median"] - 1) * step_s + whole.outside_s,
        "first_loss": trainer.losses[0],
        "last_loss": trainer.losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4, help="steps per block")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = {
        "command": "python3 benchmarks/profile_cost.py " + " ".join(sys.argv[1:]),
        "model": "tiny-gpt2", "precision": "bf16 autocast", "micro_batch": args.micro_batch, "pairs": args.pairs,
        "steps_a_block": args.steps, "threads": args.threads,
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "pyinstrument": metadata.version("pyinstrument")},
        **measure(args.pairs, args.steps, args.micro_batch),
    }
    print(json.dumps(result, indent=2))
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
