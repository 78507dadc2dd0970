"""Collectives of traced runs on links of known bandwidth: issued bytes, bytes on the wire and exposed time.

The measured values are compared with the traffic table and with the papers' algorithms.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.layout_record import read_layout_record
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.observe.traffic import NOTHING, Traffic, call_traffic, measured, textbook_bytes
from ezpz_llm.verify.certify.case import published_traffic
from ezpz_llm.verify.explain.events import subtract, total, union
from ezpz_llm.verify.explain.split import PAIRED, assign_exposed_time, find_waits
from ezpz_llm.verify.explain.trace import RankTrace, read_trace
from ezpz_llm.verify.explain.trainer_run import read_trainer_run

_SCALAR = 8
"""Bytes of a single number."""

Issued = dict[str, tuple[int, int]]
"""Count and bytes of the collectives in a step, by kind and group."""

WHY = {
    "ddp": "",
    "zero1": "DeepSpeed all-reduces gradients, where the paper reduce-scatters them",
    "zero2": "as ZeRO-1",
    "zero3": "gloo's reduce-scatter is an all-reduce, which adds as much as is saved: so small a model is gathered "
             "once a step, where the paper gathers for both passes",
    "tp2": "two numbers a token for the loss, whose vocabulary is divided",
    "pp2": "the gradient of the embedding that both ends have",
}


@dataclass(frozen=True)
class Moved:
    """A layout's communication in a step, averaged over ranks.

    Attributes:
        issued: collectives, by groups of ranks that issue the same.
        wire: traffic of the busiest rank, without traffic to itself.
        textbook: bytes in the busier direction with the papers' algorithms.
        expected_s: duration of the calls in sequence, from the traffic table.
        measured_s: exposed communication, see `moved`.
    """

    issued: dict[tuple[int, ...], Issued]
    wire: Traffic
    textbook: float
    expected_s: float
    measured_s: float

    def as_row(self, layout: str, nodes: int, seconds: dict[str, tuple[float, float]]) -> dict[str, Any]:
        """Return a row for JSON, with expected and measured seconds at several rates."""
        return {"layout": layout, "nodes": nodes,
                "issued": [{"ranks": ranks, **kinds} for ranks, kinds in self.issued.items()],
                "wire_bytes": round(self.wire.bytes), "textbook_bytes": round(self.textbook),
                "expected_s": {rate: round(pair[0], 5) for rate, pair in seconds.items()},
                "measured_s": {rate: round(pair[1], 5) for rate, pair in seconds.items()}}


def moved(folder: Path, bandwidth: float) -> Moved:
    """Read a traced run, without the time that its ranks waited for each other.

    A send ends for its rank when the kernel has the bytes, so its duration is taken from the receiving rank.
    """
    traces = [read_trace(path) for path in sorted(RunDir(folder).profile.glob("trace-rank*.json.gz"))]
    waited = find_waits(traces)
    took, expected, wires = [], [], []
    for trace in traces:
        exposed = subtract(union((flight.start, flight.end) for flight in trace.flights), trace.computing)
        by_step: Counter[int] = Counter()
        busy = NOTHING
        for flight, wait, piece in zip(trace.flights, waited[trace.rank],
                                       assign_exposed_time(exposed, trace.flights), strict=True):
            if len(flight.ranks) < 2:
                continue
            traffic = call_traffic("gloo", flight.kind, flight.size, len(flight.ranks))
            if flight.step == min(trace.steps):
                busy += traffic
                expected.append(0.0 if flight.kind == "send" else traffic.seconds(bandwidth))
            if flight.kind != "send":
                by_step[flight.step] += total(subtract(piece, wait.spans))
        took.append(statistics.median(by_step[step] for step in trace.steps))
        wires.append(busy)
    return Moved(_issued(traces), max(wires, key=lambda wire: wire.bytes), _textbook(folder, len(traces)),
                 sum(expected) / len(traces), statistics.fmean(took))


def _issued(traces: list[RankTrace]) -> dict[tuple[int, ...], Issued]:
    by_rank: dict[int, Issued] = {}
    for trace in traces:
        steps: dict[int, Issued] = defaultdict(dict)
        for flight in trace.flights:
            if len(flight.ranks) > 1:
                label = "scalars" if flight.size <= _SCALAR else flight.label
                count, size = steps[flight.step].get(label, (0, 0))
                steps[flight.step][label] = (count + 1, size + flight.size)
        first, *others = steps.values()
        assert all(other == first for other in others), "traced steps issue the same"
        by_rank[trace.rank] = dict(sorted(first.items()))
    by_ranks: dict[tuple[int, ...], Issued] = {}
    for issued in by_rank.values():
        ranks = tuple(rank for rank, other in by_rank.items() if other == issued)
        by_ranks[ranks] = issued
    return by_ranks


def _textbook(folder: Path, ranks: int) -> float:
    run_dir = RunDir(folder)
    run = read_trainer_run(run_dir, read_record(run_dir), read_layout_record(run_dir))
    assert run is not None
    layout = run.layout
    # With tp or pp of 2, four ranks only have groups of two.
    group = ranks if layout.tp == layout.pp == 1 else 2
    volumes = {kind: textbook_bytes(kind, size, group)
               for kind, size in published_traffic(layout, run.model, run.batch).items()}
    both = sum(size for kind, size in volumes.items() if kind not in PAIRED)
    return both + max(volumes.get("send", 0.0), volumes.get("recv", 0.0))


def page_table(result: Path) -> list[str]:
    """Return the lines of the page's table."""
    lines = ["| layout | nodes | issued (MB) | wire MB | textbook MB | 1 Gbit/s: bytes, table, measured ms | "
             "200 Mbit/s | why it differs from the textbook |", "|---|---|---|---|---|---|---|---|"]
    goodput = measured("gloo")["goodput"]
    for row in json.loads(result.read_text())["rows"]:
        kinds = {label: value for label, value in row["issued"][0].items() if label not in ("ranks", "scalars")}
        issued = ", ".join(f"{count} {label} {size / 1e6:.2f}" for label, (count, size) in kinds.items())
        times = (", ".join(f"{seconds * 1e3:.0f}" for seconds in (
            row["wire_bytes"] / goodput[rate], row["expected_s"][rate], row["measured_s"][rate]))
            for rate in ("1gbit", "200mbit"))
        lines.append(f"| {row['layout']} | {row['nodes']} | {issued} | {row['wire_bytes'] / 1e6:.2f} | "
                     f"{row['textbook_bytes'] / 1e6:.2f} | {' | '.join(times)} | {WHY[row['layout']]} |")
    return lines
