"""Measure the cost of measuring a run: python3 benchmarks/measuring_cost.py [--out FILE.json] [-- OPTIONS]

Trains as `python3 -m ezpz_llm.train` does, in one process, with two kinds of steps: the default (timeline,
heartbeat, metrics.jsonl and the checks of its lines, progress line, norms by decay group), and the same loop with
stubs for all of these. They alternate in random order, so that drift of the machine affects both equally: step by
step on a CPU, in blocks of --log-every steps on an asynchronous device. A pair is --log-every steps of each kind.
OPTIONS are training options. Prints and writes one JSON object: the ratios of wall time and of CPU time (which
other programs disturb less) with bootstrap intervals, the additional CPU seconds of a step, and the step time of
both kinds. A small model shows these seconds best: except for the norms, they do not depend on the model.
profile_cost.py measures the profile of the first steady steps.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import io
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from profile_cost import interval

from ezpz_llm.core.rundir import write_json
from ezpz_llm.launcher.basics.variables import HEARTBEAT_VARIABLE, TRAINING
from ezpz_llm.training.dist import Heartbeat
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.observe import WallClock
from ezpz_llm.training.trainer.loop import train_step
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import start
from ezpz_llm.training.trainer.session import Session
from ezpz_llm.training.trainer.step_end import after_step

ENDLESS = 10**6
ALLOWED = 1.01
FIXED = ["--steps", str(ENDLESS), "--eval-every", "0", "--sample-tokens", "0", "--save-every", "-1",
         "--profile", "false", "--warmup-steps", "10", "--decay-steps", str(ENDLESS)]


class Nothing:
    """Stub for the objects that measure."""

    due = False

    def is_due(self, step: int) -> bool:
        return False

    def span(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def nothing(self, *_: Any) -> None:
        """Do nothing, in place of the other methods."""

    beat = begin_step = end_step = record = nothing


def take(session: Session, steps: int) -> tuple[float, float]:
    """Take steps like the trainer's loop, and return wall and CPU seconds."""
    device = session.engine.device
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    began, began_cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        session.heartbeat.beat(TRAINING, session.step)
        with session.clock.span("training"):
            train_step(session, session.step)
        session.step += 1
        after_step(session)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter() - began, time.process_time() - began_cpu


def pair(on: Session, off: Session, shuffle: random.Random) -> dict[str, tuple[float, float]]:
    """Return the wall and CPU seconds per step of both kinds, over --log-every steps of each."""
    steps = on.config.log_every
    turn = 1 if on.engine.device.type == "cpu" else steps
    spent = {"on": [0.0, 0.0], "off": [0.0, 0.0]}
    for _ in range(steps // turn):
        for kind, session in shuffle.sample((("on", on), ("off", off)), 2):
            for index, seconds in enumerate(take(session, turn)):
                spent[kind][index] += seconds / steps
    return {kind: (wall, cpu) for kind, (wall, cpu) in spent.items()}


def measure(pairs: int, options: list[str]) -> dict[str, object]:
    """Run the pairs and summarize them.

    Raises:
        SystemExit: the loss did not decrease, so the timings are not of training.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        heartbeat = Heartbeat({**os.environ, HEARTBEAT_VARIABLE: str(Path(folder) / "heartbeat")})
        with setup(run_dir=Path(folder) / "run") as dist:
            on = start(parse([*FIXED, *options]), dist, WallClock(), heartbeat)
            off = replace(on, timeline=Nothing(), metrics=Nothing(), heartbeat=Nothing(), clock=Nothing(),
                          callbacks=copy.copy(on.callbacks))
            off.callbacks.context = copy.copy(on.callbacks.context)  # with its own step number
            shuffle = random.Random(1)
            pair(on, off, shuffle)  # warm-up, with the flush after the first step
            found = [pair(on, off, shuffle) for _ in range(pairs)]
            lines = [json.loads(line) for line in dist.run_dir.metrics.read_text().splitlines()]
    if not lines[-1]["loss"] < lines[0]["loss"]:
        raise SystemExit(f"error: the loss went from {lines[0]['loss']:.3f} to {lines[-1]['loss']:.3f}")
    ratios = {name: interval([one["on"][index] / one["off"][index] for one in found], shuffle)
              for index, name in enumerate(("wall_ratio", "cpu_ratio"))}
    return {"model": on.config.model, "precision": on.plan.resolved.precision, "steps_a_pair": on.config.log_every,
            **{f"step_s_{kind}": statistics.median(one[kind][0] for one in found) for kind in ("on", "off")},
            **{f"cpu_s_{kind}": statistics.median(one[kind][1] for one in found) for kind in ("on", "off")},
            "cpu_s_more": interval([one["on"][1] - one["off"][1] for one in found], shuffle), **ratios,
            "within_1_percent": {name: one["95_percent"][1] < ALLOWED for name, one in ratios.items()},
            "first_loss": lines[0]["loss"], "last_loss": lines[-1]["loss"], "lines": len(lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", help="options of ezpz_llm.train, after --")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = {
        "command": "python3 benchmarks/measuring_cost.py " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(), "pairs": args.pairs, "threads": args.threads,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        **measure(args.pairs, args.options),
    }
    print(json.dumps(result, indent=2))
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
