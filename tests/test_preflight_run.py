"""Preflight for real: ranks here, strangers on the port, a torch that hangs, thousands of connections."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launch_runs import clean_env, launch

from ezpz_llm.errors import UserError
from ezpz_llm.preflight.board import Board
from ezpz_llm.preflight.facts.network import addresses
from ezpz_llm.preflight.facts.sockets import used_interfaces
from ezpz_llm.preflight.wire import encode, meeting_point

PREFLIGHT = (sys.executable, "-m", "ezpz_llm.preflight")
CALM = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run(*words: str, timeout: float = 90, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=clean_env(**env), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=timeout, check=False)


def test_its_check_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    began = time.monotonic()
    done = run(*PREFLIGHT, "--check", "--world-size", "8", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert time.monotonic() - began < 2
    assert "--limit" in run(*PREFLIGHT, "--help").stdout
    wrong = run(*PREFLIGHT, "--check", "--limit", "3")
    assert wrong.returncode == 2
    assert "--limit" in wrong.stderr


def test_ranks_without_an_address_are_told_to_use_launch() -> None:
    with pytest.raises(UserError, match="no MASTER_PORT") as caught:
        meeting_point({"MASTER_ADDR": "n1"}, 4)
    assert "launch python3 -m ezpz_llm.preflight" in str(caught.value)
    assert meeting_point({}, 1) == ("127.0.0.1", 0)


def test_two_healthy_ranks_are_fit(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "2", "--run-dir", "r", *PREFLIGHT, timeout=90, **CALM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "preflight: fit" in done.stdout
    assert "MPICH" in done.stdout
    report = json.loads((tmp_path / "r" / "preflight.json").read_text())
    assert report["fit"] is True
    assert [finding for finding in report["findings"] if finding["level"] == "bad"] == []
    ranks = [{**report["common"], **one} for one in report["ranks"]]
    assert [one["rank"] for one in ranks] == [0, 1]
    for one in ranks:
        assert one["host"] == socket.gethostname()
        assert set(one["cores"]) <= os.sched_getaffinity(0)
        assert one["stages"]["mpi"]["size"] == 2
        assert one["stages"]["compute"]["flops_per_second"] > 1e8
        assert one["stages"]["reduce node"]["bytes_per_second"] > 1e5
        assert one["versions"]["torch"].startswith(one["stages"]["ready"]["torch"])
        assert abs(one["clock"][0]) < 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_hanging_torch_a_taken_port_one_core_and_one_device(tmp_path: Path) -> None:
    """Under a bare mpiexec, with a stranger on MASTER_PORT who accepts and says nothing that makes sense, and a
    torch on rank 1 whose import never ends."""
    hanging = tmp_path / "hanging" / "torch"
    hanging.mkdir(parents=True)
    (hanging / "__init__.py").write_text("import time\ntime.sleep(300)\n")
    (hanging / "version.py").write_text("__version__ = '2.11.0'\n")
    program = (f'[ "$PMI_RANK" = 0 ] || export PYTHONPATH={hanging.parent}; '
               'exec "$0" -m ezpz_llm.preflight --limit 20 --run-dir "$1"')
    core = str(min(os.sched_getaffinity(0)))
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = stranger.accept()
                    connection.sendall(b"220 hello\r\n")
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        done = run("mpiexec", "-n", "2", "taskset", "-c", core, "bash", "-c", program, sys.executable,
                   str(tmp_path / "r"), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="7",
                   **CALM)
    assert time.monotonic() - began < 60
    assert done.returncode == 3, done.stdout + done.stderr
    assert "2 of 2 ranks" in done.stdout
    for finding in (f"bad   meeting: MASTER_PORT {port} cannot be bound on rank 0's host: Address already in use: "
                    f"pid {os.getpid()} (",
                    f"2 ranks run on 1 core(s) ({core}), while cores",
                    "local ranks 0-1 share one device (CUDA_VISIBLE_DEVICES 7)",
                    "did not come back from importing torch and taking its device",
                    "torch differs: ", "2.11.0"):
        assert finding in done.stdout, done.stdout


@pytest.mark.slow
def test_under_torchrun_whose_agent_holds_the_port(tmp_path: Path) -> None:
    done = run("torchrun", "--nproc-per-node", "2", "--master-port", "29617", "-m", "ezpz_llm.preflight",
               "--run-dir", str(tmp_path / "r"), timeout=120, **CALM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "preflight: fit" in done.stdout


@pytest.mark.slow
def test_thirty_two_ranks_on_few_cores_within_the_limit(tmp_path: Path) -> None:
    began = time.monotonic()
    done = launch(tmp_path, "-n", "32", "--run-dir", "r", *PREFLIGHT, timeout=150, **CALM)
    assert "32 of 32 ranks" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 100


def _fake_rank(port: int, rank: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(encode({"token": "right", "rank": rank, "host": f"n{rank // 8}"}))
    connection.sendall(encode({"facts": {"rank": rank, "text": "x" * 3000}}))
    return connection


def test_the_board_takes_a_thousand_ranks_and_no_stranger() -> None:
    """Strangers that send garbage, the wrong word, or nothing at all; ranks that go away are noticed."""
    board = Board(0, "right")
    strangers = [socket.create_connection(("127.0.0.1", board.port)) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.0\r\n\r\n")
    strangers[1].sendall(encode({"token": "wrong", "rank": 0, "host": "x"}))
    ranks: list[socket.socket] = []

    def come() -> None:
        ranks.extend(_fake_rank(board.port, rank) for rank in range(1000))

    threading.Thread(target=come, daemon=True).start()
    began = time.monotonic()
    assert board.wait(began + 30, lambda: len(board.accounted) == 1000)
    assert sorted(member.rank for member in board.members) == list(range(1000))
    ranks[7].close()
    lost = next(member for member in board.members if member.rank == 7)
    board.ask("stage", {lost: {}}, time.monotonic() + 10)
    assert lost.lost_in == "stage"
    began = time.monotonic()
    board.ask("late", {member: {} for member in board.members}, began + 0.5)
    assert 0.4 < time.monotonic() - began < 5
    assert {member.stuck_in for member in board.members if member.rank != 7} == {"late"}
    board.dismiss(5)
    for connection in (*ranks, *strangers):
        connection.close()


def test_the_interface_of_an_open_connection_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            assert used_interfaces(addresses()) == ["lo"]
            assert used_interfaces(addresses(), frozenset({port})) == []
