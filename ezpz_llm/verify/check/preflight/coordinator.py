"""Rank 0's side of preflight: gather facts, run measurements, and write the report within the time limit."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ezpz_llm.core.base import EXIT_PREFLIGHT, UserError, group_by_key, print_lines, run_secret
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import Launch, read_record
from ezpz_llm.launcher.basics.addresses import is_loopback
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.launcher.planning.sites import find_site
from ezpz_llm.verify.check.facts import ConnectedRank, Ready, StoreLocation, find_answer
from ezpz_llm.verify.check.findings import is_fit
from ezpz_llm.verify.check.preflight.client import connect_and_serve, read_unreached, unreached_files
from ezpz_llm.verify.check.preflight.endpoint import Endpoint
from ezpz_llm.verify.check.preflight.messages import CLOCK, Request
from ezpz_llm.verify.check.preflight.report import Report, as_text, report_path, write_report
from ezpz_llm.verify.check.preflight.rules import Gathered, apply_rules
from ezpz_llm.verify.check.preflight.rules.gathered import COMPUTE, LINK, MPI, NETWORK, NODE, READY
from ezpz_llm.verify.check.preflight.server import Member, PreflightServer

# Fractions of the time limit at which stages end at the latest, and maximum seconds of short stages.
_FACTS, _READY, _MEASURED, _MPI = 0.40, 0.65, 0.90, 0.96
_CLOCKS_S, _COMPUTE_S, _REDUCE_S, _NETWORK_S = 2.0, 8.0, 10.0, 3.0
_FIRST_REDUCE_S = 25.0
"""Limit of the first all-reduce between devices: NCCL and oneCCL load libraries, slowly from a cold file system."""
_JOIN_TIMEOUT_S = 4.0
"""Time limit for rank 0's client thread to exit after the report."""
_UNREACHED_POLL_S = 1.0


def run_coordinator(info: RankInfo, env: Mapping[str, str], run_dir: RunDir, rendezvous: Endpoint,
                    limit_s: float) -> int:
    """Run all preflight stages and write the report. Return 0 if no check failed, else EXIT_PREFLIGHT."""
    began = time.monotonic()
    for stale in (report_path(run_dir), *unreached_files(run_dir.path)):
        stale.unlink(missing_ok=True)
    server = PreflightServer(rendezvous)
    # In a thread, so that the report is written even if gathering this rank's own facts hangs.
    client_thread = threading.Thread(target=connect_and_serve, daemon=True, args=(
        server.endpoint, info, env, None, lambda: time.monotonic() > began + limit_s))
    client_thread.start()
    gathered = _Coordinator(server, info, env, run_dir, began, limit_s).gather()
    report = Report(gathered, apply_rules(gathered), time.monotonic() - began)
    print_lines(as_text(report))
    write_report(run_dir, report)
    server.dismiss()
    client_thread.join(_JOIN_TIMEOUT_S)
    code = 0 if is_fit(report.findings) else EXIT_PREFLIGHT
    if client_thread.is_alive():
        # A thread that hangs in the kernel would block a normal exit.
        sys.stdout.flush()
        os._exit(code)
    return code


