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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from launch_runs import clean_env, cpu_seconds, launch
from msgspec.structs import replace
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.records import as_plain, as_record
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.verify.check.facts import Compute, Facts, Mpi, Ready, Reduction, find_answer
from ezpz_llm.verify.check.node_facts import addresses, gather_facts, used_interfaces
from ezpz_llm.verify.check.preflight.client import connect, connect_and_serve, read_unreached
from ezpz_llm.verify.check.preflight.endpoint import Endpoint, rendezvous_point
from ezpz_llm.verify.check.preflight.measurements import Worker
from ezpz_llm.verify.check.preflight.messages import (
    CLOCK,
    FACTS,
    Introduction,
    Reply,
    Request,
    authenticate,
    receive,
    send,
)
from ezpz_llm.verify.check.preflight.rules.gathered import Unreached
from ezpz_llm.verify.check.preflight.server import PreflightServer

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
    ranks = [as_record(Facts, {**report["common"], **own}, "preflight.json") for own in report["ranks"]]
    assert [facts.rank for facts in ranks] == [0, 1]
    for facts in ranks:
        assert facts.host == socket.gethostname()
        assert set(facts.cores) <= os.sched_getaffinity(0)
        mpi, compute, ready = (find_answer(facts.stages, kind) for kind in (Mpi, Compute, Ready))
        assert isinstance(mpi, Mpi)
        assert mpi.size == 2
        assert isinstance(compute, Compute)
        assert compute.flops_per_second > 1e8
        reduction = facts.stages["reduce node"]
        assert isinstance(reduction, Reduction)
        assert reduction.bytes_per_second > 1e5
        assert isinstance(ready, Ready)
        assert facts.versions["torch"].startswith(ready.torch)
    assert ranks[0].clock is not None
    assert abs(ranks[0].clock[0]) < 1


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


_connections: list[Connection] = []
"""Connections of fake ranks, which the fixture `server` closes."""


@pytest.fixture
def server() -> Iterator[PreflightServer]:
    preflight_server = PreflightServer(Endpoint("127.0.0.1", 0, SECRET))
    yield preflight_server
    preflight_server.dismiss()
    while _connections:
        _connections.pop().close()


def _fake_rank(server: PreflightServer, rank: int, secret: bytes = SECRET) -> bool:
    """Connect as a rank, and add the connection to `_connections`. Return False if the server rejects it."""
    port = server.endpoint.port
    connection = authenticate(socket.create_connection(("127.0.0.1", port), timeout=20), secret, port, serves=False)
    if connection is None:
        return False
    _connections.append(connection)
    send(connection, Introduction(rank, f"n{rank // 8}"))
    assert receive(connection, Request) == Request(FACTS)
    info = RankInfo(rank, 8, rank, 8, 0, "test", ("x" * 3000,))
    send(connection, Reply(FACTS, facts=gather_facts(info, {})))
    return True


def _start_ranks(server: PreflightServer, count: int) -> None:
    """Connect ranks in a thread, in order."""
    threading.Thread(target=lambda: [_fake_rank(server, rank) for rank in range(count)], daemon=True).start()


def test_the_server_accepts_a_thousand_ranks(server: PreflightServer) -> None:
    """Lost ranks are noticed, and those that do not reply do not block the server."""
    _start_ranks(server, 1000)
    assert server.wait(time.monotonic() + scaled(60), lambda: len(server.accounted) == 1000)
    members = {member.rank: member for member in server.members}
    assert members.keys() == set(range(1000))
    _connections[7].close()
    server.ask({members[7]: Request("stage")}, time.monotonic() + scaled(10))
    assert members[7].lost_in == "stage"
    began = time.monotonic()
    server.ask(dict.fromkeys(server.members, Request("late")), began + 0.5)
    assert 0.4 < time.monotonic() - began < scaled(5)
    assert {member.stuck_in for member in server.members if member.rank != 7} == {"late"}
    assert receive(_connections[8], Request) == Request("late")
    server.dismiss()
    assert receive(_connections[8], Request) == Request("end")


def test_the_clock_of_a_rank_is_compared(server: PreflightServer) -> None:
    _start_ranks(server, 1)
    assert server.wait(time.monotonic() + scaled(20), lambda: server.accounted == {0})
    (member,) = server.members
    assert member.clock is None

    def answer() -> None:
        assert receive(_connections[0], Request) == Request(CLOCK)
        send(_connections[0], Reply(CLOCK, time=time.time() + 500))

    threading.Thread(target=answer, daemon=True).start()
    server.ask({member: Request(CLOCK)}, time.monotonic() + scaled(20))
    assert member.clock is not None
    offset, within = member.clock
    assert abs(offset - 500) <= within + 0.01
    assert member.stuck_in is None


