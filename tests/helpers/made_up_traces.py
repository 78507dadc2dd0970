"""Synthetic traces in torch.profiler's format, built event by event, so that their content is known."""

from __future__ import annotations

import io
import json
from typing import Any

from ezpz_llm.verify.explain.trace import RankTrace, parse_trace, rank_trace

MAIN, WORKER = 10, 20
_START_US = 4.4e12  # timestamps in traces count from the boot of the node


class MadeUp:
    """Trace of one rank. Each method adds an event that starts at `start` and takes `ms`, both in milliseconds."""

    def __init__(self, rank: int = 0, collectives: list[dict[str, Any]] | None = None, device: str = "cpu",
                 offset_ms: float = 0.0, host: str = "made-up") -> None:
        self.events: list[dict[str, Any]] = []
        self.notes = {"rank": rank, "device": device, "layout": "ddp", "collectives": collectives or []}
        self._offset_us = _START_US + offset_ms * 1e3
        self._host, self._launches = host, 0

    def add(self, category: str, name: str, start: float, ms: float, thread: int = MAIN, **args: Any) -> None:
        self.events.append({"ph": "X", "cat": category, "name": name, "tid": thread, "pid": 1, "args": args,
                            "ts": self._offset_us + start * 1e3, "dur": ms * 1e3})

    def mark(self, name: str, start: float, ms: float) -> None:
        self.add("user_annotation", name, start, ms)

    def op(self, start: float, ms: float, name: str = "aten::mm", thread: int = MAIN) -> None:
        self.add("cpu_op", name, start, ms, thread)

    def collective(self, operator: str, work: str, start: float, ms: float, taken_up: float = 0.1) -> None:
        """Add a call of 0.02 ms and its work in another thread, which begins `taken_up` ms later."""
        self.add("cpu_op", f"c10d::{operator}", start, 0.02)
        self.add("user_annotation", f"gloo:{work}", start + taken_up, ms - taken_up, thread=WORKER)

    def kernel(self, start: float, ms: float, launched: float, name: str = "gemm", **args: Any) -> None:
        """Add a device kernel and its launch on the CPU."""
        self._launches += 1
        self.add("cuda_runtime", "cudaLaunchKernel", launched, 0.01, correlation=self._launches)
        self.add("kernel", name, start, ms, thread=7, correlation=self._launches, **args)

    def whole(self) -> dict[str, Any]:
        return {"traceEvents": [{"ph": "M", "name": "process_name"}, *self.events], "host_name": self._host,
                "ezpz_llm": self.notes}

    def read(self) -> RankTrace:
        return rank_trace(parse_trace(io.StringIO(json.dumps(self.whole())), "here"), "here")


def of_all(kind: str, ranks: list[int], size: int = 1_000_000, axes: str = "dp") -> dict[str, Any]:
    """Return a collective as listed in the census."""
    return {"kind": kind, "axes": axes, "ranks": ranks, "bytes": size}
