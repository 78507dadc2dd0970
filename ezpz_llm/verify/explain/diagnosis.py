"""Diagnosis of a run directory: step-time breakdown, causes, memory, and cross-checks (imports no torch)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, as_type
from ezpz_llm.core.rundir import RunDir, read_json, schemas
from ezpz_llm.core.rundir.layout_record import read_layout_record
from ezpz_llm.core.rundir.records import Memory as MemoryRecord, read_record
from ezpz_llm.core.rundir.summary_record import Summary
from ezpz_llm.launcher.basics.hostlist import rank_ranges
from ezpz_llm.training.dist.collective_network import describe_fallback
from ezpz_llm.training.layout.memory import bucket_bytes
from ezpz_llm.training.observe.history import PHASES, History, read_history, steady_steps
from ezpz_llm.training.observe.machine_load import MachineLoad, recorded_load
from ezpz_llm.verify.explain.causes import (
    Cause,
    is_compile_unavailable,
    limit_to_run,
    phase_causes,
    rank_causes,
    rank_causes_of_own_program,
)
from ezpz_llm.verify.explain.split import IN_STEP, OTHER, Split, split_run
from ezpz_llm.verify.explain.step_times import StepTimes, step_time_causes, step_times
from ezpz_llm.verify.explain.trace import BETWEEN
from ezpz_llm.verify.explain.trainer_run import TrainerRun, read_trainer_run

_TORCH = "torch"


def crosschecks(run_dir: Path, split: Split | None) -> dict[str, Any]:
    """Return measurements of the same steps by other tools.

    `collectives`: rank 0's collectives per step, according to DeepSpeed's logger (logged) and the trace (issued).
    `flops`: FLOPs of the matmuls in rank 0's forward passes of a step, according to DeepSpeed's profiler and to
    ezpz_llm. `host`: seconds of rank 0 by Python package, according to pyinstrument.
    """
    checks: dict[str, Any] = {}
    if split is not None:
        rank = split.ranks[0]
        if logged := sum(entry["count"] for entry in (rank.notes.get("deepspeed") or {}).values()):
            issued = sum(exposed.count for exposed in rank.exposed) / rank.steps
            if logged <= issued:  # DeepSpeed also logs collectives of groups of one rank
                checks["collectives"] = {"logged": logged, "issued": issued}
        if flops := rank.notes.get("flops"):
            checks["flops"] = {**flops, "ratio": flops["deepspeed"] / flops["ours"]}
    path = RunDir(run_dir).profile / "host.json"
    host = as_type(schemas.PackageSeconds, read_json(path) or {}, str(path))
    if sum(host.values()) > 0:
        checks["host"] = host
    return checks


def check_sentences(checks: dict[str, Any]) -> list[str]:
    """Return one sentence per cross-check."""
    lines = []
    if collectives := checks.get("collectives"):
        lines.append(f"DeepSpeed's communication logger counted {collectives['logged']} of the "
                     f"{collectives['issued']:g} collectives in a step of rank 0; it does not see calls outside of "
                     "DeepSpeed.")
    if flops := checks.get("flops"):
        lines.append(f"DeepSpeed's FLOPs profiler counted {flops['deepspeed']:.6g} FLOPs in the matmuls of rank "
                     f"0's forward passes, {flops['ratio']:.4f} times ezpz_llm's estimate of {flops['ours']:.6g}."
                     + _explain_excess(flops["ratio"]))
    if host := checks.get("host"):
        whole = sum(host.values())
        shares = ", ".join(f"{seconds / whole:.1%} {name}" for name, seconds in
                           sorted(host.items(), key=lambda item: -item[1]) if name != _TORCH)
        lines.append(f"According to pyinstrument, rank 0 spent {host.get(_TORCH, 0) / whole:.1%} of its time in "
                     f"torch; elsewhere: {shares} (profile/host.html).")
    return lines


def _explain_excess(ratio: float) -> str:
    if ratio < 1.001:
        return ""
    return (" It includes matmuls of the backward pass that run during a forward pass: the head's matmuls if the "
            "loss is computed in chunks, and recomputed activations.")


STATES = ("parameters", "gradients", "optimizer", "copy", "secondary")


@dataclass(frozen=True)
class Memory:
    """Estimated and measured memory in bytes by kind, each on the rank that uses most of it.

    None if there is no estimate or no measurement. "buffers" is DeepSpeed's gradient bucket or, without one, the
    largest buffer of a collective that is not a model state; under ddp, the buckets are the gradients themselves.
    "activations" is the peak of a step minus the memory at its start, without buffers. "other" is the rest of the
    peak; on a CPU, Python and libraries.
    """

    expected: dict[str, int | None]
    measured: dict[str, int | None]
    peak: int


def _compare_memory(record: MemoryRecord | None, split: Split | None, deepspeed: Mapping[str, Any],
                    run: TrainerRun | None) -> Memory | None:
    """Return estimated and measured memory from a run's record and traces; None if the run has not ended.

    Args:
        record: entry "memory" of the run's record.
        deepspeed: DeepSpeed's configuration, empty for other engines.
    """
    if record is None or record.peak is None:
        return None
    expected = {kind: int(size + record.elsewhere.get(kind, 0)) for kind, size in record.expected.items()}
    measured: dict[str, int | None] = {kind: record.measured.get(kind) for kind in STATES}
    notes = [] if split is None else [rank.notes for rank in split.ranks if "transient_bytes" in rank.notes]
    measured["buffers"] = measured["activations"] = None
    if run is not None and split is not None and notes:
        measured["buffers"] = max(note.get("buffer_bytes", 0) for note in notes)
        measured["activations"] = max(0, max(note["transient_bytes"] - note.get("buffer_transient_bytes", 0)
                                             for note in notes))
        if bucket := bucket_bytes(run.layout, run.model, deepspeed, split.device):
            expected["buffers"] = bucket
    sizes = [size for kind, size in measured.items() if size is not None and not record.elsewhere.get(kind)]
    measured["other"] = max(0, record.peak - sum(sizes)) if notes else None
    return Memory({kind: expected.get(kind) for kind in measured}, measured, record.peak)


_OWN_LAYOUT = "of its own"
"""Layout shown for a program that does not use ezpz_llm's layouts."""
_SHOWN_CAUSES = 8
_MIN_SHOWN_SHARE = 0.002
"""Minimum share of the run's time for a cause to be shown."""


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a run.

    Attributes:
        wall: rank 0's wall time in seconds by activity; empty if the run has not ended.
        split: breakdown of the traced steps, or None if there are no traces.
        phases: seconds per steady step of rank 0 according to metrics.jsonl, by phase and "other".
        memory: estimated and measured memory; None if the run has not ended.
        checks: see `crosschecks`.
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
    is_foreign: bool = False
    """True if a program other than ezpz_llm's trainer wrote the run."""
    times: StepTimes | None = None
    """Step times of rank 0's steady steps, traced or not."""
    load: MachineLoad | None = None
    """Load of rank 0's node."""
    fallback: str | None = None
    """Description of collectives over TCP although nodes have faster devices."""

    @property
    def untraced(self) -> list[int]:
        """Ranks without a trace (not written yet, or lost); empty if no rank has one."""
        traced = {rank.rank for rank in self.split.ranks} if self.split else set(range(self.ranks))
        return [rank for rank in range(self.ranks) if rank not in traced]

    @property
    def opening(self) -> list[str]:
        """Sentences to print first: about a busy machine, a slow network, and the step times."""
        return [*([self.load.sentence()] if self.load and self.load.is_busy else []),
                *([f"{self.fallback}."] if self.fallback else []),
                *([self.times.sentence()] if self.times else [])]

    @property
    def shown_causes(self) -> list[Cause]:
        """Most expensive causes with a relevant share, the most expensive first."""
        return [cause for cause in self.causes if cause.share >= _MIN_SHOWN_SHARE][:_SHOWN_CAUSES]

    @property
    def missing_traces_note(self) -> str:
        """Sentence about missing traces and what is not visible without them, or an empty string."""
        if self.split is None:
            return ("Exposed communication and slow ranks are only visible in traces"
                    + ("." if self.is_foreign else ": run with --trace-steps 10."))
        if self.untraced:
            return (f"There is no trace of {rank_ranges(self.untraced)}: means are over the other ranks, and "
                    "waiting for the missing ranks is not visible.")
        return ""

    def as_record(self) -> dict[str, Any]:
        """Return the diagnosis as a JSON object."""
        record = {**asdict(self), "run_dir": str(self.run_dir)}
        if self.split is not None:
            record["split"] = {
                "ranks": [{**asdict(rank), "window_s": rank.window_s, "step_s": rank.step_s, "own_s": rank.own_s,
                           "waited_s": rank.waited_s, "per_step": rank.per_step()} for rank in self.split.ranks],
                "straggler": self.split.straggler.rank, "per_step": self.split.per_step(),
                "untraced": self.untraced}
        return record


