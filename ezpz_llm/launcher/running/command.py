"""Start a program on every rank of the allocation."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ezpz_llm.core.base import UserError, make_private, print_lines, system_text, version_text
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, remove_incomplete_checkpoints, write_atomic
from ezpz_llm.launcher.basics.ranks import is_set_by_user
from ezpz_llm.launcher.basics.relay import print_stderr
from ezpz_llm.launcher.basics.start_errors import start_problem
from ezpz_llm.launcher.jobs.option_parsing import Options, help_text, parse, reads_program, run_dir_of
from ezpz_llm.launcher.jobs.schedulers.scheduler import clock
from ezpz_llm.launcher.planning.plan import LaunchPlan, build_plan
from ezpz_llm.launcher.planning.plan_text import details, json_text, opening_lines, summary

if TYPE_CHECKING:
    from ezpz_llm.core.rundir.records import Exit, Launch
    from ezpz_llm.launcher.running.precheck import CheckOutcome


_PRINT_ONLY_COMMANDS = ("ezpz_llm.evaluate", "ezpz_llm.generate")
_MAX_LINES, _MAX_BYTES = 64, 16384
"""Limits on the output of ranks other than 0 that launch prints at the end; longer output stays in the logs."""


def main(argv: Sequence[str]) -> int:
    """Plan, print, check, and run the command; return the exit code of the run.

    Raises:
        UserError: the command line is invalid, or does not fit this machine.
    """
    options = parse(argv)
    if options.help:
        print_lines(help_text())
        return 0
    if options.version:
        print_lines(version_text())
        return 0
    plan = build_plan(options, os.environ)
    _check_stdin(options, len(plan.ranks))
    if options.dry_run:
        return _dry_run(plan, options)
    return _exec_command(plan) if plan.is_existing_rank else _start(plan, options, argv)


def _check_stdin(options: Options, world_size: int) -> None:
    """Reject ranks that would read their program from standard input, which is empty for all but one rank.

    Raises:
        UserError: such a command.
    """
    if not reads_program(options.command) or (world_size == 1 and (options.stdin or os.isatty(0))):
        return
    typed = shlex.join(options.command)
    raise UserError("ranks cannot read their program from standard input: rank 0 reads it only with --stdin, and"
                    " other ranks have none", where=f"the command to launch: {typed}",
                    instead="save the program to a file, and pass that file to the interpreter")


def _exec_command(plan: LaunchPlan) -> int:
    if plan.ranks[0].rank == 0 or is_set_by_user(os.environ):
        print_lines(f"launch: {plan.notes[0]}", file=sys.stderr)
    env = {**os.environ, **{name: setting.value for name, setting in plan.env.items()}}
    try:
        os.execvpe(plan.argv[0], plan.argv, env)
    except OSError as error:
        raise UserError(f"cannot run {plan.argv[0]!r}: {start_problem(plan.argv[0], error)}",
                        where="the command to launch", exit_code=127) from error


def _start(plan: LaunchPlan, options: Options, typed: Sequence[str]) -> int:
    # Imported only if ranks start: --dry-run and --help do not need these modules.
    from ezpz_llm.launcher.jobs.owner import become_owner
    from ezpz_llm.launcher.on_nodes.known_failures import site_texts
    from ezpz_llm.launcher.running.open_files import check_open_files

    # Report an error in a site's file of failure texts now, not when the run fails.
    site_texts(os.environ, {name: setting.value for name, setting in plan.env.items()})
    check_open_files(plan)
    with contextlib.ExitStack() as stack:
        # Become the owner of an existing directory before the check: if it is in use, report that error first.
        exists = run_dir_of(plan.target, options.run_dir) is not None and plan.run_dir.control.is_dir()
        owned = stack.enter_context(become_owner(plan.run_dir, plan.run_id, os.environ)) if exists else None
        checked = _check(plan)
        if checked.code:
            print_stderr("launch: nothing was started: the command's own check failed")
            return checked.code
        plan = _make_run_dir(plan, options)
        if owned is None:
            owned = stack.enter_context(become_owner(plan.run_dir, plan.run_id, os.environ))
        _clear_run_dir(plan, owned.killed_run_id)
        return _run(plan, options, typed, checked)


def _run(plan: LaunchPlan, options: Options, typed: Sequence[str], checked: CheckOutcome) -> int:
    from ezpz_llm.core.rundir.records import update_record
    from ezpz_llm.launcher.diagnosis.recorded_exit import exit_record, not_started_record
    from ezpz_llm.launcher.running.supervision import run

    if options.explain:
        print_stderr(f"{details(plan)}\n\n{checked.explanation}".rstrip())
    else:
        # --verbose of a command of this package applies to launch too.
        is_verbose = options.verbose or (plan.target.module is not None and "--verbose" in plan.target.arguments)
        # Do not wrap lines in a log file, so that grep finds them.
        width = shutil.get_terminal_size().columns if sys.stderr.isatty() else sys.maxsize
        print_stderr(summary(plan) if is_verbose else opening_lines(plan, width))
    started = time.time()
    update_record(plan.run_dir, launch=_record(plan, typed), exit=None)
    if options.preflight:
        from ezpz_llm.launcher.running.precheck import run_preflight

        if code := run_preflight(plan, options, lambda step: _record(step, typed)):
            return code
    try:
        with _maybe_staged(plan, options) as plan:
            outcome = run(plan, options.idle_limit_s, start_limit_s=options.start_limit_s or None,
                          record_end=lambda ended: _record_end(plan, exit_record(ended)),
                          reads_stdin=options.stdin or os.isatty(0))
    except UserError as error:
        _record_end(plan, not_started_record(error.exit_code, error.found, time.time()))
        raise
    shutil.rmtree(plan.run_dir.offloaded, ignore_errors=True)  # killed ranks leave their files behind
    if outcome.code == 0 and _discards_run_dir(plan, options):
        shutil.rmtree(plan.run_dir.path, ignore_errors=True)
    if outcome.code == 0 and plan.target.module is None:
        if options.tee == "0":
            with contextlib.suppress(OSError):  # a log that was removed does not change the outcome
                _show_other_logs(plan)
        # Commands of this package print their own last lines.
        print_stderr(f"launch: exit code 0 after {clock(round(time.time() - started))}, run directory "
                     f"{plan.run_dir.path}")
    return outcome.code


def _discards_run_dir(plan: LaunchPlan, options: Options) -> bool:
    """Return True for a command that only prints, if the user named no run directory.

    Its directory would otherwise be the newest run in runs/.
    """
    return plan.target.module in _PRINT_ONLY_COMMANDS and run_dir_of(plan.target, options.run_dir) is None


def _dry_run(plan: LaunchPlan, options: Options) -> int:
    """Run the command's own check, as a real run would, print the plan with its notes, and return the exit code."""
    from ezpz_llm.launcher.running.precheck import CheckOutcome

    checked = CheckOutcome()
    explains = options.explain and not options.as_json
    try:
        if not (options.no_check or plan.is_existing_rank):
            checked = _check(plan)
    finally:
        if not explains:
            plan = plan._replace(notes=(*plan.notes, *checked.notes))
        print_lines(json_text(plan) if options.as_json else details(plan))
    if checked.code:
        print_lines("launch: the command would not start: its own check failed", file=sys.stderr)
    elif explains and checked.explanation:
        print_lines(f"\n{checked.explanation}")
    return checked.code


