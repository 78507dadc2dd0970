"""Rank 0's side of preflight: gather, have measured, judge, report, each within its share of the time."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ezpz_llm.base import EXIT_PREFLIGHT, UserError, grouped, run_secret, show
from ezpz_llm.check.client import read_unreached, take_part, unreached_files
from ezpz_llm.check.judge import Gathered, judge
from ezpz_llm.check.judge.gathered import COMPUTE, LINK, MPI, NETWORK, NODE, READY
from ezpz_llm.check.judge.hosts import LOST, STUCK
from ezpz_llm.check.report import Report, as_text, report_path, write_report
from ezpz_llm.check.server import CLOCK, FACTS, Board, Member, Place
from ezpz_llm.launch.addresses import is_loopback
from ezpz_llm.launch.ranks import RankInfo
from ezpz_llm.launch.sites import find_site
from ezpz_llm.rundir import RunDir, read_record

# Shares of the time limit by which each stage is over, and the most seconds that a short one may take.
_TOLD, _READY, _MEASURED, _MPI = 0.40, 0.65, 0.90, 0.96
_CLOCKS_S, _COMPUTE_S, _REDUCE_S, _NETWORK_S = 2.0, 8.0, 10.0, 3.0
_FIRST_REDUCE_S = 25.0
"""For the first all-reduce between devices: NCCL and oneCCL load libraries then, on a cold file system slowly."""
_END_WITHIN_S = 4.0
"""For this rank's own thread, once the report is given."""
_LOOK_FOR_UNREACHED_S = 1.0


def lead(info: RankInfo, env: Mapping[str, str], run_dir: RunDir, rendezvous: Place, limit_s: float) -> int:
    """Run the preflight and print its report; 0 if the reservation is fit, EXIT_PREFLIGHT if not."""
    began = time.monotonic()
    for stale in (report_path(run_dir), *unreached_files(run_dir.path)):
        stale.unlink(missing_ok=True)
    board = Board(rendezvous.address, rendezvous.port, rendezvous.secret)
    # In a thread: whatever this rank's own facts hang in, the report is given.
    place = Place(board.address, board.port, rendezvous.secret)
    own = threading.Thread(target=take_part, daemon=True, args=(
        place, info, env, None, lambda: time.monotonic() > began + limit_s))
    own.start()
    gathered = _Lead(board, info, env, run_dir, began, limit_s).gather()
    report = Report(gathered, judge(gathered), time.monotonic() - began)
    show(as_text(report))
    write_report(run_dir, report)
    board.dismiss()
    own.join(_END_WITHIN_S)
    code = 0 if report.is_fit else EXIT_PREFLIGHT
    if own.is_alive():
        # A thread that hangs in the kernel would keep an orderly exit waiting.
        sys.stdout.flush()
        os._exit(code)
    return code


@dataclass
class _Lead:
    """The stages, one after the other."""

    board: Board
    info: RankInfo
    env: Mapping[str, str]
    run_dir: RunDir
    began: float
    limit_s: float
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)

    def gather(self) -> Gathered:
        """All facts that come in time."""
        board = self.board
        board.wait(self._by(_TOLD), self._all_are_in())
        waited_s = time.monotonic() - self.began
        members = list(board.members)
        if len({member.rank for member in members}) == len(members):
            self._measure(members)
        ordered = sorted(board.members, key=lambda member: member.rank)
        # Under torchrun the port is its agent's, as it should be; on one node under launch our ranks do without it.
        on_node = run_secret(self.env) is not None and is_loopback(self.env.get("MASTER_ADDR", ""))
        port_error = None if on_node or self.info.source.startswith("torchrun") else board.port_error
        return Gathered(self.info.world_size, [self._facts(member) for member in ordered],
                        planned_hosts(self.run_dir, self.info.world_size), read_unreached(self.run_dir.path),
                        port_error, site_network(self.env), waited_s)

    def _by(self, share: float, within_s: float = float("inf")) -> float:
        return min(self.began + share * self.limit_s, time.monotonic() + within_s)

    def _all_are_in(self) -> Callable[[], bool]:
        """Has every rank told its facts, or why it cannot?"""
        next_look = time.monotonic() + _LOOK_FOR_UNREACHED_S
        told = self.board.accounted

        def done() -> bool:
            """True once every rank has told its facts or has been told of as unreached; files are looked for
            now and then.
            """
            nonlocal next_look
            began = time.monotonic()
            if len(told) >= self.info.world_size:
                return True
            if began < next_look:
                return False
            unreached = [one for one in read_unreached(self.run_dir.path) if one["rank"] not in told]
            # Many files on a slow file system: the ranks that do come must not wait for that.
            ended = time.monotonic()
            next_look = ended + max(_LOOK_FOR_UNREACHED_S, 5 * (ended - began))
            return len(told) + sum(one["ranks_there"] for one in unreached) >= self.info.world_size

        return done

    def _measure(self, members: Sequence[Member]) -> None:
        board = self.board
        told = [member for member in members if FACTS in member.replies]
        board.ask(READY, {member: {"serve": member.rank == 0} for member in told}, self._by(_READY))
        self._compare_clocks({member.host: member for member in reversed(told)}.values())
        board.ask(COMPUTE, {member: {} for member in _able(told)}, self._by(_MEASURED, _COMPUTE_S))
        first = next((member for member in told if member.rank == 0), None)
        store = first.replies.get(READY, {}).get("store") if first else None
        if store is not None:
            self._reduce(told, store)
        board.ask(NETWORK, {member: {} for member in told}, self._by(_MPI, _NETWORK_S))
        # Starting MPI is collective: it would only hang without those who cannot take part. torchrun's ranks are
        # none of MPI's.
        able = _able(told)
        if len(able) == self.info.world_size > 1 and not self.info.source.startswith("torchrun"):
            board.ask(MPI, {member: {} for member in able}, self._by(_MPI))

    def _compare_clocks(self, members: Iterable[Member]) -> None:
        """One rank a host, one after the other: a round trip in a crowd says nothing."""
        until = self._by(_MEASURED, _CLOCKS_S)
        for member in members:
            if time.monotonic() > until:
                return
            if (clock := self.board.clock_of(member, until)) is not None:
                self.clocks[member.host] = clock

    def _reduce(self, told: Sequence[Member], store: str | list[Any]) -> None:
        stages = [(NODE, node_groups(_places(_able(told))))]
        stages += [(f"{LINK} {turn}", groups) for turn, groups in enumerate(link_groups(_places(_able(told))))]
        on_devices = any(member.replies[READY]["device"]["kind"] != "cpu" for member in _able(told))
        for number, (stage, groups) in enumerate(stages):
            able = {member.rank: member for member in _able(told)}
            questions: dict[Member, dict[str, Any]] = {}
            for group in groups:
                if all(rank in able for rank in group):
                    name = f" {group[0]}"
                    questions |= {able[rank]: {"group": name, "index": index, "size": len(group), "store": store}
                                  for index, rank in enumerate(group)}
            within_s = _FIRST_REDUCE_S if on_devices and number == 0 else _REDUCE_S
            self.board.ask(stage, questions, self._by(_MEASURED, within_s))

    def _facts(self, member: Member) -> dict[str, Any]:
        """What came of a rank."""
        stages = {stage: answer for stage, answer in member.replies.items() if not stage.startswith((CLOCK, FACTS))}
        facts = {"rank": member.rank, "host": member.host, **member.replies.get(FACTS, {}), "stages": stages}
        if member.host in self.clocks:
            facts["clock"] = list(self.clocks[member.host])
        if member.lost_in is not None:
            facts[LOST] = member.lost_in
        elif member.stuck_in is not None:
            facts[STUCK] = member.stuck_in
        return facts


