"""Start a program on every rank of the reservation."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ezpz_llm.base import UserError, make_private, run_command, show, system_text, version_text
from ezpz_llm.launch.option_parsing import Options, help_text, parse, run_dir_of
from ezpz_llm.launch.plan import LaunchPlan, build_plan
from ezpz_llm.launch.ranks import is_by_hand
from ezpz_llm.launch.relay import say
from ezpz_llm.launch.schedulers.scheduler import clock
from ezpz_llm.launch.show import details, first_lines, json_text, summary
from ezpz_llm.rundir import RUN_DIR_VARIABLE, sweep_checkpoints, update_record, write_atomic

if TYPE_CHECKING:
    from ezpz_llm.launch.precheck import Checked


_PRINTS_ALONE = ("ezpz_llm.evaluate", "ezpz_llm.generate")
_SHOWN_LINES, _SHOWN_BYTES = 64, 16384
"""What the other ranks may have printed in all to be shown at the end."""


def main(argv: Sequence[str]) -> int:
    """Plan, show, check, run; the exit code is the run's.

    Raises:
        UserError: any mistake in what was typed or what the machine offers.
    """
    options = parse(argv)
    if options.help:
        print(help_text())
        return 0
    if options.version:
        print(version_text())
        return 0
    plan = build_plan(options, os.environ)
    if options.dry_run:
        show(json_text(plan) if options.as_json else details(plan))
        return _dry_check(plan, options)
    return _become(plan) if plan.is_started else _start(plan, options, argv)


def _become(plan: LaunchPlan) -> int:
    if plan.ranks[0].rank == 0 or is_by_hand(os.environ):
        print(f"launch: {plan.notes[0]}", file=sys.stderr, flush=True)
    env = {**os.environ, **{name: setting.value for name, setting in plan.env.items()}}
    try:
        os.execvpe(plan.argv[0], plan.argv, env)
    except OSError as error:
        raise UserError(f"cannot run {plan.argv[0]!r}: {error.strerror}", where="the command to launch",
                        exit_code=127) from error


def _start(plan: LaunchPlan, options: Options, typed: Sequence[str]) -> int:
    # Imported where ranks really start: --dry-run and --help do without.
    from ezpz_llm.launch.failures.texts import site_texts
    from ezpz_llm.launch.owner import own

    # A mistake in a site's file is to be known before a run has ended badly.
    site_texts(os.environ, {name: setting.value for name, setting in plan.env.items()})
    with contextlib.ExitStack() as until_the_end:
        # A directory that is in use has nothing to check; and what its check found would not be the reason.
        stands = run_dir_of(plan.target, options.run_dir) is not None and plan.run_dir.control.is_dir()
        owned = until_the_end.enter_context(own(plan.run_dir, plan.run_id, os.environ)) if stands else None
        checked = _check(plan)
        if checked.code:
            say("launch: nothing was started: the command's own check failed")
            return checked.code
        plan = _make_run_dir(plan, options)
        if owned is None:
            owned = until_the_end.enter_context(own(plan.run_dir, plan.run_id, os.environ))
        _clear_run_dir(plan, owned.killed)
        return _run(plan, options, typed, checked)


def _run(plan: LaunchPlan, options: Options, typed: Sequence[str], checked: Checked) -> int:
    from ezpz_llm.launch.failures.facts import exit_record, not_started
    from ezpz_llm.launch.supervise import run

    if options.explain:
        say(f"{details(plan)}\n\n{checked.explanation}".rstrip())
    else:
        # --verbose of our own command is meant for the whole of what starts.
        is_verbose = options.verbose or (plan.target.module is not None and "--verbose" in plan.target.arguments)
        # Lines of a log stay whole, for those who search it.
        width = shutil.get_terminal_size().columns if sys.stderr.isatty() else sys.maxsize
        say(summary(plan) if is_verbose else first_lines(plan, width))
    started = time.time()
    update_record(plan.run_dir, launch=_record(plan, typed), exit=None)
    if options.preflight:
        from ezpz_llm.launch.precheck import fit_for

        if code := fit_for(plan, options, lambda step: _record(step, typed)):
            return code
    try:
        with _where_it_runs(plan, options) as plan:
            outcome = run(plan, options.idle_limit_s, start_limit_s=options.start_limit_s or None,
                          keep=lambda ended: _record_end(plan, exit_record(ended)))
    except UserError as error:
        _record_end(plan, not_started(error.exit_code, error.found, time.time()))
        raise
    shutil.rmtree(plan.run_dir.offloaded, ignore_errors=True)  # killed ranks leave theirs
    if outcome.code == 0 and _leaves_no_run(plan, options):
        shutil.rmtree(plan.run_dir.path, ignore_errors=True)
    if outcome.code == 0 and plan.target.module is None:
        if options.tee == "0":
            with contextlib.suppress(OSError):  # removed or closed to us meanwhile, which changes no outcome
                _show_other_logs(plan)
        # Our own commands end with lines of their own.
        say(f"launch: exit code 0 after {clock(round(time.time() - started))}, run directory {plan.run_dir.path}")
    return outcome.code


def _leaves_no_run(plan: LaunchPlan, options: Options) -> bool:
    """True of a command that only prints, unless a run directory was named. It would be the newest run in runs/."""
    return plan.target.module in _PRINTS_ALONE and run_dir_of(plan.target, options.run_dir) is None


def _dry_check(plan: LaunchPlan, options: Options) -> int:
    """What the command itself makes of the plan: the check that a start would begin with, and its code."""
    if options.no_check or plan.is_started:
        return 0
    checked = _check(plan)
    if checked.code:
        print("launch: this would not start: the command's own check failed", file=sys.stderr, flush=True)
    elif options.explain and not options.as_json and checked.explanation:
        print(f"\n{checked.explanation}")
    return checked.code


def _check(plan: LaunchPlan) -> Checked:
    from ezpz_llm.launch.precheck import check_first

    places = list(Counter(place.host for place in plan.ranks).items())
    return check_first(plan.target, plan.command, len(plan.ranks),
                       {**os.environ, RUN_DIR_VARIABLE: str(plan.run_dir.path)}, places)


def _record_end(plan: LaunchPlan, how: dict[str, object]) -> None:
    """Write it where that is still possible: the exit code is what it is all the same."""
    try:
        update_record(plan.run_dir, exit=how)
    except (OSError, UserError) as error:
        why = error.found if isinstance(error, UserError) else error.strerror
        say(f"launch: the end of the run is not in {plan.run_dir.record}: {why}")


def _show_other_logs(plan: LaunchPlan) -> None:
    """`launch hostname` shows the line of every rank; of longer output, say where that of the others is."""
    logs = {place.rank: plan.run_dir.rank_log(place.rank) for place in plan.ranks if place.rank}
    sizes = {rank: log.stat().st_size for rank, log in logs.items() if log.exists()}
    written = [rank for rank, size in sizes.items() if size]
    if not written:
        return
    if sum(sizes.values()) <= _SHOWN_BYTES:
        texts = {rank: system_text(logs[rank], most=_SHOWN_BYTES).splitlines() for rank in written}
        if sum(map(len, texts.values())) <= _SHOWN_LINES:
            say("\n".join(f"[{rank}] {line}" for rank, lines in texts.items() for line in lines))
            return
    say(f"launch: {len(written)} other rank{'' if len(written) == 1 else 's'} wrote to"
        f" {plan.run_dir.rank_log(0).parent} (--tee all shows it here)")


def _where_it_runs(plan: LaunchPlan, options: Options) -> contextlib.AbstractContextManager[LaunchPlan]:
    """The plan as it is, or from copies of the environment that are there meanwhile."""
    if not options.stage_env:
        return contextlib.nullcontext(plan)
    from ezpz_llm.launch.staging.stage import staged

    return staged(plan, options, os.environ)


def _make_run_dir(plan: LaunchPlan, options: Options) -> LaunchPlan:
    """Make the run directory; a default one is this launch's alone, even if another began in the same second."""
    while run_dir_of(plan.target, options.run_dir) is None and not plan.run_dir.claim():
        plan = build_plan(options, os.environ)
    plan.run_dir.create()
    return plan


