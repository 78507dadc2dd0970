"""Status of a run, read from its directory without contacting the run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ezpz_llm.core.base import UserError, parse_json, system_text
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import Launch, read_record
from ezpz_llm.launcher.basics.variables import RUN_ID_VARIABLE
from ezpz_llm.launcher.diagnosis.liveness import Live, RankLife, read_live_state

_TAIL_BYTES = 1 << 16
_MAX_LINES = 50


@dataclass(frozen=True)
class Status:
    """Status of a run; unknown values are None. Times are in seconds.

    Attributes:
        state: "starting", "running", "ended", or "lost" if launch was killed.
        step: step of the rank that is furthest ahead.
        loss, tokens_per_second: from the last line of metrics.jsonl, which may be some steps behind.
        loss_step: step of that line.
        slowest: rank more than one step behind the median, with its hostname and lag; None if there is none.
    """

    state: str
    elapsed_s: float | None = None
    phase: str | None = None
    step: int | None = None
    steps: int | None = None
    left_s: float | None = None
    loss: float | None = None
    loss_step: int | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    step_s: float | None = None
    ranks: int | None = None
    slowest: dict[str, Any] | None = None
    silent: tuple[int, ...] = ()
    last_words: str | None = None
    code: int | None = None
    cause: str | None = None
    stopped: str | None = None
    """Reason why the run stopped early, if it stopped in an orderly way with its state saved."""
    run_id: str | None = None
    """Id of this launch; a restart in the same directory has another id."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return asdict(self)


def read_status(run_dir: RunDir, silent_after_s: float) -> Status:
    """Read the status of a run.

    Raises:
        UserError: run.json cannot be read.
    """
    record = read_record(run_dir)
    launch = record.launch or Launch()
    run_id = (launch.env or {}).get(RUN_ID_VARIABLE)
    lines = _read_last_lines(run_dir)
    last = lines[-1] if lines else {}
    times = [value for line in lines if (value := _number(line, "step_time_s")) is not None]
    step_s = statistics.median(times) if times else None
    common: dict[str, Any] = {
        "steps": record.settings.steps, "loss": _number(last, "loss"), "loss_step": last.get("step"),
        "step_s": step_s,
        "tokens_per_second": _number(last, "tokens_per_second"), "run_id": run_id,
        "ranks": launch.world_size,
        "val_loss": next((_number(line, "val_loss") for line in reversed(lines) if "val_loss" in line), None),
        "last_words": _last_log_line(run_dir)}
    step, started = last.get("step"), launch.started
    if (ended := record.exit) is not None:
        elapsed = None if started is None or ended.ended is None else ended.ended - started
        return Status("ended", elapsed, step=step, code=ended.code, cause=ended.cause,
                      stopped=record.stopped if not ended.code or ended.is_interrupted else None, **common)
    live = read_live_state(run_dir, record, silent_after_s) if run_id and started is not None else None
    if live is None:
        return Status("lost" if run_id else "running", None, step=step, **common)
    return _running(live, step, started, common)


def _running(live: Live, logged_step: int | None, started: float | None, common: Mapping[str, Any]) -> Status:
    with_step = [life for life in live.ranks if life.step is not None]
    leader = max(with_step, key=lambda life: life.step or 0, default=None)
    reached = [step for step in (logged_step, leader.step if leader else None) if step is not None]
    step, steps, step_s = max(reached, default=None), common["steps"], common["step_s"]
    left_s = None if None in (step, steps, step_s) else max(0, steps - step) * step_s
    shown = leader or next(iter(live.ranks), None)
    return Status("running" if with_step else "starting", None if started is None else time.time() - started,
                  shown.phase if shown else None, step, left_s=left_s, slowest=_slowest(with_step),
                  silent=tuple(life.rank for life in live.silent), **common)


def _slowest(ranks: list[RankLife]) -> dict[str, Any] | None:
    """Return the slowest rank if it is more than one step behind the median, else None.

    The median is used because reports of ranks are up to a second apart, in which fast ranks finish several steps.
    """
    if len(ranks) < 2:
        return None
    middle = statistics.median_low(life.step or 0 for life in ranks)
    last = min(ranks, key=lambda life: life.step or 0)
    behind = middle - (last.step or 0)
    return {"rank": last.rank, "host": last.host, "steps_behind": behind} if behind > 1 else None


def _read_last_lines(run_dir: RunDir) -> list[dict[str, Any]]:
    """Return up to 50 lines from the last 64 KiB of metrics.jsonl, without a line that is being written."""
    lines = []
    for text in system_text(run_dir.metrics, _TAIL_BYTES).split("\n")[:-1][-_MAX_LINES:]:
        try:
            line = parse_json(text, str(run_dir.metrics))
        except UserError:  # the first line may be incomplete
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def _number(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _last_log_line(run_dir: RunDir) -> str | None:
    """Return the last line in rank 0's log that is not blank."""
    lines = [line for line in system_text(run_dir.rank_log(0), 4096).splitlines() if line.strip()]
    return lines[-1].strip() if lines else None