def _able(members: Sequence[Member]) -> list[Member]:
    """Those who can be asked to measure: there, with a device, and not still at something else."""
    return [member for member in members if member.lost_in is None and member.stuck_in is None
            and "error" not in member.replies.get(READY, {"error": ""})]


def _places(members: Sequence[Member]) -> list[tuple[int, str]]:
    return sorted((member.rank, member.host) for member in members)


# What the plan of this launch says: the host of each rank, and the site's network.
def planned_hosts(run_dir: RunDir, world_size: int) -> list[str]:
    """The host of each rank, from launch's record; empty without one, or where it is of another world."""
    launch = read_record(run_dir).get("launch", {})
    hosts, counts = launch.get("hosts", []), launch.get("ranks_per_host", [])
    table = [host for host, count in zip(hosts, counts, strict=False) for _ in range(count)]
    return table if len(table) == world_size else []


def site_network(env: Mapping[str, str]) -> str | None:
    """The network that this site's communication library should choose; None where no site says."""
    # launch has read the same file before and refused a broken one.
    with contextlib.suppress(UserError):
        return find_site(None, env).network
    return None


# Groups of ranks that measure together: those of a node, and nodes with their neighbours.
RankPlace = tuple[int, str]
"""A rank and its host."""


def node_groups(places: Sequence[RankPlace]) -> list[tuple[int, ...]]:
    """The ranks of each host that runs several."""
    return [tuple(ranks) for ranks in _by_host(places).values() if len(ranks) > 1]


def link_groups(places: Sequence[RankPlace]) -> list[list[tuple[int, ...]]]:
    """Rounds of pairs of ranks on neighbouring hosts; in a round each host has one neighbour at most, and all pairs
    of a round can measure at the same time.

    The hosts form a ring, so that each is measured with both of its neighbours. The n-th rank of a host pairs with
    the n-th of the other: where each rank has a network adapter of its own, each adapter is measured.
    """
    by_host = _by_host(places)
    hosts = list(by_host)
    return [[pair for one, other in turn for pair in zip(by_host[hosts[one]], by_host[hosts[other]], strict=False)]
            for turn in ring_rounds(len(hosts))]


def ring_rounds(count: int) -> list[list[tuple[int, int]]]:
    """The edges of a ring of `count` hosts in two or three rounds, no host twice in one; one edge for two hosts."""
    if count < 2:
        return []
    even = [(i, i + 1) for i in range(0, count - 1, 2)]
    odd = [(i, i + 1) for i in range(1, count - 1, 2)]
    closing = [(count - 1, 0)] if count > 2 else []
    # With an even number of hosts the closing edge is free in the odd round; with an odd number in neither.
    rounds = [even, odd, closing] if count % 2 else [even, odd + closing]
    return [turn for turn in rounds if turn]


def _by_host(places: Sequence[RankPlace]) -> dict[str, list[int]]:
    return grouped((host, rank) for rank, host in sorted(places))
