"""Run short traced training runs, one after another in the same processes.

    mpiexec -n 2 python3 tests/helpers/explain_ranks.py FOLDER JOB…

A JOB is LAYOUT[+OPTION=VALUE…][@PLANT]; PLANT is a delay of planted_train.py. Each run directory is FOLDER/JOB.
"""

from __future__ import annotations

import sys
from pathlib import Path

from planted_train import plant

from ezpz_llm.training.checkpoint.saver import Saver
from ezpz_llm.training.data.samples import Batches
from ezpz_llm.training.model.gpt import Block
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import run as run_training

_SHORT = ("--steps", "14", "--trace-steps", "5", "--profile", "false", "--save-every", "-1", "--eval-tokens",
          "1024", "--sample-tokens", "0", "--log-every", "4", "--block-size", "128", "--loss-chunk", "0")


def run(folder: Path, job: str) -> int:
    """Run one training and return its exit code."""
    configuration, _, planted = job.partition("@")
    layout, *options = configuration.split("+")
    changed = [word for option in options for word in ("--" + option).split("=")]
    original = Block.forward, Batches.micro_batches, Saver.start
    if planted:
        plant(*planted.split(":"))
    try:
        return run_training(parse(["--ds-config", layout, "--run-dir", str(folder / job), *_SHORT, *changed]))
    finally:
        Block.forward, Batches.micro_batches, Saver.start = original


if __name__ == "__main__":
    for job in sys.argv[2:]:
        if code := run(Path(sys.argv[1]), job):
            raise SystemExit(code)