def _accept_in_threads(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Serve each connection in a thread until the listener is closed."""
    def serve_and_close(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            serve(peer)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve_and_close, args=listener.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            target.sendall(data)


def _record(heard: list[bytes], peer: socket.socket) -> None:
    while data := peer.recv(4096):
        heard.append(data)


def _drip(peer: socket.socket) -> None:
    peer.sendall(b"\0\0\0\xff")
    while True:
        peer.sendall(b"x")
        time.sleep(0.02)


def test_another_program_on_the_port_learns_nothing_and_does_not_block_a_rank(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is silent, sends a byte every 20 ms, echoes, sends garbage, or is rank 0 of another run."""
    monkeypatch.setattr("ezpz_llm.verify.check.preflight.messages.AUTHENTICATE_S", 0.3)
    heard: list[bytes] = []
    programs: dict[str, Callable[[socket.socket], object]] = {
        "silent": lambda peer: _record(heard, peer), "drip": _drip, "echo": lambda peer: _pump(peer, peer),
        "garbage": lambda peer: peer.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n"),
        "another run": lambda peer: authenticate(peer, bytes(32), peer.getsockname()[1], serves=True)}
    for serve in programs.values():
        with socket.create_server(("127.0.0.1", 0)) as squatter:
            _accept_in_threads(squatter, serve)
            endpoint, turns = Endpoint("127.0.0.1", squatter.getsockname()[1], SECRET), iter([False, False, True])
            assert connect(endpoint, RankInfo(1, 2, 1, 2, 0, "test"), None, lambda turns=turns: next(turns)) is None
    # Two challenges: a length, a prefix, and random bytes. Neither a proof, nor the rank or hostname.
    assert len(heard) == 2
    assert all(data[4:].startswith(b"#CHALLENGE#") for data in heard)
    assert not any(socket.gethostname().encode() in data for data in heard)


def test_a_program_that_passes_messages_on_to_rank_0_is_not_accepted(server: PreflightServer) -> None:
    def relay(peer: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", server.endpoint.port)) as rank_0:
            threading.Thread(target=_pump, args=(rank_0, peer), daemon=True).start()
            _pump(peer, rank_0)

    with socket.create_server(("127.0.0.1", 0)) as squatter:
        _accept_in_threads(squatter, relay)
        port = squatter.getsockname()[1]
        peer = socket.create_connection(("127.0.0.1", port))
        assert authenticate(peer, SECRET, port, serves=False) is None
    assert not server.wait(time.monotonic() + 0.2, lambda: bool(server.members))


def test_a_stranger_cannot_return_rank_0s_own_proof(server: PreflightServer) -> None:
    """The stranger returns each of rank 0's messages on a second connection, and its replies on the first."""
    address = "127.0.0.1", server.endpoint.port
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        # Python 3.12 names the digest in the challenge.
        challenge = b"#CHALLENGE#" + (b"{sha256}" if sys.version_info >= (3, 12) else b"") + bytes(40)
        first.sendall(len(challenge).to_bytes(4, "big") + challenge)
        first_connection, second_connection = Connection(first.detach()), Connection(second.detach())
        first_connection.recv_bytes(256)
        first_connection.send_bytes(b"#WELCOME#")
        challenge_of_server = first_connection.recv_bytes(256)
        second_connection.send_bytes(challenge_of_server)
        first_connection.send_bytes(second_connection.recv_bytes(256))
        assert first_connection.recv_bytes(256) == b"#FAILURE#"
    assert not server.wait(time.monotonic() + 0.2, lambda: bool(server.members))


def test_a_rank_that_is_disconnected_before_the_first_request_tries_again() -> None:
    """Rank 0 disconnects if its time limit for authentication expires just after the last message."""
    accepted: list[int] = []

    def serve(peer: socket.socket) -> None:
        connection = authenticate(peer, SECRET, port, serves=True)
        assert connection is not None
        with connection:
            accepted.append(receive(connection, Introduction).rank)
            if len(accepted) > 1:
                send(connection, Request("end"))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        _accept_in_threads(listener, serve)
        endpoint = Endpoint("127.0.0.1", port, SECRET)
        assert connect_and_serve(endpoint, RankInfo(1, 2, 1, 2, 0, "test"), os.environ, None, lambda: False)
    assert accepted == [1, 1]


def test_the_server_drops_silent_strangers(server: PreflightServer) -> None:
    """Silent connections are closed after a while, and a rank connects among them."""
    idle = [socket.create_connection(("127.0.0.1", server.endpoint.port)) for _ in range(200)]
    _start_ranks(server, 1)
    assert server.wait(time.monotonic() + scaled(20), lambda: server.accounted == {0})
    assert server.wait(time.monotonic() + scaled(20), lambda: _are_closed(idle))


def test_a_hundred_of_each_attack_do_not_affect_the_server(server: PreflightServer) -> None:
    """No attacker becomes a member, and a rank connects among them."""
    evil = json.dumps({"rank": 1, "host": "\x1b]0;PWNED\x07"}).encode()
    attacks = (b"[" * 100_000 + b"\n", evil + b"\n", b"x" * (1 << 20), b"\xff" * 100, bytes(100), b"\0",
               len(evil).to_bytes(4, "big") + evil, b"\xff\xff\xff\xff" + b"\x7f" * 8, b"GET / HTTP/1.0\r\n\r\n")
    address = "127.0.0.1", server.endpoint.port

    def attack(data: bytes) -> None:
        for _ in range(100):
            with socket.create_connection(address) as peer, contextlib.suppress(OSError):
                peer.sendall(data)

    attackers = [threading.Thread(target=attack, args=(data,), daemon=True) for data in attacks]
    for attacker in attackers:
        attacker.start()
    _start_ranks(server, 1)
    assert server.wait(time.monotonic() + scaled(60), lambda: server.accounted == {0}
                       and not any(attacker.is_alive() for attacker in attackers))
    assert not _fake_rank(server, 4, secret=bytes(32))
    assert [(member.rank, member.host, member.lost_in) for member in server.members] == [(0, "n0", None)]


@pytest.mark.parametrize("message", [
    b"", b"[1]", b"{", b'{"rank": "1", "host": "n1"}', b'{"rank": 1}', b"[" * 500 + b"]" * 500,
    b'{"rank": 1, "host": "n1", "more": 1}', b"x" * ((1 << 23) + 1)])
def test_invalid_messages_of_a_rank_are_rejected(message: bytes) -> None:
    ours, theirs = socket.socketpair()
    threading.Thread(target=_send_bytes, args=(ours, message), daemon=True).start()
    with ours, Connection(theirs.detach()) as receiver, pytest.raises((UserError, OSError)):
        receive(receiver, Introduction)


def _send_bytes(peer: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):
        peer.sendall(len(message).to_bytes(4, "big") + message)


def test_a_rank_that_sends_an_invalid_reply_is_lost(server: PreflightServer) -> None:
    _start_ranks(server, 1)
    assert server.wait(time.monotonic() + scaled(20), lambda: server.accounted == {0})
    _connections[0].send_bytes(b'{"stage": 1}')
    server.wait(time.monotonic() + scaled(20), lambda: server.members[0].lost_in is not None)
    assert server.members[0].lost_in == "its introduction"


@pytest.mark.parametrize(("change", "message"), [
    ({"facts": {"cores": ["x"]}}, "facts.cores[0] is 'x', but must be a whole number"),
    ({"facts": {"memory": {"total": 1}}}, "facts.memory.free is missing"),
    ({"facts": {"tmp": []}}, "facts.tmp is a list, but must be an object"),
    ({"facts": {"stages": {"ready": {"error": "x"}}}}, "facts.stages.ready.type is missing"),
    ({"answer": {"type": "ready", "torch": "2"}}, "answer.device is missing"),
    ({"answer": {"type": "other"}}, "answer.type is 'other'"),
    ({"answer": {"type": "compute", "flops_per_second": "fast"}},
     "answer.flops_per_second is 'fast', but must be a number"),
])
def test_invalid_facts_and_measurements_are_rejected(change: dict, message: str) -> None:
    reply = as_plain(Reply(FACTS, facts=gather_facts(RankInfo(0, 1, 0, 1, 0, "test"), {})))
    reply["facts"] |= change.pop("facts", {})
    ours, theirs = socket.socketpair()
    _send_bytes(ours, json.dumps(reply | change).encode())
    with ours, Connection(theirs.detach()) as receiver, pytest.raises(UserError) as caught:
        receive(receiver, Reply)
    assert message in str(caught.value)


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
    assert read_unreached(tmp_path) == [Unreached(**valid)]


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
    request = Request("reduce links 0", group=" 0", index=0, size=1)
    for backend, after in (("gloo", ["gloo"]), ("nccl", [])):
        worker = Worker()
        worker._device, worker._store, worker._store_port = torch.device("cpu"), dist.HashStore(), 1
        destroyed.clear()
        with monkeypatch.context() as broken:
            broken.setattr(dist, "get_backend", lambda backend=backend: backend)
            broken.setattr(dist, "all_reduce", lambda values: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                worker.measure(request)
            assert destroyed == []
            worker.leave_failed_group(request)
            assert destroyed == after
        if backend == "gloo":
            assert isinstance(worker.measure(replace(request, stage="reduce links 1")), Reduction)
        else:
            with pytest.raises(RuntimeError, match="this rank's group for reduce links 0 has failed"):
                worker.measure(replace(request, stage="reduce links 1"))
            destroy()
