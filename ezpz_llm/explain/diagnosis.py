"""All that a run directory tells about where time and memory went, gathered (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.schema import as_dataclass
from ezpz_llm.explain.causes import Cause, rank_causes
from ezpz_llm.explain.checks import Memory, crosschecks, memory_of
from ezpz_llm.explain.counterfactual import Taken, taken
from ezpz_llm.explain.split import IN_STEP, OTHER, Split, split_run
from ezpz_llm.explain.trace import BETWEEN
from ezpz_llm.layout.batch import Batch
from ezpz_llm.layout.layout import Layout
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.observe.history import PHASES, History, read_history, steady
from ezpz_llm.rundir import RunDir, read_json, read_layout, read_record


@dataclass(frozen=True)
class Account:
    """Attributes:
        wall: rank 0's seconds of the whole run by what they were spent on; empty where it has not ended.
        split: of the traced steps, None where none were.
        phases: seconds a step of rank 0 by metrics.jsonl, over steady steps, "other" among them.
        memory: None where the run has not ended.
        checks: see checks.py.
    """

    run_dir: Path
    layout: str
    ranks: int
    wall: dict[str, float]
    split: Split | None
    phases: dict[str, float]
    causes: tuple[Cause, ...]
    memory: Memory | None
    checks: dict[str, Any]
    counterfactual: tuple[Taken, ...] = ()
    """Steps without collectives, by rank, of this run or of one that was made for it."""

    @property
    def untraced(self) -> list[int]:
        """Ranks without a trace, where others have one: not written yet, or lost."""
        there = {rank.rank for rank in self.split.ranks} if self.split else set(range(self.ranks))
        return [rank for rank in range(self.ranks) if rank not in there]

    def as_record(self) -> dict[str, Any]:
        """The account as JSON."""
        record = {**asdict(self), "run_dir": str(self.run_dir)}
        if self.split is not None:
            record["split"] = {
                "ranks": [{**asdict(rank), "window_s": rank.window_s, "step_s": rank.step_s, "own_s": rank.own_s,
                           "waited_s": rank.waited_s, "per_step": rank.per_step()} for rank in self.split.ranks],
                "straggler": self.split.straggler.rank, "per_step": self.split.per_step(),
                "untraced": self.untraced}
        record["counterfactual"] = [{**asdict(one), "removed_share": one.removed_share,
                                     "exposed_share": one.exposed_share} for one in self.counterfactual]
        return record


def account(run_dir: Path) -> Account:
    """Read a run directory.

    Raises:
        UserError: it is none of a training run, no step has been written, or a trace cannot be read.
    """
    record = read_record(RunDir(run_dir))
    rows = read_history(RunDir(run_dir))
    if "config" not in record or "model" not in record or not len(rows):
        raise UserError("there is no step of a training run here", where=str(run_dir),
                        instead="the directory of a run of ezpz_llm.train, or ezpz-llm why if it ended early")
    timed = steady(rows)
    phases = {name: float(np.mean(timed.column(f"{name}_s"))) for name in (*PHASES, "other")}
    split = split_run(run_dir) if any(RunDir(run_dir).profile.glob("trace-rank*.json.gz")) else None
    wall = dict((record.get("summary") or {}).get("wall") or {})
    run = described(run_dir, record)
    deepspeed = read_json(RunDir(run_dir).deepspeed) or {}
    causes = rank_causes(split, wall or _traced_wall(split, rows), run, deepspeed)
    return Account(run_dir, run["layout"].name, run["world_size"], wall, split, phases, tuple(causes),
                   memory_of(record.get("memory") or {}, split, deepspeed, run),
                   crosschecks(run_dir, split), tuple(taken(run_dir, split)))


def described(run_dir: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Facts for advice: model, layout, batch, optimizer, ranks, the device and its memory, the configuration.

    Raises:
        UserError: layout.json is missing or damaged.
    """
    resolved = read_layout(RunDir(run_dir).layout)
    if resolved is None:
        raise UserError("this run left no layout.json", where=str(run_dir), instead="a whole run directory")
    where = str(RunDir(run_dir).layout)
    environment = record.get("environment") or {}
    device = environment.get("device") or {}
    return {"model": as_dataclass(ModelConfig, record["model"], str(RunDir(run_dir).record)),
            "layout": Layout.from_record(resolved.get("layout"), where),
            "batch": as_dataclass(Batch, resolved.get("batch"), where), "precision": resolved.get("precision"),
            "optimizer": record["config"].get("optimizer", "adamw"), "world_size": environment.get("world_size", 1),
            "device": device.get("type"), "memory_bytes": device.get("memory_bytes"), "config": record["config"]}


def _traced_wall(split: Split | None, rows: History) -> dict[str, float]:
    """In place of a run's wall time, the traced window's; without traces, of all steps that have a line."""
    if split is None:
        return {"training": float(np.nansum(rows.column("step_time_s")))}
    return {"training": sum(split.mean(name) for name in IN_STEP),
            **{name: split.mean(name) for name in (*BETWEEN, OTHER)}}
