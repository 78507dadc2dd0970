"""Interfaces, and what this host's own name means."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

from ezpz_llm.doctor.result import Check
from ezpz_llm.launch.addresses import is_loopback, resolve
from ezpz_llm.launch.interfaces import describe, missing_interface, own_interfaces
from ezpz_llm.preflight.facts.network import named_interfaces


def checks(env: Mapping[str, str]) -> Iterator[Check]:
    """The lines about the network."""
    own = own_interfaces()
    yield Check("ok", "interfaces", describe(own))
    for variable, wanted in named_interfaces(env).items():
        if missing := missing_interface(variable, wanted, own):
            yield Check("bad", "interfaces", f"{variable}={wanted}, but there is no {missing}",
                        f"{variable} with one of them, or unset it")
    yield host_name(socket.gethostname(), resolve(socket.gethostname()))


def host_name(name: str, address: str | None) -> Check:
    """What the host's own name resolves to: ranks of other hosts that are sent there must find this one."""
    if address is None:
        return Check("warn", "host name", f"{name} does not resolve",
                     "runs on several hosts need launch --interface NAME, or an entry in /etc/hosts")
    if is_loopback(address):
        return Check("warn", "host name", f"{name} is {address} here",
                     "runs on several hosts need launch --interface NAME: gloo would listen on the loopback")
    return Check("ok", "host name", f"{name} is {address}")
