"""Breakdown of the wall time of traced steps into disjoint parts, and waiting time by the rank that was waited for.

Every moment is assigned to the first part that applies: work between steps; exposed communication (collectives in
flight while nothing computes); a phase; the rest. If several collectives are in flight, the moment is assigned to
the collective that was called first.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, group_by_key
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.verify.explain.events import Flight, Interval, intersect, subtract, total, union, within
from ezpz_llm.verify.explain.trace import BETWEEN, RankTrace, read_trace

IN_STEP = ("data", "forward", "backward", "exposed_communication", "optimizer", "idle")
"""Parts of a step. "idle" is the rest: on a CPU, Python between phases; on a device, time in which it is idle."""
HOST = "host"
"""Time of forward, backward and optimizer in which a CPU rank runs no operator. Not a separate part of a step."""
OTHER = "other"
"""Time outside of steps and of marked work between steps: Python."""
CATEGORIES = (*IN_STEP, *BETWEEN, OTHER)


@dataclass(frozen=True)
class Exposed:
    """Exposed collectives of one kind and group. Seconds and counts are over all traced steps.

    `waited_s` is the part of `seconds` before the last rank had called the collective. `bytes` is the size of full
    buffers, or None if unknown. `ranks` are the ranks of the group, empty if unknown.
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
    """Breakdown of one rank's traced wall time.

    Attributes:
        steps: number of traced steps.
        seconds: seconds by category of CATEGORIES; they add up to the traced window.
        exposed: exposed collectives by kind and group, the longest first; they add up to exposed communication.
        waited_for: seconds of waiting in collectives, by the rank that called last.
        by_step: seconds of each step by IN_STEP, and HOST: time of forward, backward and optimizer in which a CPU
            rank ran no operator (Python, sleeps).
        notes: metadata that the run wrote into the trace, see training/engine/step_trace.py.
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
        """Mean seconds per step."""
        return sum(self.seconds[name] for name in IN_STEP) / self.steps

    @property
    def cpu_s(self) -> float:
        """Seconds of HOST over all steps."""
        return sum(step[HOST] for step in self.by_step)

    def median_s(self, name: str) -> float:
        """Return the seconds of a part of a step, median over steps."""
        return statistics.median(step[name] for step in self.by_step)

    @property
    def waited_s(self) -> float:
        """Seconds per step of waiting for other ranks."""
        return sum(self.waited_for.values()) / self.steps

    @property
    def own_s(self) -> float:
        """Seconds per step without waiting for other ranks. The straggler is the rank with the most."""
        return self.step_s - self.waited_s

    def per_step(self) -> dict[str, float]:
        """Return the parts of step_s: compute, exposed_communication, data, optimizer and other."""
        step = {name: self.seconds[name] / self.steps for name in IN_STEP}
        return {"compute": step["forward"] + step["backward"],
                "exposed_communication": step["exposed_communication"], "data": step["data"],
                "optimizer": step["optimizer"], "other": step["idle"]}


@dataclass(frozen=True)
class Split:
    """Breakdowns of all ranks, by rank."""

    ranks: tuple[RankSplit, ...]
    device: str

    def crosses_nodes(self, exposed: Exposed) -> bool:
        """Return True if the group has ranks on several nodes, or is unknown."""
        hosts = {rank.rank: rank.host for rank in self.ranks}
        return not exposed.ranks or len({hosts.get(rank) for rank in exposed.ranks}) > 1

    @property
    def by_label(self) -> dict[str, list[tuple[RankSplit, Exposed]]]:
        """Exposed collectives by kind and group, with the ranks that have them."""
        return group_by_key((exposed.label, (rank, exposed)) for rank in self.ranks for exposed in rank.exposed)

    @property
    def straggler(self) -> RankSplit:
        """Rank with the longest step without waiting."""
        return max(self.ranks, key=lambda rank: rank.own_s)

    @property
    def median_own_s(self) -> float:
        """Seconds per step without waiting, median over ranks."""
        return statistics.median(rank.own_s for rank in self.ranks)

    def mean(self, category: str) -> float:
        """Return the seconds of a category in the traced window, averaged over ranks."""
        return statistics.fmean(rank.seconds[category] for rank in self.ranks)

    def per_step(self) -> dict[str, float]:
        """Return `RankSplit.per_step`, averaged over ranks."""
        all_ranks = [rank.per_step() for rank in self.ranks]
        return {name: statistics.fmean(step[name] for step in all_ranks) for name in all_ranks[0]}


def split_run(run_dir: Path) -> Split:
    """Break down the traced steps of a run.

    Raises:
        UserError: the run has no traces, or a trace cannot be read.
    """
    paths = sorted(path for path in RunDir(run_dir).profile.glob("trace-rank*.json.gz")
                   if re.fullmatch(r"trace-rank\d+\.json\.gz", path.name))
    if not paths:
        raise UserError("the run has no traces", where=str(run_dir / "profile"),
                        instead="run it again with --trace-steps 10")
    return split_traces(read_trace(path) for path in paths)


def split_traces(traces: Iterable[RankTrace]) -> Split:
    """Break down traces. They are consumed one at a time, because each needs much memory."""
    parts = sorted(map(_break_down_rank, traces), key=lambda part: part.trace.rank)
    by_rank = find_waits([part.trace for part in parts])
    return Split(tuple(_add_waits(part, by_rank[part.trace.rank]) for part in parts), parts[0].trace.device)


@dataclass(frozen=True)
class _RankParts:
    """Breakdown of a single rank's trace, before its waiting time is known.

    `trace` has no intervals except flights, so that only one rank's millions of intervals are in memory at a time.
    `pieces` is the exposed time of each flight.
    """

    trace: RankTrace
    seconds: dict[str, float]
    pieces: list[list[Interval]]
    by_step: tuple[dict[str, float], ...]


def _break_down_rank(trace: RankTrace) -> _RankParts:
    unassigned = [trace.window]
    assigned: dict[str, list[Interval]] = {}

    def assign(name: str, intervals: Sequence[Interval]) -> None:
        """Assign the time in these intervals that is not assigned yet to a part."""
        nonlocal unassigned
        assigned[name] = intersect(unassigned, intervals)
        unassigned = subtract(unassigned, intervals)

    for name in BETWEEN:
        assign(name, trace.between[name])
    steps = union(trace.steps.values())
    in_flight = union((flight.start, flight.end) for flight in trace.flights)
    exposed = subtract(intersect(in_flight, intersect(unassigned, steps)), trace.computing)
    pieces = assign_exposed_time(exposed, trace.flights)
    assign("exposed_communication", exposed)
    # On a device, count only the part of the data phase that device work does not hide.
    order = ("data", "forward", "backward", "optimizer")
    for name in order if trace.device == "cpu" else (*order[1:], order[0]):
        assign(name, intersect(trace.phases[name], steps))
    assign("idle", steps)
    assign(OTHER, [trace.window])
    busy = [interval for name in ("forward", "backward", "optimizer") for interval in trace.phases[name]]
    host = subtract(subtract(union(busy), trace.operators), in_flight) if trace.device == "cpu" else []
    by_step = tuple({name: total(within(intervals, start, end))
                     for name, intervals in (*((name, assigned[name]) for name in IN_STEP), (HOST, host))}
                    for start, end in trace.steps.values())
    return _RankParts(replace(trace, between={}, phases={}, computing=[], operators=[]),
                      {name: total(assigned[name]) for name in CATEGORIES}, pieces, by_step)


def _add_waits(parts: _RankParts, waits: Sequence[Wait | None]) -> RankSplit:
    trace = parts.trace
    waited_for: dict[int, float] = defaultdict(float)
    waited = []
    for piece, wait in zip(parts.pieces, waits, strict=True):
        seconds = 0.0 if wait is None else total(intersect(piece, wait.spans))
        waited.append(seconds)
        if wait is not None and seconds:
            waited_for[wait.last] += seconds
    return RankSplit(trace.rank, trace.host, len(trace.steps), parts.seconds,
                     _by_label(trace.flights, parts.pieces, waited), dict(waited_for), parts.by_step, trace.notes)


def assign_exposed_time(exposed: Sequence[Interval], flights: Sequence[Flight]) -> list[list[Interval]]:
    """Return the exposed time of each flight. Flights must be sorted by start; earlier ones take precedence."""
    pieces, assigned_until = [], float("-inf")
    for flight in flights:
        start = max(assigned_until, flight.start)
        pieces.append(within(exposed, start, flight.end) if start < flight.end else [])
        assigned_until = max(assigned_until, flight.end)
    return pieces


def _by_label(flights: Sequence[Flight], pieces: Sequence[list[Interval]],
              waited: Sequence[float]) -> tuple[Exposed, ...]:
    collectives = []
    for label, members in group_by_key((flight.label, i) for i, flight in enumerate(flights)).items():
        sizes = [size for i in members if (size := flights[i].size) is not None]
        collectives.append(Exposed(label, len(members), sum(total(pieces[i]) for i in members),
                                   sum(waited[i] for i in members),
                                   total(union((flights[i].start, flights[i].end) for i in members)),
                                   sum(sizes) if len(sizes) == len(members) else None, flights[members[0]].ranks))
    return tuple(sorted(collectives, key=lambda exposed: -exposed.seconds))


PAIRED = ("send", "recv")


@dataclass(frozen=True)
class Wait:
    """Times when a rank waited in a collective for the rank `last`, on the clock of the waiting rank's trace."""

    spans: list[Interval]
    last: int


