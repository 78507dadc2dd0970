"""What the judges are given and what they give: plain values, so that every case can be tested by hand."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

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
