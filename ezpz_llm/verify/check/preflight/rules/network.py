"""Rules for the network: routes to rank 0, interfaces, chosen network, and speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from ezpz_llm.core.base import group_by_key
from ezpz_llm.core.rundir.records import Finding
from ezpz_llm.launcher.basics.addresses import is_loopback, missing_interface
from ezpz_llm.launcher.basics.hostlist import rank_ranges
from ezpz_llm.training.dist.collective_network import PLUGIN_ADVICE, network_family
from ezpz_llm.verify.check.facts import Compute, Facts, Failed, Network, Reduction
from ezpz_llm.verify.check.findings import Level
from ezpz_llm.verify.check.preflight.rules.gathered import (
    COMPUTE,
    LINK,
    NODE,
    READY,
    Gathered,
    Unreached,
    describe_differences,
    format_rate,
    node_ranges,
    stage_name,
)


def _wrong_network(gathered: Gathered) -> Iterator[Finding]:
    if gathered.network is None or len(gathered.by_node()) < 2:
        return
    # oneCCL over MPI does not know which network MPI uses.
    wrong = group_by_key(((answer.library, answer.network), facts) for facts, answer in gathered.measured(Network)
                         if answer.network not in ("", "mpi")
                         and network_family(answer.network) != network_family(gathered.network))
    for (library, network), ranks in wrong.items():
        names = node_ranges(facts.host for facts in ranks)
        consequence = ", which is TCP and many times slower" if network_family(network) == "tcp" else ""
        yield Finding("bad", "network", f"{library} chose {network!r} on {names} "
                                        f"({rank_ranges(facts.rank for facts in ranks)}), but "
                                        f"the network of this site is {gathered.network!r}{consequence}",
                      f"{PLUGIN_ADVICE}; set NCCL_NET={gathered.network!r} to make NCCL fail, instead of falling "
                      "back, if the plug-in is missing")


def _network_differences(gathered: Gathered) -> Iterator[Finding]:
    values = {facts.host: answer.network for facts, answer in gathered.measured(Network) if answer.network}
    if text := describe_differences(values):
        yield Finding("bad", "network", f"nodes chose different networks: {text}",
                      "use the same modules and variables on every node")


def used_interfaces(gathered: Gathered) -> dict[str, str]:
    """Return the interfaces with which each node reached other nodes, by hostname, joined by commas."""
    observed = [(facts.host, interface) for facts, answer in gathered.measured(Reduction, LINK)
                for interface in answer.interfaces]
    observed += [(facts.host, answer.interface) for facts, answer in gathered.measured(Network) if answer.interface]
    return {host: ",".join(sorted(set(names))) for host, names in group_by_key(observed).items()}


def _interface_differences(gathered: Gathered) -> Iterator[Finding]:
    used = used_interfaces(gathered)
    if text := describe_differences(used):
        yield Finding("warn", "network", f"nodes use different interfaces: {text}",
                      "pass launch --interface NAME with an interface that every node has")
    for host, ranks in gathered.by_node().items():
        configured = ranks[0].named_interfaces.get("GLOO_SOCKET_IFNAME")
        if configured and not set(used.get(host, configured).split(",")) <= set(configured.split(",")):
            yield Finding("warn", "network",
                          f"{host} uses {used[host]}, although GLOO_SOCKET_IFNAME is {configured}",
                          "set GLOO_SOCKET_IFNAME to an interface that the node has")


def _unbound_port(gathered: Gathered) -> Iterator[Finding]:
    if gathered.port_error:
        first = _first(gathered)
        port = first.master.port if first and first.master else ""
        yield Finding("bad", "rendezvous", f"MASTER_PORT {port} cannot be bound on rank 0's node: "
                                           f"{gathered.port_error}",
                      "set another MASTER_PORT, or end the program that uses the port (ss -ltnp)")


def _unreached_nodes(gathered: Gathered) -> Iterator[Finding]:
    reported = {facts.rank for facts in gathered.facts}
    groups = group_by_key(((f"{report.address}:{report.port}", report.reason, _route(report)), report.host)
                          for report in gathered.unreached if report.rank not in reported)
    for (master, reason, route), names in groups.items():
        instead = ("pass launch --interface NAME, or set MASTER_ADDR to an address of rank 0's node that every "
                   "node can reach")
        if reason == "timed out":
            instead = "check for a firewall or a route that drops packets, or " + instead
        yield Finding("bad", "rendezvous",
                      f"{node_ranges(names)} cannot reach MASTER_ADDR {master}{route}: {reason}", instead)


def _route(report: Unreached) -> str:
    if not report.resolves_to:
        return ", which does not resolve there"
    if is_loopback(report.resolves_to):
        return f", which resolves to the loopback address {report.resolves_to} there"
    return f" over {report.interface}" if report.interface else ", to which there is no route"


def _first(gathered: Gathered) -> Facts | None:
    return next((facts for facts in gathered.reporting if facts.rank == 0), None)


def _wrong_master_address(gathered: Gathered) -> Iterator[Finding]:
    first = _first(gathered)
    if first is None or first.master is None:
        return
    address = first.master.resolves_to
    own_addresses = {address for addresses in first.interfaces.values() for address in addresses}
    if address is None or (address not in own_addresses and not is_loopback(address)):
        text = f"{first.master.address} ({address or 'which does not resolve'})"
        yield Finding("bad", "rendezvous", f"MASTER_ADDR {text} is not an address of rank 0's node {first.host}",
                      "unset MASTER_ADDR, so that launch sets it, or set it to an address of that node")


def missing_interfaces(gathered: Gathered) -> Iterator[Finding]:
    """Yield a finding for each interface that a variable names and that a node does not have."""
    hosts = gathered.by_node()
    without_interface = group_by_key(((missing, f"{variable}={value}"), host) for host, ranks in hosts.items()
                                     for variable, value in ranks[0].named_interfaces.items()
                                     if (missing := missing_interface(variable, value, ranks[0].interfaces)))
    for (missing, source), names in without_interface.items():
        text = "no node has" if len(names) == len(hosts) > 1 else f"{node_ranges(names)}: no"
        yield Finding("bad", "interface", f"{text} interface {missing} ({source})",
                      "pass launch --interface NAME with an interface that every node has (ip -br address)")


def _hostname_problems(gathered: Gathered) -> Iterator[Finding]:
    hosts = gathered.by_node()
    if len(hosts) < 2:
        return
    on_loopback = [host for host, ranks in hosts.items()
                   if is_loopback(ranks[0].name_resolves_to or "")
                   and "GLOO_SOCKET_IFNAME" not in ranks[0].named_interfaces]
    if on_loopback:
        yield Finding("warn", "interface",
                      f"on {node_ranges(on_loopback)} the hostname resolves to a loopback address",
                      "pass launch --interface NAME; otherwise gloo listens on that address")
    boots = group_by_key((boot, host) for host, ranks in hosts.items() if (boot := ranks[0].boot_id))
    for names in boots.values():
        if len(names) > 1:
            yield Finding("warn", "hosts", f"{node_ranges(names)} have the same boot id",
                          "if they are containers on one kernel, set a different NCCL_HOSTID or boot id in each: "
                          "NCCL and UCX may try shared memory between them")


_SLOW, _VERY_SLOW = 2.0, 5.0
"""Slowdowns relative to the median from which a finding is a warning, and from which it is `bad`."""
_SPREADS = 3.0
_MAD_TO_DEVIATION = 1.4826
Key = TypeVar("Key", bound=Hashable)


def outliers(rates: Mapping[Key, float]) -> dict[Key, float]:
    """Return the slow keys, and how many times slower than the median they are.

    A key is slow if its rate is below the median by more than a factor of SLOW and by more than three robust
    standard deviations (1.4826 x the median absolute deviation, which outliers do not affect). Deviations are
    measured on a logarithmic scale, because load changes rates by factors. Two values are never outliers, and noise
    in all values rarely makes one.
    """
    if not rates:
        return {}
    # log(0) is undefined. A rate of 0 counts as extremely slow.
    logs = {key: math.log(max(rate, 1e-9)) for key, rate in rates.items()}
    middle = statistics.median(logs.values())
    spread = _MAD_TO_DEVIATION * statistics.median(abs(value - middle) for value in logs.values())
    threshold = max(math.log(_SLOW), _SPREADS * spread)
    return {key: math.exp(middle - value) for key, value in logs.items() if middle - value > threshold}


def _slowdown_level(times: float) -> Level:
    return "bad" if times >= _VERY_SLOW else "warn"


def _slow_matmuls(gathered: Gathered) -> Iterator[Finding]:
    rates = {facts.rank: answer.flops_per_second for facts, answer in gathered.measured(Compute)}
    slow = outliers(rates)
    if not slow:
        return
    usual = format_rate(statistics.median(rates.values()), "FLOP/s")
    hosts = {facts.rank: facts.host for facts in gathered.reporting}
    for host, numbers in group_by_key((hosts[rank], rank) for rank in slow).items():
        is_whole_node = all(facts.rank in slow for facts in gathered.by_node()[host])
        subject = host if is_whole_node else f"{rank_ranges(numbers)} on {host}"
        worst = max(numbers, key=slow.__getitem__)
        verb = "is" if is_whole_node or len(numbers) == 1 else "are"
        yield Finding(_slowdown_level(slow[worst]), "speed",
                      f"{subject} {verb} slow: {slow[worst]:.1f} times slower in a matmul than the median rank "
                      f"({format_rate(rates[worst], 'FLOP/s')}, median {usual})",
                      f"look for other processes, heat or a power limit on {host} (top, nvidia-smi -q -d "
                      "PERFORMANCE), or exclude it with launch --hosts")


def _wrong_values(gathered: Gathered) -> Iterator[Finding]:
    kinds = group_by_key((facts.host, kind) for facts in gathered.reporting for answer in facts.stages.values()
                         if isinstance(answer, Reduction) for kind in answer.wrong_kinds)
    for host, names in kinds.items():
        yield Finding("bad", "links", f"wrong values of collectives on {host}: {', '.join(dict.fromkeys(names))}",
                      "exclude the node with launch --hosts, or use another version of torch")


def _slow_nodes(gathered: Gathered) -> Iterator[Finding]:
    rates = {host: min(of_host) for host, of_host in group_by_key(
        (facts.host, answer.bytes_per_second) for facts, answer in gathered.measured(Reduction, NODE)).items()}
    for host, times in outliers(rates).items():
        yield Finding(_slowdown_level(times), "links",
                      f"all-reduces among the ranks of {host} are {times:.1f} times slower than on the median node "
                      f"({format_rate(rates[host], 'B/s')})",
                      "check the links between its devices (nvidia-smi topo -m, nvidia-smi nvlink -s), or "
                      "exclude it with launch --hosts")


def link_rates(gathered: Gathered) -> dict[str, float]:
    """Return the bandwidth of each node to its neighbors in bytes per second.

    Uses the node's slowest rank, and the faster of its two neighbors: a node with a bad link is slow with both
    neighbors, but each neighbor is slow only with that node.
    """
    rounds = group_by_key(((facts.host, stage), answer.bytes_per_second)
                          for facts in gathered.reporting for stage, answer in facts.stages.items()
                          if isinstance(answer, Reduction) and stage.startswith(LINK))
    slowest = group_by_key((host, min(rates)) for (host, _), rates in rounds.items())
    return {host: max(rates) for host, rates in slowest.items()}


def _slow_links(gathered: Gathered) -> Iterator[Finding]:
    rates = link_rates(gathered)
    if not rates:
        return
    usual = format_rate(statistics.median(rates.values()), "B/s")
    for host, times in outliers(rates).items():
        yield Finding(_slowdown_level(times), "links",
                      f"the link of {host} is slow: all-reduces with its neighbors are {times:.1f} times slower "
                      f"than on the median node ({format_rate(rates[host], 'B/s')}, median {usual})",
                      f"check the network adapter of {host} (ethtool, ip -s link), or exclude it with "
                      "launch --hosts")


def _failed_stages(gathered: Gathered) -> Iterator[Finding]:
    for stage in (READY, COMPUTE, NODE):
        errors = group_by_key(((facts.host, answer.error), facts.rank)
                              for facts, answer in gathered.measured(Failed, stage))
        for (host, error), numbers in errors.items():
            remedy = "for details, run python3 -m ezpz_llm.test_dist on that node alone"
            if "No module named 'torch'" in error:
                remedy = "pip install 'ezpz_llm[train]', or run launch with launchers/with-env"
            yield Finding("bad", "torch" if stage == READY else "links",
                          f"{rank_ranges(numbers)} on {host} failed in {stage_name(stage)}: {error}", remedy)


def _failed_links(gathered: Gathered) -> Iterator[Finding]:
    """Find nodes that have a failed link and no working link."""
    working = set(link_rates(gathered))
    failed = group_by_key((facts.host, answer.error) for facts, answer in gathered.measured(Failed, LINK)
                          if facts.host not in working)
    for host, errors in failed.items():
        yield Finding("bad", "links", f"all-reduces between {host} and its neighbors fail: {errors[0]}",
                      "pass launch --interface NAME with an interface that reaches every node")


REACH_RULES = (_unbound_port, _unreached_nodes, _wrong_master_address, missing_interfaces, _hostname_problems)
"""Rules for the route to MASTER_ADDR:MASTER_PORT, and for interfaces."""
LINK_RULES = (_wrong_network, _network_differences, _interface_differences, _failed_stages, _failed_links,
              _wrong_values, _slow_matmuls, _slow_nodes, _slow_links)
"""Rules for the network that NCCL, RCCL or oneCCL chose, the interfaces that gloo used, and speed."""
