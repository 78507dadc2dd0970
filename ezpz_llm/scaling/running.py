"""Run what is left of a study, one run after the other on part of the reservation, or submit a job per point; and
read what each finished run measured.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, open_regular
from ezpz_llm.explain.split import Split, split_run
from ezpz_llm.launch.child import launch_words, run_launch
from ezpz_llm.launch.liveness import look
from ezpz_llm.launch.option_parsing import value_of
from ezpz_llm.launch.variables import ENDS_AT_VARIABLE
from ezpz_llm.observe.history import finite, steady
from ezpz_llm.observe.throughput import short_number
from ezpz_llm.rundir import RunDir, is_interrupted, locked, read_layout, read_lines, read_record
from ezpz_llm.scaling.options import is_own_script
from ezpz_llm.scaling.precheck import THREADS_VARIABLE, carving, reservation
from ezpz_llm.scaling.study import (
    Point,
    Repeat,
    Study,
    add_repeat,
    carve,
    read_repeats,
    run_dir_of,
)

_IDLE_S = "300"
"""A run that hangs is ended after so long, where the user's words for launch do not say: the rest is to go on."""
_SILENT_S = 30.0
_RESERVE_S, _RESERVE_SHARE, _LONGEST_RESERVE_S = 20.0, 0.1, 120.0
"""Before the end of a reservation the trainer stops by itself, after these: no run is begun that would meet it."""


class Cut(Exception):
    """The study cannot go on now, for the reason given. A run that was told to end before its last step counts for
    nothing, and is made again."""


def left(study: Study, folder: Path, only: Sequence[str], retry_failed: bool) -> list[tuple[Point, int]]:
    """The runs that are still to be made, in order.

    Raises:
        UserError: there is no such point.
    """
    names = {study.point(name).name for name in only} or {point.name for point in study.points}
    over = {(one.point, one.repeat) for one in read_repeats(folder) if one.error is None or not retry_failed}
    return [(point, repeat) for point, repeat in study.order()
            if point.name in names and (point.name, repeat) not in over]


def run_all(study: Study, folder: Path, runs: Sequence[tuple[Point, int]]) -> None:
    """Make the runs; each leaves a line in points.jsonl. SIGTERM ends the one under way in order, and then this.

    Raises:
        UserError: the reservation has too few hosts, or another process is running one of the points.
        Cut: the reservation is over, or nearly, or somebody ended a run.
    """
    allocation = reservation(study.hosts, study.points[0].launch, os.environ)
    hosts = tuple(host.name for host in allocation.hosts)
    most = max((point for point, _ in runs), key=lambda point: point.nodes)
    if most.nodes > len(hosts):
        fitting = dict.fromkeys(point.name for point, _ in runs if point.nodes <= len(hosts))
        raise UserError(f"point {most.name} needs {most.nodes} nodes, and there are {len(hosts)}",
                        where=allocation.source,
                        instead=f"--point {','.join(fitting)}" if fitting else "a larger reservation")
    signal.signal(signal.SIGTERM, _end)
    longest = 0.0
    for number, (point, repeat) in enumerate(runs, 1):
        told = os.environ.get(ENDS_AT_VARIABLE)
        ends_at = allocation.ends_at or (float(told) if told else None)
        left_s = math.inf if ends_at is None else ends_at - time.time()
        if longest + _RESERVE_S + min(_RESERVE_SHARE * left_s, _LONGEST_RESERVE_S) > left_s:
            raise Cut("too little of the reservation is left for another run")
        began = time.monotonic()
        chosen = carve(hosts, point.nodes, repeat)
        place = run_dir_of(folder, point, repeat).path.parent
        place.mkdir(parents=True, exist_ok=True)
        with locked(place, 0) as is_ours:
            if not is_ours:
                raise UserError(f"another process is running point {point.name}", where=str(place),
                                instead="wait for it, or --point with others")
            done = _make(study, folder, point, repeat, carving(allocation, chosen))
        longest = max(longest, time.monotonic() - began)
        print(f"[{number:>{len(str(len(runs)))}}/{len(runs)}] {_told(done, study, chosen)}", flush=True)


def _make(study: Study, folder: Path, point: Point, repeat: int, part: tuple[str, ...]) -> Repeat:
    """One repeat, its line written; one that had ended before its line was written is not run again."""
    run_dir = run_dir_of(folder, point, repeat)
    known = {(one.point, one.repeat) for one in read_repeats(folder)}
    if run_dir.path.exists():
        _wait_for_its_end(run_dir)
        if (point.name, repeat) not in known and (done := measure(folder, point, repeat)) is not None:
            add_repeat(folder, done)
            return done
        _put_aside(run_dir.path)
    output = run_dir.path.with_suffix(".txt")
    _launch(study, point, ("--run-dir", str(run_dir.path), *part), output)
    done = measure(folder, point, repeat)
    if done is None:
        record = read_record(run_dir)
        if record.get("exit") is not None:
            raise Cut(record.get("stopped") or record["exit"]["cause"])
        done = _repeat(folder, point, repeat, error=_last_words(output))
    add_repeat(folder, done)
    return done


