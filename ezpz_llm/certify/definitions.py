"""Definitions of what is around a step and beneath it, checked in a process of its own before any layout is.

The trainer's loop sets a process's handlers, seeds and settings, and none of that may reach the ranks. The cheap
ones come first, and the first that is broken ends it. They are checked on a CPU, whatever the ranks have.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ezpz_llm.base import EXIT_IDLE, UserError
from ezpz_llm.certify.lead import Definition, definitions, definitions_file
from ezpz_llm.launch.variables import ENDS_AT_VARIABLE
from ezpz_llm.rundir import write_json

TOPICS = {"rates": "schedule_rates", "parts": "tensor_parts", "loss scale": "loss_scaling",
          "dropout": "dropout_masks", "sums": "wide_sums", "trainer": "trainer_run"}
"""By what a complaint of it is called: the module, whose `complaints` are what is wrong."""
LIMIT_S = 200
"""Ten times what they take on two cores; ranks wait a little longer for each other."""


def hold_to_definitions(root: Path) -> None:
    """Check all topics and write what was found below `root`. One rank calls it.

    Raises:
        UserError: one of them is not what its definition says.
    """
    from ezpz_llm.certify.one_process import DISAGREES  # with torch, which rates do without

    found = definitions_file(root)
    found.parent.mkdir(parents=True, exist_ok=True)
    # What is left of a reservation is no reason for the small runs of it to end early.
    env = {name: value for name, value in os.environ.items() if name != ENDS_AT_VARIABLE}
    with tempfile.TemporaryFile("w+") as output:
        try:
            code = subprocess.run([sys.executable, "-m", "ezpz_llm.certify.definitions", str(found)], env=env,
                                  stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            code = EXIT_IDLE
        output.seek(0)
        said = output.read().strip().splitlines()
    wrong = [f"{one['what']}: {one['wrong']}" for one in definitions(root) if one["wrong"] is not None]
    if code and not wrong:
        last = said[-1] if said else "its start"
        wrong = [f"no end in {LIMIT_S} s, in {last}" if code == EXIT_IDLE
                 else f"exit code {code} of what checks them: {last}"]
    if wrong:
        raise UserError(f"{DISAGREES}: {wrong[0]}", where="certify", exit_code=1,
                        instead="no certificate of any layout before one process is right")


def main(argv: Sequence[str]) -> int:
    """Check every topic until one is wrong, and write them to a file; 1 if one is."""
    held: list[Definition] = []
    for what, name in TOPICS.items():
        print(what, flush=True)  # the last line of one that does not end
        began = time.monotonic()
        try:
            wrong = next(import_module(f"ezpz_llm.certify.{name}").complaints(), None)
        except Exception as error:  # so wrong that it cannot be asked
            traceback.print_exc()
            wrong = f"{type(error).__name__}: {error}"
        held.append({"what": what, "wrong": wrong, "seconds": round(time.monotonic() - began, 2)})
        if wrong is not None:
            break
    write_json(Path(argv[0]), held)
    return int(held[-1]["wrong"] is not None)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