def _check(plan: LaunchPlan) -> CheckOutcome:
    from ezpz_llm.launcher.running.precheck import check_command

    places = list(Counter(place.host for place in plan.ranks).items())
    return check_command(plan.target, plan.command, len(plan.ranks),
                         {**os.environ, RUN_DIR_VARIABLE: str(plan.run_dir.path)}, places)


def _record_end(plan: LaunchPlan, end: Exit) -> None:
    """Record the end of the run if possible; a failure to write does not change the exit code."""
    from ezpz_llm.core.rundir.records import update_record

    try:
        update_record(plan.run_dir, exit=end)
    except (OSError, UserError) as error:
        reason = error.found if isinstance(error, UserError) else error.strerror
        print_stderr(f"launch: cannot record the end of the run in {plan.run_dir.record}: {reason}")


def _show_other_logs(plan: LaunchPlan) -> None:
    """Print the output of ranks other than 0 if it is short (`launch hostname`), else the path of their logs."""
    logs = {place.rank: plan.run_dir.rank_log(place.rank) for place in plan.ranks if place.rank}
    sizes = {rank: log.stat().st_size for rank, log in logs.items() if log.exists()}
    written = [rank for rank, size in sizes.items() if size]
    if not written:
        return
    if sum(sizes.values()) <= _MAX_BYTES:
        texts = {rank: system_text(logs[rank], most=_MAX_BYTES).splitlines() for rank in written}
        if sum(map(len, texts.values())) <= _MAX_LINES:
            print_stderr("\n".join(f"[{rank}] {line}" for rank, lines in texts.items() for line in lines))
            return
    print_stderr(f"launch: {len(written)} other rank{'' if len(written) == 1 else 's'} wrote to"
                 f" {plan.run_dir.rank_log(0).parent} (--tee all shows it here)")