def diagnose(run_dir: Path) -> Diagnosis:
    """Diagnose a run from its directory.

    Raises:
        UserError: the directory does not belong to a training run, has no step yet, or has an unreadable trace.
    """
    where = RunDir(run_dir)
    where.check_exists()
    record, rows = read_record(where), read_history(where)
    if record.config is None or not len(rows):
        raise UserError("the directory has no step of a training run", where=str(run_dir),
                        instead="pass the directory of a run of ezpz_llm.train, or of a script that calls "
                                "ezpz_llm.record; if the run ended early, use ezpz-llm why")
    layout = read_layout_record(where)
    run = read_trainer_run(where, record, layout)
    summary, last = record.summary or Summary(), rows.steps[-1]
    if summary.steps not in (0, last) or summary.first_step >= last:  # of an earlier attempt than the last
        summary = Summary()
    # The wall time is that of one attempt, and metrics.jsonl has the steps of all.
    rows = rows.select(step > summary.first_step for step in rows.steps)
    timed = steady_steps(rows)
    phases = {name: statistics.fmean(timed.column(f"{name}_s")) for name in (*PHASES, "other")}
    split = split_run(run_dir) if run and any(where.profile.glob("trace-rank*.json.gz")) else None
    wall = summary.wall
    deepspeed = as_type(schemas.DeepSpeedGiven, read_json(where.deepspeed) or {}, str(where.deepspeed))
    spent = wall if wall.get("training", 0) > 0 else _traced_wall(split, rows)
    causes = (rank_causes(split, spent, run, deepspeed) if run else
              rank_causes_of_own_program(spent, record.settings.log_every))
    world_size = record.world_size or 1
    if split is None:
        run_s = sum(seconds for name, seconds in spent.items() if name != "set-up")
        of_steps = step_time_causes(rows, run_s, ranks=world_size, can_trace=run is not None)
        causes = sorted([*causes, *phase_causes(phases, len(rows), spent), *of_steps],
                        key=lambda cause: -cause.seconds)
    network = record.environment.network if record.environment else None
    return Diagnosis(run_dir, (layout and layout.degrees.name) or _OWN_LAYOUT, world_size, wall, split,
                     phases, tuple(limit_to_run(causes)), _compare_memory(record.memory, split, deepspeed, run),
                     crosschecks(run_dir, split), is_foreign=run is None,
                     times=step_times(rows, summary.ceiling_share,
                                      _low_share_advice(run, is_traced=split is not None)),
                     load=recorded_load(record), fallback=describe_fallback(network) if network else None)


def _low_share_advice(run: TrainerRun | None, *, is_traced: bool) -> list[str]:
    """Return options that may raise a low share of the matmul peak; none for programs other than the trainer."""
    if run is None:
        return []
    return ["a larger --micro-batch-size", *([] if is_compile_unavailable(run) else ["--compile true"]),
            *([] if is_traced else ["--trace-steps 10 to see the breakdown"])]


def _traced_wall(split: Split | None, rows: History) -> dict[str, float]:
    """Return the wall time of the traced window by activity or, without traces, of all recorded steps."""
    if split is None:
        return {"training": sum(rows.finite("step_time_s"))}
    return {"training": sum(split.mean(name) for name in IN_STEP),
            **{name: split.mean(name) for name in (*BETWEEN, OTHER)}}
