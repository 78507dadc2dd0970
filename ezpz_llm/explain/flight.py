"""A collective in flight, and which one it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ezpz_llm.explain.intervals import Interval

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
    """The flights that begin in steps, by their beginnings, with what the census of one step says of them.

    A step that issues other collectives than the one that was counted keeps what its trace says.

    Args:
        flights: in the order of their calls.
        collectives: those of the census, in that order.
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
