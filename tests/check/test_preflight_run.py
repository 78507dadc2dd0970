"""Tests of running preflight: ranks on this machine, invalid peers, a hanging torch, many connections."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_runs import clean_env, cpu_seconds, launch
from slowness import scaled

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.frames import Frames
from ezpz_llm.check.client import connect, read_unreached
from ezpz_llm.check.measurements import Worker
from ezpz_llm.check.node_facts import addresses, used_interfaces
from ezpz_llm.check.server import Endpoint, PreflightServer, rendezvous_point
from ezpz_llm.launch.ranks import RankInfo

PREFLIGHT = (sys.executable, "-m", "ezpz_llm.preflight")
SECRET = bytes(range(32))
CALM = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run(*words: str, timeout: float = 90, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=clean_env(**env), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=timeout, check=False)


def test_check_is_fast_and_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    began = cpu_seconds()
    done = run(*PREFLIGHT, "--check", "--world-size", "8", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert cpu_seconds() - began < scaled(2)
    assert "--limit" in run(*PREFLIGHT, "--help").stdout
    wrong = run(*PREFLIGHT, "--check", "--limit", "3")
    assert wrong.returncode == 2
    assert "--limit" in wrong.stderr


def test_the_error_for_a_missing_address_suggests_launch() -> None:
    with pytest.raises(UserError, match="MASTER_PORT is not set") as caught:
        rendezvous_point({"MASTER_ADDR": "n1"}, 4)
    assert "launch python3 -m ezpz_llm.preflight" in str(caught.value)
    assert rendezvous_point({}, 1) == ("127.0.0.1", 0)


@pytest.mark.full
def test_two_healthy_ranks_are_fit(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "2", "--run-dir", "r", *PREFLIGHT, timeout=90, **CALM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "preflight: fit" in done.stdout
    assert "MPICH" in done.stdout
    report = json.loads((tmp_path / "r" / "preflight.json").read_text())
    assert report["fit"] is True
    assert [finding for finding in report["findings"] if finding["level"] == "bad"] == []
    ranks = [{**report["common"], **own} for own in report["ranks"]]
    assert [facts["rank"] for facts in ranks] == [0, 1]
    for facts in ranks:
        assert facts["host"] == socket.gethostname()
        assert set(facts["cores"]) <= os.sched_getaffinity(0)
        assert facts["stages"]["mpi"]["size"] == 2
        assert facts["stages"]["compute"]["flops_per_second"] > 1e8
        assert facts["stages"]["reduce node"]["bytes_per_second"] > 1e5
        assert facts["versions"]["torch"].startswith(facts["stages"]["ready"]["torch"])
        assert abs(facts["clock"][0]) < 1


@pytest.mark.full
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_hanging_torch_a_port_in_use_one_core_and_one_device(tmp_path: Path) -> None:
    """Run under mpiexec without launch, with another program on MASTER_PORT and a hanging torch on rank 1."""
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
    assert time.monotonic() - began < scaled(60)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "2 of 2 ranks" in done.stdout
    in_use = f"bad   rendezvous: MASTER_PORT {port} cannot be bound on rank 0's node: Address already in use: "
    for finding in (in_use +
                    f"pid {os.getpid()} (",
                    f"2 ranks run on 1 core ({core}), while cores",
                    "local ranks 0-1 share one device (CUDA_VISIBLE_DEVICES 7)",
                    "did not finish importing torch and selecting its device",
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
    assert time.monotonic() - began < scaled(100)


def _fake_rank(port: int, rank: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    frames = Frames(SECRET, serves=False)
    connection.sendall(frames.opening)
    while not frames.is_open:
        frames.feed(connection.recv(4096))
    connection.sendall(frames.pack({"rank": rank, "host": f"n{rank // 8}"}))
    connection.sendall(frames.pack({"stage": "facts", "answer": {"rank": rank, "text": "x" * 3000}}))
    return connection


def test_the_server_accepts_a_thousand_ranks_and_no_other_peers() -> None:
    """Peers that send garbage, unsigned frames or nothing are ignored, and lost ranks are noticed."""
    board = PreflightServer("127.0.0.1", 0, SECRET)
    strangers = [socket.create_connection(("127.0.0.1", board.port)) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.0\r\n\r\n")
    strangers[1].sendall(bytes(32) + (20).to_bytes(4, "big") + b'{"rank":0,"host":""}' + bytes(32))
    ranks: list[socket.socket] = []

    def connect() -> None:
        ranks.extend(_fake_rank(board.port, rank) for rank in range(1000))

    threading.Thread(target=connect, daemon=True).start()
    began = time.monotonic()
    assert board.wait(began + 30, lambda: len(board.accounted) == 1000)
    assert sorted(member.rank for member in board.members) == list(range(1000))
    ranks[7].close()
    lost = next(member for member in board.members if member.rank == 7)
    board.ask("stage", {lost: {}}, time.monotonic() + scaled(10))
    assert lost.lost_in == "stage"
    began = time.monotonic()
    board.ask("late", {member: {} for member in board.members}, began + 0.5)
    assert 0.4 < time.monotonic() - began < scaled(5)
    assert {member.stuck_in for member in board.members if member.rank != 7} == {"late"}
    board.dismiss()
    for connection in (*ranks, *strangers):
        connection.close()


def test_another_program_on_the_port_does_not_block_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program sends a byte every 20 ms, or echoes its input."""
    monkeypatch.setattr("ezpz_llm.check.client.AUTHENTICATE_S", 0.3)
    ended = threading.Event()

    def drip(peer: socket.socket) -> None:
        while not ended.wait(0.02):
            peer.sendall(b"\0")

    def echo(peer: socket.socket) -> None:
        while data := peer.recv(4096):
            peer.sendall(data)

    for serve in (drip, echo):
        with socket.create_server(("127.0.0.1", 0)) as squatter:

            def answer(squatter: socket.socket = squatter, serve: Callable[[socket.socket], None] = serve) -> None:
                with contextlib.suppress(OSError):
                    while True:
                        with squatter.accept()[0] as peer, contextlib.suppress(OSError):
                            serve(peer)

            threading.Thread(target=answer, daemon=True).start()
            place, turns = Endpoint("127.0.0.1", squatter.getsockname()[1], SECRET), iter([False, False, True])
            assert connect(place, RankInfo(1, 2, 1, 2, 0, "test"), None, lambda turns=turns: next(turns)) is None
    ended.set()


