"""Measurements of a finished run of a study, read from its run directory."""

from __future__ import annotations

import gzip
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ezpz_llm.base.errors import UserError
from ezpz_llm.explain.split import Split, split_run
from ezpz_llm.observe.history import finite, steady
from ezpz_llm.rundir import RunDir, read_layout, read_lines, read_record
from ezpz_llm.scaling.sample import Repeat
from ezpz_llm.scaling.study import Point, run_dir_of

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
    if ended is None or (ended.get("stopped") or {}).get("kind") == "signal":
        return None
    if ended["code"]:
        return failed(study, point, repeat, f"{ended['cause']} (code {ended['code']})")
    if record.get("stopped"):
        return None
    rows = list(read_lines(run_dir.metrics))
    kept = untraced(rows, run_dir)
    if len(kept) < _LEAST_STEPS:
        return failed(study, point, repeat, f"{len(kept)} steady steps are too few to measure: give more --steps")
    mfu = _mfu(kept)
    if mfu is not None and mfu > 1:
        return failed(study, point, repeat, "more than half of its steps give an MFU above 100 %, which cannot be "
                      "(the run's output has the numbers)")
    return _measured(study, point, repeat, record, rows, kept, mfu)


def failed(study: Path, point: Point, repeat: int, why: str) -> Repeat:
    """A repeat without numbers."""
    return _repeat(study, point, repeat, error=why)


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
    with gzip.open(trace) as file:
        while part := file.read(1 << 20):
            rest += part
            last = max([last, *(int(step) for step in re.findall(rb'"step (\d{1,15})"', rest))])
            # A step's name may lie across two parts.
            rest = rest[-32:]
    return last


def _measured(study: Path, point: Point, repeat: int, record: dict[str, Any], rows: Sequence[dict[str, Any]],
              kept: Sequence[dict[str, Any]], mfu: float | None) -> Repeat:
    run_dir = run_dir_of(study, point, repeat)
    batch = read_layout(run_dir.layout)["batch"]
    block_size = record["model"]["block_size"]
    times = tuple(row["step_time_s"] for row in kept)
    memory = record["memory"]
    is_cpu = record["environment"]["device"]["type"] == "cpu"
    last = [row["loss"] for row in rows[-max(1, len(rows) // 10):]]
    split = _split(run_dir, point.ranks)
    told = ((record.get("summary") or {}).get("straggler") or {}).get("rank", 0)
    slowest = split.straggler.rank if split else told
    return _repeat(
        study, point, repeat,
        global_batch=batch["global_batch"], micro_batch=batch["micro_batch"], accumulation=batch["accumulation"],
        block_size=block_size,
        step_times_s=times,
        tokens_per_second=batch["global_batch"] * block_size / statistics.median(times),
        mfu=mfu,
        peak_device_bytes=None if is_cpu else memory["peak"],
        peak_host_bytes=memory["host_peak"],
        split=split.per_step() if split else None,
        slowest_rank=slowest,
        slowest_host=host_of(slowest, record),
        first_loss=rows[0]["loss"],
        last_loss=statistics.mean(last) if all(map(finite, last)) else None,
    )


def _mfu(kept: Sequence[dict[str, Any]]) -> float | None:
    """Of the median step; None where none has one. The trainer leaves those out that are above 1: they count as
    that."""
    if not any("mfu" in row for row in kept):
        return None
    return statistics.median(row.get("mfu", math.inf) for row in kept)


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


def _repeat(study: Path, point: Point, repeat: int, **found: Any) -> Repeat:
    """A repeat of `point` with what was found; without numbers where nothing was."""
    nothing: dict[str, Any] = {
        "global_batch": point.global_batch, "micro_batch": point.micro_batch, "accumulation": point.accumulation,
        "block_size": 0, "step_times_s": (), "tokens_per_second": None, "mfu": None, "peak_device_bytes": None,
        "peak_host_bytes": None, "split": None, "slowest_rank": None, "slowest_host": None, "first_loss": None,
        "last_loss": None,
    }
    run_dir = run_dir_of(study, point, repeat).path.relative_to(study)
    return Repeat(point=point.name, mode=point.mode, ds_config=point.ds_config, nodes=point.nodes,
                  ranks=point.ranks, repeat=repeat, run_dir=str(run_dir), **{**nothing, **found})
