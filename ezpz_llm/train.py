"""`launch python3 -m ezpz_llm.train`: train a GPT on text under the layout that a ds_config selects."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from ezpz_llm.base.errors import run_command
from ezpz_llm.launch.devices import has_none
from ezpz_llm.launch.precheck import read_places
from ezpz_llm.layout.rank_map import Places
from ezpz_llm.trainer.check_report import account, remarks, warning
from ezpz_llm.trainer.options import Options, dump, parse
from ezpz_llm.trainer.plan import check_run
from ezpz_llm.trainer.resume import find_beginning


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code. torch is imported only once there is something to train."""
    options = parse(argv)
    if options.print_config:
        print(dump(options.config), end="")
        return 0
    if options.check:
        return _check(options)
    from ezpz_llm.trainer.run import run

    return run(options)


def _check(options: Options) -> int:
    """Find what is wrong; say what will be on standard output, and what one may not want on standard error."""
    begins = find_beginning(options)
    if begins.complete:
        print(begins.complete)
        return 0
    options = begins.options
    places = read_places(os.environ)
    plan = check_run(options, options.world_size or 1, _device(places), puts_aside=begins.puts_aside)
    print(account(plan, places))
    for text in (warning(plan, options, places), *(f"warning: {remark}" for remark in remarks(plan))):
        if text:
            print(text, file=sys.stderr)
    return 0


def _device(places: Places) -> str | None:
    """The kind of device that all ranks will have, where that is certain without torch: a CPU, if they run here."""
    here = {"localhost", socket.gethostname(), socket.gethostname().split(".")[0]}
    return "cpu" if places and {host for host, _ in places} <= here and has_none(os.environ) else None


if __name__ == "__main__":
    raise SystemExit(run_command(main))
