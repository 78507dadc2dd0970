"""The check before the start: our own commands find their configuration errors before any rank runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from ezpz_llm.errors import UserError
from ezpz_llm.launch.target import Target

TIMEOUT_S = 120


def check_first(target: Target, command: tuple[str, ...], world_size: int, env: Mapping[str, str]) -> int:
    """Run `command --check --world-size N` once, where it is one of our own commands.

    Returns 0 where all is well or there is nothing to check; else the check's code, after showing what it said.

    Raises:
        UserError: the check does not end.
    """
    # A launch inside the ranks has nothing to check: it only executes its own command.
    if target.module in (None, "ezpz_llm.launch"):
        return 0
    words = [*command, "--check", "--world-size", str(world_size)]
    try:
        done = subprocess.run(words, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False)
    except OSError as error:
        raise UserError(f"cannot run {command[0]!r}: {error.strerror}", where="the command to launch",
                        exit_code=127 if isinstance(error, FileNotFoundError) else 126) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the check before the start took longer than {TIMEOUT_S} s",
                        where=" ".join(words)) from error
    if done.returncode:
        print(done.stdout.decode(errors="replace").rstrip(), file=sys.stderr)
        print("launch: nothing was started: the command's own check failed", file=sys.stderr, flush=True)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode
