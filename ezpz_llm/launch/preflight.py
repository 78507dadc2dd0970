"""The preflight before a run (--preflight): the same launcher, hosts and ranks, another program first."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ezpz_llm.errors import EXIT_PREFLIGHT
from ezpz_llm.launch.console import say
from ezpz_llm.launch.failures import not_started
from ezpz_llm.launch.options import Options
from ezpz_llm.launch.plan import LaunchPlan, build_plan
from ezpz_llm.launch.supervise import run
from ezpz_llm.rundir import update_record, write_atomic

PROGRAM = "ezpz_llm.preflight"

_LIMIT_S = 180.0
"""It reports within a minute of its last rank's start; so long it may take to start them all, and to end."""
_INTERRUPTED = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))


def fit_for(plan: LaunchPlan, options: Options, record: Callable[[LaunchPlan], dict[str, Any]]) -> int:
    """Whether the hosts of `plan` may begin its run: 0, or the code that launch ends with, after saying why.

    What the preflight writes goes into the folder preflight/ of the run directory. Words of --wrap are left out: it
    looks at the hosts.

    Args:
        record: what run.json says of a launch; the preflight reads its ranks' hosts there.
    """
    step = build_plan(replace(options, command=(sys.executable, "-m", PROGRAM), wrap=(), tee="0",
                              run_dir=plan.run_dir.preflight.path), os.environ)
    step.run_dir.create()
    for path, content in step.files.items():
        write_atomic(path, content)
    update_record(step.run_dir, launch=record(step), exit=None)
    report = step.run_dir.path / "preflight.json"
    report.unlink(missing_ok=True)
    # Its report is the account of its end, if it came to one.
    code = run(step, None, _LIMIT_S, tell=lambda: not report.exists()).code
    if code == 0:
        return 0
    code = code if code in _INTERRUPTED else EXIT_PREFLIGHT
    what = "was interrupted" if code in _INTERRUPTED else "found the reservation unfit"
    cause = f"the preflight {what}: {report if report.exists() else step.run_dir.path}"
    update_record(plan.run_dir, exit=not_started(code, cause, time.time()))
    say(f"launch: nothing was started: {cause}")
    return code
