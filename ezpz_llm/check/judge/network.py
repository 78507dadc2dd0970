"""Judges the network: every node reaches rank 0, over the network that this machine has for that."""

from __future__ import annotations

from collections.abc import Iterator

from ezpz_llm.check.facts.network import family
from ezpz_llm.check.judge.gathered import (
    LINK,
    NETWORK,
    Facts,
    Finding,
    Gathered,
    collected,
    differing,
    host_ranges,
    rank_ranges,
)
from ezpz_llm.launch.addresses import is_loopback
from ezpz_llm.launch.interfaces import missing_interface


def judge(gathered: Gathered) -> Iterator[Finding]:
    """Findings on the network that NCCL, RCCL or oneCCL chose, and on the interfaces that gloo talked over."""
    if len(gathered.by_host()) > 1:
        yield from _chosen(gathered)
        yield from _differing(gathered)
    yield from _interfaces(gathered)


def _chosen(gathered: Gathered) -> Iterator[Finding]:
    if gathered.network is None:
        return
    # oneCCL over MPI does not know what MPI talks over.
    told = [(facts, answer) for facts, answer in gathered.measured(NETWORK)
            if answer.get("network", "mpi") != "mpi"]
    wrong = [((answer["library"], answer["network"]), facts) for facts, answer in told
             if family(answer["network"]) != family(gathered.network)]
    for (library, network), numbers in collected((key, facts["rank"]) for key, facts in wrong).items():
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
    found: dict[str, set[str]] = {}
    for facts in gathered.told:
        stages = facts.get("stages", {})
        for stage, answer in stages.items():
            if stage.startswith(LINK):
                found.setdefault(facts["host"], set()).update(answer.get("interfaces", ()))
        if interface := stages.get(NETWORK, {}).get("interface"):
            found.setdefault(facts["host"], set()).add(interface)
    return {host: ",".join(sorted(names)) for host, names in found.items() if names}


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
def judge_reach(gathered: Gathered) -> Iterator[Finding]:
    """Findings on MASTER_ADDR:MASTER_PORT and on interfaces."""
    if gathered.port_error:
        master = _master(gathered)
        yield Finding("bad", "meeting", f"MASTER_PORT {master.get('port', '')} cannot be bound on rank 0's host: "
                                        f"{gathered.port_error}",
                      "another MASTER_PORT, or end the program that holds it (ss -ltnp)")
    yield from _unreached(gathered)
    yield from _master_address(gathered)
    yield from _interface_findings(gathered)
    yield from _names(gathered)


def _unreached(gathered: Gathered) -> Iterator[Finding]:
    reported = {facts["rank"] for facts in gathered.facts}
    groups: dict[tuple[str, ...], list[str]] = {}
    for one in gathered.unreached:
        if one["rank"] not in reported:
            groups.setdefault((f"{one['address']}:{one['port']}", one["reason"], _way(one)), []).append(one["host"])
    for (master, reason, way), names in groups.items():
        instead = "an address of rank 0's host that every host reaches: launch --interface NAME, or set MASTER_ADDR"
        if reason == "timed out":
            instead = "a firewall or a route drops it: " + instead
        yield Finding("bad", "meeting", f"{host_ranges(names)} cannot reach MASTER_ADDR {master}{way}: {reason}",
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
        yield Finding("bad", "meeting", f"MASTER_ADDR {text} is no address of rank 0's host {first['host']}",
                      "unset MASTER_ADDR, so that launch sets it, or name an address of that host")


def _interface_findings(gathered: Gathered) -> Iterator[Finding]:
    hosts = gathered.by_host()
    lacking: dict[tuple[str, str], list[str]] = {}
    for host, ranks in hosts.items():
        for variable, wanted in ranks[0].get("named_interfaces", {}).items():
            if missing := missing_interface(variable, wanted, ranks[0]["interfaces"]):
                lacking.setdefault((missing, f"{variable}={wanted}"), []).append(host)
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
    boots: dict[str, list[str]] = {}
    for host, ranks in hosts.items():
        if ranks[0]["boot_id"]:
            boots.setdefault(ranks[0]["boot_id"], []).append(host)
    for names in boots.values():
        if len(names) > 1:
            yield Finding("warn", "hosts", f"{host_ranges(names)} have one boot id, as one machine has",
                          "containers on one kernel: NCCL and UCX may try shared memory between them "
                          "(NCCL_HOSTID, a boot id of its own for each)")