def _maybe_staged(plan: LaunchPlan, options: Options) -> contextlib.AbstractContextManager[LaunchPlan]:
    """Return a context manager for the plan; with --stage-env, its ranks run from copies of the environment."""
    if not options.stage_env:
        return contextlib.nullcontext(plan)
    from ezpz_llm.launcher.running.staging.sender import stage_environment

    return stage_environment(plan, options, os.environ)


def _make_run_dir(plan: LaunchPlan, options: Options) -> LaunchPlan:
    """Create the run directory, and return the plan for it.

    A default directory belongs to this launch alone: if another launch has claimed it in the same second, the plan
    is built again with another directory.
    """
    while run_dir_of(plan.target, options.run_dir) is None and not plan.run_dir.claim():
        plan = build_plan(options, os.environ)
    plan.run_dir.create()
    return plan


def _clear_run_dir(plan: LaunchPlan, killed: str) -> None:
    """Remove the files of an earlier launch from the run directory.

    Args:
        killed: run id of a launch that was killed on this node; its processes are ended first.
    """
    if killed:
        from ezpz_llm.launcher.running.teardown import end_killed_run

        end_killed_run(plan.run_dir, killed)
    from ezpz_llm.launcher.basics.messages import clear_orders

    # Records and heartbeats of an earlier run would be attributed to this run.
    clear_orders(plan.run_dir)
    for path, prefix in ((plan.run_dir.errors, "rank"), (plan.run_dir.heartbeat, "")):
        with make_private(path) as folder:
            for name in folder.names(prefix):
                folder.remove(name)
    plan.run_dir.post_mortem.unlink(missing_ok=True)
    # Incomplete checkpoints may fill the disk before the first new checkpoint is written.
    remove_incomplete_checkpoints(plan.run_dir.checkpoints)
    for path, content in plan.files.items():
        write_atomic(path, content)


def _record(plan: LaunchPlan, typed: Sequence[str]) -> Launch:
    from ezpz_llm.core.rundir.records import Launch

    return Launch(
        typed=["launch", *typed],
        argv=list(plan.argv),
        command=list(plan.command),
        scheduler=plan.allocation.scheduler,
        job_id=plan.allocation.job_id,
        hosts=list(plan.hosts),
        ranks_per_host=list(Counter(place.host for place in plan.ranks).values()),
        launcher=plan.launcher.kind,
        dialect=plan.launcher.title,
        site=plan.site.name,
        binding=plan.binding._asdict(),
        notes=list(plan.notes),
        sources={"hosts": plan.allocation.source, "ranks": plan.ranks_source, "launcher": plan.launcher.source,
                 "site": plan.site.source, **{name: setting.source for name, setting in plan.env.items()}},
        world_size=len(plan.ranks),
        env={name: setting.value for name, setting in plan.env.items()},
        started=time.time())
