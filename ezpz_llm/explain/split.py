"""The wall time of traced steps, split so that every moment counts once; and which rank the others waited for.

In this order: what came between steps; collectives in flight while nothing computed (exposed); the phases; the
rest. Where several are in flight, the moment belongs to the one that was called first.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, grouped
from ezpz_llm.explain.events import Flight, Interval, intersect, subtract, total, union, within
from ezpz_llm.explain.trace import BETWEEN, RankTrace, read_trace
from ezpz_llm.rundir import RunDir

IN_STEP = ("data", "forward", "backward", "exposed_communication", "optimizer", "idle")
"""Parts of a step. "idle" is the rest of it: on a CPU Python between phases, on a device no kernel."""
HOST = "host"
OTHER = "other"
"""Time neither in a step nor marked: Python between steps."""
CATEGORIES = (*IN_STEP, *BETWEEN, OTHER)


@dataclass(frozen=True)
class Exposed:
    """A kind of collectives of one group. Seconds and counts are of all traced steps.

    `waited_s` is the part of `seconds` in which another rank had not called yet. `bytes` is of whole buffers, None
    where they are not known; `ranks` are those of the group, empty where they are not known.
    """

    label: str
    count: int
    seconds: float
    waited_s: float
    in_flight_s: float
    bytes: int | None
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankSplit:
    """One rank's traced wall time.

    Attributes:
        steps: how many were traced.
        seconds: by CATEGORIES, adding up to the whole window.
        exposed: by kind and group, the longest first; their seconds add up to that of the category.
        waited_for: seconds in which this rank waited in a collective, by the rank that called last.
        by_step: seconds of each step by IN_STEP; and under HOST those of forward, backward and optimizer in which a
            CPU rank ran no operator: Python, sleeps.
        notes: what the run wrote into the trace, see engine/step_trace.py.
    """

    rank: int
    host: str
    steps: int
    seconds: dict[str, float]
    exposed: tuple[Exposed, ...]
    waited_for: dict[int, float]
    by_step: tuple[dict[str, float], ...]
    notes: dict[str, Any]

    @property
    def window_s(self) -> float:
        """Seconds of the traced window."""
        return sum(self.seconds.values())

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds[name] for name in IN_STEP) / self.steps

    @property
    def host_s(self) -> float:
        """Seconds of all steps under HOST."""
        return sum(step[HOST] for step in self.by_step)

    def usual(self, name: str) -> float:
        """Seconds of the median step."""
        return statistics.median(step[name] for step in self.by_step)

    @property
    def waited_s(self) -> float:
        """Seconds a step in which it waited for other ranks."""
        return sum(self.waited_for.values()) / self.steps

    @property
    def own_s(self) -> float:
        """Seconds a step that it took without waiting for others: the rank that has most is the straggler."""
        return self.step_s - self.waited_s

    def per_step(self) -> dict[str, float]:
        """Seconds a step of compute, exposed_communication, data, optimizer and other, adding up to the step."""
        step = {name: self.seconds[name] / self.steps for name in IN_STEP}
        return {"compute": step["forward"] + step["backward"],
                "exposed_communication": step["exposed_communication"], "data": step["data"],
                "optimizer": step["optimizer"], "other": step["idle"]}


@dataclass(frozen=True)
class Split:
    """All ranks' splits, by rank."""

    ranks: tuple[RankSplit, ...]
    device: str

    def crosses_hosts(self, exposed: Exposed) -> bool:
        """True if the group has ranks on several hosts; one that is not known may have."""
        hosts = {rank.rank: rank.host for rank in self.ranks}
        return not exposed.ranks or len({hosts.get(rank) for rank in exposed.ranks}) > 1

    @property
    def by_label(self) -> dict[str, list[tuple[RankSplit, Exposed]]]:
        """The exposed collectives of a kind and group, on each rank that has them."""
        return grouped((one.label, (rank, one)) for rank in self.ranks for one in rank.exposed)

    @property
    def straggler(self) -> RankSplit:
        """The rank that takes longest by itself."""
        return max(self.ranks, key=lambda rank: rank.own_s)

    @property
    def median_own_s(self) -> float:
        """Seconds a step without waiting, of the median rank."""
        return statistics.median(rank.own_s for rank in self.ranks)

    def mean(self, category: str) -> float:
        """Seconds of a category in the whole window, of the mean rank."""
        return statistics.fmean(rank.seconds[category] for rank in self.ranks)

    def per_step(self) -> dict[str, float]:
        """RankSplit.per_step of the mean rank."""
        all_ranks = [rank.per_step() for rank in self.ranks]
        return {name: statistics.fmean(one[name] for one in all_ranks) for name in all_ranks[0]}


