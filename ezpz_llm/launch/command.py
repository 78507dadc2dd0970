"""The command `launch`."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ezpz_llm.errors import UserError
from ezpz_llm.launch.options import Options, help_text, parse
from ezpz_llm.launch.plan import LaunchPlan, build_plan
from ezpz_llm.launch.show import details, json_text, summary
from ezpz_llm.launch.target import run_dir_of

if TYPE_CHECKING:
    from ezpz_llm.launch.precheck import Checked


def main(argv: Sequence[str]) -> int:
    """Plan, show, check, run; the exit code is the run's.

    Raises:
        UserError: any mistake in what was typed or what the machine offers.
    """
    options = parse(argv)
    if options.help:
        print(help_text())
        return 0
    plan = build_plan(options, os.environ)
    if options.dry_run:
        print(json_text(plan) if options.as_json else details(plan))
        return _explain(plan) if options.explain and not options.as_json and not plan.is_started else 0
    if plan.is_started:
        return _become(plan)
    return _start(plan, options, argv)


def _become(plan: LaunchPlan) -> int:
    if plan.ranks[0].rank == 0:
        print(f"launch: {plan.notes[0]}", file=sys.stderr, flush=True)
    env = {**os.environ, **{name: setting.value for name, setting in plan.env.items()}}
    try:
        os.execvpe(plan.argv[0], plan.argv, env)
    except OSError as error:
        raise UserError(f"cannot run {plan.argv[0]!r}: {error.strerror}", where="the command to launch",
                        exit_code=127) from error


def _start(plan: LaunchPlan, options: Options, typed: Sequence[str]) -> int:
    # Imported where ranks really start: --dry-run and --help do without.
    from ezpz_llm.launch.failures import exit_record, not_started
    from ezpz_llm.launch.supervise import run
    from ezpz_llm.rundir import update_record

    checked = _check(plan)
    if checked.code:
        return checked.code
    plan = _claim_run_dir(plan, options)
    shown = f"{details(plan)}\n\n{checked.explanation}".rstrip() if options.explain else summary(plan)
    print(shown, file=sys.stderr, flush=True)
    update_record(plan.run_dir, launch=_record(plan, typed), exit=None)
    if options.preflight:
        from ezpz_llm.launch.preflight import fit_for

        if code := fit_for(plan, options, lambda step: _record(step, typed)):
            return code
    try:
        with _where_it_runs(plan, options) as plan:
            outcome = run(plan, options.idle_limit_s)
    except UserError as error:
        _record_end(plan, not_started(error.exit_code, error.found, time.time()))
        raise
    shutil.rmtree(plan.run_dir.offloaded, ignore_errors=True)  # killed ranks leave theirs
    _record_end(plan, exit_record(outcome))
    return outcome.code


def _explain(plan: LaunchPlan) -> int:
    """What the command itself makes of the plan: its check, without a start."""
    checked = _check(plan)
    if checked.code == 0 and checked.explanation:
        print(f"\n{checked.explanation}")
    return checked.code


def _check(plan: LaunchPlan) -> Checked:
    from ezpz_llm.launch.precheck import check_first
    from ezpz_llm.rundir import RUN_DIR_VARIABLE

    places = list(Counter(place.host for place in plan.ranks).items())
    return check_first(plan.target, plan.command, len(plan.ranks),
                       {**os.environ, RUN_DIR_VARIABLE: str(plan.run_dir.path)}, places)


def _record_end(plan: LaunchPlan, how: dict[str, object]) -> None:
    """Write it where that is still possible: the exit code is what it is all the same."""
    from ezpz_llm.rundir import update_record

    try:
        update_record(plan.run_dir, exit=how)
    except (OSError, UserError) as error:
        why = error.found if isinstance(error, UserError) else error.strerror
        print(f"launch: the end of the run is not in {plan.run_dir.record}: {why}", file=sys.stderr, flush=True)


def _where_it_runs(plan: LaunchPlan, options: Options) -> contextlib.AbstractContextManager[LaunchPlan]:
    """The plan as it is, or from copies of the environment that are there meanwhile."""
    if not options.stage_env:
        return contextlib.nullcontext(plan)
    from ezpz_llm.launch.staging.stage import staged

    return staged(plan, options, os.environ)


def _claim_run_dir(plan: LaunchPlan, options: Options) -> LaunchPlan:
    """Make the run directory; a default one is this launch's alone, even if another began in the same second."""
    while run_dir_of(plan.target, options.run_dir) is None:
        try:
            plan.run_dir.path.mkdir(parents=True)
            break
        except FileExistsError:
            plan = build_plan(options, os.environ)
        except OSError:
            # create() says what is wrong with the place.
            break
    plan.run_dir.create()
    # Records and heartbeats of an earlier run in the same directory would be taken for this one's.
    for stale in (*plan.run_dir.errors.glob("rank*"), *(plan.run_dir.path / "heartbeat").glob("*"),
                  plan.run_dir.post_mortem, plan.run_dir.control / "logs"):
        stale.unlink(missing_ok=True)
    for path, content in plan.files.items():
        path.write_text(content)
    return plan


def _record(plan: LaunchPlan, typed: Sequence[str]) -> dict[str, object]:
    return {
        "typed": ["launch", *typed],
        "argv": list(plan.argv),
        "command": list(plan.command),
        "scheduler": plan.allocation.scheduler,
        "job_id": plan.allocation.job_id,
        "hosts": list(plan.hosts),
        "ranks_per_host": list(Counter(place.host for place in plan.ranks).values()),
        "launcher": plan.launcher.kind,
        "dialect": plan.launcher.dialect,
        "world_size": len(plan.ranks),
        "env": {name: setting.value for name, setting in plan.env.items()},
        "started": time.time(),
    }
