"""Events of a torch.profiler trace (Chrome trace format): computation, communication, and interval arithmetic."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ezpz_llm.core.base import group_by_key

Interval = tuple[float, float]
"""Half-open interval (start, end). Sets of times are sorted lists of disjoint intervals."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, which may overlap and be unsorted. Empty intervals are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def within(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """Return the part of a set between two times."""
    if end <= start:
        return []
    first = bisect_right(intervals, start, key=lambda interval: interval[1])
    last = bisect_left(intervals, end, key=lambda interval: interval[0])
    return [(max(a, start), min(b, end)) for a, b in intervals[first:last]]


def subtract(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the difference of two sets."""
    difference, j = [], 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if start < second[k][0]:
                difference.append((start, second[k][0]))
            start = max(start, second[k][1])
            k += 1
        if start < end:
            difference.append((start, end))
    return difference


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two sets."""
    return subtract(first, subtract(first, second))


def close_gaps(intervals: Sequence[Interval], gap: float, separators: Sequence[float] = ()) -> list[Interval]:
    """Close gaps shorter than `gap`, except those that contain one of the sorted times in `separators`."""
    closed: list[Interval] = []
    for start, end in intervals:
        if closed and start - closed[-1][1] < gap:
            previous_end = closed[-1][1]
            if bisect_left(separators, previous_end) == bisect_right(separators, start):
                closed[-1] = (closed[-1][0], end)
                continue
        closed.append((start, end))
    return closed


def total(intervals: Iterable[Interval]) -> float:
    """Return the total length of intervals."""
    return sum(end - start for start, end in intervals)


class Event(NamedTuple):
    """Trace event with a duration; times in microseconds.

    A device event and its launch on the CPU have the same `correlation`. `args` are the other arguments that are
    used.
    """

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
_COMMUNICATION_PREFIXES = (_C10D, "record_param_comms")
_AUTOGRAD = "autograd::engine"
_COMPUTATION = re.compile(r"^(?!c10d::|autograd::|torch::)\w+::|^CompiledFunction|^Torch-Compiled")
_CPU_WORK = re.compile(r"^(?:gloo|mpi|ucc|xccl|ccl):(\w+)")
"""Names of process-group work on the CPU. It lasts from the call, or its start in a thread, to its end."""
_COMMUNICATION = re.compile(r"nccl|rccl|oneccl|xccl", re.IGNORECASE)
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver", "xpu_runtime")
MARK_CATEGORY = "user_annotation"
READ_CATEGORIES = (_OPERATORS, MARK_CATEGORY, *DEVICE_CATEGORIES, *LAUNCH_CATEGORIES)
"""Categories of the events that are read."""
_MAX_WAKEUP_S = 1e-3
"""Maximum time until a thread that waited for a collective runs again, in seconds."""
_DTYPE_BYTES = {"Float": 4, "Double": 8, "BFloat16": 2, "Half": 2, "Int": 4, "Long": 8, "Byte": 1, "Char": 1,
                "Bool": 1}
_KINDS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "gather", "scatter", "reduce",
          "sendrecv", "send", "recv", "barrier")
_DISPLAY_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
                  "alltoall": "all_to_all", "sendrecv": "send/recv"}


@dataclass(frozen=True)
class Flight:
    """Execution of a collective on one rank, in flight from its call at `start` until `end`.

    `group` names the mesh axes of its `ranks`; both are empty if unknown. `size` is the size of the full buffer in
    bytes, or None if unknown. `peer` is the other rank of a send or receive. `step` is None outside of steps.
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
        """Kind and group, as shown in tables."""
        return f"{self.kind} ({self.group})" if self.group else self.kind


def kind_of(name: str) -> str:
    """Return the kind of a collective from its name in a library, such as `_allgather_base_`."""
    word = name.lower().replace("_", "")
    kind = next((kind for kind in _KINDS if word.startswith(kind)), None)
    return name if kind is None else _DISPLAY_NAMES.get(kind, kind)


def label_flights(flights: Sequence[Flight], steps: dict[int, Interval],
                  collectives: Sequence[dict[str, Any]]) -> tuple[Flight, ...]:
    """Return the flights that begin in steps, sorted by start, with groups and sizes from the counted step.

    If the collectives of a step differ from those of the counted step, its flights keep only the trace's data.

    Args:
        flights: flights in the order of their calls.
        collectives: collectives of the counted step, in order; see training/engine/step_trace.py.
    """
    labeled: list[Flight] = []
    for number, (start, end) in sorted(steps.items()):
        in_step = [flight for flight in flights if start <= flight.start < end]
        same = len(in_step) == len(collectives) and all(
            _kinds_match(flight.kind, kind_of(call["kind"]))
            for flight, call in zip(in_step, collectives, strict=True))
        for i, flight in enumerate(in_step):
            flight = replace(flight, step=number)
            if same:
                call = collectives[i]
                flight = replace(flight, kind=kind_of(call["kind"]), group=call["axes"], size=call["bytes"],
                                 ranks=tuple(call["ranks"]), peer=call.get("peer"))
            labeled.append(flight)
    return tuple(sorted(labeled, key=lambda flight: flight.start))


def _kinds_match(traced: str, counted: str) -> bool:
    """Return True if the kinds match; a traced send/recv kernel matches both send and recv."""
    return traced == counted or (traced == _DISPLAY_NAMES["sendrecv"] and counted in ("send", "recv"))


def is_computation(event: Event) -> bool:
    """Return True for an operator that computes for its whole duration, including the events nested in it."""
    return event.cat == _OPERATORS and _COMPUTATION.match(event.name) is not None


def is_operator(event: Event) -> bool:
    """Return True for an operator that neither communicates nor marks the autograd thread."""
    return event.cat == _OPERATORS and not event.name.startswith((_AUTOGRAD, *_COMMUNICATION_PREFIXES))


