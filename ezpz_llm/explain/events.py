"""Events of a torch.profiler trace: which compute, which communicate, and when (the Chrome trace format); and
arithmetic on sets of times."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ezpz_llm.base import grouped

# Sets of times: sorted lists of disjoint half-open intervals (start, end).
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Any intervals, overlapping and in any order, as a set. Empty ones are dropped."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def within(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """The part of a set that lies between two times."""
    if end <= start:
        return []
    first = bisect_right(intervals, start, key=lambda one: one[1])
    last = bisect_left(intervals, end, key=lambda one: one[0])
    return [(max(a, start), min(b, end)) for a, b in intervals[first:last]]


def subtract(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Difference of two sets."""
    found, j = [], 0
    for start, end in one:
        while j < len(other) and other[j][1] <= start:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if start < other[k][0]:
                found.append((start, other[k][0]))
            start = max(start, other[k][1])
            k += 1
        if start < end:
            found.append((start, end))
    return found


def intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Intersection of two sets."""
    return subtract(one, subtract(one, other))


def bridge(intervals: Sequence[Interval], gap: float, apart: Sequence[float] = ()) -> list[Interval]:
    """A set without its gaps shorter than `gap`, but for those in which one of the times `apart` (sorted) lies."""
    found: list[Interval] = []
    for start, end in intervals:
        if found and start - found[-1][1] < gap:
            before = found[-1][1]
            if bisect_left(apart, before) == bisect_right(apart, start):
                found[-1] = (found[-1][0], end)
                continue
        found.append((start, end))
    return found


def total(intervals: Iterable[Interval]) -> float:
    """The length of a set."""
    return sum(end - start for start, end in intervals)


# Events of a trace, in such times.
class Event(NamedTuple):
    """One event with a duration: times in microseconds. A device's work has the `correlation` of its launch on the
    host; `args` are those of its other arguments that are looked at."""

    name: str
    ts: float
    dur: float
    tid: int | str
    cat: str
    correlation: int | str | None = None
    args: Mapping[str, Any] = MappingProxyType({})


Span = Callable[[Event], Interval]

_OPERATORS = "cpu_op"
_C10D = "c10d::"
_COMMUNICATES = (_C10D, "record_param_comms")
_AUTOGRAD = "autograd::engine"
_COMPUTES = re.compile(r"^(?!c10d::|autograd::|torch::)\w+::|^CompiledFunction|^Torch-Compiled")
_WORK = re.compile(r"^(?:gloo|mpi|ucc|xccl|ccl):(\w+)")
"""Names of process-group work on the CPU, from the call (or the start in a thread) to the end."""
_COMMUNICATION = re.compile(r"nccl|rccl|oneccl|xccl", re.IGNORECASE)
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime")
MARKS = "user_annotation"
LOOKED_AT = (_OPERATORS, MARKS, *DEVICE, *LAUNCHES)
"""Categories of events that are looked at."""
_WAKING_S = 1e-3
"""Until a thread that waited for a collective runs again, at most."""
_BYTES = {"Float": 4, "Double": 8, "BFloat16": 2, "Half": 2, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}
_KINDS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "gather", "scatter", "reduce",
          "sendrecv", "send", "recv", "barrier")
_SHOWN = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
          "alltoall": "all_to_all", "sendrecv": "send/recv"}


@dataclass(frozen=True)
class Flight:
    """From `start`, when it was called, to `end`, when it was over, on one rank.

    `group` names the axes of the mesh along which its `ranks` lie; both are empty where they are not known, as is
    `size`, the bytes of the whole buffer. `peer` is the other rank of a send or receive. `step` is None outside of
    steps.
    """

    kind: str
    start: float
    end: float
    group: str = ""
    ranks: tuple[int, ...] = ()
    size: int | None = None
    peer: int | None = None
    step: int | None = None

    @property
    def label(self) -> str:
        """Its kind and group, as tables have them."""
        return f"{self.kind} ({self.group})" if self.group else self.kind


def kind_of(name: str) -> str:
    """The kind of a collective by the name that a library has for it, such as `_allgather_base_`."""
    word = name.lower().replace("_", "")
    found = next((kind for kind in _KINDS if word.startswith(kind)), None)
    return name if found is None else _SHOWN.get(found, found)


def named(flights: Sequence[Flight], steps: dict[int, Interval],
          collectives: Sequence[dict[str, Any]]) -> tuple[Flight, ...]:
    """The flights that begin in steps, by their beginnings, with what `StepTrace` says of them.

    A step that issues other collectives than the one that was counted keeps what its trace says.

    Args:
        flights: in the order of their calls.
        collectives: those of that step, in order.
    """
    found: list[Flight] = []
    for number, (start, end) in sorted(steps.items()):
        own = [flight for flight in flights if start <= flight.start < end]
        same = len(own) == len(collectives) and all(
            _may_be(flight.kind, kind_of(call["kind"])) for flight, call in zip(own, collectives, strict=True))
        for i, flight in enumerate(own):
            flight = replace(flight, step=number)
            if same:
                call = collectives[i]
                flight = replace(flight, kind=kind_of(call["kind"]), group=call["axes"], size=call["bytes"],
                                 ranks=tuple(call["ranks"]), peer=call.get("peer"))
            found.append(flight)
    return tuple(sorted(found, key=lambda flight: flight.start))


def _may_be(traced: str, counted: str) -> bool:
    """A kernel for sending may be one for receiving as well."""
    return traced == counted or (traced == _SHOWN["sendrecv"] and counted in ("send", "recv"))


def computes(event: Event) -> bool:
    """True of an operator that computes, with all that is inside it."""
    return event.cat == _OPERATORS and _COMPUTES.match(event.name) is not None


def is_operator(event: Event) -> bool:
    """True of an operator that is looked at for the time it takes alone: none that communicates or tells autograd's
    thread."""
    return event.cat == _OPERATORS and not event.name.startswith((_AUTOGRAD, *_COMMUNICATES))


def operators(events: Sequence[Event], main: int | str, span: Span) -> list[Interval]:
    """When the main thread or autograd's were inside an operator that computes.

    Those of C++ do (`aten::mm`), with all that is inside them. Others are looked into: nodes of autograd and
    functions in Python may as well be waiting for a collective.
    """
    threads = grouped((event.tid, event) for event in events if event.cat == _OPERATORS)
    found: list[Interval] = []
    for thread, own in threads.items():
        if thread == main or any(event.name.startswith(_AUTOGRAD) for event in own):
            begins = sorted(event.ts for event in own)
            found += [span(event) for event in own if computes(event) or _is_leaf(event, begins)]
    return union(found)


def _is_leaf(event: Event, begins: Sequence[float]) -> bool:
    """True if the event communicates not, and none of those that begin then is inside it."""
    inside = bisect_left(begins, event.ts + event.dur) - bisect_left(begins, event.ts)
    return inside == 1 and not event.name.startswith(_COMMUNICATES)


def collective_calls(events: Sequence[Event], main: int | str, span: Span) -> list[tuple[str, Interval]]:
    """Kind and time of every call of a collective, in order."""
    return sorted(((kind_of(event.name.removeprefix(_C10D)), span(event)) for event in events
                   if event.cat == _OPERATORS and event.name.startswith(_C10D)), key=lambda one: one[1])


def host_flights(calls: Sequence[tuple[str, Interval]], marks: Sequence[Event], span: Span) -> list[Flight]:
    """Each call with the end of its work: of works that begin after the call, and are such work, the first.

    Some backends do a collective by another one (gloo scatters what it has all-reduced), so that a call is content
    with any work but a send or receive. One without work that can be found lasts as long as its call.
    """
    works = sorted(((kind_of(match[1]), span(mark)) for mark in marks if (match := _WORK.match(mark.name))),
                   key=lambda one: one[1])
    lists = {True: [one for one in works if one[0] in ("send", "recv")],
             False: [one for one in works if one[0] not in ("send", "recv")]}
    found = []
    for kind, (start, end) in calls:
        is_paired = kind in ("send", "recv")
        waiting = lists[is_paired]
        chosen = next((i for i, (other, work) in enumerate(waiting)
                       if work[0] >= start and (other == kind or not is_paired)), None)
        if chosen is not None:
            end = max(end, waiting.pop(chosen)[1][1])
            # What began before this call belongs to none that follows.
            del waiting[:chosen]
        found.append(Flight(kind, start, end))
    return found


def awaited(flights: Sequence[Flight], computed: Sequence[Interval]) -> list[Flight]:
    """Flights after which nothing is in flight, nor computes, last until something does: a thread that waits is not
    awake at once. No longer than that takes, so that what a host does by itself then is not theirs.

    Args:
        computed: when operators ran, as a set.
    """
    idle = subtract([(end, end + _WAKING_S) for _, end in union((one.start, one.end) for one in flights)],
                    union([*computed, *((one.start, one.end) for one in flights)]))
    awake = dict(idle)
    return [replace(flight, end=awake.get(flight.end, flight.end)) for flight in flights]


def device_flights(events: Sequence[Event], launched: Callable[[Event], float], span: Span) -> list[Flight]:
    """Kernels that communicate, with what the profiler knows of them, in the order in which they were launched.

    Each group has a stream of its own, so that they need not begin in that order.
    """
    found = []
    for event in events:
        if event.cat == "kernel" and _COMMUNICATION.search(event.name):
            args = event.args
            # Such as ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>).
            name = args.get("Collective name") or re.sub(r"^.*?Kernel_?", "", event.name)
            elements = max(args.get("In msg nelems") or 0, args.get("Out msg nelems") or 0)
            width = _BYTES.get(args.get("dtype", ""))
            flight = Flight(kind_of(name.lstrip("_")), *span(event),
                            ranks=_ranks(args.get("Process Group Ranks", "")),
                            size=elements * width if elements and width else None)
            found.append((launched(event), flight))
    return [flight for _, flight in sorted(found, key=lambda one: one[0])]


def _ranks(written: str) -> tuple[int, ...]:
    """Those of a list such as "[0, 1]"; none of one that the profiler has shortened."""
    return () if "..." in written else tuple(map(int, re.findall(r"\d{1,9}", written)))


def device_work(events: Sequence[Event], launched: Callable[[Event], float],
                span: Span) -> list[tuple[Interval, float]]:
    """Device kernels other than communication, each with the time of its launch on the CPU."""
    return [(span(event), launched(event)) for event in events
            if event.cat in DEVICE and not _COMMUNICATION.search(event.name)]


def phase_of_launches(work: Sequence[tuple[Interval, float]], phases: dict[str, list[Interval]],
                      names: Sequence[str]) -> dict[str, list[Interval]]:
    """The device's work by the phase in which it was launched."""
    spans = sorted((start, end, name) for name in names for start, end in phases[name])
    starts = [start for start, _, _ in spans]
    found: dict[str, list[Interval]] = {name: [] for name in names}
    for lasted, launched in work:
        i = bisect_right(starts, launched) - 1
        if i >= 0 and launched < spans[i][1]:
            found[spans[i][2]].append(lasted)
    return {name: union(intervals) for name, intervals in found.items()}
