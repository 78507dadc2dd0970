"""Bytes on the wire of a collective, as measured on a link, beside the textbook's (imports no torch).

The table of a backend is a file beside this one, written by a measurement (docs/evidence/traffic.md): one rank a
node, each with a link of its own, whose counters say what a call of a kind sent for a buffer of so many bytes
among so many ranks. Bytes of buffers are counted as in the collectives that a run issues: what is reduced, what is
gathered, what is divided, what is sent, always the whole buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import grouped, read_json

_FOLDER = Path(__file__).resolve().parent

_SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "gather": 1.0,
          "scatter": 1.0}
"""Times (n-1)/n of the buffer."""

_NAMES = ("sent", "received", "line_bytes", "overhead_s")

NEAR = 0.05
"""Measured volumes this near to the textbook's are the textbook's."""

_REASONS = {
    ("gloo", "reduce_scatter"): "gloo all-reduces the whole buffer, and each rank keeps its share",
    ("gloo", "broadcast"): "the root of a tree sends the whole buffer to log2(n) ranks",
    ("gloo", "reduce"): "shares are reduced in a ring and then gathered: the root receives 2 (n-1)/n of the buffer",
}
"""Read in the sources of gloo (broadcast.cc, reduce.cc) and of torch's ProcessGroupGloo."""


@dataclass(frozen=True)
class Traffic:
    """Traffic of one call, or of several, in bytes of the rank that has most.

    A call takes `overhead_s` seconds whatever the bandwidth, and as long as the link needs for `line_bytes`, which
    are more than `bytes` where ranks wait for each other.
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
        """Seconds of the calls one after the other on a link that carries so many bytes of data a second."""
        return self.overhead_s + self.line_bytes / bandwidth

    @property
    def textbook(self) -> float:
        """The same in the algorithms that send least."""
        return max(self.textbook_sent, self.textbook_received)

    @property
    def is_textbook(self) -> bool:
        """True if the measured bytes are within NEAR of the textbook's."""
        return abs(self.bytes - self.textbook) <= NEAR * self.textbook

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: int) -> Traffic:
        """So many calls."""
        return Traffic(*(count * value for value in astuple(self)))


NOTHING = Traffic(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def textbook_bytes(kind: str, size: float, ranks: int) -> float:
    """Bytes that the busiest rank sends, or receives, in the algorithms that send least.

    All-reduce as reduce-scatter and all-gather (Chan et al. 2007, doi:10.1002/cpe.1206): 2 (n-1)/n of the buffer;
    each of the two, and an exchange of all with all, half of it; broadcast, reduce, send and receive once.
    """
    if ranks == 1:
        return 0.0
    return size * (_SHARE[kind] * (ranks - 1) / ranks if kind in _SHARE else 1.0)


def call_traffic(backend: str, kind: str, size: float, ranks: int) -> Traffic | None:
    """Bytes on the wire of one call of a collective; None if it was not measured.

    Args:
        kind: as in the collectives issued: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce,
            gather, scatter, send or recv. A recv is the other end of a send.
        size: bytes of the whole buffer. Between two measured sizes, and below the smallest, volumes are taken to be
            linear; above the largest, proportional.
        ranks: of the group. Only measured numbers are known.
    """
    if ranks == 1:
        return NOTHING
    rows = _rows(backend).get(("send", 2) if kind in ("send", "recv") else (kind, ranks))
    if not rows:
        return None
    sent, received, line, overhead_s = (_between(rows, name, size) for name in _NAMES)
    least = textbook_bytes(kind, size, ranks)
    if kind == "send":
        return Traffic(sent, 0.0, line, overhead_s, least, 0.0)
    if kind == "recv":
        return Traffic(0.0, received, line, overhead_s, 0.0, least)
    return Traffic(sent, received, line, overhead_s, least, least)


def step_traffic(backend: str, issued: Mapping[str, Mapping[str, int]], ranks: int) -> dict[str, Traffic]:
    """Bytes on the wire of a step's collectives, by kind, all of them of one group of `ranks`.

    The sum of the values, from NOTHING on, is the step's.

    Args:
        issued: {kind: {"count": …, "bytes": …}}; bytes are taken to be spread evenly over the calls. Single numbers
            ("scalars") are left out, since they are not what a link is busy with.

    Raises:
        KeyError: a kind that was not measured, or not among so many ranks.
    """
    found = {}
    for kind, calls in issued.items():
        if kind == "scalars" or not calls["count"]:
            continue
        one = call_traffic(backend, kind, calls["bytes"] / calls["count"], ranks)
        if one is None:
            raise KeyError(f"{kind} among {ranks} ranks over {backend} was not measured")
        found[kind] = one.times(calls["count"])
    return found


def reason(backend: str, kind: str) -> str | None:
    """Why a backend's volume is not the textbook's; None where it is, or nobody knows."""
    return _REASONS.get((backend, kind))


def measured(backend: str) -> dict[str, Any] | None:
    """A backend's table as it was written, with its date, versions, link and command; None without one."""
    path = _FOLDER / f"traffic_{backend}.json"
    return read_json(path) if path.is_file() else None


@functools.cache
def _rows(backend: str) -> dict[tuple[str, int], list[dict[str, float]]]:
    """The measurements by kind and ranks, in order of their sizes."""
    table = measured(backend)
    if table is None:
        return {}
    return grouped(((row["kind"], row["ranks"]), {**row, **_times(row, table["goodput"])})
                   for row in sorted(table["rows"], key=lambda row: row["bytes"]))


def _times(row: Mapping[str, Any], goodput: Mapping[str, float]) -> dict[str, float]:
    """From the seconds at two bandwidths, what grows with their inverse and what does not.

    A link lets a burst pass faster than its rate, so that the time of a small buffer says nothing of its bytes. The
    overhead is the smaller of the two found: a disturbed measurement is too long.
    """
    (fast, fast_s), (slow, slow_s) = sorted(((goodput[rate], taken) for rate, taken in row["seconds"].items()),
                                            reverse=True)
    line = max((slow_s - fast_s) / (1 / slow - 1 / fast), row["sent"], row["received"])
    return {"line_bytes": line, "overhead_s": max(0.0, min(fast_s - line / fast, slow_s - line / slow))}


def _between(rows: Sequence[Mapping[str, float]], name: str, size: float) -> float:
    if len(rows) == 1 or size >= rows[-1]["bytes"]:
        return rows[-1][name] * size / rows[-1]["bytes"]
    upper = next(index for index, row in enumerate(rows) if index and size <= row["bytes"])
    below, above = rows[upper - 1], rows[upper]
    slope = (above[name] - below[name]) / (above["bytes"] - below["bytes"])
    return max(0.0, below[name] + slope * (size - below["bytes"]))