def _wait_for_its_end(run_dir: RunDir) -> None:
    """Of an earlier study that was killed, launch and its ranks may still be at work."""
    record, told = read_record(run_dir), False
    while "launch" in record and look(run_dir, record, _SILENT_S) is not None:
        if not told:
            print(f"waiting for the end of an earlier attempt: {run_dir.path}", flush=True)
        told = True
        time.sleep(1)
        record = read_record(run_dir)


def _put_aside(path: Path) -> None:
    """Keep what an earlier attempt left, under another name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.attempt-{number}")).exists():
        number += 1
    path.rename(aside)


def _launch(study: Study, point: Point, place: Sequence[str], output: Path) -> None:
    """Start launch and wait for its end; what it prints goes to `output`."""
    has_limit = value_of(point.launch, "--idle-timeout", "--timeout-idle") is not None
    limit = () if has_limit else ("--idle-timeout", _IDLE_S)
    words = launch_words([*point.launch, *place, *limit], point.command)
    threads = {} if study.threads is None else {THREADS_VARIABLE: str(study.threads)}
    with output.open("wb") as file:
        run_launch(words, variables=threads, cwd=study.directory, output=file)


def _last_words(output: Path) -> str:
    said = output.read_text(errors="replace").strip().splitlines()
    errors = [line for line in said if line.startswith("error: ")]
    return (errors or said or ["launch said nothing"])[-1].removeprefix("error: ") + f" (see {output})"


def _told(done: Repeat, study: Study, hosts: Sequence[str]) -> str:
    width = max(len(point.name) for point in study.points)
    name = f"{done.point:<{width}}  run {done.repeat}"
    if study.unit == "nodes":
        name += f"  on {','.join(hosts[:4])}{',…' if len(hosts) > 4 else ''}"
    if done.error is not None or not done.tokens_per_second:
        return f"{name}  FAILED: {done.error}"
    step_s = done.step_tokens / done.tokens_per_second
    text = f"{name}  {step_s * 1e3:8.1f} ms/step  {short_number(done.tokens_per_second):>6} tok/s"
    if done.first_loss is None or done.last_loss is None or done.last_loss >= done.first_loss:
        return f"{text}  the loss did not fall: this speed says nothing"
    return f"{text}  loss {done.first_loss:.2f} to {done.last_loss:.2f}"


def _end(number: int, frame: object) -> None:
    """Leave by way of what ends the launch that is under way."""
    raise SystemExit(128 + number)


# One job a point, queued by `ezpz-llm submit`; each runs the repeats of its point.
def submit_points(study: Study, folder: Path, points: Sequence[Point], words: Sequence[str]) -> None:
    """Queue the points' jobs.

    Args:
        words: the user's options for submit, such as --time and --account.

    Raises:
        UserError: submit refused one; those before it are queued.
    """
    for number, point in enumerate(points):
        command = [sys.executable, "-m", "ezpz_llm.submit", *words, "--nodes", str(point.nodes),
                   "--name", point.name, "--run-dir", str(folder / "points" / point.name / "job"), "--",
                   "ezpz-llm", "scale", "--study", str(folder), "--point", point.name]
        print(f"{point.name}:", flush=True)
        done = subprocess.run(command, cwd=study.directory, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise UserError(f"the job of {point.name} was not queued, {number} before it were", exit_code=1,
                            where="ezpz-llm submit, above",
                            instead=f"ezpz-llm scale --study {folder} --point "
                                    f'{",".join(one.name for one in points[number:])} --submit "…" once that is '
                                    "mended")


# Measurements of a finished run, read from its run directory.
_LEAST_STEPS = 3
"""Fewer steady steps are too few to measure."""
_WRITING_STEPS = 2
_TRACES = "trace-rank*.json.gz"


def measure(study: Path, point: Point, repeat: int) -> Repeat | None:
    """The repeat as it ended; None where it did not come to its end: launch was ended or told to end, or the
    reservation was over."""
    run_dir = run_dir_of(study, point, repeat)
    record = read_record(run_dir)
    ended = record.get("exit")
    if ended is None or is_interrupted(ended):
        return None
    if ended["code"]:
        return _repeat(study, point, repeat, error=f"{ended['cause']} (code {ended['code']})")
    if record.get("stopped"):
        return None
    rows = list(read_lines(run_dir.metrics))
    kept = untraced(rows, run_dir)
    own = is_own_script(point.command)
    if len(kept) < _LEAST_STEPS:
        mend = "ezpz_llm.record(…) each, and more of them" if own else "give more --steps"
        return _repeat(study, point, repeat, error=f"{len(kept)} steady steps are too few to measure: {mend}")
    mfu = _mfu(kept)
    if mfu is not None and mfu > 1:
        return _repeat(study, point, repeat, error="more than half of its steps give an MFU above 100 %, which "
                                                   "cannot be (the run's output has the numbers)")
    if own:
        tokens = [row["tokens_per_second"] * row["step_time_s"] for row in kept if "tokens_per_second" in row]
        if not tokens:
            return _repeat(study, point, repeat, error="its steps have no tokens, or samples: "
                                                       "ezpz_llm.record(step, loss=…, tokens=…)")
        batch = {"global_batch": point.ranks, "micro_batch": 1, "accumulation": 1,
                 "block_size": round(statistics.median(tokens) / point.ranks)}
        return _as_repeat(study, point, repeat, record, batch, rows, kept, mfu)
    layout = read_layout(run_dir.layout)
    if layout is None:
        return _repeat(study, point, repeat, error=f"{run_dir.layout} is gone: its batch is not known")
    batch = {name: layout["batch"][name] for name in ("global_batch", "micro_batch", "accumulation")}
    batch["block_size"] = record["model"]["block_size"]
    return _as_repeat(study, point, repeat, record, batch, rows, kept, mfu)


def untraced(rows: list[dict[str, Any]], run_dir: RunDir) -> list[dict[str, Any]]:
    """The steady steps: without those that were traced, all before them, and those in which ranks wait for each
    other's traces to be written."""
    traces = sorted(run_dir.profile.glob(_TRACES))
    if not traces:
        return steady(rows)
    first = _last_traced(traces[0]) + 1 + _WRITING_STEPS
    return [row for row in rows[:-1] if row["step"] >= first]


