"""Other tools' measurements of the same steps, and measured memory beside the estimate (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.explain.split import Split
from ezpz_llm.layout.memory import bucket_bytes
from ezpz_llm.observe.tables import table
from ezpz_llm.rundir import RunDir, read_json

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
    if host := read_json(RunDir(run_dir).profile / "host.json"):
        found["host"] = host
    return found


def checks_text(found: dict[str, Any]) -> str:
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
        lines.append(f"pyinstrument found rank 0 {host[_TORCH] / whole:.1%} of its time in torch, and outside of "
                     f"it: {shares} (profile/host.html).")
    return "".join(f"  {line}\n" for line in ["Checks by other tools:", *lines]) if lines else ""


def _why_more(ratio: float) -> str:
    if ratio < 1.001:
        return ""
    return (" It also counts products of the backward pass that are made in a forward pass: the head's where the "
            "loss is taken in chunks, and activations that are computed again.")


# Memory by what it holds, measured beside the arithmetic.
STATES = ("parameters", "gradients", "optimizer", "copy")
_NAMES = {"copy": "copy for the optimizer", "buffers": "communication buffers",
          "activations": "activations and temporaries", "other": "other"}


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


def memory_of(record: Mapping[str, Any], split: Split | None, deepspeed: Mapping[str, Any],
              run: Mapping[str, Any]) -> Memory | None:
    """Cross-checks from a run's record and its traces; None if it has not ended.

    Args:
        record: what the run's record has under "memory".
        deepspeed: what DeepSpeed was given, empty for other engines.
        run: see account.py.
    """
    if not record:
        return None
    expected = {kind: int(size) + record["elsewhere"].get(kind, 0) for kind, size in record["expected"].items()}
    measured: dict[str, int | None] = {kind: record["measured"].get(kind) for kind in STATES}
    notes = [] if split is None else [rank.notes for rank in split.ranks if "transient_bytes" in rank.notes]
    measured["buffers"] = measured["activations"] = None
    if split is not None and notes:
        measured["buffers"] = max(note.get("buffer_bytes", 0) for note in notes)
        measured["activations"] = max(0, max(note["transient_bytes"] - note.get("buffer_transient_bytes", 0)
                                             for note in notes))
        zero = deepspeed.get("zero_optimization") or {}
        if bucket := bucket_bytes(run["layout"], run["model"], zero, split.device):
            expected["buffers"] = bucket
    there = [size for kind, size in measured.items() if size is not None and not record["elsewhere"].get(kind)]
    measured["other"] = max(0, record["peak"] - sum(there)) if notes else None
    return Memory({kind: expected.get(kind) for kind in measured}, measured, record["peak"])


def memory_text(memory: Memory, *, rich: bool) -> str:
    """The table as text."""
    def show(size: int | None) -> str:
        return "-" if size is None else f"{size / 1e6:,.1f}"

    rows = [[_NAMES.get(kind, kind), show(memory.expected[kind]), show(size)]
            for kind, size in memory.measured.items() if size or memory.expected[kind]]
    return table("Memory in MB, each class on the rank that has most of it", ("", "arithmetic", "measured"), rows,
                 footer=("peak", "", show(memory.peak)), rich=rich)
