"""The network of the collectives: what NCCL and oneCCL log, and TCP beside faster devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ezpz_llm.core.rundir.records import Network
from ezpz_llm.training.dist.collective_network import (
    describe_fallback,
    find_fast_devices,
    logged_network,
    network_family,
    parse_network,
    unused_devices,
)
from ezpz_llm.training.observe.peaks import choose_network

# From public logs of NCCL 2.12 to 2.27, its OFI plug-in and oneCCL 2021.15; not captured by us.
LOGS = {
    "Socket": (["host:7:7 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
                "host:7:7 [0] NCCL INFO NET/IB : No device found.",
                "host:7:7 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>",
                "host:7:7 [0] NCCL INFO Assigned NET plugin Socket to comm",
                "host:7:7 [0] NCCL INFO Using network Socket"],
               {"library": "NCCL", "network": "Socket", "interface": "eth0"}, "tcp"),
    "Slingshot": (["nid1:5:9 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)",
                   "nid1:5:9 [0] NCCL INFO Using network AWS Libfabric"],
                  {"library": "NCCL", "network": "AWS Libfabric", "provider": "cxi"}, "libfabric"),
    "InfiniBand": (["h:7:19 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
                    "h:7:19 [0] NCCL INFO Using network IB"],
                   {"library": "NCCL", "network": "IB", "interface": "mlx5_0"}, "ib"),
    "oneCCL": (["2025:11:26-12:43:48:(401) |CCL_INFO| provider: tcp",
                "2025:11:26-12:43:48:(401) |CCL_INFO|   nic: { name tcp:br-1894, state unknown, speed 1.25 GB/s }",
                "2025:11:26-12:43:48:(401) |CCL_INFO| CCL_ATL_TRANSPORT: ofi"],
               {"library": "oneCCL", "network": "tcp", "transport": "ofi", "provider": "tcp",
                "interface": "br-1894"}, "tcp"),
    "oneCCL over MPI": (["2025:11:26-12:43:48:(4016676) |CCL_INFO| CCL_ATL_TRANSPORT: mpi"],
                        {"library": "oneCCL", "network": "mpi", "transport": "mpi"}, "mpi"),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_chosen_network_is_parsed_from_logs(name: str) -> None:
    lines, network, kind = LOGS[name]
    assert parse_network(["torch is imported", *lines]) == network
    assert network_family(network["network"]) == kind
    assert parse_network(["provider: the user's own print"]) == {}


def network_of(lines: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Network:
    """Return the network of a block that writes these lines where NCCL does."""
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    with logged_network("nccl") as network:
        assert os.environ["NCCL_DEBUG"] == "INFO"
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text("\n".join(lines))
    return network


def test_log_of_nccl_is_read_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "ALL")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    network = network_of(LOGS["InfiniBand"][0], tmp_path, monkeypatch)
    assert (network.library, network.network, network.interface) == ("NCCL", "IB", "mlx5_0")
    assert os.environ["NCCL_DEBUG_SUBSYS"] == "ALL"
    assert {"NCCL_DEBUG", "NCCL_DEBUG_FILE"}.isdisjoint(os.environ)
    assert not list(tmp_path.iterdir())


def test_rank_without_a_temporary_folder_joins_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    with logged_network("nccl") as network:
        assert "NCCL_DEBUG_FILE" not in os.environ
    assert network == Network("NCCL")


def test_log_that_the_user_requested_stays_with_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_DEBUG=WARN\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    with logged_network("nccl"):
        assert "NCCL_DEBUG" not in os.environ
    monkeypatch.delenv("NCCL_CONF_FILE")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with logged_network("nccl") as network:
        assert os.environ["NCCL_DEBUG"] == "WARN"
        assert "NCCL_DEBUG_FILE" not in os.environ
    assert network == Network("NCCL")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "hsn0")
    with logged_network("gloo") as network:
        pass
    assert network == Network("gloo", "tcp", interface="hsn0")


def system_with(root: Path, *, active: dict[str, str] | None = None, down: tuple[str, ...] = (),
                cxi: int = 0) -> Path:
    """Create a folder like /sys/class with active devices (by rate), inactive ones, and Slingshot's."""
    for name in (*(active or {}), *down):
        port = root / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text("1: DOWN\n" if name in down else "4: ACTIVE\n")
        (port / "rate").write_text(f"{(active or {}).get(name, '10 Gb/sec')}\n")
    for number in range(cxi):
        (root / "cxi" / f"cxi{number}").mkdir(parents=True)
    return root


