"""Draw loss and throughput of one or several runs, in the terminal and as one HTML page."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.base.errors import UserError, run_command
from ezpz_llm.observe.plots import terminal_width, wants_colour
from ezpz_llm.report.document import report_page
from ezpz_llm.report.runs import load_runs
from ezpz_llm.report.terminal import DRAWABLE, report_text
from ezpz_llm.rundir import newest_run, write_atomic


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code.

    Raises:
        UserError: a directory is none of a run, no run has a step, or the page cannot be written.
    """
    parser = argparse.ArgumentParser(prog="ezpz-llm report", description=__doc__, allow_abbrev=False)
    parser.add_argument("run_dir", nargs="*", type=Path, metavar="RUN_DIR",
                        help="the runs, finished or not (default: the newest in runs/)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one page that needs no network")
    options = parser.parse_args(argv)
    runs = load_runs(options.run_dir or [newest_run(Path("runs"), "ezpz-llm report RUN_DIR").path])
    if not any(len(run.rows) for run in runs):
        raise UserError("no step has been written yet", where=", ".join(str(run.path) for run in runs),
                        instead="again after the first line of its progress, or ezpz-llm why if there is none")
    if len(runs) > DRAWABLE:
        raise UserError(f"{len(runs)} runs in one plot", instead=f"at most {DRAWABLE}")
    print(report_text(runs, terminal_width(), colour=wants_colour()), end="")
    if options.html:
        _write(options.html, report_page(runs))
        print(f"\npage: {options.html}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as error:
        raise UserError(f"cannot write the page: {os.strerror(error.errno)}", where=f"--html {path}",
                        instead="a file in a folder that exists and is yours") from error


if __name__ == "__main__":
    raise SystemExit(run_command(main))
