"""The check before the start: our own commands find their configuration errors before any rank runs.

What a check writes to its standard error is shown, what it writes to its standard output under --explain only.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ezpz_llm.base import EXIT_PREFLIGHT, UserError
from ezpz_llm.launch.hostlist import expand_counts, expand_hosts, fold_counts, fold_hosts
from ezpz_llm.launch.variables import PLACES_VARIABLE

if TYPE_CHECKING:
    from ezpz_llm.launch.option_parsing import Options, Target
    from ezpz_llm.launch.plan import LaunchPlan

TIMEOUT_S = 120


@dataclass(frozen=True)
class Checked:
    """How a check ended: its exit code, and what it has to say under --explain."""

    code: int = 0
    explanation: str = ""


@dataclass(frozen=True)
class CheckReport:
    """Result of a training command's check: the one JSON object that `--check --json` prints.

    Attributes:
        layout, precision: names; they and the batch are None if the run cannot start, or is complete already.
        global_batch, micro_batch, accumulation: of a step; the first two in sequences.
        explanation: every decision with its source, as `--check` alone prints it.
        warnings: what `--check` alone prints on standard error.
        error, where, instead: why the run cannot start, as in `UserError`.
    """

    layout: str | None = None
    precision: str | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    explanation: str = ""
    warnings: tuple[str, ...] = ()
    error: str | None = None
    where: str | None = None
    instead: str | None = None


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
    env = {**env, **({PLACES_VARIABLE: write_places(places)} if places else {})}
    done = run_check(command, world_size, env)
    said, warned = done.stdout.rstrip(), done.stderr.rstrip()
    if done.returncode:
        print("\n".join(filter(None, (said, warned))), file=sys.stderr, flush=True)
    elif warned:
        print(warned, file=sys.stderr, flush=True)
    return Checked(done.returncode if done.returncode >= 0 else 128 - done.returncode, said)


def run_check(command: Sequence[str], world_size: int, env: Mapping[str, str], *form: str, cwd: Path | None = None,
              what: str = "the check before the start") -> subprocess.CompletedProcess[str]:
    """Run `command --check --world-size N`, which starts no rank and imports no torch, and wait for its end.

    Args:
        form: options for what it prints, such as --json.
        what: names this check in messages.

    Raises:
        UserError: the command cannot be run, or takes longer than two minutes.
    """
    words = [*command, "--check", *form, "--world-size", str(world_size)]
    try:
        return subprocess.run(words, env=env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", timeout=TIMEOUT_S, check=False)
    except OSError as error:
        raise UserError(f"cannot run {command[0]!r}: {error.strerror}", where="the command to launch",
                        exit_code=127 if isinstance(error, FileNotFoundError) else 126) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{what} took longer than {TIMEOUT_S} s", where=" ".join(words)) from error


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


# The preflight before a run (--preflight): the same launcher, hosts and ranks, another program first.
PROGRAM = "ezpz_llm.preflight"

_LIMIT_S = 180.0
"""It reports within a minute of its last rank's start; so long it may take to start them all, and to end."""


def fit_for(plan: LaunchPlan, options: Options, record: Callable[[LaunchPlan], dict[str, Any]]) -> int:
    """Whether the hosts of `plan` may begin its run: 0, or the code that launch ends with, after saying why.

    What the preflight writes goes into the folder preflight/ of the run directory. Words of --wrap are left out: it
    looks at the hosts.

    Args:
        record: what run.json says of a launch; the preflight reads its ranks' hosts there.
    """
    # A command's check imports this module for its report, and would wait for all that starts a run.
    from ezpz_llm.launch.failures.facts import not_started
    from ezpz_llm.launch.plan import prepare_step
    from ezpz_llm.launch.relay import say
    from ezpz_llm.launch.supervise import INTERRUPTED, run
    from ezpz_llm.rundir import update_record

    step = prepare_step(options, command=(sys.executable, "-m", PROGRAM), tee="0",
                        run_dir=plan.run_dir.preflight.path)
    update_record(step.run_dir, launch=record(step), exit=None)
    report = step.run_dir.path / "preflight.json"
    report.unlink(missing_ok=True)
    # Its report is the account of its end, if it came to one.
    code = run(step, None, _LIMIT_S, tell=lambda: not report.exists()).code
    if code == 0:
        return 0
    code = code if code in INTERRUPTED else EXIT_PREFLIGHT
    what = "was interrupted" if code in INTERRUPTED else "found the reservation unfit"
    cause = f"the preflight {what}: {report if report.exists() else step.run_dir.path}"
    update_record(plan.run_dir, exit=not_started(code, cause, time.time()))
    say(f"launch: nothing was started: {cause}")
    return code
