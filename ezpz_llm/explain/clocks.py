"""One clock for traces of several hosts, whose own clocks may differ by more than a collective takes."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ezpz_llm.explain.flight import Flight
    from ezpz_llm.explain.trace import RankTrace

Meeting = Sequence[tuple[int, "Flight"]]
"""The flights of one collective, with their ranks."""

_TRUSTED = 4
"""One all-reduce in so many sets the clocks, the shortest ones."""


def common_clock(traces: Sequence[RankTrace], meetings: Collection[Meeting]) -> dict[int, float]:
    """By rank, the seconds to add to times of its trace, so that those of all ranks can be compared.

    Ranks of one host share its clock. No rank's all-reduce ends before all have given their share, and then it
    ends on all at about the same moment: this sets every host's clock by that of the first rank's host. A host
    that had none together with it is believed.
    """
    first = traces[0]
    zeros = {trace.rank: trace.began - first.began for trace in traces}
    hosts = {trace.rank: trace.host for trace in traces}
    together = sorted((meeting for meeting in meetings if meeting[0][1].kind == "all_reduce"),
                      key=lambda meeting: min(flight.end - flight.start for _, flight in meeting))
    ahead = {first.host: 0.0}
    for host in set(hosts.values()) - {first.host}:
        found = []
        for meeting in together:
            here, there = ([zeros[rank] + flight.end for rank, flight in meeting if hosts[rank] == one]
                           for one in (first.host, host))
            if here and there:
                found.append(max(there) - max(here))
        trusted = found[:max(1, len(found) // _TRUSTED)]
        ahead[host] = statistics.median(trusted) if trusted else 0.0
    return {rank: zero - ahead[hosts[rank]] for rank, zero in zeros.items()}
