"""Input and output of the judges as plain values, and many ranks or nodes in few words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ezpz_llm.base import grouped
from ezpz_llm.base.shell_commands import typable_text
from ezpz_llm.launch.hostlist import fold_numbers

Facts = Mapping[str, Any]
"""What one rank told (`client.gather_facts`), with what was measured with it (`stages`)."""

Level = Literal["bad", "warn", "ok"]
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
    """One thing that is wrong (`bad`: the reservation is unfit), odd (`warn`) or well (`ok`), and what mends it."""

    level: Level
    topic: str
    found: str
    instead: str = ""


def judged(topic: str, found: str, *problems: tuple[bool, Level, str]) -> Finding:
    """The first problem that holds, as (holds, level, what mends it); `ok` where none does."""
    return next((Finding(level, topic, found, instead) for holds, level, instead in problems if holds),
                Finding("ok", topic, found))


def findings_text(findings: Iterable[Finding]) -> str:
    """A line a finding, its remedy under it; empty without any."""
    return "".join(f"{one.level:<5} {one.topic}: {one.found}\n"
                   + (f"      do: {typable_text(one.instead)}\n" if one.instead else "") for one in findings)


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
        return grouped((facts["host"], facts) for facts in self.told)

    def measured(self, stage: str) -> Iterator[tuple[Facts, Mapping[str, Any]]]:
        """The ranks that answered in a stage without an error, with their answers."""
        for facts in self.told:
            if (answer := answer_of(facts, stage)) and "error" not in answer:
                yield facts, answer

    def linked(self) -> Iterator[tuple[str, str, Facts]]:
        """(node, stage, answer) of every rank in every round of all-reduces between nodes."""
        for facts in self.told:
            for stage, answer in facts.get("stages", {}).items():
                if stage.startswith(LINK):
                    yield facts["host"], stage, answer


def answer_of(facts: Facts, stage: str) -> Facts:
    """What a rank answered in a stage; empty where it was not asked, or has not answered."""
    return facts.get("stages", {}).get(stage, {})


# Many ranks and hosts in few words.
_NAMED = 6


def host_ranges(names: Iterable[str]) -> str:
    """`n[1-3],login` for n1, n2, n3, login: Slurm's own way, in the order of first appearance."""
    # Names without a number stand for themselves.
    parts = [match.groups() if (match := re.fullmatch(r"(.*?)(\d+)(\D*)", name)) else (name, "", "")
             for name in dict.fromkeys(names)]
    words = []
    for (prefix, width, suffix), numbers in grouped(
            ((prefix, len(digits), suffix), int(digits or 0)) for prefix, digits, suffix in parts).items():
        if not width or len(numbers) == 1:
            words.append(f"{prefix}{numbers[0]:0{width}d}{suffix}" if width else prefix)
            continue
        words.append(f"{prefix}[{_ranges(sorted(numbers), width)}]{suffix}")
    shown = words[:_NAMED]
    return ",".join(shown) + (f" and {len(words) - _NAMED} more" if len(words) > _NAMED else "")


def _ranges(numbers: Sequence[int], width: int) -> str:
    padded = (part.split("-") for part in fold_numbers(numbers).split(","))
    return ",".join("-".join(end.zfill(width) for end in part) for part in padded)


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