def _last_traced(trace: Path) -> int:
    """The last step of a trace, read part by part; 0 where it has none."""
    last, rest = 0, b""
    with open_regular(trace) as packed, gzip.open(packed) as file:
        while part := file.read(1 << 20):
            rest += part
            last = max([last, *(int(step) for step in re.findall(rb'"step (\d{1,15})"', rest))])
            # A step's name may lie across two parts.
            rest = rest[-32:]
    return last


def _as_repeat(study: Path, point: Point, repeat: int, record: dict[str, Any], batch: dict[str, int],
               rows: Sequence[dict[str, Any]], kept: Sequence[dict[str, Any]], mfu: float | None) -> Repeat:
    run_dir = run_dir_of(study, point, repeat)
    memory = record.get("memory") or {}  # which the library takes down none of
    times = tuple(row["step_time_s"] for row in kept)
    is_cpu = record["environment"]["device"]["type"] == "cpu"
    last = [row["loss"] for row in rows[-max(1, len(rows) // 10):]]
    split = _split(run_dir, point.ranks)
    told = ((record.get("summary") or {}).get("straggler") or {}).get("rank", 0)
    slowest = split.straggler.rank if split else told
    return _repeat(
        study, point, repeat, **batch,
        step_times_s=times,
        tokens_per_second=batch["global_batch"] * batch["block_size"] / statistics.median(times),
        mfu=mfu,
        peak_device_bytes=None if is_cpu else memory.get("peak"),
        peak_host_bytes=memory.get("host_peak"),
        split=split.per_step() if split else None,
        slowest_rank=slowest,
        slowest_host=host_of(slowest, record),
        first_loss=rows[0]["loss"],
        last_loss=statistics.mean(last) if all(map(finite, last)) else None,
    )


def _repeat(study: Path, point: Point, repeat: int, **found: Any) -> Repeat:
    """A repeat of `point` as planned, but for what was found; without numbers where that is an error."""
    planned = {name: getattr(point, name) for name in ("mode", "ds_config", "nodes", "ranks", "global_batch",
                                                       "micro_batch", "accumulation")}
    run_dir = run_dir_of(study, point, repeat).path.relative_to(study)
    return Repeat(**{"point": point.name, "repeat": repeat, "run_dir": str(run_dir), **planned, **found})


def _mfu(kept: Sequence[dict[str, Any]]) -> float | None:
    """Of the median step; None where none has one. The trainer leaves those out that are above 1: they count as
    that."""
    known = [row.get("mfu", math.inf) for row in kept]
    return None if min(known) == math.inf else statistics.median(known)


def _split(run_dir: RunDir, ranks: int) -> Split | None:
    """Step-time breakdown of the traced steps; None where it was not traced on all ranks."""
    if not any(run_dir.profile.glob(_TRACES)):
        return None
    try:
        split = split_run(run_dir.path)
        if len(split.ranks) < ranks:
            raise UserError(f"{len(split.ranks)} of {ranks} ranks left a trace")
        return split
    except UserError as error:
        print(f"note: {run_dir.path.name} of {run_dir.path.parent.name} gets no split: {error.found}", flush=True)
        return None


def host_of(rank: int, record: dict[str, Any]) -> str:
    """The host that launch put a rank on."""
    launch = record["launch"]
    ranks = zip(launch["hosts"], launch["ranks_per_host"], strict=True)
    return [host for host, count in ranks for _ in range(count)][rank]
