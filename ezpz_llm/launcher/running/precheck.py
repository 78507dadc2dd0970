"""Pre-launch checks: commands of this package report configuration errors before any rank runs.

launch always prints the standard error of a check, and its standard output with --explain or if the check fails.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ezpz_llm.core.base import EXIT_PREFLIGHT, UserError, print_lines
from ezpz_llm.launcher.basics.check_places import format_places
from ezpz_llm.launcher.basics.start_errors import start_problem
from ezpz_llm.launcher.basics.variables import PLACES_VARIABLE

if TYPE_CHECKING:
    from ezpz_llm.core.rundir.records import Launch
    from ezpz_llm.launcher.jobs.option_parsing import Options, Target
    from ezpz_llm.launcher.planning.plan import LaunchPlan

PROGRAM = "ezpz_llm.preflight"
TIMEOUT_S = 120
_PREFLIGHT_LIMIT_S = 180.0
"""Time limit of the preflight, which reports within 60 s of the start of its last rank."""
_NOTE = "note: "


class CheckOutcome(NamedTuple):
    """Exit code of a check, and its explanation for --explain."""

    code: int = 0
    explanation: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes in the explanation."""
        lines = self.explanation.splitlines()
        return tuple(line.removeprefix(_NOTE) for line in lines if line.startswith(_NOTE))


def check_command(target: Target, command: tuple[str, ...], world_size: int, env: Mapping[str, str],
                  places: Sequence[tuple[str, int]] = ()) -> CheckOutcome:
    """Run `command --check --world-size N` once if it is a command of this package.

    Args:
        places: nodes and their numbers of ranks in rank order, if known.

    Raises:
        UserError: the check cannot be run, or exceeds its time limit.
    """
    # If a rank runs `launch`, it only executes the given command, so there is nothing to check.
    if target.module in (None, "ezpz_llm.launch"):
        return CheckOutcome()
    env = {**env, **({PLACES_VARIABLE: format_places(places)} if places else {})}
    result = run_check(command, world_size, env)
    explanation, warnings = result.stdout.rstrip(), result.stderr.rstrip()
    if result.returncode:
        print_lines("\n".join(filter(None, (explanation, warnings))), file=sys.stderr)
    elif warnings:
        print_lines(warnings, file=sys.stderr)
    return CheckOutcome(result.returncode if result.returncode >= 0 else 128 - result.returncode, explanation)


def run_check(command: Sequence[str], world_size: int, env: Mapping[str, str], *form: str, cwd: Path | None = None,
              what: str = "the pre-launch check") -> subprocess.CompletedProcess[str]:
    """Run `command --check --world-size N`, which starts no rank and does not import torch.

    Args:
        form: options for the output format, such as --json.
        what: name of this check in error messages.

    Raises:
        UserError: the command cannot be run, or takes longer than two minutes.
    """
    arguments = [*command, "--check", *form, "--world-size", str(world_size)]
    try:
        return subprocess.run(arguments, env=env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", timeout=TIMEOUT_S, check=False)
    except OSError as error:
        raise UserError(f"cannot run {command[0]!r}: {start_problem(command[0], error)}",
                        where="the command to launch",
                        exit_code=127 if isinstance(error, FileNotFoundError) else 126) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{what} took longer than {TIMEOUT_S} s", where=" ".join(arguments)) from error


def run_preflight(plan: LaunchPlan, options: Options, record: Callable[[LaunchPlan], Launch]) -> int:
    """Run the preflight on the nodes of `plan`; return 0, or launch's exit code after printing the reason.

    The preflight uses the same launcher, nodes and ranks, without --wrap, and writes to preflight/ in the run
    directory.

    Args:
        record: returns the launch record for run.json, in which the preflight finds the nodes of its ranks.
    """
    # Imported here, since most launches run no preflight.
    from ezpz_llm.core.rundir.records import update_record
    from ezpz_llm.launcher.basics.relay import print_stderr
    from ezpz_llm.launcher.diagnosis.recorded_exit import not_started_record
    from ezpz_llm.launcher.planning.plan import prepare_step
    from ezpz_llm.launcher.running.signals import INTERRUPTED
    from ezpz_llm.launcher.running.supervision import run

    step = prepare_step(options, command=(sys.executable, "-m", PROGRAM), tee="0",
                        run_dir=plan.run_dir.preflight.path)
    update_record(step.run_dir, launch=record(step), exit=None)
    report = step.run_dir.path / "preflight.json"
    report.unlink(missing_ok=True)
    # If the preflight wrote its report, a post-mortem would add nothing.
    code = run(step, None, _PREFLIGHT_LIMIT_S, prints_postmortem=lambda: not report.exists()).code
    if code == 0:
        return 0
    code = code if code in INTERRUPTED else EXIT_PREFLIGHT
    outcome = "was interrupted" if code in INTERRUPTED else "failed"
    cause = f"the preflight {outcome}: {report if report.exists() else step.run_dir.path}"
    update_record(plan.run_dir, exit=not_started_record(code, cause, time.time()))
    print_stderr(f"launch: nothing was started: {cause}")
    return code
