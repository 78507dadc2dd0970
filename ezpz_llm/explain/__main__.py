"""Say where the time of a run went, what cost most, and what to try against it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ezpz_llm.base.errors import run_command
from ezpz_llm.explain.counterfactual import rerun
from ezpz_llm.explain.diagnosis import account
from ezpz_llm.explain.text import account_text
from ezpz_llm.observe.plots import terminal_width, wants_colour
from ezpz_llm.rundir import RunDir, newest_run, read_record


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code.

    Raises:
        UserError: the directory is none of a training run, or a trace cannot be read.
    """
    parser = argparse.ArgumentParser(prog="ezpz-llm explain", description=__doc__, allow_abbrev=False)
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR",
                        help="the run (default: the newest in runs/)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--counterfactual", action="store_true",
                        help="run a few of its steps again here, some of them without collectives")
    parser.add_argument("--yes", action="store_true", help="start them without asking")
    options = parser.parse_args(argv)
    run_dir = (options.run_dir or newest_run(Path("runs"), "ezpz-llm explain RUN_DIR").path).absolute()
    found = account(run_dir)
    if options.counterfactual:
        again = account(rerun(run_dir, read_record(RunDir(run_dir)), options.yes))
        found = replace(found, counterfactual=again.counterfactual)
    if options.json:
        print(json.dumps(found.as_record(), indent=2))
    else:
        print(account_text(found, terminal_width(), colour=wants_colour()), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
