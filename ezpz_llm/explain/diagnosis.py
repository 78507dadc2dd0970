"""All that a run directory tells about where time and memory went, other tools' measurements of the same steps
among it (imports no torch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.base import UserError, as_dataclass, as_type
from ezpz_llm.explain.causes import Cause, compile_is_no_option, phase_causes, rank_causes
from ezpz_llm.explain.counterfactual import Taken, taken
from ezpz_llm.explain.split import IN_STEP, OTHER, Split, split_run
from ezpz_llm.explain.step_times import StepTimes, step_time_causes, step_times
from ezpz_llm.explain.trace import BETWEEN
from ezpz_llm.launch.hostlist import rank_ranges
from ezpz_llm.layout.batch import Batch
from ezpz_llm.layout.layout import Layout
from ezpz_llm.layout.memory import bucket_bytes
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.observe.history import PHASES, History, read_history, steady
from ezpz_llm.observe.machine_load import MachineLoad, recorded_load
from ezpz_llm.rundir import RunDir, read_json, read_layout, read_record, schemas

# Other tools' measurements of the same steps.
_TORCH = "torch"


def crosschecks(run_dir: Path, split: Split | None) -> dict[str, Any]:
    """Cross-checks: `collectives`, a step's by DeepSpeed's logger (logged) and by the traces (issued); `flops`,
    of the matrix products in a step's forward passes on rank 0, by DeepSpeed's profiler and by our arithmetic;
    `host`, seconds of pyinstrument's profile of rank 0 by package."""
    found: dict[str, Any] = {}
    if split is not None:
        rank = split.ranks[0]
        if logged := sum(entry["count"] for entry in (rank.notes.get("deepspeed") or {}).values()):
            issued = sum(one.count for one in rank.exposed) / rank.steps
            found["collectives"] = {"logged": logged, "issued": issued}
        if flops := rank.notes.get("flops"):
            found["flops"] = {**flops, "ratio": flops["deepspeed"] / flops["ours"]}
    path = RunDir(run_dir).profile / "host.json"
    host = as_type(schemas.PackageSeconds, read_json(path) or {}, str(path))
    if sum(host.values()) > 0:
        found["host"] = host
    return found


def check_sentences(found: dict[str, Any]) -> list[str]:
    """A sentence on each."""
    lines = []
    if collectives := found.get("collectives"):
        lines.append(f"DeepSpeed's own logger counted {collectives['logged']} of the {collectives['issued']:g} "
                     "collectives of rank 0's step; what it leaves out is not called through DeepSpeed.")
    if flops := found.get("flops"):
        lines.append(f"DeepSpeed's FLOPs profiler counted {flops['deepspeed']:.6g} in the products of rank 0's "
                     f"forward passes, {flops['ratio']:.4f} times our {flops['ours']:.6g}."
                     + _why_more(flops["ratio"]))
    if host := found.get("host"):
        whole = sum(host.values())
        shares = ", ".join(f"{seconds / whole:.1%} {name}" for name, seconds in
                           sorted(host.items(), key=lambda one: -one[1]) if name != _TORCH)
        lines.append(f"pyinstrument found rank 0 {host.get(_TORCH, 0) / whole:.1%} of its time in torch, and "
                     f"outside of it: {shares} (profile/host.html).")
    return lines


def _why_more(ratio: float) -> str:
    if ratio < 1.001:
        return ""
    return (" It also counts products of the backward pass that are made in a forward pass: the head's where the "
            "loss is taken in chunks, and activations that are computed again.")


# Memory by what it holds, measured beside the arithmetic.
STATES = ("parameters", "gradients", "optimizer", "copy", "secondary")


@dataclass(frozen=True)
class Memory:
    """Bytes by class, each on the rank that has most of it; None where there is no arithmetic, or nothing was
    measured.

    "buffers" is what DeepSpeed's bucket for gradients takes, without one the largest that a collective moved
    besides states; under ddp the buckets are the gradients themselves. "activations" is what a step allocates at
    most above what is there when it begins, without buffers. "other" is what the peak has beyond all of these: on
    a CPU the process with Python and libraries.
    """

    expected: dict[str, int | None]
    measured: dict[str, int | None]
    peak: int