def split_run(run_dir: Path) -> Split:
    """Split the traced steps of a run.

    Raises:
        UserError: it has no traces, or one that cannot be read.
    """
    paths = sorted(path for path in RunDir(run_dir).profile.glob("trace-rank*.json.gz")
                   if re.fullmatch(r"trace-rank\d+\.json\.gz", path.name))
    if not paths:
        raise UserError("there are no traces: none of the run's steps were traced", where=str(run_dir / "profile"),
                        instead="run it again with --trace-steps 10")
    return split_traces(read_trace(path) for path in paths)


def split_traces(traces: Iterable[RankTrace]) -> Split:
    """The same for traces that are read one at a time, since each takes much memory."""
    parts = sorted(map(_parts, traces), key=lambda one: one.trace.rank)
    found = waits([one.trace for one in parts])
    return Split(tuple(_split(one, found[one.trace.rank]) for one in parts), parts[0].trace.device)


@dataclass(frozen=True)
class _Parts:
    """What a rank's trace says by itself. Of `trace` the millions of intervals are left out, so that those of one
    rank are in memory at a time. `pieces` is the exposed time of each flight."""

    trace: RankTrace
    seconds: dict[str, float]
    pieces: list[list[Interval]]
    by_step: tuple[dict[str, float], ...]


def _parts(trace: RankTrace) -> _Parts:
    left = [trace.window]
    taken: dict[str, list[Interval]] = {}

    def take(name: str, intervals: Sequence[Interval]) -> None:
        """Give `name` what is left of these intervals; nothing counts twice."""
        nonlocal left
        taken[name] = intersect(left, intervals)
        left = subtract(left, intervals)

    for name in BETWEEN:
        take(name, trace.between[name])
    steps = union(trace.steps.values())
    in_flight = union((flight.start, flight.end) for flight in trace.flights)
    exposed = subtract(intersect(in_flight, intersect(left, steps)), trace.computing)
    pieces = owned(exposed, trace.flights)
    take("exposed_communication", exposed)
    # On a device the data phase is what its work did not hide.
    order = ("data", "forward", "backward", "optimizer")
    for name in order if trace.device == "cpu" else (*order[1:], order[0]):
        take(name, intersect(trace.phases[name], steps))
    take("idle", steps)
    take(OTHER, [trace.window])
    busy = [one for name in ("forward", "backward", "optimizer") for one in trace.phases[name]]
    host = subtract(subtract(union(busy), trace.operators), in_flight) if trace.device == "cpu" else []
    by_step = tuple({name: total(within(found, start, end))
                     for name, found in (*((name, taken[name]) for name in IN_STEP), (HOST, host))}
                    for start, end in trace.steps.values())
    return _Parts(replace(trace, between={}, phases={}, computing=[], operators=[]),
                  {name: total(taken[name]) for name in CATEGORIES}, pieces, by_step)


def _split(parts: _Parts, known: Sequence[Wait | None]) -> RankSplit:
    trace = parts.trace
    waited_for: dict[int, float] = defaultdict(float)
    waited = []
    for piece, wait in zip(parts.pieces, known, strict=True):
        seconds = 0.0 if wait is None else total(intersect(piece, wait.spans))
        waited.append(seconds)
        if wait is not None and seconds:
            waited_for[wait.last] += seconds
    return RankSplit(trace.rank, trace.host, len(trace.steps), parts.seconds,
                     _by_label(trace.flights, parts.pieces, waited), dict(waited_for), parts.by_step, trace.notes)


def owned(exposed: Sequence[Interval], flights: Sequence[Flight]) -> list[list[Interval]]:
    """The exposed time of each flight; flights are in order of their beginnings."""
    found, taken = [], float("-inf")
    for flight in flights:
        start = max(taken, flight.start)
        found.append(within(exposed, start, flight.end) if start < flight.end else [])
        taken = max(taken, flight.end)
    return found


