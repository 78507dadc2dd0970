"""Memory by what it holds, measured beside the arithmetic (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ezpz_llm.engine.memory import bucket_bytes
from ezpz_llm.explain.split import Split
from ezpz_llm.observe.tables import table

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
    """What a run's record and its traces tell; None where it has not ended.

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
        measured["buffers"] = max(note["buffer_bytes"] for note in notes)
        measured["activations"] = max(0, max(note["transient_bytes"] - note["buffer_transient_bytes"]
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
