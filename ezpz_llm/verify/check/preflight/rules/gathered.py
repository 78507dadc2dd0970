"""Input and output of the rules, and compact texts for many ranks or nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from ezpz_llm.core.base import group_by_key
from ezpz_llm.core.base.records import Rank, Whole
from ezpz_llm.launcher.basics.hostlist import fold_numbers
from ezpz_llm.verify.check.facts import A, ConnectedRank, Facts

READY, COMPUTE, NODE, LINK, NETWORK, MPI = "ready", "compute", "reduce node", "reduce link", "network", "mpi"
"""Stages of measurement. The round number follows in the name of a link stage."""

_STAGE_NAMES = {READY: "importing torch and selecting its device", COMPUTE: "a matmul",
                NODE: "an all-reduce with the ranks of its node", LINK: "an all-reduce with a rank of another node",
                NETWORK: "reporting its network", MPI: "starting MPI"}


def stage_name(stage: str) -> str:
    """Return a description of a stage."""
    return _STAGE_NAMES.get(stage.rstrip("0123456789").strip(), stage)


class Unreached(Struct, frozen=True):
    """Report of a node that cannot reach rank 0; the file of the same name contains it."""

    rank: Rank
    host: str
    reason: str
    address: str
    port: Whole
    ranks_there: Rank
    resolves_to: str | None
    interface: str | None


@dataclass(frozen=True)
class Gathered:
    """Facts and measurements that rank 0 gathered.

    Args:
        world_size: number of ranks according to rank 0.
        facts: facts of the ranks that connected, in rank order.
        hosts: planned hostname of each rank; empty if unknown.
        unreached: reports of nodes that could not reach rank 0.
        port_error: reason why MASTER_PORT could not be bound; None if it was bound or not needed.
        network: network that the communication library should choose, from the site file.
        waited_s: seconds that rank 0 waited for facts.
    """

    world_size: int
    facts: Sequence[ConnectedRank]
    hosts: Sequence[str] = ()
    unreached: Sequence[Unreached] = ()
    port_error: str | None = None
    network: str | None = None
    waited_s: float = 0.0

    @property
    def reporting(self) -> list[Facts]:
        """Facts of the ranks that sent their facts. Other ranks may have only connected."""
        return [facts for facts in self.facts if isinstance(facts, Facts)]

    def by_node(self) -> dict[str, list[Facts]]:
        """Return the facts of ranks by hostname, in order of each node's first rank."""
        return group_by_key((facts.host, facts) for facts in self.reporting)

    def measured(self, kind: type[A], stage: str = "") -> Iterator[tuple[Facts, A]]:
        """Yield (facts, answer) for answers of a kind in stages that begin with `stage`."""
        for facts in self.reporting:
            for name, answer in facts.stages.items():
                if isinstance(answer, kind) and name.startswith(stage):
                    yield facts, answer


_MAX_NAMES = 6


def node_ranges(names: Iterable[str]) -> str:
    """Return `n[1-3],login` for n1, n2, n3, login: Slurm's format, in order of first appearance."""
    # Names without a number are kept unchanged.
    parts = [match.groups() if (match := re.fullmatch(r"(.*?)(\d+)(\D*)", name)) else (name, "", "")
             for name in dict.fromkeys(names)]
    ranges = []
    for (prefix, width, suffix), numbers in group_by_key(
            ((prefix, len(digits), suffix), int(digits or 0)) for prefix, digits, suffix in parts).items():
        if not width or len(numbers) == 1:
            ranges.append(f"{prefix}{numbers[0]:0{width}d}{suffix}" if width else prefix)
            continue
        ranges.append(f"{prefix}[{_ranges(sorted(numbers), width)}]{suffix}")
    first_ranges = ranges[:_MAX_NAMES]
    return ",".join(first_ranges) + (f" and {len(ranges) - _MAX_NAMES} more" if len(ranges) > _MAX_NAMES else "")


def _ranges(numbers: Sequence[int], width: int) -> str:
    padded = (part.split("-") for part in fold_numbers(numbers).split(","))
    return ",".join("-".join(end.zfill(width) for end in part) for part in padded)


def describe_differences(values: Mapping[str, str]) -> str | None:
    """Return text such as `n3: 2.11, all others 2.13` for values by hostname; None if all are equal.

    If no value has a majority, the text lists every value with its hostnames.
    """
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return None
    usual, usual_count = counts[0]
    if usual_count <= len(values) / 2:
        return "; ".join(f"{node_ranges(_with(values, value))}: {value}" for value, _ in counts)
    odd = [f"{node_ranges(_with(values, value))}: {value}" for value, _ in counts[1:]]
    return f"{'; '.join(odd)}, {'all others' if usual_count > 1 else 'the other'} {usual}"


def _with(values: Mapping[str, str], expected: str) -> list[str]:
    return [name for name, value in values.items() if value == expected]


def format_bytes(count: float | None) -> str:
    """Format bytes, such as `3.2 GiB`."""
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_rate(value: float, unit: str) -> str:
    """Format a rate with a prefix, such as `3.1 GB/s` or `250 MFLOP/s`."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"