SOCKET = {"library": "NCCL", "network": "Socket", "interface": "eth0"}
HDR = {"mlx5_0": "200 Gb/sec (4X HDR)", "mlx5_1": "200 Gb/sec (4X HDR)"}
FALLBACKS = [
    (SOCKET, {"active": HDR}, {}), (SOCKET, {"active": {"mlx5_0": "25 Gb/sec (1X EDR)"}}, {}),
    (SOCKET, {"cxi": 1}, {}), (SOCKET, {"cxi": 4}, {}), (SOCKET, {"active": {"rdmap0s6": "100 Gb/sec"}}, {}),
    (SOCKET, {"active": HDR, "down": ("mlx5_2",)}, {}), (SOCKET, {"cxi": 4}, {"NCCL_IB_DISABLE": "1"}),
    (SOCKET, {"active": HDR}, {"NCCL_NET": "IB"}), ({**SOCKET, "network": "tcp"}, {"cxi": 2}, {}),
    ({**SOCKET, "network": "tcp;ofi_rxm"}, {"cxi": 4}, {"NCCL_NET": "AWS Libfabric"}),
]
CLEAN = [
    *(({"library": "NCCL", **LOGS[name][1]}, devices, {}) for name in ("Slingshot", "InfiniBand")
      for devices in ({"active": HDR}, {"cxi": 4}, {}, {"down": ("mlx5_0",)})),
    (SOCKET, {}, {}), (SOCKET, {"down": ("mlx5_0",), "active": {"rxe0": "10 Gb/sec"}}, {}),
    (SOCKET, {"active": {"ibp65s0": "200 Gb/sec"}}, {"NCCL_IB_DISABLE": "1"}),
    (SOCKET, {"cxi": 4}, {"NCCL_NET": "Socket"}), ({"library": "NCCL"}, {"active": HDR}, {}),
    ({"library": "NCCL", "network": "UCX"}, {"active": HDR}, {}),
    ({"library": "gloo", "network": "tcp"}, {"cxi": 4}, {}),
    ({"library": "gloo", "network": "tcp"}, {"active": HDR}, {}), (LOGS["oneCCL"][1], {"cxi": 8}, {}),
    (LOGS["oneCCL over MPI"][1], {"cxi": 8}, {}), ({"library": "oneCCL"}, {"cxi": 8}, {}), ({}, {"cxi": 8}, {}),
]


@pytest.mark.parametrize(("network", "devices", "env"), FALLBACKS)
def test_fallback_to_tcp_names_the_faster_devices(network: dict, devices: dict, env: dict[str, str],
                                                  tmp_path: Path) -> None:
    used = Network(**network)
    used.unused = unused_devices(used, env, system_with(tmp_path, **devices))
    text = describe_fallback(used)
    assert text is not None
    assert text.startswith("NCCL fell back to TCP on eth0, which is many times slower than the node's ")
    for name in (*devices.get("active", ()), *(f"cxi{number}" for number in range(devices.get("cxi", 0)))):
        assert name in text
    assert not any(name in text for name in devices.get("down", ()))


@pytest.mark.parametrize(("network", "devices", "env"), CLEAN)
def test_other_runs_have_no_fallback(network: dict, devices: dict, env: dict[str, str], tmp_path: Path) -> None:
    used = Network(**network)
    used.unused = unused_devices(used, env, system_with(tmp_path, **devices))
    assert describe_fallback(used) is None


def test_devices_have_their_rates(tmp_path: Path) -> None:
    assert find_fast_devices(system_with(tmp_path, active=HDR, cxi=1)) == [
        "mlx5_0 (200 Gb/sec)", "mlx5_1 (200 Gb/sec)", "cxi0"]


def test_run_on_several_nodes_records_the_rank_that_fell_back() -> None:
    fast, slow = {"library": "NCCL", "network": "IB"}, {**SOCKET, "unused": ["mlx5_0"]}
    used = choose_network([fast, slow], several_nodes=True)
    assert used is not None
    assert used.unused == ["mlx5_0"]
    on_a_node = choose_network([slow, slow], several_nodes=False)
    assert on_a_node is not None
    assert on_a_node.unused == []
    assert choose_network([None], several_nodes=False) is None
