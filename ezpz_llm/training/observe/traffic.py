"""Measured and textbook bytes on the wire of collectives (does not import torch).

Each measured backend has a table in this folder (docs/evidence/traffic.md). The measurements used one rank per node
and one link per rank, whose counters give the traffic of a call by kind, buffer size, and number of ranks. Buffer
sizes refer to the whole buffer: the data that is reduced, gathered, scattered, or sent.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import group_by_key, read_json

_FOLDER = Path(__file__).resolve().parent

_SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "gather": 1.0,
          "scatter": 1.0}
"""Traffic of a call on n ranks, in units of (n-1)/n of the buffer."""

_NAMES = ("sent", "received", "line_bytes", "overhead_s")

_TEXTBOOK_TOLERANCE = 0.05
"""Relative difference up to which measured bytes are treated as equal to the textbook's."""

_REASONS = {
    ("gloo", "reduce_scatter"): "gloo all-reduces the whole buffer, and each rank keeps its share",
    ("gloo", "broadcast"): "the root of a tree sends the whole buffer to log2(n) ranks",
    ("gloo", "reduce"): "shares are reduced in a ring and then gathered: the root receives 2 (n-1)/n of the buffer",
}
"""Reasons why measured bytes differ from the textbook's, from the source code of gloo (broadcast.cc, reduce.cc) and
torch's ProcessGroupGloo."""


@dataclass(frozen=True)
class Traffic:
    """Traffic of one or several calls, in bytes of the rank with the most traffic.

    The time of a call is `overhead_s` plus the time of the link for `line_bytes`. `line_bytes` is larger than
    `bytes` if ranks wait for each other.
    """

    sent: float
    received: float
    line_bytes: float
    overhead_s: float
    textbook_sent: float
    textbook_received: float

    @property
    def bytes(self) -> float:
        """Bytes in the busier direction; divided by the bandwidth, a lower bound of the communication time."""
        return max(self.sent, self.received)

    def seconds(self, bandwidth: float) -> float:
        """Return the seconds of successive calls on a link with this bandwidth in bytes per second."""
        return self.overhead_s + self.line_bytes / bandwidth

    @property
    def textbook(self) -> float:
        """`bytes` of the algorithms with the least traffic."""
        return max(self.textbook_sent, self.textbook_received)

    @property
    def is_textbook(self) -> bool:
        """True if the measured bytes differ from the textbook's by at most _TEXTBOOK_TOLERANCE."""
        return abs(self.bytes - self.textbook) <= _TEXTBOOK_TOLERANCE * self.textbook

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: int) -> Traffic:
        """Return the traffic of `count` such calls."""
        return Traffic(*(count * value for value in astuple(self)))


NOTHING = Traffic(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def textbook_bytes(kind: str, size: float, ranks: int) -> float:
    """Return the bytes that the busiest rank sends or receives in the algorithms with the least traffic.

    All-reduce as reduce-scatter and all-gather takes 2 (n-1)/n of the buffer (Chan et al. 2007,
    doi:10.1002/cpe.1206). Reduce-scatter, all-gather, and all-to-all take half of that. Broadcast, reduce, send,
    and receive take one buffer.
    """
    if ranks == 1:
        return 0.0
    return size * (_SHARE[kind] * (ranks - 1) / ranks if kind in _SHARE else 1.0)


def call_traffic(backend: str, kind: str, size: float, ranks: int) -> Traffic | None:
    """Return the bytes on the wire of one call of a collective; None if it was not measured.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send, or recv.
            A recv is the other end of a send.
        size: size of the whole buffer in bytes. Results are interpolated linearly between measured sizes,
            extrapolated linearly below the smallest, and proportional to the size above the largest.
        ranks: number of ranks in the group.
    """
    if ranks == 1:
        return NOTHING
    rows = _rows(backend).get(("send", 2) if kind in ("send", "recv") else (kind, ranks))
    if not rows:
        return None
    sent, received, line, overhead_s = (_interpolate(rows, name, size) for name in _NAMES)
    least = textbook_bytes(kind, size, ranks)
    if kind == "send":
        return Traffic(sent, 0.0, line, overhead_s, least, 0.0)
    if kind == "recv":
        return Traffic(0.0, received, line, overhead_s, 0.0, least)
    return Traffic(sent, received, line, overhead_s, least, least)


def traffic_per_step(backend: str, issued: Mapping[str, Mapping[str, int]], ranks: int) -> dict[str, Traffic]:
    """Return the bytes on the wire of a step's collectives in one group, by kind.

    `sum(…, NOTHING)` of the values is the traffic of the step.

    Args:
        issued: {kind: {"count": …, "bytes": …}}, where each call is assumed to have the same size. Single
            numbers ("scalars") are ignored, since their traffic is negligible.

    Raises:
        KeyError: a kind was not measured with this number of ranks.
    """
    traffic_by_kind = {}
    for kind, calls in issued.items():
        if kind == "scalars" or not calls["count"]:
            continue
        traffic = call_traffic(backend, kind, calls["bytes"] / calls["count"], ranks)
        if traffic is None:
            raise KeyError(f"{kind} among {ranks} ranks over {backend} was not measured")
        traffic_by_kind[kind] = traffic.times(calls["count"])
    return traffic_by_kind


def reason(backend: str, kind: str) -> str | None:
    """Return why a backend's bytes differ from the textbook's; None if they do not, or the reason is unknown."""
    return _REASONS.get((backend, kind))


def measured(backend: str) -> dict[str, Any] | None:
    """Return a backend's table with its date, versions, link, and command; None if the backend was not measured."""
    path = _FOLDER / f"traffic_{backend}.json"
    return read_json(path) if path.is_file() else None


@functools.cache
def _rows(backend: str) -> dict[tuple[str, int], list[dict[str, float]]]:
    """Return the measurements by kind and number of ranks, sorted by size."""
    table = measured(backend)
    if table is None:
        return {}
    return group_by_key(((row["kind"], row["ranks"]), {**row, **_split_seconds(row, table["goodput"])})
                        for row in sorted(table["rows"], key=lambda row: row["bytes"]))


def _split_seconds(row: Mapping[str, Any], goodput: Mapping[str, float]) -> dict[str, float]:
    """Split the seconds measured at two bandwidths into bytes on the link and a constant overhead.

    A link transfers a burst faster than its rate, so the time of a small buffer does not measure its bytes. The
    overhead is the smaller of the two estimates, since disturbances only lengthen measurements.
    """
    (fast, fast_s), (slow, slow_s) = sorted(((goodput[rate], seconds) for rate, seconds in row["seconds"].items()),
                                            reverse=True)
    line = max((slow_s - fast_s) / (1 / slow - 1 / fast), row["sent"], row["received"])
    return {"line_bytes": line, "overhead_s": max(0.0, min(fast_s - line / fast, slow_s - line / slow))}


def _interpolate(rows: Sequence[Mapping[str, float]], name: str, size: float) -> float:
    if len(rows) == 1 or size >= rows[-1]["bytes"]:
        return rows[-1][name] * size / rows[-1]["bytes"]
    upper = next(index for index, row in enumerate(rows) if index and size <= row["bytes"])
    below, above = rows[upper - 1], rows[upper]
    slope = (above[name] - below[name]) / (above["bytes"] - below["bytes"])
    return max(0.0, below[name] + slope * (size - below["bytes"]))
