"""How long ranks waited for each other inside collectives, without comparing clocks of different hosts.

A collective cannot end before its last rank has called it, and ends on all at about the same moment. So the rank on
which it was shortest called last, what it took there is the transfer, and what it took longer on another rank is
that rank's wait. For a send and its receive the same holds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ezpz_llm.explain.flight import Flight

if TYPE_CHECKING:
    from ezpz_llm.explain.trace import RankTrace


@dataclass(frozen=True)
class Wait:
    """Seconds from a call until the rank `last` had called, too."""

    seconds: float
    last: int


def waits(traces: Sequence[RankTrace]) -> dict[int, list[Wait | None]]:
    """By rank, for each of its flights; None where the other ranks' flights cannot be found."""
    meetings: dict[Any, list[tuple[int, int, float]]] = defaultdict(list)
    for trace in traces:
        for i, key in enumerate(_keys(trace.rank, trace.flights)):
            if key is not None:
                flight = trace.flights[i]
                meetings[key].append((trace.rank, i, flight.end - flight.start))
    found: dict[int, list[Wait | None]] = {trace.rank: [None] * len(trace.flights) for trace in traces}
    for key, met in meetings.items():
        if len(met) == len(key[1]):
            last, _, least = min(met, key=lambda one: one[2])
            for rank, i, seconds in met:
                found[rank][i] = Wait(seconds - least, last)
    return found


def _keys(rank: int, flights: Sequence[Flight]) -> list[Any]:
    """What the flights of one collective have in common on all its ranks: the step, the ranks, which one it is."""
    seen: Counter[Any] = Counter()
    found: list[Any] = []
    for flight in flights:
        ranks: tuple[Any, ...] = flight.ranks
        if flight.kind in ("send", "recv"):
            if flight.peer is None:
                found.append(None)
                continue
            way = (rank, flight.peer) if flight.kind == "send" else (flight.peer, rank)
            # From one to the other, apart from the collectives that the same two have.
            ranks, place = way, "->"
        else:
            place = "all"
        if not ranks:
            found.append(None)
            continue
        key = (flight.step, ranks, place)
        found.append((*key, seen[key]))
        seen[key] += 1
    return found
