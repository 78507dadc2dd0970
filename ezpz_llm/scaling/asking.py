"""The training command's own check, asked for one number of ranks: may it run so, and with which batch?"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.errors import UserError
from ezpz_llm.launch.precheck import TIMEOUT_S
from ezpz_llm.rundir import RUN_DIR_VARIABLE


@dataclass(frozen=True)
class Answer:
    """What a run would be. The batch is in sequences."""

    layout: str
    global_batch: int
    micro_batch: int
    accumulation: int


def ask(command: Sequence[str], ranks: int, directory: Path, what: str) -> Answer:
    """What `command` would be on so many ranks. Starts no rank and imports no torch.

    Args:
        what: names the command in the message.

    Raises:
        UserError: its check refuses it; the check's own words are passed on.
    """
    words = [*command, "--check", "--world-size", str(ranks)]
    env = {name: value for name, value in os.environ.items() if name != RUN_DIR_VARIABLE}
    try:
        done = subprocess.run(words, env=env, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=TIMEOUT_S, check=False)
    except OSError as error:
        raise UserError(f"cannot run {command[0]!r}: {error.strerror}", where="the command to study") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the check of {what} took longer than {TIMEOUT_S} s", where=" ".join(words)) from error
    if done.returncode:
        raise _refused(done.stderr or done.stdout, what)
    return _read(done.stdout)


def _read(said: str) -> Answer:
    # As Resolved.explain writes it: name, value, where the value came from.
    found = dict(re.findall(r"^(layout|global_batch|micro_batch|accumulation) +([^\s:]+)", said, re.MULTILINE))
    return Answer(found["layout"], *(int(found[name]) for name in ("global_batch", "micro_batch", "accumulation")))


def _refused(said: str, what: str) -> UserError:
    """The check's message, with what it is about."""
    found = re.search(r"^error: (.*?)(?=\n {2}(?:where|instead): |\Z)", said, re.MULTILINE | re.DOTALL)
    rest = {name: re.search(rf"^ {{2}}{name}: +(.*)$", said, re.MULTILINE) for name in ("where", "instead")}
    return UserError(f"{what} cannot run: {found[1].strip() if found else said.strip()}",
                     **{name: match[1] for name, match in rest.items() if match})