def test_the_server_drops_unauthenticated_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections are dropped after a while, and the oldest of too many at once."""
    monkeypatch.setattr("ezpz_llm.check.server.AUTHENTICATE_S", 0.3)
    monkeypatch.setattr("ezpz_llm.check.server._MAX_UNPROVEN", 5)
    board = PreflightServer("127.0.0.1", 0, SECRET)
    idle = [socket.create_connection(("127.0.0.1", board.port)) for _ in range(20)]
    assert board.wait(time.monotonic() + scaled(20), lambda: not board._unproven and _are_closed(idle))
    rank = threading.Thread(target=lambda: idle.append(_fake_rank(board.port, 3)), daemon=True)
    rank.start()
    assert board.wait(time.monotonic() + scaled(20), lambda: board.accounted == {3})
    board.dismiss()


def test_a_hundred_of_each_attack_do_not_affect_the_server() -> None:
    """No attacker becomes a member, and a rank connects among them."""
    evil = json.dumps({"token": "right", "rank": 1, "host": "\x1b]0;PWNED\x07"}).encode()
    attacks = (b"[" * 100_000 + b"\n", evil + b"\n", b"x" * (1 << 20), bytes(32) + b"\xff" * 100,
               bytes(32) + len(evil).to_bytes(4, "big") + evil + bytes(32), b"\0", b"GET / HTTP/1.0\r\n\r\n")
    board = PreflightServer("127.0.0.1", 0, SECRET)

    def attack(data: bytes) -> None:
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", board.port)) as peer, contextlib.suppress(OSError):
                peer.sendall(data)

    attackers = [threading.Thread(target=attack, args=(data,), daemon=True) for data in attacks]
    for attacker in attackers:
        attacker.start()
    ranks: list[socket.socket] = []
    threading.Thread(target=lambda: ranks.append(_fake_rank(board.port, 3)), daemon=True).start()
    assert board.wait(time.monotonic() + scaled(60), lambda: board.accounted == {3}
                      and not any(attacker.is_alive() for attacker in attackers))
    board.wait(time.monotonic() + scaled(60), lambda: not board._unproven)
    assert [(member.rank, member.host, member.lost_in) for member in board.members] == [(3, "n0", None)]
    board.dismiss()
    for connection in ranks:
        connection.close()


def _are_closed(connections: list[socket.socket]) -> bool:
    for connection in connections:
        connection.setblocking(False)
        try:
            while connection.recv(4096):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
    return True


def test_invalid_unreached_files_are_skipped(tmp_path: Path) -> None:
    valid = {"rank": 1, "host": "n2", "reason": "refused", "address": "n1", "port": 1, "ranks_there": 2,
             "resolves_to": None, "interface": "eth0"}
    texts = [json.dumps(valid), "{", "[" * 100_000, "[]", json.dumps({**valid, "rank": "1"}),
             json.dumps({name: value for name, value in valid.items() if name != "reason"})]
    for number, text in enumerate(texts):
        (tmp_path / f"unreached-n{number}.json").write_text(text)
    assert read_unreached(tmp_path) == [valid]


def test_the_interface_of_an_open_connection_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            assert used_interfaces(addresses()) == ["lo"]
            assert used_interfaces(addresses(), frozenset({port})) == []


def test_a_worker_reports_an_error_before_it_leaves_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying an NCCL group waits for its ranks, so it is not destroyed after an error."""
    torch = pytest.importorskip("torch")
    dist, destroyed = torch.distributed, []
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(dist.get_backend()) or destroy())
    question = {"ask": "reduce links 0", "group": " 0", "index": 0, "size": 1}
    for backend, after in (("gloo", ["gloo"]), ("nccl", [])):
        worker = Worker()
        worker._device, worker._store, worker._store_port = torch.device("cpu"), dist.HashStore(), 1
        destroyed.clear()
        with monkeypatch.context() as broken:
            broken.setattr(dist, "get_backend", lambda backend=backend: backend)
            broken.setattr(dist, "all_reduce", lambda values: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                worker.measure(question)
            assert destroyed == []
            worker.leave_failed_group(question)
            assert destroyed == after
        if backend == "gloo":
            assert worker.measure({**question, "ask": "reduce links 1"})["bytes_per_second"] >= 0
        else:
            with pytest.raises(RuntimeError, match="this rank's group for reduce links 0 has failed"):
                worker.measure({**question, "ask": "reduce links 1"})
            destroy()