def operators(events: Sequence[Event], main: int | str, span: Span) -> list[Interval]:
    """Return the times when the main thread or the autograd thread was inside an operator that computes.

    C++ operators (`aten::mm`) compute for their whole duration. Autograd nodes and Python functions may also wait
    for a collective, so they only count if no other operator is nested in them.
    """
    threads = group_by_key((event.tid, event) for event in events if event.cat == _OPERATORS)
    computing: list[Interval] = []
    for thread, thread_events in threads.items():
        if thread == main or any(event.name.startswith(_AUTOGRAD) for event in thread_events):
            begins = sorted(event.ts for event in thread_events)
            computing += [span(event) for event in thread_events
                          if is_computation(event) or _is_leaf(event, begins)]
    return union(computing)


def _is_leaf(event: Event, begins: Sequence[float]) -> bool:
    """Return True if no other event begins inside the event, and it does not communicate."""
    inside = bisect_left(begins, event.ts + event.dur) - bisect_left(begins, event.ts)
    return inside == 1 and not event.name.startswith(_COMMUNICATION_PREFIXES)


def collective_calls(events: Sequence[Event], main: int | str, span: Span) -> list[tuple[str, Interval]]:
    """Return kind and time of every call of a collective, in order."""
    return sorted(((kind_of(event.name.removeprefix(_C10D)), span(event)) for event in events
                   if event.cat == _OPERATORS and event.name.startswith(_C10D)), key=lambda call: call[1])


def cpu_flights(calls: Sequence[tuple[str, Interval]], marks: Sequence[Event], span: Span) -> list[Flight]:
    """Match each call with the first suitable work that begins after it, whose end is the end of the flight.

    Some backends implement one collective with another (gloo implements reduce-scatter with all-reduce), so any
    work except a send or receive is suitable. The flight of a call without matching work ends when the call
    returns.
    """
    works = sorted(((kind_of(match[1]), span(mark)) for mark in marks if (match := _CPU_WORK.match(mark.name))),
                   key=lambda work: work[1])
    lists = {True: [work for work in works if work[0] in ("send", "recv")],
             False: [work for work in works if work[0] not in ("send", "recv")]}
    flights = []
    for kind, (start, end) in calls:
        is_paired = kind in ("send", "recv")
        waiting = lists[is_paired]
        chosen = next((i for i, (work_kind, work) in enumerate(waiting)
                       if work[0] >= start and (work_kind == kind or not is_paired)), None)
        if chosen is not None:
            end = max(end, waiting.pop(chosen)[1][1])
            # Earlier works began before this call, so no later call can match them either.
            del waiting[:chosen]
        flights.append(Flight(kind, start, end))
    return flights


def extend_to_wakeup(flights: Sequence[Flight], computed: Sequence[Interval]) -> list[Flight]:
    """Extend flights by the time that the waiting thread takes to wake up.

    A flight that is followed by idle time is extended to the next operator or flight, by at most _MAX_WAKEUP_S. The
    limit avoids counting other work on the CPU as communication.

    Args:
        computed: set of times when operators ran.
    """
    idle = subtract([(end, end + _MAX_WAKEUP_S)
                     for _, end in union((flight.start, flight.end) for flight in flights)],
                    union([*computed, *((flight.start, flight.end) for flight in flights)]))
    awake = dict(idle)
    return [replace(flight, end=awake.get(flight.end, flight.end)) for flight in flights]


def device_flights(events: Sequence[Event], launched: Callable[[Event], float], span: Span) -> list[Flight]:
    """Return communication kernels as flights, in the order of their launches.

    Each process group has a separate stream, so kernels may begin in a different order.
    """
    kernels = []
    for event in events:
        if event.cat == "kernel" and _COMMUNICATION.search(event.name):
            args = event.args
            # For example, ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>).
            name = args.get("Collective name") or re.sub(r"^.*?Kernel_?", "", event.name)
            elements = max(args.get("In msg nelems") or 0, args.get("Out msg nelems") or 0)
            width = _DTYPE_BYTES.get(args.get("dtype", ""))
            flight = Flight(kind_of(name.lstrip("_")), *span(event),
                            ranks=_ranks(args.get("Process Group Ranks", "")),
                            size=elements * width if elements and width else None)
            kernels.append((launched(event), flight))
    return [flight for _, flight in sorted(kernels, key=lambda kernel: kernel[0])]


def _ranks(text: str) -> tuple[int, ...]:
    """Parse a list of ranks such as "[0, 1]"; empty if the profiler has truncated the list."""
    return () if "..." in text else tuple(map(int, re.findall(r"\d{1,9}", text)))


def device_work(events: Sequence[Event], launched: Callable[[Event], float],
                span: Span) -> list[tuple[Interval, float]]:
    """Return device events other than communication, each with the time of its launch on the CPU."""
    return [(span(event), launched(event)) for event in events
            if event.cat in DEVICE_CATEGORIES and not _COMMUNICATION.search(event.name)]


def phase_of_launches(work: Sequence[tuple[Interval, float]], phases: dict[str, list[Interval]],
                      names: Sequence[str]) -> dict[str, list[Interval]]:
    """Return the device's work by the phase in which the CPU launched it."""
    spans = sorted((start, end, name) for name in names for start, end in phases[name])
    starts = [start for start, _, _ in spans]
    by_phase: dict[str, list[Interval]] = {name: [] for name in names}
    for lasted, launched in work:
        i = bisect_right(starts, launched) - 1
        if i >= 0 and launched < spans[i][1]:
            by_phase[spans[i][2]].append(lasted)
    return {name: union(intervals) for name, intervals in by_phase.items()}
