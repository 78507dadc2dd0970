"""Messages between ranks beside the device's backend, and the interface on which gloo listens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS
from slowness import scaled
from torch.distributed import HashStore

from ezpz_llm.launcher.basics.addresses import list_interfaces
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist.control_group import choose_gloo_interface


def test_messages_do_not_use_the_backend_of_the_device(tmp_path: Path) -> None:
    """The device's backend is torch's fake one, which returns without communicating."""
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", "3", "--run-dir", str(tmp_path / "run"),
               sys.executable, str(HELPERS / "control_ranks.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(3):
        expected = ["fake", [0, 1, 2] if rank == 0 else None, [0, 1, 2], [0.5, 1.5, 2.5], 7, [3, 3], 2,
                    "planted on rank 1", False, "SIGUSR1 was received", "step-00000001", True, [3, 3]]
        assert str(expected) in (tmp_path / f"run/logs/rank{rank:04d}.log").read_text()


def interface_for(monkeypatch: pytest.MonkeyPatch, *, hostname: str, master: str, rank: int = 0, last: str = "",
                  on_node: bool = False) -> str | None:
    """Return the interface that a rank of two nodes chooses.

    Args:
        last: address that the last rank has put into the store.
    """
    store, env = HashStore(), {"MASTER_ADDR": master}
    store.set("gloo/address of the last rank", last)
    monkeypatch.setattr(socket, "gethostname", lambda: hostname)
    choose_gloo_interface(store, RankInfo(rank, 4, 0, 2, rank // 2, "test"), on_node, env)
    if rank == 3:
        assert store.get("gloo/address of the last rank").decode() == master
    return env.get("GLOO_SOCKET_IFNAME")


def test_gloo_listens_where_other_nodes_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Debian's /etc/hosts, the hostname has a loopback address, and so has MASTER_ADDR on the node of rank 0."""
    addresses = {name: address for name, address in list_interfaces().items() if address is not None}
    loopback = next(name for name, address in addresses.items() if address == "127.0.0.1")
    reachable = {name: address for name, address in addresses.items() if name != loopback}
    assert reachable, "this machine has no network"
    for name, address in reachable.items():
        assert interface_for(monkeypatch, hostname="localhost", master=address) == name
        assert interface_for(monkeypatch, hostname="localhost", master=address, rank=3) == name
        assert interface_for(monkeypatch, hostname="localhost", master="localhost", last=address) == name
        assert interface_for(monkeypatch, hostname="no-such-host.invalid", master=address) == name
        assert interface_for(monkeypatch, hostname=address, master=address) is None
    assert interface_for(monkeypatch, hostname="localhost", master="localhost", last="127.0.0.1") is None
    assert interface_for(monkeypatch, hostname="localhost", master="localhost", on_node=True) == loopback


def test_interface_of_the_user_is_kept() -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "hsn0"}
    choose_gloo_interface(HashStore(), RankInfo(0, 2, 0, 2, 0, "test"), True, env)
    assert env["GLOO_SOCKET_IFNAME"] == "hsn0"
