"""Waiting time of ranks in collectives for a rank that had not called yet.

Whoever called before waited for the rank that called last, and what follows is the transfer. How long a rank is in
a collective does not tell one from the other: a send is over for its rank when the kernel has the bytes, and an
all-gather for the rank that calls last when it has what the others sent before.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ezpz_llm.base import grouped
from ezpz_llm.explain.events import Flight
from ezpz_llm.explain.intervals import Interval, subtract, union, within

if TYPE_CHECKING:
    from ezpz_llm.explain.trace import RankTrace

PAIRED = ("send", "recv")


@dataclass(frozen=True)
class Wait:
    """When a rank, in a collective of its own, waited for the rank `last`: in times of its trace."""

    spans: list[Interval]
    last: int


def waits(traces: Sequence[RankTrace]) -> dict[int, list[Wait | None]]:
    """By rank, for each of its flights; None where the other ranks' flights cannot be found.

    While the last rank moves the data of a collective before, with whomever, the others wait for a link and not
    for it: where ranks have collectives by turns, one of them comes first.
    """
    met = grouped((key, (trace.rank, i, trace.flights[i])) for trace in traces
                  for i, key in enumerate(_keys(trace.rank, trace.flights)) if key is not None)
    whole = [meeting for key, meeting in met.items() if len(meeting) == len(key[1])]
    clock = common_clock(traces, [[(rank, flight) for rank, _, flight in meeting] for meeting in whole])
    # From here on times are those of the common clock.
    called = [max((clock[rank] + flight.start, rank) for rank, _, flight in meeting) for meeting in whole]
    moving = grouped((rank, (since, clock[rank] + flight.end))
                     for meeting, (since, _) in zip(whole, called, strict=True)
                     for rank, _, flight in meeting if flight.kind not in PAIRED)
    moved = {rank: union(spans) for rank, spans in moving.items()}
    found: dict[int, list[Wait | None]] = {trace.rank: [None] * len(trace.flights) for trace in traces}
    for meeting, (since, last) in zip(whole, called, strict=True):
        for rank, i, flight in meeting:
            start, end = (clock[rank] + moment for moment in (flight.start, flight.end))
            waited = [(start, min(since, end))] if start < since else []
            if flight.kind not in PAIRED:
                waited = subtract(waited, within(moved.get(last, []), start, end))
            found[rank][i] = Wait([(begin - clock[rank], over - clock[rank]) for begin, over in waited], last)
    return found


def _keys(rank: int, flights: Sequence[Flight]) -> list[Any]:
    """Key of one collective on all its ranks: the step, the ranks, its number."""
    seen: Counter[Any] = Counter()
    found: list[Any] = []
    for flight in flights:
        ranks, place = flight.ranks, "all"
        if flight.kind in PAIRED:
            # From one to the other, apart from the collectives that the same two have.
            way = () if flight.peer is None else (rank, flight.peer)
            ranks, place = way if flight.kind == "send" else way[::-1], "->"
        key = (flight.step, ranks, place)
        found.append((*key, seen[key]) if ranks else None)
        seen[key] += 1
    return found


# A host that sends or receives much slower than the others.
_SLOW = 0.5
"""The share of the usual rate below which a host, or a link, is named."""


@dataclass(frozen=True)
class SlowLink:
    """A slow transfer: its rate and the usual one in bytes a second."""

    what: str
    host: str
    rate: float
    usual: float


def slow_link(links: Sequence[Mapping[str, Any]]) -> SlowLink | None:
    """The slowest host whose sending or receiving is under half of the other hosts'; None where there is none.

    A host is as fast as its better neighbour lets it be. Of two hosts only the direction can be named.

    Args:
        links: see dist/links.py.
    """
    found = []
    for way, verb in (("sender", "sends"), ("receiver", "receives")):
        rates: dict[str, float] = {}
        for link in links:
            rates[link[way]] = max(rates.get(link[way], 0.0), link["rate"])
        for host, rate in rates.items():
            others = [other for name, other in rates.items() if name != host]
            if others and rate < _SLOW * statistics.median(others):
                found.append(SlowLink(f"{host} {verb}", host, rate, statistics.median(others)))
    return min(found, key=lambda one: one.rate / one.usual, default=None)


# One clock for traces of several hosts, whose own clocks may differ by more than a collective takes.

Meeting = Sequence[tuple[int, "Flight"]]
"""The flights of one collective, with their ranks."""

_TRUSTED = 4
"""One all-reduce in so many sets the clocks, the shortest ones."""


def common_clock(traces: Sequence[RankTrace], meetings: Collection[Meeting]) -> dict[int, float]:
    """By rank, the seconds to add to times of its trace, so that those of all ranks can be compared.

    Ranks of one host share its clock. No rank's all-reduce ends before all have given their share, and then it
    ends on all at about the same moment: this sets every host's clock by that of the first rank's host. A host
    that had none together with it is believed.
    """
    first = traces[0]
    zeros = {trace.rank: trace.began - first.began for trace in traces}
    hosts = {trace.rank: trace.host for trace in traces}
    together = sorted((meeting for meeting in meetings if meeting[0][1].kind == "all_reduce"),
                      key=lambda meeting: min(flight.end - flight.start for _, flight in meeting))
    ahead = {first.host: 0.0}
    for host in set(hosts.values()) - {first.host}:
        found = []
        for meeting in together:
            here, there = ([zeros[rank] + flight.end for rank, flight in meeting if hosts[rank] == one]
                           for one in (first.host, host))
            if here and there:
                found.append(max(there) - max(here))
        trusted = found[:max(1, len(found) // _TRUSTED)]
        ahead[host] = statistics.median(trusted) if trusted else 0.0
    return {rank: zero - ahead[hosts[rank]] for rank, zero in zeros.items()}