def _clear_run_dir(plan: LaunchPlan, killed: str) -> None:
    """Remove what an earlier launch, which may have been `killed`, left in the directory that is ours now."""
    if killed:
        from ezpz_llm.launch.teardown import end_killed

        end_killed(plan.run_dir, killed)
    from ezpz_llm.launch.node.messages import clear_orders

    # Records and heartbeats of an earlier run in the same directory would be taken for this one's.
    clear_orders(plan.run_dir)
    for path, begin in ((plan.run_dir.errors, "rank"), (plan.run_dir.heartbeat, "")):
        with make_private(path) as folder:
            for name in folder.names(begin):
                folder.remove(name)
    plan.run_dir.post_mortem.unlink(missing_ok=True)
    # They may fill the disk before the first new checkpoint is written.
    sweep_checkpoints(plan.run_dir.checkpoints)
    for path, content in plan.files.items():
        write_atomic(path, content)


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
        "site": plan.site.name,
        "binding": asdict(plan.binding),
        "notes": list(plan.notes),
        "sources": {"hosts": plan.allocation.source, "ranks": plan.ranks_source, "launcher": plan.launcher.source,
                    "site": plan.site.source, **{name: setting.source for name, setting in plan.env.items()}},
        "world_size": len(plan.ranks),
        "env": {name: setting.value for name, setting in plan.env.items()},
        "started": time.time(),
    }


if __name__ == "__main__":
    raise SystemExit(run_command(main))
