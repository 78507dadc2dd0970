"""The check before the start: our own commands find their configuration errors before any rank runs.

What a check writes to its standard error is shown, what it writes to its standard output under --explain only.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ezpz_llm.errors import UserError
from ezpz_llm.launch.hostlist import expand_counts, expand_hosts, fold_counts, fold_hosts
from ezpz_llm.launch.target import Target
from ezpz_llm.launch.variables import PLACES_VARIABLE

TIMEOUT_S = 120


@dataclass(frozen=True)
class Checked:
    """How a check ended: its exit code, and what it has to say under --explain."""

    code: int = 0
    explanation: str = ""


def check_first(target: Target, command: tuple[str, ...], world_size: int, env: Mapping[str, str],
                places: Sequence[tuple[str, int]] = ()) -> Checked:
    """Run `command --check --world-size N` once, where it is one of our own commands.

    Args:
        places: hosts and their numbers of ranks, in the order in which ranks are numbered, where they are known.

    Raises:
        UserError: the check does not end.
    """
    # A launch inside the ranks has nothing to check: it only executes its own command.
    if target.module in (None, "ezpz_llm.launch"):
        return Checked()
    words = [*command, "--check", "--world-size", str(world_size)]
    env = {**env, **({PLACES_VARIABLE: write_places(places)} if places else {})}
    try:
        done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S,
                              check=False)
    except OSError as error:
        raise UserError(f"cannot run {command[0]!r}: {error.strerror}", where="the command to launch",
                        exit_code=127 if isinstance(error, FileNotFoundError) else 126) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the check before the start took longer than {TIMEOUT_S} s",
                        where=" ".join(words)) from error
    said, warned = (text.decode(errors="replace").rstrip() for text in (done.stdout, done.stderr))
    if done.returncode:
        print("\n".join(filter(None, (said, warned))), file=sys.stderr, flush=True)
    elif warned:
        print(warned, file=sys.stderr, flush=True)
    return Checked(done.returncode if done.returncode >= 0 else 128 - done.returncode, said)


def write_places(places: Sequence[tuple[str, int]]) -> str:
    """Hosts and ranks a host as text that `read_places` reads back."""
    return f"{fold_hosts([host for host, _ in places])} {fold_counts([count for _, count in places])}"


def read_places(env: Mapping[str, str]) -> list[tuple[str, int]]:
    """What launch told the check of hosts and ranks a host; empty where it told nothing.

    Raises:
        UserError: a value that is none.
    """
    if not (text := env.get(PLACES_VARIABLE)):
        return []
    hosts, _, counts = text.rpartition(" ")
    names, ranks = expand_hosts(hosts), expand_counts(counts)
    if len(names) != len(ranks):
        raise UserError(f"{len(names)} hosts with numbers of ranks for {len(ranks)}", where=PLACES_VARIABLE)
    return list(zip(names, ranks, strict=True))
