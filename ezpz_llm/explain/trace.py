"""One rank's trace, reduced to what its time is split by.

On a CPU rank the host computes, in operators of the main thread or of autograd's. A collective is in flight from
the call until its work has ended, whichever thread does it, and the host that waited for it is awake again. On a
device both are kernels on its streams, and the phase of a kernel is that in which the host launched it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.errors import UserError
from ezpz_llm.explain.events import (
    awaited,
    collective_calls,
    device_flights,
    device_work,
    host_flights,
    operators,
    phase_of_launches,
)
from ezpz_llm.explain.flight import Flight, named
from ezpz_llm.explain.intervals import Interval, bridge, union
from ezpz_llm.explain.trace_file import load_trace
from ezpz_llm.observe.history import PHASES

BETWEEN = ("evaluation", "logging", "sampling", "checkpoints")
"""What can come after a step, before the next, as it is marked in traces."""

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
    """What the run wrote into the trace, without the list of collectives."""


def read_trace(path: Path) -> RankTrace:
    """Read a `trace-rankNNNN.json.gz`.

    Raises:
        UserError: it is damaged, or not written by this trainer.
    """
    loaded = load_trace(path)
    try:
        return rank_trace(loaded, where=str(path))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise UserError(f"what the trace says of its run is not what the trainer writes ({error!r})",
                        where=str(path), instead="trace the run again") from error


def rank_trace(loaded: dict[str, Any], where: str) -> RankTrace:
    """The same for a trace that was read.

    Raises:
        UserError: it has no marked steps.
    """
    notes = loaded.get("ezpz_llm")
    events = [event for event in loaded.get("traceEvents", ()) if event.get("ph") == "X"]
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [event for event in marks if event["name"].startswith(_STEP) and event["name"][len(_STEP):].isdigit()]
    if not isinstance(notes, dict) or not steps:
        raise UserError("this trace has no marked steps", where=where,
                        instead="one that python3 -m ezpz_llm.train --trace-steps N has written")
    zero, main = min(event["ts"] for event in steps), steps[0]["tid"]

    def span(event: dict[str, Any]) -> Interval:
        start = (event["ts"] - zero) / 1e6
        return start, start + event["dur"] / 1e6

    def marked(name: str) -> list[Interval]:
        return union(span(event) for event in marks if event["name"] == name and event["tid"] == main)

    numbered = {int(event["name"][len(_STEP):]): span(event) for event in steps}
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
        flights = device_flights(events, span)
        # A group of one rank launches none.
        collectives = [call for call in collectives if len(call["ranks"]) > 1]
        work = device_work(events, span)
        computing = union(one for one, _ in work)
        phases.update(phase_of_launches(work, phases, _COMPUTE))
    began = zero / 1e6 + loaded.get("baseTimeNanoseconds", 0) / 1e9
    return RankTrace(notes["rank"], loaded.get("host_name", ""), began, notes["device"], numbered, (0.0, end),
                     between, phases, computing, named(flights, numbered, collectives), computed,
                     {name: note for name, note in notes.items() if name != "collectives"})
