"""Tests of preflight on four nodes with injected faults; each is reported with its node within the limit."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from simcluster.cluster import Cluster
from slowness import scaled

CALM = {"OMP_NUM_THREADS": "1", "SLURM_MPI_TYPE": "none"}
"""Environment without PMI: on a busy machine Slurm 22.05's pmi2 plug-in may split MPICH's lines, so MPI hangs."""
ALLOCATION = ("salloc", "--quiet", "-N4", "--ntasks-per-node=2")
PREFLIGHT = f'exec {sys.executable} -m ezpz_llm.preflight'


@contextlib.contextmanager
def on_node(cluster: Cluster, node: str, do: str, undo: str) -> Iterator[None]:
    """Run a command on a node and, at exit, the one that reverts it."""
    done = cluster.run(*do.split(), node=node)
    assert done.returncode == 0, f"{do}: {done.stderr}"
    try:
        yield
    finally:
        cluster.run(*undo.split(), node=node)


def preflight(cluster: Cluster, folder: Path, script: str = PREFLIGHT, *allocation: str, timeout: float = 120,
              **env: str) -> tuple[int, list[str], str]:
    """Run `script` on every rank of four nodes.

    Return launch's exit code, the findings as `level topic: found`, and all output.
    """
    done = cluster.run(*(allocation or ALLOCATION), "launch", "--run-dir", "r", "bash", "-c", script, cwd=folder,
                       timeout=timeout, **{**CALM, **env})
    text = done.stdout + done.stderr
    path = folder / "r" / "preflight.json"
    findings = json.loads(path.read_text())["findings"] if path.exists() else []
    texts = [f"{finding['level']} {finding['topic']}: {finding['found']}" for finding in findings]
    return done.returncode, texts, text


def has(findings: list[str], *words: str) -> bool:
    return any(all(word in finding for word in words) for finding in findings)


@pytest.mark.full
def test_launch_runs_preflight_before_the_program(cluster: Cluster, tmp_path: Path) -> None:
    """launch --preflight on a fit reservation runs the program on every rank."""
    done = cluster.run(*ALLOCATION, "launch", "--preflight", "--run-dir", "r", "hostname", cwd=tmp_path,
                       timeout=150, **CALM)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "preflight: fit" in text
    assert "8 of 8 ranks on 4 nodes" in text
    hosts = [(tmp_path / "r" / "logs" / f"rank{rank:04d}.log").read_text().strip() for rank in range(8)]
    assert hosts == [f"n{1 + rank // 2}" for rank in range(8)]
    report = json.loads((tmp_path / "r" / "preflight" / "preflight.json").read_text())
    assert report["fit"] is True
    assert len(report["ranks"]) == 8


@pytest.mark.full
def test_launch_does_not_run_the_program_on_an_unfit_reservation(cluster: Cluster, tmp_path: Path) -> None:
    """n3 has a slow link, another version and another variable, n4 lacks an interface, ranks share a device."""
    other = tmp_path / "other" / "deepspeed-0.15.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.15.1\n")
    start_up = tmp_path / "start_up"
    start_up.mkdir()
    (start_up / "sitecustomize.py").write_text(
        "import os, socket, sys\n"
        "if socket.gethostname() == 'n3':\n"
        f"    sys.path.insert(0, {str(other.parent)!r})\n"
        "    os.environ['NCCL_CROSS_NIC'] = '0'\n")
    throttle = "tc qdisc replace dev eth0 root tbf rate 20mbit burst 128kb latency 100ms"
    with contextlib.ExitStack() as faults:
        faults.enter_context(on_node(cluster, "n3", throttle, "tc qdisc del dev eth0 root"))
        for node in ("n1", "n2", "n3"):
            faults.enter_context(on_node(cluster, node, "ip link add fab0 type bridge", "ip link del fab0"))
        done = cluster.run(*ALLOCATION, "launch", "--preflight", "--run-dir", "r", "touch", "r/started",
                           cwd=tmp_path, timeout=150, NCCL_SOCKET_IFNAME="fab0", CUDA_VISIBLE_DEVICES="0",
                           PYTHONPATH=os.pathsep.join([str(start_up), *os.environ.get("PYTHONPATH", "").split()]),
                           **CALM)
    text = done.stdout + done.stderr
    assert done.returncode == 3, text
    assert not (tmp_path / "r" / "started").exists()
    for finding in ("bad   links: the link of n3 is slow: ",
                    "bad   versions: deepspeed differs: n3: 0.15.1, all others ",
                    "bad   interface: n4: no interface fab0 (NCCL_SOCKET_IFNAME=fab0)",
                    "warn  environment: NCCL_CROSS_NIC differs: n3: 0, all others unset",
                    # Because of SLURM_MPI_TYPE=none in CALM.
                    "has 1 rank, but the environment has 8 (ranks 0-7)",
                    "warn  devices: on n[1-4] local ranks 0-1 share one device (CUDA_VISIBLE_DEVICES 0)"):
        assert finding in text, text
    assert "preflight: unfit: 3 problems" in text, text


@pytest.mark.full
def test_a_node_without_a_route_and_a_rank_that_never_starts(cluster: Cluster, tmp_path: Path) -> None:
    script = f'if [ "$SLURM_PROCID" = 5 ]; then exec sleep 200; fi; {PREFLIGHT} --limit 30'
    gateway = cluster.run("getent", "hosts", "n1").stdout.split()[0]
    with on_node(cluster, "n2", f"ip route add blackhole {gateway}/32", f"ip route del blackhole {gateway}/32"):
        began = time.monotonic()
        code, findings, text = preflight(cluster, tmp_path, script)
    assert code == 3, text
    assert has(findings, "bad rendezvous: n2 cannot reach MASTER_ADDR", "Invalid argument"), text
    assert has(findings, "bad missing: rank 5 on n3 did not report within"), text
    assert time.monotonic() - began < scaled(75)


@pytest.mark.slow
def test_a_route_that_drops_packets(cluster: Cluster, tmp_path: Path) -> None:
    """The gateway is missing, so connections time out instead of being refused."""
    address = cluster.run("getent", "hosts", "n1").stdout.split()[0]
    via = f"{address}/32 via {address.rpartition('.')[0]}.99"
    with on_node(cluster, "n2", f"ip route add {via}", f"ip route del {via}"):
        code, findings, text = preflight(cluster, tmp_path)
    assert code == 3, text
    assert has(findings, "bad rendezvous: n2 cannot reach MASTER_ADDR", "over eth0: "), text


@pytest.mark.slow
def test_mpi_and_the_environment_agree_under_srun_with_pmi(cluster: Cluster, tmp_path: Path) -> None:
    code, findings, text = preflight(cluster, tmp_path, SLURM_MPI_TYPE="pmi2")
    assert code == 0, text
    assert "invalid client request" in text or not has(findings, "MPI"), text


@pytest.mark.slow
def test_rank_0_never_starts(cluster: Cluster, tmp_path: Path) -> None:
    """There is no report, but every other rank prints what it waited for, and where."""
    script = f'if [ "$SLURM_PROCID" = 0 ]; then exec sleep 200; fi; {PREFLIGHT} --limit 10'
    code, findings, text = preflight(cluster, tmp_path, script)
    assert (code, findings) == (3, []), text
    assert "for rank 0 at MASTER_ADDR" in text


@pytest.mark.slow
def test_a_busy_node_is_reported_as_slow(cluster: Cluster, tmp_path: Path) -> None:
    """The rank on n3 shares its core with a process of higher priority."""
    hog = '(exec taskset -c 1 timeout 60 nice -n -10 sh -c "while :; do :; done") &'
    script = (f'if [ "$(hostname)" = n3 ]; then {hog} '
              f'exec taskset -c 1 {PREFLIGHT[5:]}; else exec taskset -c 0 {PREFLIGHT[5:]}; fi')
    code, findings, text = preflight(cluster, tmp_path, script, "salloc", "--quiet", "-N4", "--ntasks-per-node=1")
    slow = [finding for finding in findings if " speed: " in finding]
    assert len(slow) == 1, text
    assert "n3 is slow" in slow[0]
    assert code == (3 if slow[0].startswith("bad") else 0)