def memory_of(record: schemas.Memory | None, split: Split | None, deepspeed: Mapping[str, Any],
              run: Mapping[str, Any]) -> Memory | None:
    """Cross-checks from a run's record and its traces; None if it has not ended.

    Args:
        record: what the run's record has under "memory".
        deepspeed: what DeepSpeed was given, empty for other engines.
        run: facts for advice, see `described`.
    """
    if not record:
        return None
    expected = {kind: int(size + record["elsewhere"].get(kind, 0)) for kind, size in record["expected"].items()}
    measured: dict[str, int | None] = {kind: record["measured"].get(kind) for kind in STATES}
    notes = [] if split is None else [rank.notes for rank in split.ranks if "transient_bytes" in rank.notes]
    measured["buffers"] = measured["activations"] = None
    if split is not None and notes:
        measured["buffers"] = max(note.get("buffer_bytes", 0) for note in notes)
        measured["activations"] = max(0, max(note["transient_bytes"] - note.get("buffer_transient_bytes", 0)
                                             for note in notes))
        if bucket := bucket_bytes(run["layout"], run["model"], deepspeed, split.device):
            expected["buffers"] = bucket
    there = [size for kind, size in measured.items() if size is not None and not record["elsewhere"].get(kind)]
    measured["other"] = max(0, record["peak"] - sum(there)) if notes else None
    return Memory({kind: expected.get(kind) for kind in measured}, measured, record["peak"])


OWN_LAYOUT = "of its own"
"""What is said of a program that was not wrapped into a layout of ours."""
_SHOWN_CAUSES = 8
_WORTH_SAYING = 0.002
"""Of the run."""


@dataclass(frozen=True)
class Diagnosis:
    """Attributes:
        wall: rank 0's seconds of the whole run by what they were spent on; empty where it has not ended.
        split: of the traced steps, None where none were.
        phases: seconds a step of rank 0 by metrics.jsonl, over steady steps, "other" among them.
        memory: None where the run has not ended.
        checks: see crosschecks.
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
    is_foreign: bool = False
    """Whether another program than the trainer ran."""
    times: StepTimes | None = None
    """Of rank 0's steady steps, traced or not."""
    load: MachineLoad | None = None
    """Of rank 0's node."""

    @property
    def untraced(self) -> list[int]:
        """Ranks without a trace, where others have one: not written yet, or lost."""
        there = {rank.rank for rank in self.split.ranks} if self.split else set(range(self.ranks))
        return [rank for rank in range(self.ranks) if rank not in there]

    @property
    def opening(self) -> list[str]:
        """The first things to know of the run."""
        return [*([self.load.sentence()] if self.load and self.load.is_busy else []),
                *([self.times.sentence()] if self.times else [])]

    @property
    def shown_causes(self) -> list[Cause]:
        """The causes that are worth a line, the one that costs most first."""
        return [cause for cause in self.causes if cause.share >= _WORTH_SAYING][:_SHOWN_CAUSES]

    @property
    def unseen(self) -> str:
        """The sentence on what does not show without traces, or without those of some ranks; empty otherwise."""
        if self.split is None:
            return ("Exposed communication and slow ranks show in traces alone"
                    + ("." if self.is_foreign else ": run with --trace-steps 10."))
        if self.untraced:
            return (f"No trace of {rank_ranges(self.untraced)}: means are over the others, and waits for these are "
                    "not seen.")
        return ""

    def as_record(self) -> dict[str, Any]:
        """The diagnosis as JSON."""
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


