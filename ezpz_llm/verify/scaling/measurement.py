"""Measurements of a study's finished runs, read from their run directories (no torch)."""

from __future__ import annotations

import gzip
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ezpz_llm.core.base import UserError, open_regular, print_lines
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.layout_record import read_layout_record
from ezpz_llm.core.rundir.records import Environment, Launch, Memory, RunRecord, read_record
from ezpz_llm.training.observe.history import is_finite, steady_steps
from ezpz_llm.training.observe.profile_windows import trace_window
from ezpz_llm.verify.explain.split import Split, split_run
from ezpz_llm.verify.scaling.options import is_own_script
from ezpz_llm.verify.scaling.study import Point, Repeat, run_dir_of

MIN_STEPS = 3
"""Minimum number of steady steps of a measurement."""
_WRITING_STEPS = 2
_TRACES = "trace-rank*.json.gz"


class _UnusableRun(Exception):
    """The run ended with code 0, but cannot be measured; the message is the reason."""


def measure(study: Path, point: Point, repeat: int) -> Repeat | None:
    """Measure a finished repeat; return None if it was interrupted, by a signal or the end of the allocation."""
    run_dir = run_dir_of(study, point, repeat)
    record = read_record(run_dir)
    ended = record.exit
    if ended is None or ended.is_interrupted:
        return None
    if ended.code:
        return failed_repeat(study, point, repeat, f"{ended.cause} (code {ended.code})")
    if record.stopped:
        return None
    planned = _planned_repeat(study, point, repeat)
    try:
        return _measured_repeat(planned, run_dir, record, is_own_script(point.command))
    except _UnusableRun as error:
        return replace(planned, error=str(error))


def failed_repeat(study: Path, point: Point, repeat: int, error: str) -> Repeat:
    """Return a failed repeat, with the planned batch."""
    return replace(_planned_repeat(study, point, repeat), error=error)


def _planned_repeat(study: Path, point: Point, repeat: int) -> Repeat:
    run_dir = run_dir_of(study, point, repeat).path.relative_to(study)
    return Repeat(point.name, point.mode, point.ds_config, point.nodes, point.ranks, repeat, point.global_batch,
                  point.micro_batch, point.accumulation, str(run_dir))


def _measured_repeat(planned: Repeat, run_dir: RunDir, record: RunRecord, is_script: bool) -> Repeat:
    rows = list(read_lines(run_dir.metrics))
    steps = untraced_steps(rows, run_dir)
    if len(steps) < MIN_STEPS:
        fix = "run more steps, and call ezpz_llm.record(…) in each" if is_script else "increase --steps"
        raise _UnusableRun(f"{len(steps)} steady steps, but a measurement needs {MIN_STEPS}: {fix}")
    mfu = _median_mfu(steps)
    if mfu is not None and mfu > 1:
        raise _UnusableRun("more than half of the steps have an MFU above 100 %, which is impossible (the run's "
                           "output has the numbers)")
    measured = (_with_batch_of_script(planned, steps) if is_script else
                _with_batch_of_trainer(planned, run_dir, record))
    times = tuple(row["step_time_s"] for row in steps)
    memory = record.memory or Memory()  # missing in runs of the library
    is_cpu = (record.environment or Environment()).device.type == "cpu"
    last = [row["loss"] for row in rows[-max(1, len(rows) // 10):]]
    split = _read_split(run_dir, planned.ranks)
    straggler = split.straggler if split else record.summary and record.summary.straggler
    slowest = straggler.rank if straggler else 0
    return replace(
        measured,
        step_times_s=times,
        tokens_per_second=measured.step_tokens / statistics.median(times),
        mfu=mfu,
        peak_device_bytes=None if is_cpu else memory.peak,
        peak_host_bytes=memory.host_peak,
        split=split.per_step() if split else None,
        slowest_rank=slowest,
        slowest_host=_hostname_of(slowest, record),
        first_loss=rows[0]["loss"],
        last_loss=statistics.mean(last) if all(map(is_finite, last)) else None,
    )


def _with_batch_of_script(planned: Repeat, steps: Sequence[dict[str, Any]]) -> Repeat:
    """Return the repeat with the batch of a user's script: a sequence per rank, with the tokens it recorded."""
    tokens = [row["tokens_per_second"] * row["step_time_s"] for row in steps if "tokens_per_second" in row]
    if not tokens:
        raise _UnusableRun("its steps have neither tokens nor samples: call ezpz_llm.record(step, loss=…, "
                           "tokens=…)")
    return replace(planned, global_batch=planned.ranks, micro_batch=1, accumulation=1,
                   block_size=round(statistics.median(tokens) / planned.ranks))


def _with_batch_of_trainer(planned: Repeat, run_dir: RunDir, record: RunRecord) -> Repeat:
    layout = read_layout_record(run_dir)
    block_size = record.model_settings.block_size
    if layout is None or layout.batch is None or block_size is None:
        missing = run_dir.record if block_size is None else run_dir.layout
        raise _UnusableRun(f"{missing} is missing or incomplete, so the batch is unknown")
    batch = layout.batch
    return replace(planned, global_batch=batch.global_batch, micro_batch=batch.micro_batch,
                   accumulation=batch.accumulation, block_size=block_size)


def untraced_steps(rows: list[dict[str, Any]], run_dir: RunDir) -> list[dict[str, Any]]:
    """Return the steady steps: after the traced steps and the two in which ranks wait for traces to be written."""
    traces = sorted(run_dir.profile.glob(_TRACES))
    if not traces:
        return steady_steps(rows)
    first = _last_traced_step(traces[0]) + 1 + _WRITING_STEPS
    return [row for row in rows[:-1] if row["step"] >= first]


def measured_steps(steps: int, trace_steps: int, *, has_profile: bool) -> int:
    """Return the number of steady steps that a run of the trainer will have for its measurement."""
    window = trace_window(0, steps, trace_steps, has_profile=has_profile)
    if window is None:
        return len(steady_steps([{}] * steps))
    return max(0, steps - 1 - (window.last + 1 + _WRITING_STEPS))


def _last_traced_step(trace: Path) -> int:
    """Return the last step in a trace, read in chunks; 0 if it has none."""
    last, buffer = 0, b""
    with open_regular(trace) as packed, gzip.open(packed) as file:
        while part := file.read(1 << 20):
            buffer += part
            last = max([last, *(int(step) for step in re.findall(rb'"step (\d{1,15})"', buffer))])
            # A step's name may be split between two chunks.
            buffer = buffer[-32:]
    return last


def _median_mfu(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the median MFU; None if no step has one. The trainer omits values above 1: count them as infinite."""
    values = [row.get("mfu", math.inf) for row in rows]
    return None if min(values) == math.inf else statistics.median(values)


def _read_split(run_dir: RunDir, ranks: int) -> Split | None:
    """Return the step-time breakdown of the traced steps; None unless all ranks were traced."""
    if not any(run_dir.profile.glob(_TRACES)):
        return None
    try:
        split = split_run(run_dir.path)
        if len(split.ranks) < ranks:
            raise UserError(f"{len(split.ranks)} of {ranks} ranks left a trace")
        return split
    except UserError as error:
        print_lines(f"note: no step-time breakdown for {run_dir.path.name} of {run_dir.path.parent.name}: "
                    f"{error.found}")
        return None


def _hostname_of(rank: int, record: RunRecord) -> str:
    """Return the hostname on which launch placed a rank."""
    hosts = (record.launch or Launch()).rank_hosts
    if rank >= len(hosts):
        raise _UnusableRun(f"run.json does not name the node of rank {rank}")
    return hosts[rank]
