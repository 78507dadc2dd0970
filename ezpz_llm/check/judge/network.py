"""Judges the network: every node reaches rank 0, over the network that this machine has for that."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from ezpz_llm.base import grouped
from ezpz_llm.check.facts import family
from ezpz_llm.check.judge.gathered import (
    COMPUTE,
    NETWORK,
    NODE,
    READY,
    Facts,
    Finding,
    Gathered,
    Level,
    answer_of,
    differing,
    format_rate,
    host_ranges,
    stage_name,
)
from ezpz_llm.launch.addresses import is_loopback, missing_interface
from ezpz_llm.launch.hostlist import rank_ranges


def _chosen(gathered: Gathered) -> Iterator[Finding]:
    if gathered.network is None or len(gathered.by_host()) < 2:
        return
    # oneCCL over MPI does not know what MPI talks over.
    told = [(facts, answer) for facts, answer in gathered.measured(NETWORK)
            if answer.get("network", "mpi") != "mpi"]
    wrong = [((answer["library"], answer["network"]), facts) for facts, answer in told
             if family(answer["network"]) != family(gathered.network)]
    for (library, network), numbers in grouped((key, facts["rank"]) for key, facts in wrong).items():
        names = host_ranges(facts["host"] for key, facts in wrong if key == (library, network))
        silent = ", which is TCP: many times slower" if family(network) == "tcp" else ""
        yield Finding("bad", "network", f"{library} chose {network!r} on {names} ({rank_ranges(numbers)}), this "
                                        f"site has {gathered.network!r}{silent}",
                      "load the module with the network plug-in (aws-ofi-nccl, rccl-net-plugin) and put it on "
                      f"LD_LIBRARY_PATH; NCCL_NET={gathered.network!r} makes a missing one an error")


def _differing(gathered: Gathered) -> Iterator[Finding]:
    values = {facts["host"]: answer["network"] for facts, answer in gathered.measured(NETWORK)
              if "network" in answer}
    if text := differing(values):
        yield Finding("bad", "network", f"the hosts chose different networks: {text}",
                      "the same modules and variables on every host")


def talks_over(gathered: Gathered) -> dict[str, str]:
    """The interfaces over which each host was seen to talk to others, joined by commas."""
    seen = [(host, interface) for host, _, answer in gathered.linked()
            for interface in answer.get("interfaces", ())]
    seen += [(facts["host"], interface) for facts in gathered.told
             if (interface := answer_of(facts, NETWORK).get("interface"))]
    return {host: ",".join(sorted(set(names))) for host, names in grouped(seen).items()}


def _interfaces(gathered: Gathered) -> Iterator[Finding]:
    used = talks_over(gathered)
    if text := differing(used):
        yield Finding("warn", "network", f"the hosts talk over different interfaces: {text}",
                      "launch --interface NAME, with one that every host has")
    for host, ranks in gathered.by_host().items():
        wanted = ranks[0].get("named_interfaces", {}).get("GLOO_SOCKET_IFNAME")
        if wanted and not set(used.get(host, wanted).split(",")) <= set(wanted.split(",")):
            yield Finding("warn", "network",
                          f"{host} talks over {used[host]}, though GLOO_SOCKET_IFNAME is {wanted}",
                          "an interface that the host has")


# Can every host reach rank 0, and has each the interfaces that it is to talk on?
def _port(gathered: Gathered) -> Iterator[Finding]:
    if gathered.port_error:
        master = _master(gathered)
        port = master.get("port", "")
        yield Finding("bad", "rendezvous", f"MASTER_PORT {port} cannot be bound on rank 0's host: "
                                           f"{gathered.port_error}",
                      "another MASTER_PORT, or end the program that holds it (ss -ltnp)")


def _unreached(gathered: Gathered) -> Iterator[Finding]:
    reported = {facts["rank"] for facts in gathered.facts}
    groups = grouped(((f"{one['address']}:{one['port']}", one["reason"], _way(one)), one["host"])
                     for one in gathered.unreached if one["rank"] not in reported)
    for (master, reason, way), names in groups.items():
        instead = "an address of rank 0's host that every host reaches: launch --interface NAME, or set MASTER_ADDR"
        if reason == "timed out":
            instead = "a firewall or a route drops it: " + instead
        yield Finding("bad", "rendezvous", f"{host_ranges(names)} cannot reach MASTER_ADDR {master}{way}: {reason}",
                      instead)


def _way(one: Facts) -> str:
    if not one["resolves_to"]:
        return ", a name without an address there"
    if is_loopback(one["resolves_to"]):
        return f", which is {one['resolves_to']} there, the host itself"
    return f" by {one['interface']}" if one.get("interface") else ", to which it has no route"


def _master(gathered: Gathered) -> Facts:
    return next((facts.get("master", {}) for facts in gathered.told if facts["rank"] == 0), {})


def _master_address(gathered: Gathered) -> Iterator[Finding]:
    first, master = next((facts for facts in gathered.told if facts["rank"] == 0), None), _master(gathered)
    if first is None or not master:
        return
    address = master["resolves_to"]
    own = {address for addresses in first["interfaces"].values() for address in addresses}
    if address is None or (address not in own and not is_loopback(address)):
        text = f"{master['address']} ({address or 'which does not resolve'})"
        yield Finding("bad", "rendezvous", f"MASTER_ADDR {text} is no address of rank 0's host {first['host']}",
                      "unset MASTER_ADDR, so that launch sets it, or name an address of that host")


def _interface_findings(gathered: Gathered) -> Iterator[Finding]:
    hosts = gathered.by_host()
    lacking = grouped(((missing, f"{variable}={wanted}"), host) for host, ranks in hosts.items()
                      for variable, wanted in ranks[0].get("named_interfaces", {}).items()
                      if (missing := missing_interface(variable, wanted, ranks[0]["interfaces"])))
    for (missing, source), names in lacking.items():
        who = "no host has" if len(names) == len(hosts) > 1 else f"{host_ranges(names)}: no"
        yield Finding("bad", "interface", f"{who} interface {missing} ({source})",
                      "an interface that every host has (ip -br address): launch --interface NAME")


def _names(gathered: Gathered) -> Iterator[Finding]:
    hosts = gathered.by_host()
    if len(hosts) < 2:
        return
    looped = [host for host, ranks in hosts.items()
              if ranks[0]["name_resolves_to"] and is_loopback(ranks[0]["name_resolves_to"])
              and "GLOO_SOCKET_IFNAME" not in ranks[0].get("named_interfaces", {})]
    if looped:
        yield Finding("warn", "interface", f"on {host_ranges(looped)} the host's own name is a loopback address",
                      "launch --interface NAME, since gloo listens on the address of the host's name otherwise")
    boots = grouped((boot, host) for host, ranks in hosts.items() if (boot := ranks[0]["boot_id"]))
    for names in boots.values():
        if len(names) > 1:
            yield Finding("warn", "hosts", f"{host_ranges(names)} have one boot id, as one machine has",
                          "containers on one kernel: NCCL and UCX may try shared memory between them "
                          "(NCCL_HOSTID, a boot id of its own for each)")


# Slow ranks, nodes and links, by comparison with the others only.
SLOW, VERY_SLOW = 2.0, 5.0
"""Times slower than the median: worth a word, and not worth a start."""
_SPREADS = 3.0
_MAD_TO_DEVIATION = 1.4826
Key = TypeVar("Key", bound=Hashable)


def outliers(rates: Mapping[Key, float]) -> dict[Key, float]:
    """Who is slow, and how many times slower than the median.

    On a logarithmic scale, since load makes rates differ by factors: at least SLOW times below the median, and
    three robust standard deviations (1.4826 x the median absolute deviation, which outliers do not move). So two
    values name nobody, and neither does noise that spreads all values.
    """
    if not rates:
        return {}
    # What did not move at all within the time is slower than any number.
    logs = {key: math.log(max(rate, 1e-9)) for key, rate in rates.items()}
    middle = statistics.median(logs.values())
    spread = _MAD_TO_DEVIATION * statistics.median(abs(value - middle) for value in logs.values())
    least = max(math.log(SLOW), _SPREADS * spread)
    return {key: math.exp(middle - value) for key, value in logs.items() if middle - value > least}


def _level(times: float) -> Level:
    return "bad" if times >= VERY_SLOW else "warn"


def _compute(gathered: Gathered) -> Iterator[Finding]:
    rates = {facts["rank"]: answer["flops_per_second"] for facts, answer in gathered.measured(COMPUTE)}
    slow = outliers(rates)
    if not slow:
        return
    usual = format_rate(statistics.median(rates.values()), "FLOP/s")
    hosts = {facts["rank"]: facts["host"] for facts in gathered.told}
    for host, numbers in grouped((hosts[rank], rank) for rank in slow).items():
        all_of_it = all(facts["rank"] in slow for facts in gathered.by_host()[host])
        who = host if all_of_it else f"{rank_ranges(numbers)} on {host}"
        worst = max(numbers, key=slow.__getitem__)
        verb = "is" if all_of_it or len(numbers) == 1 else "are"
        yield Finding(_level(slow[worst]), "speed",
                      f"{who} {verb} slow: {slow[worst]:.1f} times slower in a matrix product than the median rank "
                      f"({format_rate(rates[worst], 'FLOP/s')}, median {usual})",
                      f"look for other processes, heat or a power limit on {host} (top, nvidia-smi -q -d "
                      "PERFORMANCE), or leave it out with launch --hosts")


def _nodes(gathered: Gathered) -> Iterator[Finding]:
    rates = {host: min(found) for host, found in grouped(
        (facts["host"], answer["bytes_per_second"]) for facts, answer in gathered.measured(NODE)).items()}
    for host, times in outliers(rates).items():
        yield Finding(_level(times), "links",
                      f"all-reduces among the ranks of {host} are {times:.1f} times slower than on the median host "
                      f"({format_rate(rates[host], 'B/s')})",
                      "look at the links between its devices (nvidia-smi topo -m, nvlink -s), or leave it out")


def link_rates(gathered: Gathered) -> dict[str, float]:
    """The bandwidth of each host to its neighbours, bytes a second.

    Of its two neighbours the better one counts: a host with a bad link is slow with both, its neighbours only with
    it. Of the ranks of a host the slowest counts.
    """
    rounds = grouped(((host, stage), answer["bytes_per_second"]) for host, stage, answer in gathered.linked()
                     if "bytes_per_second" in answer)
    slowest = grouped((host, min(rates)) for (host, _), rates in rounds.items())
    return {host: max(rates) for host, rates in slowest.items()}


def _links(gathered: Gathered) -> Iterator[Finding]:
    rates = link_rates(gathered)
    if not rates:
        return
    usual = format_rate(statistics.median(rates.values()), "B/s")
    for host, times in outliers(rates).items():
        yield Finding(_level(times), "links",
                      f"the link of {host} is slow: all-reduces with its neighbours are {times:.1f} times slower "
                      f"than on the median host ({format_rate(rates[host], 'B/s')}, median {usual})",
                      f"look at the network adapter of {host} (ethtool, ip -s link), or leave it out with "
                      "launch --hosts")


def _failed(gathered: Gathered) -> Iterator[Finding]:
    for stage in (READY, COMPUTE, NODE):
        errors = [((facts["host"], facts["stages"][stage]["error"]), facts["rank"]) for facts in gathered.told
                  if "error" in answer_of(facts, stage)]
        for (host, error), numbers in grouped(errors).items():
            yield Finding("bad", "torch" if stage == READY else "links",
                          f"{rank_ranges(numbers)} on {host} failed in {stage_name(stage)}: {error}",
                          "the same command on that host alone shows more: python3 -m ezpz_llm.test_dist")


def _failed_links(gathered: Gathered) -> Iterator[Finding]:
    """Hosts whose every link failed; where both ends of one have no other that works, both are named."""
    worked = set(link_rates(gathered))
    failed = grouped((host, answer["error"]) for host, _, answer in gathered.linked()
                     if "error" in answer and host not in worked)
    for host, errors in failed.items():
        yield Finding("bad", "links", f"all-reduces between {host} and its neighbours fail: {errors[0]}",
                      "the interface that ranks talk on has to reach every host: launch --interface NAME")


REACH_JUDGES = (_port, _unreached, _master_address, _interface_findings, _names)
"""Findings on the way to MASTER_ADDR:MASTER_PORT, and on interfaces."""
LINK_JUDGES = (_chosen, _differing, _interfaces, _failed, _failed_links, _compute, _nodes, _links)
"""Findings on the network that NCCL, RCCL or oneCCL chose, the interfaces that gloo talked over, and on speed."""