@dataclass
class _Coordinator:
    """Preflight stages, in order."""

    server: PreflightServer
    info: RankInfo
    env: Mapping[str, str]
    run_dir: RunDir
    began: float
    limit_s: float

    def gather(self) -> Gathered:
        """Gather the facts and measurements that arrive in time."""
        server = self.server
        self._wait_for_facts()
        waited_s = time.monotonic() - self.began
        members = list(server.members)
        if len({member.rank for member in members}) == len(members):
            self._measure(members)
        ordered = sorted(server.members, key=lambda member: member.rank)
        # torchrun's agent holds the port by design. On one node under launch, ranks do not use it.
        on_node = run_secret(self.env) is not None and is_loopback(self.env.get("MASTER_ADDR", ""))
        port_error = None if on_node or self.info.source.startswith("torchrun") else server.port_error
        return Gathered(self.info.world_size, [_rank_of(member) for member in ordered],
                        _planned_nodes(self.run_dir, self.info.world_size), read_unreached(self.run_dir.path),
                        port_error, _site_network(self.env), waited_s)

    def _by(self, share: float, within_s: float = float("inf")) -> float:
        return min(self.began + share * self.limit_s, time.monotonic() + within_s)

    def _wait_for_facts(self) -> None:
        """Wait until each rank has sent its facts, disconnected, or reported that it cannot reach rank 0."""
        accounted, world_size, until = self.server.accounted, self.info.world_size, self._by(_FACTS)
        while time.monotonic() < until:
            if self.server.wait(self._by(_FACTS, _UNREACHED_POLL_S), lambda: len(accounted) >= world_size):
                return
            unreached = [report for report in read_unreached(self.run_dir.path) if report.rank not in accounted]
            if len(accounted) + sum(report.ranks_there for report in unreached) >= world_size:
                return

    def _measure(self, members: Sequence[Member]) -> None:
        ask = self.server.ask
        reporting = [member for member in members if member.facts]
        ask({member: Request(READY, serve=member.rank == 0) for member in reporting}, self._by(_READY))
        one_per_node = {member.host: member for member in reversed(reporting)}.values()
        ask(dict.fromkeys(one_per_node, Request(CLOCK)), self._by(_MEASURED, _CLOCKS_S))
        ask(dict.fromkeys(_ready_members(reporting), Request(COMPUTE)), self._by(_MEASURED, _COMPUTE_S))
        first = next((member for member in reporting if member.rank == 0), None)
        ready = find_answer(first.stages, Ready) if first else None
        if ready and ready.store is not None:
            self._reduce(reporting, ready.store)
        ask(dict.fromkeys(reporting, Request(NETWORK)), self._by(_MPI, _NETWORK_S))
        # Starting MPI is collective: it would hang if a rank is missing. torchrun's ranks are not MPI ranks.
        able = _ready_members(reporting)
        if len(able) == self.info.world_size > 1 and not self.info.source.startswith("torchrun"):
            ask(dict.fromkeys(able, Request(MPI)), self._by(_MPI))

    def _reduce(self, members: Sequence[Member], store: StoreLocation) -> None:
        stages = [(NODE, node_groups(_ranks_and_hosts(_ready_members(members))))]
        links = link_groups(_ranks_and_hosts(_ready_members(members)))
        stages += [(f"{LINK} {number}", groups) for number, groups in enumerate(links)]
        on_devices = any(ready.device.kind != "cpu" for member in _ready_members(members)
                         if (ready := find_answer(member.stages, Ready)))
        for number, (stage, groups) in enumerate(stages):
            able = {member.rank: member for member in _ready_members(members)}
            requests = {able[rank]: Request(stage, group=f" {group[0]}", index=index, size=len(group), store=store)
                        for group in groups if all(rank in able for rank in group)
                        for index, rank in enumerate(group)}
            within_s = _FIRST_REDUCE_S if on_devices and number == 0 else _REDUCE_S
            self.server.ask(requests, self._by(_MEASURED, within_s))


def _rank_of(member: Member) -> ConnectedRank:
    """Return a rank's facts, its measurements, and the stage in which it disconnected or hangs."""
    return replace(member.facts or ConnectedRank(rank=member.rank, host=member.host, stages={}),
                   stages=member.stages, clock=member.clock, lost_in=member.lost_in,
                   stuck_in=member.stuck_in if member.lost_in is None else None)


def _ready_members(members: Sequence[Member]) -> list[Member]:
    """Return the members that can measure: connected, with a device, and not busy with an earlier request."""
    return [member for member in members if member.lost_in is None and member.stuck_in is None
            and find_answer(member.stages, Ready)]


def _ranks_and_hosts(members: Sequence[Member]) -> list[tuple[int, str]]:
    return sorted((member.rank, member.host) for member in members)


def _planned_nodes(run_dir: RunDir, world_size: int) -> list[str]:
    """Return the hostname of each rank from launch's record; empty if the record is for another world size."""
    table = (read_record(run_dir).launch or Launch()).rank_hosts
    return table if len(table) == world_size else []


def _site_network(env: Mapping[str, str]) -> str | None:
    """Return the network that the communication library should choose, from the site file, or None."""
    # launch has read the same file and rejected an invalid one.
    with contextlib.suppress(UserError):
        return find_site(None, env).network
    return None


RankHost = tuple[int, str]
"""A rank and its hostname."""


def node_groups(rank_hosts: Sequence[RankHost]) -> list[tuple[int, ...]]:
    """Return the ranks of each node with more than one rank."""
    return [tuple(ranks) for ranks in _by_node(rank_hosts).values() if len(ranks) > 1]


def link_groups(rank_hosts: Sequence[RankHost]) -> list[list[tuple[int, ...]]]:
    """Return rounds of pairs of ranks on neighboring nodes; all pairs of a round can measure at the same time.

    The nodes form a ring, so that each node is measured with both of its neighbors, one per round. The n-th rank of
    a node pairs with the n-th rank of the other node. If each rank has a network adapter, all are measured.
    """
    by_node = _by_node(rank_hosts)
    hosts = list(by_node)
    return [[pair for left, right in edges
             for pair in zip(by_node[hosts[left]], by_node[hosts[right]], strict=False)]
            for edges in ring_rounds(len(hosts))]


def ring_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return the edges of a ring of `count` nodes in up to three rounds, with a node at most once per round.

    Two nodes have a single edge, and thus one round.
    """
    if count < 2:
        return []
    even = [(i, i + 1) for i in range(0, count - 1, 2)]
    odd = [(i, i + 1) for i in range(1, count - 1, 2)]
    closing = [(count - 1, 0)] if count > 2 else []
    # With an even number of nodes, the closing edge fits into the odd round. Otherwise it fits into neither.
    rounds = [even, odd, closing] if count % 2 else [even, odd + closing]
    return [edges for edges in rounds if edges]


def _by_node(rank_hosts: Sequence[RankHost]) -> dict[str, list[int]]:
    return group_by_key((host, rank) for rank, host in sorted(rank_hosts))
