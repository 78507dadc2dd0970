"""Show why a run ended, or what a running job is waiting for."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ezpz_llm.core.base import UserError, open_private, print_lines, run_command
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.base.shell_commands import to_typable
from ezpz_llm.core.rundir import LAUNCHED, RunDir, newest_run
from ezpz_llm.core.rundir.records import Exit, Launch, RunRecord, read_own_record, read_record
from ezpz_llm.launcher.basics.hostlist import expand_numbers
from ezpz_llm.launcher.basics.messages import order_logs, take_stacks
from ezpz_llm.launcher.basics.variables import RUN_ID_VARIABLE
from ezpz_llm.launcher.diagnosis.collective_differences import describe_difference
from ezpz_llm.launcher.diagnosis.liveness import Live, as_details, as_lines, describe_silent_ranks, read_live_state
from ezpz_llm.launcher.diagnosis.postmortem import postmortem_of, tail_text
from ezpz_llm.launcher.diagnosis.recorded_exit import NOT_STARTED, facts_from
from ezpz_llm.launcher.on_nodes.node.builds import find_locks

_STACKS_WITHIN_S = 15.0
_STACK_LINES = 60
_SILENT_AFTER_S = 30.0
_STACKS_TAKEN = 2
_CLOCK_SLACK_S = 60.0
"""Allowance for a file server's clock."""


def main(argv: Sequence[str]) -> int:
    """Print the post-mortem of a finished run, or the state of a running one.

    Raises:
        UserError: there is no such run, or launch did not start it.
    """
    options = _parse(argv)
    named = options.run_dir
    run_dir = RunDir(named.absolute()) if named else newest_run(Path("runs"), LAUNCHED, "ezpz-llm why RUN_DIR")
    run_dir.check_exists()
    record = read_record(run_dir)
    if (ended := record.exit) and record.launch is None and ended.code is not None:
        return _show_exit_only(run_dir, ended, options.json)
    _check_launch(run_dir, record)
    _warn_if_unreadable(run_dir)
    if options.logs:
        _request_logs(run_dir, options.logs)
    live = read_live_state(run_dir, record, options.silent_after)
    if live is None:
        # Read again: launch may have recorded the exit since the first read.
        return _show_ended(run_dir, read_record(run_dir), options.json)
    return _show_running(run_dir, record, live, options)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("why", description=__doc__, shown=(
        "ezpz-llm why  the newest run",
        "ezpz-llm why runs/gpt2 --stacks 0  the stack of rank 0, for a run that hangs"))
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR",
                        help="the run (default: the newest in runs/ that launch started)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--stacks", metavar="RANKS", type=_ranks, default=set(),
                        help="show the stacks of these ranks of a running job: 0,4-7 (default: silent ranks)")
    parser.add_argument("--logs", metavar="RANKS", type=_ranks, default=set(),
                        help="above 256 ranks, copy the logs of these ranks to the run directory when they exit")
    parser.add_argument("--silent-after", metavar="S", type=float, default=_SILENT_AFTER_S,
                        help="seconds without output or heartbeat until a rank is silent (default: %(default)g)")
    return parser.parse_args(argv)


