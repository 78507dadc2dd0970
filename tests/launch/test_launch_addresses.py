"""Rendezvous addresses: interfaces, names that resolve to the loopback, ports in use.

All tests use this machine's network; test_launch_pbs.py has those that need several nodes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics import addresses
from ezpz_llm.launcher.basics.addresses import (
    bind_error,
    derived_ports,
    describe_port_holder,
    find_rendezvous,
    free_port,
    interface_address,
    is_local_address,
    list_interfaces,
    require_interfaces,
)

HERE = socket.gethostname()
# An address reserved for documentation (RFC 5737), which no machine has.
ELSEWHERE = "203.0.113.7"


@contextmanager
def _listening(port: int = 0, address: str = "127.0.0.1") -> Iterator[int]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
        yield listener.getsockname()[1]


def test_one_host_meets_on_its_loopback() -> None:
    for hosts in ([HERE], ["localhost"], ["n1"]):
        found = find_rendezvous(hosts, "key")
        assert (found.address, found.address_source) == ("127.0.0.1", "all ranks on one node")
    assert "not tested, since n1 is not this node" in found.port_source
    assert is_local_address("127.0.0.1")
    assert not is_local_address(ELSEWHERE)
    assert all(is_local_address(address) for address in list_interfaces().values() if address)


def test_a_missing_interface_is_reported_with_the_existing_ones() -> None:
    with pytest.raises(UserError, match=rf"no interface 'hsn0' on {HERE}, which has .*lo \(127\.0\.0\.1\)"):
        find_rendezvous([HERE, "n2"], "key", interface="hsn0")
    with pytest.raises(UserError) as raised:
        find_rendezvous([HERE], "key", interface="hsn0", interface_source="launchers/sites/x.toml")
    assert raised.value.where == "launchers/sites/x.toml"
    # A list as for NCCL: the first existing interface is used.
    assert interface_address("hsn0,lo", "--interface") == ("lo", "127.0.0.1")
    # The interfaces of rank 0's node are unknown on other nodes.
    assert find_rendezvous(["n1", HERE], "key", interface="hsn0").address == "n1"


def test_the_loopback_is_never_passed_to_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({"address": "localhost"}, {"address": "127.0.0.1"}, {"interface": "lo"}):
        with pytest.raises(UserError, match=r"is 127\.0\.0\.1 here: ranks on n2 would look for rank 0"):
            find_rendezvous([HERE, "n2"], "key", **given)
    with pytest.raises(UserError, match=r"127\.0\.1\.1 is 127\.0\.1\.1 here"):
        find_rendezvous(["127.0.1.1", "n2"], "key")
    # As with Debian's /etc/hosts, and n2 does not resolve.
    monkeypatch.setattr(addresses, "resolve", lambda name: "127.0.1.1" if name == HERE else None)
    with pytest.raises(UserError, match=rf"{HERE} is 127\.0\.1\.1 here, and no other address") as raised:
        find_rendezvous([HERE, "n2"], "key")
    assert "--interface" in str(raised.value)


def test_a_sites_suffix_names_another_host() -> None:
    found = find_rendezvous(["x4407c6s2b0n0.hostmgmt2.example", "x2"], "key", suffix=".hsn.invalid")
    assert found.address == "x4407c6s2b0n0.hsn.invalid"
    assert found.notes == (f"x4407c6s2b0n0.hsn.invalid does not resolve on {HERE}; it must resolve on the ranks' "
                           "nodes",)
    assert "the site's .hsn.invalid" in found.address_source


def test_the_users_own_address_and_port_stay() -> None:
    found = find_rendezvous([HERE, "n2"], "key", address=ELSEWHERE, port="29500")
    assert (found.address, found.port) == (ELSEWHERE, 29500)
    assert found.address_source == found.port_source == "your environment"
    for port in ("x", "0", "70000", "-1", "²"):
        with pytest.raises(UserError, match="is not a port number"):
            find_rendezvous([HERE], "key", port=port)


def test_the_users_port_is_refused_with_its_holder() -> None:
    with _listening() as port, pytest.raises(UserError) as raised:
        find_rendezvous([HERE], "key", port=str(port))
    assert f"MASTER_PORT={port} cannot be used on {HERE}: Address already in use" in raised.value.found
    words = Path("/proc/self/cmdline").read_bytes().decode().split("\0")
    assert f"pid {os.getpid()} ({words[0]} {words[1]}" in raised.value.found
    # Ports of another node cannot be checked from here.
    assert find_rendezvous(["n1"], "key", port=str(port)).port == port


def test_a_derived_port_is_free_and_its_own() -> None:
    ports = list(derived_ports("5.login None /runs/one"))
    assert ports == list(derived_ports("5.login None /runs/one"))
    assert ports[0] != next(derived_ports("5.login None /runs/two"))
    assert all(20000 <= port < 32768 for port in ports)
    # A listener on one interface also blocks the port, since rank 0's store listens on all of them.
    with _listening(ports[0]), _listening(ports[1], "0.0.0.0"):
        assert free_port("127.0.0.1", "5.login None /runs/one") not in ports[:2]
        assert bind_error("", ports[0])
    with pytest.raises(UserError, match=f"{ELSEWHERE} is not an address of {HERE}"):
        free_port(ELSEWHERE, "key")


def test_ports_that_are_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with _listening() as port:
        monkeypatch.setattr("ezpz_llm.launcher.basics.addresses.derived_ports", lambda key: iter([port]))
        with pytest.raises(UserError, match=rf"; port \d+: pid {os.getpid()} \("):
            free_port("127.0.0.1", "key")


def test_a_holder_that_cannot_be_seen() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert describe_port_holder(bound.getsockname()[1]).startswith("no process listens on it now")
    if os.geteuid():
        pytest.skip("only root can look with another user's eyes")
    with _listening() as port:
        # In a child: pytest itself stays root.
        script = ("import os; from ezpz_llm.launcher.basics.addresses import describe_port_holder; "
                  f"os.setuid(65534); print(describe_port_holder({port}))")
        done = subprocess.run([sys.executable, "-c", script],
                              capture_output=True, text=True, timeout=scaled(120), check=True)
    assert done.stdout == "a process owned by root, which is not visible from here\n"


@pytest.mark.parametrize(("backend", "value", "exists"), [
    ("gloo", "lo", True), ("gloo", "lo,hsn0", False), ("gloo", "l", False),
    ("nccl", "lo", True), ("nccl", "l", True), ("nccl", "=l", False), ("nccl", "=lo", True),
    ("nccl", "hsn0,lo", True), ("nccl", "hsn", False), ("nccl", "^docker,veth", True), ("xccl", "hsn", True),
])
def test_interfaces_that_a_rank_is_told_to_use(backend: str, value: str, exists: bool) -> None:
    env = {"GLOO_SOCKET_IFNAME": value} if backend == "gloo" else {"NCCL_SOCKET_IFNAME": value}
    if exists:
        require_interfaces(backend, 3, env)
        return
    with pytest.raises(UserError, match=rf"rank 3 must use interface .*, but {HERE} has only ") as raised:
        require_interfaces(backend, 3, env)
    assert "lo (127.0.0.1)" in str(raised.value)