def diagnose(run_dir: Path) -> Diagnosis:
    """Read a run directory.

    Raises:
        UserError: it is none of a training run, no step has been written, or a trace cannot be read.
    """
    RunDir(run_dir).check_there()
    record = read_record(RunDir(run_dir))
    rows = read_history(RunDir(run_dir))
    if "config" not in record or not len(rows):
        raise UserError("there is no step of a training run here", where=str(run_dir),
                        instead="the directory of a run of ezpz_llm.train, or of a script that calls "
                                "ezpz_llm.record; ezpz-llm why if it ended early")
    timed = steady(rows)
    phases = {name: float(np.mean(timed.column(f"{name}_s"))) for name in (*PHASES, "other")}
    split = split_run(run_dir) if any(RunDir(run_dir).profile.glob("trace-rank*.json.gz")) else None
    where = str(RunDir(run_dir).record)
    wall = as_type(dict[str, float], (record.get("summary") or {}).get("wall") or {}, where, "summary.wall")
    memory = as_type(schemas.Memory | None, record.get("memory") or None, where, "memory")
    run = described(run_dir, record)
    given = RunDir(run_dir).deepspeed
    deepspeed = as_type(schemas.DeepSpeedGiven, read_json(given) or {}, str(given))
    spent = wall if wall.get("training", 0) > 0 else _traced_wall(split, rows)
    causes = rank_causes(split, spent, run, deepspeed)
    if split is None:
        whole = sum(seconds for name, seconds in spent.items() if name != "set-up")
        of_steps = step_time_causes(rows, whole, ranks=run["world_size"], can_trace=run["model"] is not None)
        causes = sorted([*causes, *phase_causes(phases, len(rows), spent), *of_steps],
                        key=lambda cause: -cause.seconds)
    share = (record.get("summary") or {}).get("ceiling_share")
    share = as_type(float | None, share, where, "summary.ceiling_share")
    return Diagnosis(run_dir, run["layout"].name if run["layout"] else OWN_LAYOUT, run["world_size"], wall, split,
                   phases, tuple(causes), memory_of(memory, split, deepspeed, run),
                   crosschecks(run_dir, split), tuple(taken(run_dir, split)), is_foreign=run["model"] is None,
                   times=step_times(rows, share, _against_low_share(run, is_traced=split is not None)),
                   load=recorded_load(record))


def _against_low_share(run: Mapping[str, Any], *, is_traced: bool) -> list[str]:
    """Options against a low share of the matmul peak; none for another program's run."""
    if run["model"] is None:
        return []
    return ["a larger --micro-batch-size", *([] if compile_is_no_option(run) else ["--compile true"]),
            *([] if is_traced else ["--trace-steps 10 to see what it is"])]


def described(run_dir: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Facts for advice: model, layout, batch, optimizer, ranks, the device and its memory, the configuration.

    The model is None in a run of another program's, layout and batch where such a run has none of ours.

    Raises:
        UserError: layout.json is missing or damaged.
    """
    resolved = read_layout(RunDir(run_dir).layout) or {}
    if not resolved and "model" in record:
        raise UserError("this run left no layout.json", where=str(run_dir), instead="a whole run directory")
    where = str(RunDir(run_dir).layout)
    environment = record.get("environment") or {}
    device = environment.get("device") or {}
    model = record.get("model")
    return {"model": model and as_dataclass(ModelConfig, model, str(RunDir(run_dir).record)),
            "layout": resolved and Layout.from_record(resolved.get("layout"), where),
            "batch": as_dataclass(Batch, resolved["batch"], where) if "batch" in resolved else None,
            "precision": resolved.get("precision"),
            "optimizer": record["config"].get("optimizer", "adamw"), "world_size": environment.get("world_size", 1),
            "device": device.get("type"), "memory_bytes": device.get("memory_bytes"), "config": record["config"]}


def _traced_wall(split: Split | None, rows: History) -> dict[str, float]:
    """In place of a run's wall time, the traced window's; without traces, of all steps that have a line."""
    if split is None:
        return {"training": float(np.nansum(rows.column("step_time_s")))}
    return {"training": sum(split.mean(name) for name in IN_STEP),
            **{name: split.mean(name) for name in (*BETWEEN, OTHER)}}