def _ranks(text: str) -> set[int]:
    try:
        return set(expand_numbers(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,4-7") from error


def _check_launch(run_dir: RunDir, record: RunRecord) -> None:
    launch = record.launch or Launch()
    needed = (launch.world_size, launch.hosts, launch.ranks_per_host, launch.launcher, launch.started)
    if None in needed or RUN_ID_VARIABLE not in (launch.env or {}):
        raise UserError("run.json has no launch record", where=str(run_dir.record),
                        instead="the run directory of a run that launch started")


def _show_exit_only(run_dir: RunDir, ended: Exit, as_json: bool) -> int:
    """Print the exit of a run whose directory was removed during the run: only the exit is recorded."""
    print_lines(json.dumps({"state": "ended", **as_plain(ended)}, indent=2) if as_json else
                f"{run_dir.path}: ended with code {ended.code}: {ended.cause or 'success'}. The command is"
                " unknown: run.json was removed during the run")
    return 0


def _warn_if_unreadable(run_dir: RunDir) -> None:
    try:
        open_private(run_dir.errors).close()
    except FileNotFoundError:
        return
    except OSError as error:
        print_lines(f"{error.filename}: {error.strerror}: ignoring its records and using run.json and the logs",
                    file=sys.stderr)


def _request_logs(run_dir: RunDir, ranks: set[int]) -> None:
    try:
        order_logs(run_dir, ",".join(map(str, sorted(ranks))))
    except OSError as error:
        raise UserError(f"cannot request logs: {error.strerror}", where=str(run_dir.control)) from error


def _show_ended(run_dir: RunDir, record: RunRecord, as_json: bool) -> int:
    if (ended := record.exit) and ended.kind == NOT_STARTED and ended.code is not None:
        print_lines(json.dumps({"state": "not started", **as_plain(ended)}, indent=2) if as_json else
                    f"{run_dir.path}: nothing was started: {ended.cause} (code {ended.code})")
        return 0
    postmortem = postmortem_of(run_dir, facts_from(record, _last_activity(run_dir)))
    unknown = record.exit is None
    if as_json:
        print_lines(json.dumps({"state": "launch was killed" if unknown else "ended", "code": postmortem.code,
                                "cause": postmortem.cause, "kind": postmortem.kind, "rank": postmortem.rank,
                                "text": postmortem.text, **postmortem.details}, indent=2))
        return 0
    if unknown:
        print_lines(f"{run_dir.path}: launch was killed before it could record the exit. From the files of the "
                    "run:")
    else:
        end = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(postmortem.facts.ended))
        print_lines(f"{run_dir.path}: ended {end} with code {postmortem.code}")
    print_lines(postmortem.text or postmortem.cause)
    return 0


def _last_activity(run_dir: RunDir) -> float:
    """Return the time of the last write by a rank, or of run.json if no rank has written."""
    folders = (run_dir.path / name for name in ("logs", "heartbeat", "errors"))
    written = _modification_times(path for folder in folders for path in folder.glob("*"))
    return max(written, default=max(_modification_times([run_dir.record]), default=0.0))


def _modification_times(paths: Iterable[Path]) -> Iterator[float]:
    for path in paths:
        with contextlib.suppress(OSError):  # removed meanwhile
            yield path.stat().st_mtime


def _show_running(run_dir: RunDir, record: RunRecord, live: Live, options: argparse.Namespace) -> int:
    suspects = [life.rank for life in live.silent[:_STACKS_TAKEN] if not life.node_is_silent]
    wanted = sorted(options.stacks) or suspects
    launch = record.launch or Launch()
    stacks, ordered = {}, time.time()
    if wanted:
        stacks = {rank: str(path) for rank, path in
                  take_stacks(run_dir, live.run_id, wanted, _STACKS_WITHIN_S, len(launch.hosts or ())).items()}
    difference = None
    if live.silent:
        difference = describe_difference(run_dir, launch.world_size or 1, ordered - _CLOCK_SLACK_S)
    if options.json:
        print_lines(json.dumps({**as_details(live, stacks), "collectives": difference}, indent=2))
        return 0
    started = launch.started or 0.0
    print_lines(f"{run_dir.path}: running for {time.time() - started:.0f} s")
    silent = [describe_silent_ranks(live.silent)] if live.silent else []
    # Suggest removing build locks only from this user's record: another user's record may name any file.
    own_launch = (read_own_record(run_dir) or RunRecord()).launch or Launch()
    for line in (*as_lines(live), *find_locks(own_launch.env or {}), *silent, *filter(None, [difference])):
        print_lines(f"  {line}")
    print_lines(f"  to monitor it: {to_typable(f'ezpz-llm watch {run_dir.path}')}")
    for rank in wanted:
        if rank not in stacks:
            print_lines(f"  rank {rank} did not write its stack within {_STACKS_WITHIN_S:.0f} s")
            continue
        print_lines(f"  rank {rank}: {stacks[rank]}")
        for line in tail_text(Path(stacks[rank])).splitlines()[:_STACK_LINES]:
            print_lines(f"  | {line}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
