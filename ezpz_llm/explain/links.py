"""A host that sends or receives much slower than the others (imports no torch)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SLOW = 0.5
"""The share of the usual rate below which a host, or a link, is named."""


@dataclass(frozen=True)
class SlowLink:
    """What is slow, its rate and the usual one in bytes a second."""

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
