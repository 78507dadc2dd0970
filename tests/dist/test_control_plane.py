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
from ezpz_llm.training.dist.rendezvous import Rendezvous
from ezpz_llm.training.dist.setup import _gloo_interface


def test_messages_do_not_use_the_backend_of_the_device(tmp_path: Path) -> None:
    """The device's backend is torch's fake one, which returns without communicating."""
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", "3", "--run-dir", str(tmp_path / "run"),
               sys.executable, str(HELPERS / "control_ranks.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(3):
        expected = ["fake", [0, 1, 2] if rank == 0 else None, [0, 1, 2], [0.5, 1.5, 2.5], 7, [3, 3], 2,
                    "planted on rank 1", False, "SIGUSR1 was received", "step-00000001"]
        assert str(expected) in (tmp_path / f"run/logs/rank{rank:04d}.log").read_text()


def test_gloo_listens_where_other_nodes_reach_it_if_the_hostname_does_not_tell(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """In Debian's /etc/hosts, a node's hostname has a loopback address."""
    addresses = {name: address for name, address in list_interfaces().items() if address is not None}
    loopback = next(name for name, address in addresses.items() if address == "127.0.0.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    for name, address in addresses.items():
        assert _gloo_interface(Rendezvous(HashStore(), address, 1)) == name
    assert _gloo_interface(Rendezvous(HashStore(), "198.51.100.1", 1, on_node=True)) == loopback
    for address in addresses.values():
        if address != "127.0.0.1":
            monkeypatch.setattr(socket, "gethostname", lambda known=address: known)
            assert _gloo_interface(Rendezvous(HashStore(), "127.0.0.1", 1)) is None
