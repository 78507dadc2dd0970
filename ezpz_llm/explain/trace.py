"""One rank's trace, read part by part and reduced to what its time is split by.

On a CPU rank the host computes, in operators of the main thread or of autograd's. A collective is in flight from
the call until its work has ended, whichever thread does it, and the host that waited for it is awake again. On a
device both are kernels on its streams, and the phase of a kernel is that in which the host launched it.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from typing import Any, TextIO, TypedDict

from ezpz_llm.base import JsonText, UserError, as_type, open_regular, shown, whole_number
from ezpz_llm.explain.events import (
    DEVICE,
    LAUNCHES,
    LOOKED_AT,
    MARKS,
    Event,
    Flight,
    Interval,
    awaited,
    bridge,
    collective_calls,
    computes,
    device_flights,
    device_work,
    host_flights,
    is_operator,
    named,
    operators,
    phase_of_launches,
    union,
)
from ezpz_llm.observe.history import PHASES
from ezpz_llm.rundir.schemas import TraceNotes

# A trace's file, read part by part: what is not needed of its events is never in memory all at once.
_MOST_US = 1e18
"""Of a time or a duration; NaN is not below it either."""
MOST_EVENTS = 2_700_000
"""Events with a duration that are kept: with what is made of them under 1 GB."""
MOST_CHARACTERS = 4 << 30
"""Of a whole trace, unpacked."""
_MOST_OF_ONE = 16 << 20
"""Characters of one event, or of another member."""
_NUMBER, _ID = (int, float), (int, str)
_ARGUMENTS = {"Collective name": str, "In msg nelems": int, "Out msg nelems": int, "dtype": str,
              "Process Group Ranks": str}
_AGAIN = "trace the run again"
_FEWER = "fewer steps: --trace-steps 5"


def load_trace(path: Path) -> dict[str, Any]:
    """The members of a trace; of its events those with a duration that are looked at. "launches" has the time at
    which the host launched a device's work, by its correlation.

    Raises:
        UserError: it is damaged, holds what no profiler writes, or is beyond the limits.
    """
    try:
        with open_regular(path) as packed, gzip.open(packed, "rt", encoding="utf-8") as file:
            return parse_trace(file, str(path))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"the trace cannot be read: {error}", where=str(path), instead=_AGAIN) from error


def parse_trace(file: TextIO, where: str) -> dict[str, Any]:
    """The same of a trace's text, of `where` it came from.

    Raises:
        ValueError: it is no trace.
        UserError: an event is none that a profiler writes, or there are too many.
    """
    text, events = JsonText(_limited(file, where), _MOST_OF_ONE), []
    found: dict[str, Any] = {}
    threads: dict[int | str, int | str] = {}
    launches: dict[int | str | None, float] = {}
    within: dict[int | str, tuple[float, float]] = {}
    while (key := text.key()) is not None:
        if key != "traceEvents":
            found[key] = text.value()
            continue
        for read in text.items():
            if not isinstance(read, dict) or read.get("ph") != "X" or read.get("cat") not in LOOKED_AT:
                continue
            event = _event(read, threads, where)
            if event.cat in LAUNCHES:
                launches[event.correlation] = event.ts
                continue
            if is_operator(event):
                # Most lie in one that computes, with all that is inside it, and tell nothing more.
                start, end = within.get(event.tid, (0.0, -1.0))
                if start <= event.ts and event.ts + event.dur <= end:
                    continue
                if computes(event):
                    within[event.tid] = (event.ts, event.ts + event.dur)
            events.append(event)
            if len(events) + len(launches) > MOST_EVENTS:
                raise UserError(f"this trace has more than {MOST_EVENTS:,} events, not counting operators within"
                                " others", where=where, instead=_FEWER)
    return {**found, "traceEvents": events, "launches": launches}


def _event(read: dict[str, Any], threads: dict[int | str, int | str], where: str) -> Event:
    kinds_of: dict[str, Any] = {"name": str, "ts": _NUMBER, "dur": _NUMBER, "tid": _ID}
    values: list[Any] = [read.get(key) for key in kinds_of]
    for (key, kinds), value in zip(kinds_of.items(), values, strict=True):
        if not isinstance(value, kinds) or (kinds is _NUMBER and not -_MOST_US < value < _MOST_US):
            raise UserError(f"{key} of an event is {shown(value)}", where=where, instead=_AGAIN)
    name, ts, dur, tid = values
    # Millions of events have a few names and threads: each is kept once.
    event = Event(intern(name), ts, dur, threads.setdefault(tid, tid), intern(read["cat"]))
    arguments = read.get("args")
    if event.cat not in (*DEVICE, *LAUNCHES) or not isinstance(arguments, dict):
        return event
    correlation = arguments.get("correlation")
    known = {key: arguments[key] for key, kind in _ARGUMENTS.items() if isinstance(arguments.get(key), kind)}
    return event._replace(correlation=correlation if isinstance(correlation, _ID) else None,
                          args=known or event.args)


def _limited(file: TextIO, where: str) -> Callable[[int], str]:
    """Return a function that reads the next characters of a trace, up to MOST_CHARACTERS."""
    left = MOST_CHARACTERS

    def read(size: int) -> str:
        """The next `size` characters."""
        nonlocal left
        part = file.read(size)
        left -= len(part)
        if left < 0:
            raise UserError(f"this trace is larger than {MOST_CHARACTERS >> 30} GiB, unpacked", where=where,
                            instead=_FEWER)
        return part

    return read


BETWEEN = ("evaluation", "logging", "sampling", "checkpoints")
"""Marks in traces of work between two steps."""

_DATA, *_COMPUTE = PHASES
_STEP = "step "
_HOST_GAP_S = 50e-6
"""Shorter gaps between operators are Python and the dispatcher at work, unless a collective was called there."""


@dataclass(frozen=True)
class RankTrace:
    """Times in seconds since the beginning of the first traced step, which `began` so long after the epoch.

    `phases` are the host's spans on a CPU rank, and on a device the device's work for each of them. `between` has
    what was marked outside of steps; `flights` the collectives in steps, in order.
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
    """Of the host, without gaps closed."""
    notes: dict[str, Any]
    """Metadata that the run wrote into the trace, without the list of collectives."""