def find_waits(traces: Sequence[RankTrace]) -> dict[int, list[Wait | None]]:
    """Return the waiting time of each flight, by rank; None if the flights of other ranks are unknown.

    Ranks that have called a collective wait until the last rank calls it; the rest is data transfer. Waiting and
    transfer cannot be told apart by the duration of a flight: a send ends when the kernel has the bytes, and an
    all-gather ends early for the rank that calls it last.

    While the last rank still transfers data of an earlier collective, the others wait for a link, not for that
    rank. If ranks take part in several collectives, one of these must come first. This time is not included.
    """
    called_on = group_by_key((key, (trace.rank, i, trace.flights[i])) for trace in traces
                             for i, key in enumerate(_flight_keys(trace.rank, trace.flights)) if key is not None)
    whole = [collective for key, collective in called_on.items() if len(collective) == len(key[1])]
    clock = _common_clock(traces, [[(rank, flight) for rank, _, flight in collective] for collective in whole])
    # Times below are on the common clock.
    called = [max((clock[rank] + flight.start, rank) for rank, _, flight in collective) for collective in whole]
    transferring = group_by_key((rank, (since, clock[rank] + flight.end))
                                for collective, (since, _) in zip(whole, called, strict=True)
                                for rank, _, flight in collective if flight.kind not in PAIRED)
    transfers = {rank: union(spans) for rank, spans in transferring.items()}
    by_rank: dict[int, list[Wait | None]] = {trace.rank: [None] * len(trace.flights) for trace in traces}
    for collective, (since, last) in zip(whole, called, strict=True):
        for rank, i, flight in collective:
            start, end = (clock[rank] + moment for moment in (flight.start, flight.end))
            waited = [(start, min(since, end))] if start < since else []
            if flight.kind not in PAIRED:
                waited = subtract(waited, within(transfers.get(last, []), start, end))
            by_rank[rank][i] = Wait([(begin - clock[rank], stop - clock[rank]) for begin, stop in waited], last)
    return by_rank


