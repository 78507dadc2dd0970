"""Trace of one rank, read incrementally and reduced to the intervals that the breakdown needs.

On a CPU rank, operators of the main thread and the autograd thread count as computation. A collective is in flight
from its call until its work (on any thread) has ended and the waiting thread has woken up. On a device, computation
and collectives are kernels, and a kernel belongs to the phase in which the CPU launched it.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from typing import Any, TextIO, TypedDict

from ezpz_llm.core.base import JsonText, UserError, as_type, open_regular, shorten_value, whole_number
from ezpz_llm.core.rundir.schemas import TraceNotes
from ezpz_llm.training.observe.history import PHASES
from ezpz_llm.verify.explain.events import (
    DEVICE_CATEGORIES,
    LAUNCH_CATEGORIES,
    MARK_CATEGORY,
    READ_CATEGORIES,
    Event,
    Flight,
    Interval,
    close_gaps,
    collective_calls,
    cpu_flights,
    device_flights,
    device_work,
    extend_to_wakeup,
    is_computation,
    is_operator,
    label_flights,
    operators,
    phase_of_launches,
    union,
)

_MAX_US = 1e18
"""Limit of times and durations in microseconds. The comparison with it also excludes NaN."""
MAX_EVENTS = 2_700_000
"""Maximum number of kept events. They and the data derived from them need less than 1 GB."""
MAX_CHARACTERS = 4 << 30
"""Maximum size of an unpacked trace."""
_MAX_FIELD_LENGTH = 16 << 20
"""Maximum number of characters of an event, or of a member other than "traceEvents"."""
_NUMBER, _ID = (int, float), (int, str)
_ARGUMENTS = {"Collective name": str, "In msg nelems": int, "Out msg nelems": int, "dtype": str,
              "Process Group Ranks": str}
_TRACE_AGAIN = "trace the run again"
_TRACE_FEWER_STEPS = "fewer steps: --trace-steps 5"


def load_trace(path: Path) -> dict[str, Any]:
    """Read the members of a trace, with only the events that the breakdown needs.

    The added member "launches" maps each correlation id to the time at which the CPU launched the device work.

    Raises:
        UserError: the trace is damaged, has invalid events, or exceeds the limits.
    """
    try:
        with open_regular(path) as packed, gzip.open(packed, "rt", encoding="utf-8") as file:
            return parse_trace(file, str(path))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"cannot read the trace: {error}", where=str(path), instead=_TRACE_AGAIN) from error


def parse_trace(file: TextIO, where: str) -> dict[str, Any]:
    """Parse the text of a trace; see `load_trace`.

    Args:
        where: name of the file, for errors.

    Raises:
        ValueError: the text is not a trace.
        UserError: an event is invalid, or the trace exceeds the limits.
    """
    text, events = JsonText(_limit_size(file, where), _MAX_FIELD_LENGTH), []
    members: dict[str, Any] = {}
    threads: dict[int | str, int | str] = {}
    launches: dict[int | str | None, float] = {}
    within: dict[int | str, tuple[float, float]] = {}
    while (key := text.key()) is not None:
        if key != "traceEvents":
            members[key] = text.value()
            continue
        for entry in text.items():
            if not isinstance(entry, dict) or entry.get("ph") != "X" or entry.get("cat") not in READ_CATEGORIES:
                continue
            event = _event(entry, threads, where)
            if event.cat in LAUNCH_CATEGORIES:
                launches[event.correlation] = event.ts
                continue
            if is_operator(event):
                # Most operators are nested in one that computes, and can be dropped to save memory.
                start, end = within.get(event.tid, (0.0, -1.0))
                if start <= event.ts and event.ts + event.dur <= end:
                    continue
                if is_computation(event):
                    within[event.tid] = (event.ts, event.ts + event.dur)
            events.append(event)
            if len(events) + len(launches) > MAX_EVENTS:
                raise UserError(f"this trace has more than {MAX_EVENTS:,} events, not counting operators within"
                                " others", where=where, instead=_TRACE_FEWER_STEPS)
    return {**members, "traceEvents": events, "launches": launches}


def _event(entry: dict[str, Any], threads: dict[int | str, int | str], where: str) -> Event:
    kinds_of: dict[str, Any] = {"name": str, "ts": _NUMBER, "dur": _NUMBER, "tid": _ID}
    values: list[Any] = [entry.get(key) for key in kinds_of]
    for (key, kinds), value in zip(kinds_of.items(), values, strict=True):
        if not isinstance(value, kinds) or (kinds is _NUMBER and not -_MAX_US < value < _MAX_US):
            raise UserError(f"an event has an invalid {key}: {shorten_value(value)}", where=where,
                            instead=_TRACE_AGAIN)
    name, ts, dur, tid = values
    # Millions of events share a few names and threads: keep each string once.
    event = Event(intern(name), ts, dur, threads.setdefault(tid, tid), intern(entry["cat"]))
    arguments = entry.get("args")
    if event.cat not in (*DEVICE_CATEGORIES, *LAUNCH_CATEGORIES) or not isinstance(arguments, dict):
        return event
    correlation = arguments.get("correlation")
    valid = {key: arguments[key] for key, kind in _ARGUMENTS.items() if isinstance(arguments.get(key), kind)}
    return event._replace(correlation=correlation if isinstance(correlation, _ID) else None,
                          args=valid or event.args)


def _limit_size(file: TextIO, where: str) -> Callable[[int], str]:
    """Return a function that reads the next characters of a trace, and raises UserError after MAX_CHARACTERS."""
    remaining = MAX_CHARACTERS

    def read(size: int) -> str:
        """Read the next `size` characters."""
        nonlocal remaining
        part = file.read(size)
        remaining -= len(part)
        if remaining < 0:
            raise UserError(f"this trace is larger than {MAX_CHARACTERS >> 30} GiB (unpacked)", where=where,
                            instead=_TRACE_FEWER_STEPS)
        return part

    return read


BETWEEN = ("evaluation", "logging", "sampling", "checkpoints")
"""Names of marks for work between steps."""

_DATA, *_COMPUTE = PHASES
_STEP = "step "
_MAX_GAP_S = 50e-6
"""Shorter gaps between operators count as computation (Python, dispatcher), unless a collective starts or ends in
them."""


@dataclass(frozen=True)
class RankTrace:
    """Intervals of one rank's trace, in seconds since the start of the first traced step.

    `began` is the start of the first traced step in seconds since the epoch. On a CPU rank,
    `phases` are the phases themselves; on a device, forward, backward and optimizer are the device work launched in
    the phase. `between` are marks outside of steps. `flights` are the collectives in steps, sorted by start.
    """

    rank: int
    host: str
    began: float
    device: str
    steps: dict[int, Interval]
    window: Interval
    between: dict[str, list[Interval]]
    phases: dict[str, list[Interval]]
    computing: list[Interval]
    flights: tuple[Flight, ...]
    operators: list[Interval]
    """Times of computing operators on the CPU, in which short gaps are not closed."""
    notes: dict[str, Any]
    """Metadata that the run wrote into the trace, except the list of collectives."""


def read_trace(path: Path) -> RankTrace:
    """Read a `trace-rankNNNN.json.gz`.

    Raises:
        UserError: the file is damaged, or was not written by ezpz_llm's trainer.
    """
    return rank_trace(load_trace(path), where=str(path))


class _Head(TypedDict, total=False):
    """Members of a trace besides the events, as written by the profiler."""

    host_name: str
    baseTimeNanoseconds: float


def rank_trace(loaded: dict[str, Any], where: str) -> RankTrace:
    """Reduce a loaded trace to its intervals.

    Raises:
        UserError: the trace has no marked steps, or its metadata is invalid.
    """
    events: list[Event] = loaded["traceEvents"]
    launches: dict[int | str | None, float] = loaded["launches"]
    marks = [event for event in events if event.cat == MARK_CATEGORY]
    steps = [event for event in marks if _number(event) is not None]
    if not isinstance(loaded.get("ezpz_llm"), dict) or not steps:
        raise UserError("this trace has no marked steps", where=where,
                        instead="a trace written by python3 -m ezpz_llm.train --trace-steps N")
    notes = as_type(TraceNotes, loaded["ezpz_llm"], where, "ezpz_llm")
    head = as_type(_Head, loaded, where)
    zero, main = min(event.ts for event in steps), steps[0].tid

    def span(event: Event) -> Interval:
        """Return the interval of an event in seconds since the first traced step."""
        start = (event.ts - zero) / 1e6
        return start, start + event.dur / 1e6

    def launched(event: Event) -> float:
        return (launches.get(event.correlation, event.ts) - zero) / 1e6

    def marked(name: str) -> list[Interval]:
        return union(span(event) for event in marks if event.name == name and event.tid == main)

    numbered = {number: span(event) for event in steps if (number := _number(event)) is not None}
    between = {name: [interval for interval in marked(name) if interval[0] >= 0] for name in BETWEEN}
    end = max(last for _, last in (*numbered.values(), *(interval for intervals in between.values()
                                                         for interval in intervals)))
    phases = {phase: marked(phase) for phase in PHASES}
    calls = collective_calls(events, main, span)
    computed = operators(events, main, span)
    collectives = notes.get("collectives") or []
    if notes["device"] == "cpu":
        flights = extend_to_wakeup(cpu_flights(calls, marks, span), computed)
        apart = sorted(moment for flight in flights for moment in (flight.start, flight.end))
        computing = union([*close_gaps(computed, _MAX_GAP_S, apart), *phases[_DATA]])
    else:
        flights = device_flights(events, launched, span)
        # Collectives of a single rank launch no communication kernel.
        collectives = [call for call in collectives if len(call["ranks"]) > 1]
        work = device_work(events, launched, span)
        computing = union(interval for interval, _ in work)
        phases.update(phase_of_launches(work, phases, _COMPUTE))
    # A group of one rank communicates with no other: its collectives are copies.
    labeled = tuple(flight for flight in label_flights(flights, numbered, collectives) if len(flight.ranks) != 1)
    began = zero / 1e6 + head.get("baseTimeNanoseconds", 0) / 1e9
    return RankTrace(notes["rank"], head.get("host_name", ""), began, notes["device"], numbered, (0.0, end),
                     between, phases, computing, labeled, computed,
                     {name: note for name, note in notes.items() if name != "collectives"})


def _number(event: Event) -> int | None:
    return whole_number(event.name[len(_STEP):]) if event.name.startswith(_STEP) else None