def _by_label(flights: Sequence[Flight], pieces: Sequence[list[Interval]],
              waited: Sequence[float]) -> tuple[Exposed, ...]:
    found = []
    for label, members in grouped((flight.label, i) for i, flight in enumerate(flights)).items():
        sizes = [size for i in members if (size := flights[i].size) is not None]
        found.append(Exposed(label, len(members), sum(total(pieces[i]) for i in members),
                             sum(waited[i] for i in members),
                             total(union((flights[i].start, flights[i].end) for i in members)),
                             sum(sizes) if len(sizes) == len(members) else None, flights[members[0]].ranks))
    return tuple(sorted(found, key=lambda one: -one.seconds))


# Waiting time of ranks in collectives for a rank that had not called yet. Whoever called before waited for the rank
# that called last, and what follows is the transfer. How long a rank is in a collective does not tell one from the
# other: a send is over for its rank when the kernel has the bytes, and an all-gather for the rank that calls last
# when it has what the others sent before.
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
    called_on = grouped((key, (trace.rank, i, trace.flights[i])) for trace in traces
                  for i, key in enumerate(_keys(trace.rank, trace.flights)) if key is not None)
    whole = [collective for key, collective in called_on.items() if len(collective) == len(key[1])]
    clock = common_clock(traces, [[(rank, flight) for rank, _, flight in collective] for collective in whole])
    # From here on times are those of the common clock.
    called = [max((clock[rank] + flight.start, rank) for rank, _, flight in collective) for collective in whole]
    moving = grouped((rank, (since, clock[rank] + flight.end))
                     for collective, (since, _) in zip(whole, called, strict=True)
                     for rank, _, flight in collective if flight.kind not in PAIRED)
    moved = {rank: union(spans) for rank, spans in moving.items()}
    found: dict[int, list[Wait | None]] = {trace.rank: [None] * len(trace.flights) for trace in traces}
    for collective, (since, last) in zip(whole, called, strict=True):
        for rank, i, flight in collective:
            start, end = (clock[rank] + moment for moment in (flight.start, flight.end))
            waited = [(start, min(since, end))] if start < since else []
            if flight.kind not in PAIRED:
                waited = subtract(waited, within(moved.get(last, []), start, end))
            found[rank][i] = Wait([(begin - clock[rank], over - clock[rank]) for begin, over in waited], last)
    return found


def _keys(rank: int, flights: Sequence[Flight]) -> Iterator[Any]:
    """Key of one collective on all its ranks: the step, the ranks, its number."""
    seen: Counter[Any] = Counter()
    for flight in flights:
        ranks, place = flight.ranks, "all"
        if flight.kind in PAIRED:
            # From one to the other, apart from the collectives that the same two have.
            way = () if flight.peer is None else (rank, flight.peer)
            ranks, place = way if flight.kind == "send" else way[::-1], "->"
        key = (flight.step, ranks, place)
        yield (*key, seen[key]) if ranks else None
        seen[key] += 1


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

Collective = Sequence[tuple[int, "Flight"]]
"""The flights of one collective, with their ranks."""

_TRUSTED = 4
"""One all-reduce in so many sets the clocks, the shortest ones."""


def common_clock(traces: Sequence[RankTrace], collectives: Collection[Collective]) -> dict[int, float]:
    """By rank, the seconds to add to times of its trace, so that those of all ranks can be compared.

    Ranks of one host share its clock. No rank's all-reduce ends before all have given their share, and then it
    ends on all at about the same moment: this sets every host's clock by that of the first rank's host. A host
    that had none together with it is believed.
    """
    first = traces[0]
    zeros = {trace.rank: trace.began - first.began for trace in traces}
    hosts = {trace.rank: trace.host for trace in traces}
    together = sorted((collective for collective in collectives if collective[0][1].kind == "all_reduce"),
                      key=lambda collective: min(flight.end - flight.start for _, flight in collective))
    ahead = {first.host: 0.0}
    for host in set(hosts.values()) - {first.host}:
        found = []
        for collective in together:
            here, there = ([zeros[rank] + flight.end for rank, flight in collective if hosts[rank] == one]
                           for one in (first.host, host))
            if here and there:
                found.append(max(there) - max(here))
        trusted = found[:max(1, len(found) // _TRUSTED)]
        ahead[host] = statistics.median(trusted) if trusted else 0.0
    return {rank: zero - ahead[hosts[rank]] for rank, zero in zeros.items()}