def _flight_keys(rank: int, flights: Sequence[Flight]) -> Iterator[Any]:
    """Yield a key for each flight that identifies its collective on all ranks, or None if the ranks are unknown."""
    counts: Counter[Any] = Counter()
    for flight in flights:
        ranks, place = flight.ranks, "all"
        if flight.kind in PAIRED:
            # Keyed by direction, and separate from collectives of the same two ranks.
            direction = () if flight.peer is None else (rank, flight.peer)
            ranks, place = direction if flight.kind == "send" else direction[::-1], "->"
        key = (flight.step, ranks, place)
        yield (*key, counts[key]) if ranks else None
        counts[key] += 1


_SLOW_SHARE = 0.5
"""A node whose rate is below this share of the other nodes' median is reported as slow."""


@dataclass(frozen=True)
class SlowLink:
    """Node that sends or receives slowly: its rate, and the median rate of the others, in bytes/s."""

    what: str
    host: str
    rate: float
    median_rate: float


def slow_link(links: Sequence[Mapping[str, Any]]) -> SlowLink | None:
    """Return the slowest node that sends or receives at under half the median rate of the others, or None.

    The rate of a node is the maximum over its links, since a neighbor may limit a link. With two nodes, a slow
    sender and a slow receiver cannot be distinguished, only the slow direction.

    Args:
        links: measured links, see training/dist/links.py.
    """
    slow = []
    for direction, verb in (("sender", "sends"), ("receiver", "receives")):
        rates: dict[str, float] = {}
        for link in links:
            rates[link[direction]] = max(rates.get(link[direction], 0.0), link["rate"])
        for hostname, rate in rates.items():
            other_rates = [other_rate for name, other_rate in rates.items() if name != hostname]
            if other_rates and rate < _SLOW_SHARE * statistics.median(other_rates):
                slow.append(SlowLink(f"{hostname} {verb}", hostname, rate, statistics.median(other_rates)))
    return min(slow, key=lambda link: link.rate / link.median_rate, default=None)


Collective = Sequence[tuple[int, "Flight"]]
"""Flights of one collective, with their ranks."""

_ALIGNMENT_PART = 4
"""Clocks are aligned with the shortest 1/_ALIGNMENT_PART of the all-reduces."""


def _common_clock(traces: Sequence[RankTrace], collectives: Collection[Collective]) -> dict[int, float]:
    """Return the seconds to add to the times of each rank's trace to align the clocks of all nodes.

    Clocks of nodes may differ by more than a collective takes. An all-reduce ends at about the same moment on all
    ranks, so its end aligns each node's clock with that of the first rank's node. The clock of a node without a
    common all-reduce is used as is.
    """
    first = traces[0]
    zeros = {trace.rank: trace.began - first.began for trace in traces}
    nodes = {trace.rank: trace.host for trace in traces}
    all_reduces = sorted((collective for collective in collectives if collective[0][1].kind == "all_reduce"),
                         key=lambda collective: min(flight.end - flight.start for _, flight in collective))
    clock_offsets = {first.host: 0.0}
    for hostname in set(nodes.values()) - {first.host}:
        offsets = []
        for collective in all_reduces:
            ends, node_ends = ([zeros[rank] + flight.end for rank, flight in collective if nodes[rank] == node]
                               for node in (first.host, hostname))
            if ends and node_ends:
                offsets.append(max(node_ends) - max(ends))
        trusted = offsets[:max(1, len(offsets) // _ALIGNMENT_PART)]
        clock_offsets[hostname] = statistics.median(trusted) if trusted else 0.0
    return {rank: zero - clock_offsets[nodes[rank]] for rank, zero in zeros.items()}
