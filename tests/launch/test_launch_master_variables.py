"""The user's MASTER_ADDR and MASTER_PORT: errors are reported before any rank waits for them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from launch_runs import launch

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics.addresses import find_rendezvous
from ezpz_llm.launcher.basics.master_variables import require_master_address, require_master_port

HERE = socket.gethostname()


@pytest.mark.parametrize("address", ["n1", "n1.site.example", "n1.site.example.", "x_1", "10.0.0.1", "::1"])
def test_hostnames_and_addresses(address: str) -> None:
    require_master_address(address)
    with pytest.raises(UserError):
        require_master_address(f"{address}/")


@pytest.mark.parametrize("address", ["10.0.0.300", "10.0.1", "n 1", " n1", "n1,n2", "-n1", "n1..x", "é", "n[1-2]",
                                     f"{'n' * 64}", "fe80::1::2", "http://n1/"])
def test_neither_hostname_nor_address(address: str) -> None:
    with pytest.raises(UserError, match="is not a hostname or an address"):
        require_master_address(address)


@pytest.mark.parametrize("address", ["n1:29500", "tcp://n1:29500", "10.0.0.1:29500", "[::1]:29500"])
def test_a_port_that_is_appended(address: str) -> None:
    with pytest.raises(UserError, match="has a port appended") as raised:
        require_master_address(address)
    assert str(raised.value.instead).endswith("MASTER_PORT=29500")
    assert ":29500" not in str(raised.value.instead)


def test_ports() -> None:
    assert require_master_port("29500") == 29500
    for port in ("0", "65536", "²", "-1", "29500 "):
        with pytest.raises(UserError, match="is not a port number"):
            require_master_port(port)


@pytest.mark.parametrize(("address", "why"), [
    ("no-such-host.invalid", "does not resolve"), ("203.0.113.7", "is not an address of"),
    ("127.0.0.1:29500", "has a port appended")])
def test_ranks_on_this_node_need_an_address_of_it(tmp_path: Path, address: str, why: str) -> None:
    done = launch(tmp_path, "-n", "2", "python3", "-c", "print('started')", MASTER_ADDR=address)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"MASTER_ADDR={address}" in done.stderr.replace("'", "")
    assert why in done.stderr
    assert not list(tmp_path.iterdir())


def test_addresses_of_this_node_stay() -> None:
    for address in ("localhost", "127.0.0.1", "127.0.0.2"):
        assert find_rendezvous([HERE], "key", address=address).notes == ()


def test_a_name_that_other_nodes_may_know_has_a_note() -> None:
    for hosts in (["n1", "n2"], ["n1"]):
        (note,) = find_rendezvous(hosts, "key", address="no-such-host.invalid").notes
        assert note == (f"MASTER_ADDR=no-such-host.invalid does not resolve on {HERE}; it must resolve on the "
                        "ranks' nodes")
    with pytest.raises(UserError, match=r"ranks on n2 would look for rank 0"):
        find_rendezvous(["n1", "n2"], "key", address="0.0.0.0")