def read_trace(path: Path) -> RankTrace:
    """Read a `trace-rankNNNN.json.gz`.

    Raises:
        UserError: it is damaged, or not written by this trainer.
    """
    return rank_trace(load_trace(path), where=str(path))


class _Head(TypedDict, total=False):
    """What the profiler writes beside the events."""

    host_name: str
    baseTimeNanoseconds: float


def rank_trace(loaded: dict[str, Any], where: str) -> RankTrace:
    """The same for a trace that was read.

    Raises:
        UserError: it has no marked steps, or what it says of its run is not what the trainer writes.
    """
    events: list[Event] = loaded["traceEvents"]
    launches: dict[int | str | None, float] = loaded["launches"]
    marks = [event for event in events if event.cat == MARKS]
    steps = [event for event in marks if _number(event) is not None]
    if not isinstance(loaded.get("ezpz_llm"), dict) or not steps:
        raise UserError("this trace has no marked steps", where=where,
                        instead="one that python3 -m ezpz_llm.train --trace-steps N has written")
    notes = as_type(TraceNotes, loaded["ezpz_llm"], where, "ezpz_llm")
    head = as_type(_Head, loaded, where)
    zero, main = min(event.ts for event in steps), steps[0].tid

    def span(event: Event) -> Interval:
        """An event's time in seconds since the first traced step."""
        start = (event.ts - zero) / 1e6
        return start, start + event.dur / 1e6

    def launched(event: Event) -> float:
        return (launches.get(event.correlation, event.ts) - zero) / 1e6

    def marked(name: str) -> list[Interval]:
        return union(span(event) for event in marks if event.name == name and event.tid == main)

    numbered = {number: span(event) for event in steps if (number := _number(event)) is not None}
    between = {name: [one for one in marked(name) if one[0] >= 0] for name in BETWEEN}
    end = max(last for _, last in (*numbered.values(), *(one for found in between.values() for one in found)))
    phases = {phase: marked(phase) for phase in PHASES}
    calls = collective_calls(events, main, span)
    computed = operators(events, main, span)
    collectives = notes.get("collectives") or []
    if notes["device"] == "cpu":
        flights = awaited(host_flights(calls, marks, span), computed)
        apart = sorted(moment for flight in flights for moment in (flight.start, flight.end))
        computing = union([*bridge(computed, _HOST_GAP_S, apart), *phases[_DATA]])
    else:
        flights = device_flights(events, launched, span)
        # A group of one rank launches none.
        collectives = [call for call in collectives if len(call["ranks"]) > 1]
        work = device_work(events, launched, span)
        computing = union(one for one, _ in work)
        phases.update(phase_of_launches(work, phases, _COMPUTE))
    began = zero / 1e6 + head.get("baseTimeNanoseconds", 0) / 1e9
    return RankTrace(notes["rank"], head.get("host_name", ""), began, notes["device"], numbered, (0.0, end),
                     between, phases, computing, named(flights, numbered, collectives), computed,
                     {name: note for name, note in notes.items() if name != "collectives"})


def _number(event: Event) -> int | None:
    return whole_number(event.name[len(_STEP):]) if event.name.startswith(_STEP) else None
