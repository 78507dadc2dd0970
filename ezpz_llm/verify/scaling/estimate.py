"""Estimate the time and node-hours of a study from earlier runs, before it starts (no torch)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.core.base import UserError
from ezpz_llm.core.rundir.records import Exit, Launch, Startup, read_record
from ezpz_llm.launcher.jobs.option_parsing import value_of
from ezpz_llm.launcher.jobs.schedulers.scheduler import clock_with_days
from ezpz_llm.training.report.runs import load_runs
from ezpz_llm.verify.scaling.options import is_own_script
from ezpz_llm.verify.scaling.study import Point, Study, run_dir_of

_SHAPE = ("--model", "--n-layer", "--n-head", "--n-kv-head", "--n-embd", "--block-size", "--init-from", "--preset",
          "--config", "--precision", "--device")
"""Options that determine a run's throughput, except the layout."""


@dataclass(frozen=True)
class Speed:
    """Throughput of an earlier run: tokens/s per rank, and seconds from start to the end of the first step."""

    name: str
    tokens_per_second: float
    startup_s: float
    block_size: int


def estimate(study: Study, folder: Path, runs: Sequence[tuple[Point, int]], earlier: Path, *, in_jobs: bool) -> str:
    """Return the estimated time and node-hours of `runs` and their source, as text.

    Args:
        earlier: folder with runs of the same model, used while the study has no finished run.
        in_jobs: True if each point runs in its own job. Otherwise runs are sequential, and each occupies the nodes
            of the largest point.
    """
    measured = [seconds for point in study.points for repeat in range(study.repeats)
                if (seconds := _duration_s(folder, point, repeat)) is not None]
    speed = None if measured else _newest_speed(earlier, study.points[0].command)
    if measured:
        seconds_of = dict.fromkeys((point.name for point, _ in runs), statistics.mean(measured))
        source = f"from {len(measured)} run{'' if len(measured) == 1 else 's'} of this study"
    elif speed is not None:
        seconds_of = {point.name: _expected_s(point, speed) for point, _ in runs}
        source = f"perfect scaling from {speed.name}"
    else:
        return f"unknown: no run of this model in {earlier}/. Start one point first: --point {study.points[0].name}"
    total_s = sum(seconds_of[point.name] for point, _ in runs)
    max_nodes = max((point.nodes for point, _ in runs), default=0)
    node_s = sum(seconds_of[point.name] * (point.nodes if in_jobs else max_nodes) for point, _ in runs)
    return f"{clock_with_days(math.ceil(total_s))} in total, {node_s / 3600:.3g} node-hours ({source})"


def _newest_speed(folder: Path, command: Sequence[str]) -> Speed | None:
    """Return the speed of the newest run of the same model in `folder`.

    The result is None if there is no such run, or for a user's script.
    """
    if is_own_script(command):
        return None
    records = sorted(folder.glob("*/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in records:
        try:
            run, = load_runs([path.parent])
        except UserError:  # damaged, or without steps
            continue
        rate = run.median("tokens_per_second_per_device")
        block_size = run.record.model_settings.block_size
        typed = (run.record.launch or Launch()).typed or ()
        is_alike = typed and all(value_of(typed, name) == value_of(command, name) for name in _SHAPE)
        if rate and block_size and is_alike:
            startup = run.record.startup or Startup()
            return Speed(f"{folder.name}/{path.parent.name}", rate, startup.total_s, block_size)
    return None


def _expected_s(point: Point, speed: Speed) -> float:
    steps = int(value_of(point.command, "--steps") or 0)  # a study adds --steps to each command
    return speed.startup_s + steps * point.global_batch * speed.block_size / (speed.tokens_per_second * point.ranks)


def _duration_s(folder: Path, point: Point, repeat: int) -> float | None:
    """Return the duration of a repeat in seconds; None unless it succeeded."""
    record = read_record(run_dir_of(folder, point, repeat))
    ended, started = record.exit or Exit(), (record.launch or Launch()).started
    return None if started is None or ended.code != 0 or ended.ended is None else ended.ended - started
