"""Input and output of the judges as plain values, and many ranks or nodes in few words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ezpz_llm.launch.devices import core_ranges

Facts = Mapping[str, Any]
"""What one rank told (`client.gather_facts`), with what was measured with it (`stages`)."""

Level = Literal["bad", "warn"]
Key = TypeVar("Key", bound=Hashable)


READY, COMPUTE, NODE, LINK, NETWORK, MPI = "ready", "compute", "reduce node", "reduce link", "network", "mpi"
"""Stages of measuring; a link stage's name ends in the number of its round."""

_STAGE_NAMES = {READY: "importing torch and taking its device", COMPUTE: "a matrix product",
                NODE: "an all-reduce with the ranks of its host", LINK: "an all-reduce with a rank of another host",
                NETWORK: "telling its network", MPI: "starting MPI"}


def stage_name(stage: str) -> str:
    """What a stage does, in words."""
    return _STAGE_NAMES.get(stage.rstrip("0123456789").strip(), stage)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (`bad`: the reservation is unfit) or odd (`warn`), and what to do about it."""

    level: Level
    topic: str
    found: str
    instead: str


@dataclass(frozen=True)
class Gathered:
    """All that is known.

    Args:
        world_size: the number of ranks that rank 0 believes there are.
        facts: of the ranks that reported, in order of the ranks.
        hosts: the host of each rank as planned; empty where no plan is at hand.
        unreached: what hosts wrote that could not reach rank 0.
        port_error: why MASTER_PORT itself could not be bound; None where it could, or was not to be.
        network: what the site says that the communication library should choose.
        waited_s: how long rank 0 waited for the last rank.
    """

    world_size: int
    facts: Sequence[Facts]
    hosts: Sequence[str] = ()
    unreached: Sequence[Facts] = ()
    port_error: str | None = None
    network: str | None = None
    waited_s: float = 0.0

    @property
    def told(self) -> list[Facts]:
        """The facts of ranks that came as far as telling any."""
        return [facts for facts in self.facts if "cores" in facts]

    def by_host(self) -> dict[str, list[Facts]]:
        """The ranks of each host, hosts in order of their first rank."""
        found: dict[str, list[Facts]] = {}
        for facts in self.told:
            found.setdefault(facts["host"], []).append(facts)
        return found

    def measured(self, stage: str) -> Iterator[tuple[Facts, Mapping[str, Any]]]:
        """The ranks that answered in a stage without an error, with their answers."""
        for facts in self.told:
            answer = facts.get("stages", {}).get(stage)
            if answer is not None and "error" not in answer:
                yield facts, answer


def collected(pairs: Iterable[tuple[Key, int]]) -> dict[Key, list[int]]:
    """The ranks of each key, keys in order of first appearance."""
    found: dict[Key, list[int]] = {}
    for key, rank in pairs:
        found.setdefault(key, []).append(rank)
    return found


# Many ranks and hosts in few words.
_NAMED = 6


def host_ranges(names: Iterable[str]) -> str:
    """`n[1-3],login` for n1, n2, n3, login: Slurm's own way, in the order of first appearance."""
    groups: dict[tuple[str, int, str], list[int]] = {}
    for name in dict.fromkeys(names):
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        # Names without a number stand for themselves.
        prefix, digits, suffix = match.groups() if match else (name, "", "")
        groups.setdefault((prefix, len(digits), suffix), []).append(int(digits or 0))
    words = []
    for (prefix, width, suffix), numbers in groups.items():
        if not width or len(numbers) == 1:
            words.append(f"{prefix}{numbers[0]:0{width}d}{suffix}" if width else prefix)
            continue
        words.append(f"{prefix}[{_ranges(sorted(numbers), width)}]{suffix}")
    shown = words[:_NAMED]
    return ",".join(shown) + (f" and {len(words) - _NAMED} more" if len(words) > _NAMED else "")


def _ranges(numbers: Sequence[int], width: int) -> str:
    padded = (part.split("-") for part in core_ranges(tuple(numbers)).split(","))
    return ",".join("-".join(end.zfill(width) for end in part) for part in padded)


def rank_ranges(numbers: Iterable[int]) -> str:
    """`rank 3` or `ranks 0-3,8`."""
    ordered = tuple(sorted(set(numbers)))
    return f"rank{'s' * (len(ordered) > 1)} {core_ranges(ordered)}"


def differing(values: Mapping[str, str]) -> str | None:
    """`n3: 2.11, all others 2.13` for the value of each host; None where all agree.

    Without a majority every value is given with its hosts.
    """
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return None
    usual, most = counts[0]
    if most <= len(values) / 2:
        return "; ".join(f"{host_ranges(_with(values, value))}: {value}" for value, _ in counts)
    odd = [f"{host_ranges(_with(values, value))}: {value}" for value, _ in counts[1:]]
    return f"{'; '.join(odd)}, {'all others' if most > 1 else 'the other'} {usual}"


def _with(values: Mapping[str, str], wanted: str) -> list[str]:
    return [name for name, value in values.items() if value == wanted]


def format_bytes(count: float | None) -> str:
    """Bytes as `3.2 GiB`."""
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_rate(value: float, unit: str) -> str:
    """A rate with its prefix: `3.1 GB/s`, `250 MFLOP/s`."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"
