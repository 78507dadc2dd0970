"""Command-line options of test_dist and their validation (imports no torch)."""

from __future__ import annotations

import argparse
from pathlib import Path

from ezpz_llm.core.base import UserError
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.seeds import seed_for
from ezpz_llm.training.layout.resolve import Request, Resolved, resolve
from ezpz_llm.training.layout.value_source import DEFAULT

_DEFAULT_BATCH = 64
MIN_STEPS = 10

_DESCRIPTION = """Check that this allocation is healthy: test every rank's all-reduces, then train a small MLP.

Exit code 0 only if the loss decreased and every rank computed correct sums.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = CommandParser("test_dist", description=_DESCRIPTION, shown=(
        "launch python3 -m ezpz_llm.test_dist  on every rank of the allocation",
        "launch -n 4 python3 -m ezpz_llm.test_dist --ds-config zero2"))
    command.add_argument("--ds-config", default="ddp", metavar="NAME|PATH",
                         help="the parallel layout (%(default)s)")
    command.add_argument("--steps", type=int, default=100, metavar="N", help="iterations (%(default)s)")
    command.add_argument("--batch", type=int, metavar="N",
                         help=f"samples per rank and micro-step (default: the ds_config's, or {_DEFAULT_BATCH})")
    command.add_argument("--seed", type=int, default=0, metavar="N",
                         help="seed of the weights, the target map and the samples (%(default)s)")
    command.add_argument("--device", default="auto", choices=("auto", *DEVICES),
                         help="device, which determines the backend (%(default)s)")
    command.add_argument("--run-dir", type=Path, metavar="D",
                         help="run directory (default: launch's, or a new one in runs/)")
    command.add_argument("--check", action="store_true", help="only validate the options (without torch)")
    command.add_argument("--world-size", type=int, default=1, metavar="N", help="number of ranks for --check")
    return command


def check(options: argparse.Namespace, world_size: int) -> Resolved:
    """Validate the options for a number of ranks.

    Raises:
        UserError: the layout is unknown or unsupported, batch sizes contradict each other, there are too few
            iterations, or the seed is out of range.
    """
    if options.steps < MIN_STEPS:
        raise UserError(f"--steps must be at least {MIN_STEPS}, but is {options.steps}", where="--steps",
                        instead=f"--steps {MIN_STEPS} or more")
    if world_size < 1:
        raise UserError(f"{world_size} is not a number of ranks", where="--world-size", instead="1 or more")
    seed_for(options.seed, "init")
    # fp32 is the default; the ds_config's own precision overrides it.
    resolved = resolve(Request(options.ds_config, world_size=world_size, micro_batch=options.batch,
                               precision="fp32", device=options.device,
                               sources={"precision": DEFAULT, "clip": DEFAULT},
                               default_micro_batch=_DEFAULT_BATCH))
    layout = resolved.layout
    if layout.tp * layout.pp * layout.sp > 1 or layout.zero.tiled:
        raise UserError(f"layout {layout.describe(world_size)} requires a GPT, but test_dist trains an MLP",
                        where="--ds-config", instead="ddp, or zero0 to zero3; for a GPT, python3 -m "
                                                     f"ezpz_llm.train --ds-config {options.ds_config}")
    return resolved


def reject_used_directory(folder: Path | str) -> None:
    """Raise a UserError if the run directory contains metrics of another run.
    """
    if RunDir(Path(folder)).metrics.exists():
        raise UserError("the run directory contains another run's metrics", where=str(folder),
                        instead="pass another --run-dir")
