"""Which network do the ranks really talk over, and is it the one that this machine has for that?"""

from __future__ import annotations

from collections.abc import Iterator

from ezpz_llm.preflight.facts.netlog import family
from ezpz_llm.preflight.judge import folding
from ezpz_llm.preflight.judge.gathered import LINK, NETWORK, Finding, Gathered, collected


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
        names = folding.hosts(facts["host"] for key, facts in wrong if key == (library, network))
        silent = ", which is TCP: many times slower" if family(network) == "tcp" else ""
        yield Finding("bad", "network", f"{library} chose {network!r} on {names} ({folding.ranks(numbers)}), this "
                                        f"site has {gathered.network!r}{silent}",
                      "load the module with the network plug-in (aws-ofi-nccl, rccl-net-plugin) and put it on "
                      f"LD_LIBRARY_PATH; NCCL_NET={gathered.network!r} makes a missing one an error")


def _differing(gathered: Gathered) -> Iterator[Finding]:
    values = {facts["host"]: answer["network"] for facts, answer in gathered.measured(NETWORK)
              if "network" in answer}
    if text := folding.differing(values):
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
    if text := folding.differing(used):
        yield Finding("warn", "network", f"the hosts talk over different interfaces: {text}",
                      "launch --interface NAME, with one that every host has")
    for host, ranks in gathered.by_host().items():
        wanted = ranks[0].get("named_interfaces", {}).get("GLOO_SOCKET_IFNAME")
        if wanted and not set(used.get(host, wanted).split(",")) <= set(wanted.split(",")):
            yield Finding("warn", "network",
                          f"{host} talks over {used[host]}, though GLOO_SOCKET_IFNAME is {wanted}",
                          "an interface that the host has")
