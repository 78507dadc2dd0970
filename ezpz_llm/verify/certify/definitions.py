"""Checks of the trainer and of the parts of a training step against their definitions.

The checks run before any layout is certified. They use the CPU and a separate process, because the trainer's loop
sets signal handlers, seeds and global settings that must not affect the ranks. Cheap checks come first, and the
first failure ends the checks.
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

from ezpz_llm.core.base import EXIT_IDLE, UserError, print_lines
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import write_json
from ezpz_llm.launcher.basics.variables import ENDS_AT_VARIABLE
from ezpz_llm.verify.certify.local_launches import definitions_file, read_definition_outcomes
from ezpz_llm.verify.certify.records import Definition

TOPICS = {"rates": "schedule_rates", "initial weights": "initial_weights", "parts": "tensor_parts",
          "loss scale": "loss_scaling", "dropout": "dropout_masks", "sums": "wide_sums", "Muon": "muon_step",
          "architectures": "architectures", "trainer": "trainer_run"}
"""Modules by topic. `find_problems` of a module yields a message for each failed check."""
LIMIT_S = 200
"""Time limit of all checks: ten times their duration on two cores, and less than the timeout of collectives."""


def check_definitions(root: Path) -> None:
    """Check the topics up to the first failure, and write the outcome below `root`. Call on one rank.

    Raises:
        UserError: a check failed, or the checks crashed or exceeded their time limit.
    """
    from ezpz_llm.verify.certify.one_process import DISAGREES  # imports torch

    path = definitions_file(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Remove the allocation's end time: near it, the small training runs would stop early.
    env = {name: value for name, value in os.environ.items() if name != ENDS_AT_VARIABLE}
    with tempfile.TemporaryFile("w+") as output:
        try:
            code = subprocess.run([sys.executable, "-m", "ezpz_llm.verify.certify.definitions", str(path)], env=env,
                                  stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            code = EXIT_IDLE
        output.seek(0)
        lines = output.read().strip().splitlines()
    problems = [f"{topic.what}: {topic.wrong}" for topic in read_definition_outcomes(root)
                if topic.wrong is not None]
    if code and not problems:
        last = lines[-1] if lines else "startup"
        problems = [f"the checks did not finish within {LIMIT_S} s (last: {last})" if code == EXIT_IDLE
                    else f"the checks ended with exit code {code} (last line: {last})"]
    if problems:
        raise UserError(f"{DISAGREES}: {problems[0]}", where="certify", exit_code=1,
                        instead="fix this first: every layout is compared with the single process")


def main(argv: Sequence[str]) -> int:
    """Check the topics up to the first failure and write the outcome to a file; return 1 on failure."""
    checked: list[Definition] = []
    for topic, name in TOPICS.items():
        print_lines(topic)  # names the topic if the check hangs
        began = time.monotonic()
        try:
            problem = next(import_module(f"ezpz_llm.verify.certify.{name}").find_problems(), None)
        except Exception as error:  # broken code may raise anything
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"
        checked.append(Definition(topic, problem, round(time.monotonic() - began, 2)))
        if problem is not None:
            break
    write_json(Path(argv[0]), as_plain(checked))
    return int(checked[-1].wrong is not None)



if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
