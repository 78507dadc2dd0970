"""The command line and what can be wrong with it (imports no torch)."""

from __future__ import annotations

import argparse
from pathlib import Path

from ezpz_llm.base import UserError
from ezpz_llm.base.parser import CommandParser
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.dist.seeds import seed_for
from ezpz_llm.layout.resolve import Request, Resolved, resolve
from ezpz_llm.layout.value_source import DEFAULT
from ezpz_llm.rundir import RunDir

DEFAULT_BATCH = 64
LEAST_STEPS = 10

_DESCRIPTION = """Is this allocation healthy? Check every rank's reductions, then train a small MLP and judge it.

Exit code 0 only if the loss fell and every rank computed the right sums.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = CommandParser("test_dist", description=_DESCRIPTION, shown=(
        "launch python3 -m ezpz_llm.test_dist  on every rank of the reservation",
        "launch -n 4 python3 -m ezpz_llm.test_dist --ds-config zero2"))
    made.add_argument("--ds-config", default="ddp", metavar="NAME|PATH", help="the parallel layout (%(default)s)")
    made.add_argument("--steps", type=int, default=100, metavar="N", help="iterations (%(default)s)")
    made.add_argument("--batch", type=int, metavar="N",
                      help=f"samples a rank and micro-step (the ds_config's, or {DEFAULT_BATCH})")
    made.add_argument("--seed", type=int, default=0, metavar="N",
                      help="of the weights, the map to be found and the samples (%(default)s)")
    made.add_argument("--device", default="auto", choices=("auto", *DEVICES),
                      help="where to compute; the backend follows (%(default)s)")
    made.add_argument("--run-dir", type=Path, metavar="D", help="where to write (launch's, or a new one in runs/)")
    made.add_argument("--check", action="store_true", help="only find what is wrong with the options (no torch)")
    made.add_argument("--world-size", type=int, default=1, metavar="N", help="the number of ranks, for --check")
    return made


def check(options: argparse.Namespace, world_size: int) -> Resolved:
    """Validate the options for a number of ranks.

    Raises:
        UserError: an unknown layout, one that cannot run here, a batch that does not work out, too few iterations
            to judge, or a seed out of range.
    """
    if options.steps < LEAST_STEPS:
        raise UserError(f"{options.steps} iterations are too few to see a loss fall", where="--steps",
                        instead=f"--steps {LEAST_STEPS}, or more")
    if world_size < 1:
        raise UserError(f"{world_size} ranks", where="--world-size", instead="1 or more")
    seed_for(options.seed, "init")
    # A ds_config's own precision counts: this is only the default.
    resolved = resolve(Request(options.ds_config, world_size=world_size, micro_batch=options.batch,
                               precision="fp32", device=options.device,
                               sources={"precision": DEFAULT, "clip": DEFAULT},
                               default_micro_batch=DEFAULT_BATCH))
    layout = resolved.layout
    if layout.tp * layout.pp * layout.sp > 1 or layout.zero.tiled:
        raise UserError(f"layout {layout.describe(world_size)} divides the layers of a GPT, and this trains an MLP",
                        where="--ds-config", instead="ddp, or zero0 to zero3; with a GPT: python3 -m "
                                                     f"ezpz_llm.train --ds-config {options.ds_config}")
    return resolved


def refuse_used(folder: Path | str) -> None:
    """Refuse to mix two runs' metrics.

    Raises:
        UserError: the run directory has some already.
    """
    if RunDir(Path(folder)).metrics.exists():
        raise UserError("the run directory holds another run's metrics", where=str(folder),
                        instead="another --run-dir")
