"""Run the remaining runs of a study, or submit a job per point.

Runs are sequential, each on some nodes of the allocation.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.core.base import EXIT_USAGE, UserError, print_lines
from ezpz_llm.core.rundir import RunDir, locked
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.launcher.basics.child import launch_words, run_launch
from ezpz_llm.launcher.basics.variables import ENDS_AT_VARIABLE
from ezpz_llm.launcher.diagnosis.liveness import read_live_state
from ezpz_llm.launcher.jobs.option_parsing import value_of
from ezpz_llm.training.observe.throughput import format_number
from ezpz_llm.verify.scaling.measurement import failed_repeat, measure
from ezpz_llm.verify.scaling.planning import THREADS_VARIABLE, hosts_options, study_allocation
from ezpz_llm.verify.scaling.study import (
    Point,
    Repeat,
    Study,
    add_repeat,
    nodes_of_repeat,
    read_repeats,
    run_dir_of,
)

_IDLE_S = "300"
"""Default --idle-timeout of a run, so that the study continues after a run that hangs."""
_SILENT_S = 30.0
_RESERVE_S, _RESERVE_SHARE, _LONGEST_RESERVE_S = 20.0, 0.1, 120.0
"""The trainer stops this long before the allocation ends; do not start a run that would not finish before then."""


class StudyInterrupted(Exception):
    """The study cannot continue now; the message is the reason.

    An interrupted run is not counted. It is repeated later, and its files are kept.
    """


def remaining_runs(study: Study, folder: Path, only: Sequence[str], retry_failed: bool) -> list[tuple[Point, int]]:
    """Return the remaining runs in order.

    Raises:
        UserError: `only` names an unknown point.
    """
    names = {study.point(name).name for name in only} or {point.name for point in study.points}
    finished = {(repeat.point, repeat.repeat) for repeat in read_repeats(folder)
                if repeat.error is None or not retry_failed}
    return [(point, repeat) for point, repeat in study.order()
            if point.name in names and (point.name, repeat) not in finished]


def run_all(study: Study, folder: Path, runs: Sequence[tuple[Point, int]]) -> None:
    """Run the points and append a line per run to points.jsonl. SIGTERM stops the current run, then this process.

    Raises:
        UserError: the allocation has too few nodes, or another process is running one of the points.
        StudyInterrupted: the allocation has ended or is about to end, or a run was interrupted.
    """
    allocation = study_allocation(study.hosts, study.points[0].launch, os.environ)
    hosts = tuple(host.name for host in allocation.hosts)
    largest = max((point for point, _ in runs), key=lambda point: point.nodes)
    if largest.nodes > len(hosts):
        fitting = dict.fromkeys(point.name for point, _ in runs if point.nodes <= len(hosts))
        raise UserError(f"point {largest.name} requires {largest.nodes} nodes, but there are {len(hosts)}",
                        where=allocation.source,
                        instead=f"--point {','.join(fitting)}" if fitting else "a larger allocation")
    signal.signal(signal.SIGTERM, _exit_on_signal)
    longest = 0.0
    for number, (point, repeat) in enumerate(runs, 1):
        from_env = os.environ.get(ENDS_AT_VARIABLE)
        ends_at = allocation.ends_at or (float(from_env) if from_env else None)
        remaining_s = math.inf if ends_at is None else ends_at - time.time()
        if longest + _RESERVE_S + min(_RESERVE_SHARE * remaining_s, _LONGEST_RESERVE_S) > remaining_s:
            raise StudyInterrupted("not enough time left in the allocation for another run")
        began = time.monotonic()
        chosen = nodes_of_repeat(hosts, point.nodes, repeat)
        point_dir = run_dir_of(folder, point, repeat).path.parent
        point_dir.mkdir(parents=True, exist_ok=True)
        with locked(point_dir, 0) as is_locked:
            if not is_locked:
                raise UserError(f"another process is running point {point.name}", where=str(point_dir),
                                instead="wait for it, or choose other points with --point")
            result = _run_repeat(study, folder, point, repeat, hosts_options(allocation, chosen))
        longest = max(longest, time.monotonic() - began)
        print_lines(f"[{number:>{len(str(len(runs)))}}/{len(runs)}] {_summary(result, study, chosen)}")
        if number == 1 < len(runs) and result.error and _would_repeat(run_dir_of(folder, point, repeat)):
            raise StudyInterrupted(f"the first run failed for a reason that the others share: {result.error}")


def _would_repeat(run_dir: RunDir) -> bool:
    """Return True if a failed run succeeded, but cannot be measured, or had a configuration error."""
    ended = read_record(run_dir).exit
    return ended is not None and ended.code in (0, EXIT_USAGE)


def _run_repeat(study: Study, folder: Path, point: Point, repeat: int,
                host_options: tuple[str, ...]) -> Repeat:
    """Run one repeat and append its line; if an earlier run finished but its line is missing, only measure it."""
    run_dir = run_dir_of(folder, point, repeat)
    finished_repeats = {(finished.point, finished.repeat) for finished in read_repeats(folder)}
    if run_dir.path.exists():
        _wait_for_exit(run_dir)
        if (point.name, repeat) not in finished_repeats and (result := measure(folder, point, repeat)) is not None:
            add_repeat(folder, result)
            return result
        _rename_attempt(run_dir.path)
    output = run_dir.path.with_suffix(".txt")
    _run_point(study, point, ("--run-dir", str(run_dir.path), *host_options), output)
    result = measure(folder, point, repeat)
    if result is None:
        record = read_record(run_dir)
        if record.exit is not None:
            raise StudyInterrupted(record.stopped or record.exit.cause)
        result = failed_repeat(folder, point, repeat, _launch_error(output))
    add_repeat(folder, result)
    return result


def _wait_for_exit(run_dir: RunDir) -> None:
    """Wait for launch and its ranks, which may outlive a study that was killed."""
    record, announced = read_record(run_dir), False
    while read_live_state(run_dir, record, _SILENT_S) is not None:
        if not announced:
            print_lines(f"waiting for an earlier attempt to exit: {run_dir.path}")
        announced = True
        time.sleep(1)
        record = read_record(run_dir)


def _rename_attempt(path: Path) -> None:
    """Rename the run directory of an earlier attempt, to keep its files."""
    number = 1
    while (renamed := path.with_name(f"{path.name}.attempt-{number}")).exists():
        number += 1
    path.rename(renamed)


def _run_point(study: Study, point: Point, options: Sequence[str], output: Path) -> None:
    """Start launch with its output in a file, and wait until it exits."""
    has_limit = value_of(point.launch, "--idle-timeout") is not None
    limit = () if has_limit else ("--idle-timeout", _IDLE_S)
    command = launch_words([*point.launch, *options, *limit], point.command)
    threads = {} if study.threads is None else {THREADS_VARIABLE: str(study.threads)}
    with output.open("wb") as file:
        run_launch(command, variables=threads, cwd=study.directory, output=file)


def _launch_error(output: Path) -> str:
    lines = output.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["launch failed without output"])[-1].removeprefix("error: ") + f" (see {output})"


def _summary(repeat: Repeat, study: Study, hosts: Sequence[str]) -> str:
    width = max(len(point.name) for point in study.points)
    name = f"{repeat.point:<{width}}  run {repeat.repeat}"
    if study.unit == "nodes":
        name += f"  on {','.join(hosts[:4])}{',…' if len(hosts) > 4 else ''}"
    if repeat.error is not None or not repeat.tokens_per_second:
        return f"{name}  FAILED: {repeat.error}"
    step_s = repeat.step_tokens / repeat.tokens_per_second
    text = f"{name}  {step_s * 1e3:8.1f} ms/step  {format_number(repeat.tokens_per_second):>6} tok/s"
    if repeat.first_loss is None or repeat.last_loss is None or repeat.last_loss >= repeat.first_loss:
        return f"{text}  the loss did not decrease: throughput is not meaningful"
    return f"{text}  loss {repeat.first_loss:.2f} to {repeat.last_loss:.2f}"


def _exit_on_signal(number: int, frame: object) -> None:
    """Raise SystemExit, so that the cleanup of the current run stops its launch."""
    raise SystemExit(128 + number)


def submit_points(study: Study, folder: Path, points: Sequence[Point], words: Sequence[str]) -> None:
    """Submit a job for each point, which runs the point's repeats.

    Args:
        words: the user's options for submit, such as --time and --account.

    Raises:
        UserError: submit failed for a point. The points before it are queued.
    """
    for number, point in enumerate(points):
        command = [sys.executable, "-m", "ezpz_llm.submit", *words, "--nodes", str(point.nodes),
                   "--name", point.name, "--run-dir", str(folder / "points" / point.name / "job"), "--",
                   "ezpz-llm", "scale", "--study", str(folder), "--point", point.name]
        print_lines(f"{point.name}:")
        process = subprocess.run(command, cwd=study.directory, stdin=subprocess.DEVNULL, check=False)
        if process.returncode:
            raise UserError(f"submit failed for {point.name}; the {number} jobs before it are queued", exit_code=1,
                            where="ezpz-llm submit, above",
                            instead="fix the error, then ezpz-llm scale --study "
                                    f'{folder} --point {",".join(remaining.name for remaining in points[number:])} '
                                    '--submit "…"')
