"""Client side of preflight: connect to rank 0, send facts, and run measurements on request."""

from __future__ import annotations

import collections
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypedDict, cast

from ezpz_llm.base import EXIT_PREFLIGHT, UserError, as_type, parse_json, read_json
from ezpz_llm.base.frames import Frames
from ezpz_llm.check.node_facts import (
    environment_facts,
    is_about_network,
    network_facts,
    node_facts,
    read_network,
    versions,
)
from ezpz_llm.check.report import report_path
from ezpz_llm.check.rules.gathered import MPI, NETWORK
from ezpz_llm.check.server import CLOCK, FACTS, FIRST_WORDS_S, Place, candidate_ports
from ezpz_llm.launch.ranks import RankInfo
from ezpz_llm.rundir import RunDir, write_json

_CONNECT_TIMEOUT_S = 2.0
_REPORT_UNREACHED_AFTER_S = 8.0
_UNREACHED = "unreached-*.json"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Connection:
    """Authenticated connection to rank 0."""

    socket: socket.socket
    frames: Frames


def gather_facts(info: RankInfo, env: Mapping[str, str]) -> dict[str, Any]:
    """Return all facts of this rank that do not need torch."""
    return {
        "rank": info.rank, "world_size": info.world_size, "local_rank": info.local_rank,
        "local_size": info.local_size, "node_rank": info.node_rank, "rank_source": info.source,
        "rank_notes": list(info.notes), **node_facts(), **network_facts(env), **environment_facts(env),
        "versions": versions(),
    }


def connect(place: Place, info: RankInfo, folder: Path | None,
            is_over: Callable[[], bool]) -> Connection | None:
    """Connect to rank 0, retrying until `is_over()`.

    After 8 s without success, write the reason into `folder`, once per node, so that rank 0 learns of nodes that
    cannot reach it.
    """
    began, pause = time.monotonic(), 0.05
    is_reported = False
    while not is_over():
        result = _try_ports(place, info)
        if isinstance(result, Connection):
            return result
        if folder and not is_reported and time.monotonic() - began > _REPORT_UNREACHED_AFTER_S:
            is_reported = True
            _report_unreached(folder, place, info, result)
        # Jitter, because thousands of ranks retrying at the same moment would block each other.
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(1.0, pause * 1.5)
    return None


def _try_ports(place: Place, info: RankInfo) -> Connection | str:
    first_reason = ""
    for port in candidate_ports(place.port):
        try:
            connection = socket.create_connection((place.address, port), timeout=_CONNECT_TIMEOUT_S)
        except TimeoutError:
            return "timed out"
        except ConnectionRefusedError:
            first_reason = first_reason or "refused"
            continue
        except OSError as error:
            return str(error.strerror or error)
        frames = Frames(place.secret, serves=False)
        if _authenticate(connection, frames, info):
            return Connection(connection, frames)
        connection.close()
        first_reason = first_reason or "answered by another program"
    return first_reason


def _authenticate(connection: socket.socket, frames: Frames, info: RankInfo) -> bool:
    """Return True if the peer proves within 2 s that it is rank 0."""
    deadline, is_introduced = time.monotonic() + FIRST_WORDS_S, False
    try:
        connection.sendall(frames.opening)
        while not frames.is_proven:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            data = connection.recv(1 << 12)
            frames.feed(data)
            if not data or time.monotonic() > deadline:
                return False
            if frames.is_open and not is_introduced:
                connection.sendall(frames.pack({"rank": info.rank, "host": socket.gethostname()}))
                is_introduced = True
        connection.settimeout(None)
    except (OSError, ValueError):
        return False
    return True


def _report_unreached(folder: Path, place: Place, info: RankInfo, reason: str) -> None:
    host = socket.gethostname()
    path = folder / _UNREACHED.replace("*", re.sub(r"[^A-Za-z0-9_.-]", "_", host))
    facts = network_facts({"MASTER_ADDR": place.address})
    with contextlib.suppress(OSError):
        if not path.exists():
            write_json(path, {"rank": info.rank, "host": host, "reason": reason, "address": place.address,
                              "port": place.port, "ranks_there": info.local_size,
                              "resolves_to": facts["master"]["resolves_to"],
                              "interface": facts["route"]["interface"]})


def unreached_files(folder: Path) -> list[Path]:
    """Return the files that nodes wrote because they could not reach rank 0."""
    return sorted(folder.glob(_UNREACHED))


class _Unreached(TypedDict):
    rank: int
    host: str
    reason: str
    address: str
    port: int
    ranks_there: int
    resolves_to: str | None
    interface: str | None


def read_unreached(folder: Path) -> list[dict[str, Any]]:
    """Return the reports of nodes that could not reach rank 0."""
    reports = []
    for path in unreached_files(folder):
        # Skip damaged files and files of other programs.
        with contextlib.suppress(UserError):
            reports.append(as_type(_Unreached, read_json(path, _MAX_BYTES), str(path)))
    return reports


def connect_and_serve(place: Place, info: RankInfo, env: Mapping[str, str], folder: Path | None,
                      is_over: Callable[[], bool]) -> bool:
    """Connect to rank 0 (see `connect`) and serve it to the end. Return False if it was not reached."""
    connection = connect(place, info, folder, is_over)
    if connection is not None:
        serve_questions(connection, info, env)
    return connection is not None


def serve_questions(connection: Connection, info: RankInfo, env: Mapping[str, str]) -> None:
    """Send this rank's facts to rank 0 and answer its questions until it ends or disconnects."""
    sending, measuring = threading.Lock(), Measuring(env)

    def answer(question: Mapping[str, Any]) -> None:
        """Answer a question of rank 0: facts, time, network, or a measurement."""
        stage = question["ask"]
        if stage == FACTS:
            reply: Mapping[str, Any] = gather_facts(info, env)
        elif stage.startswith(CLOCK):
            reply = {"time": time.time()}
        elif stage == NETWORK:
            reply = measuring.network()
        else:
            reply = measuring.answer(question)
        with sending, contextlib.suppress(OSError):
            connection.socket.sendall(connection.frames.pack({"stage": stage, "answer": reply}))

    def begin(question: Mapping[str, Any]) -> None:
        """Answer a question in a new thread, since a stage may hang while rank 0 asks for the next."""
        threading.Thread(target=answer, args=(question,), daemon=True).start()

    begin({"ask": FACTS})
    try:
        while data := connection.socket.recv(1 << 16):
            for question in connection.frames.feed(data):
                if question["ask"] == "end":
                    return
                begin(question)
    except (OSError, ValueError):
        return
    finally:
        measuring.end()


_END_WITHIN_S = 3.0
_LAST_LINES = 6


class Measuring:
    """Subprocess `ezpz_llm.check.measurements`, which answers one question at a time.

    torch, drivers and collectives can hang or abort in it without affecting the rank.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._network: list[str] = []
        # Descriptors stay open, because MPI needs the one that its launcher passed to the rank.
        self._process = subprocess.Popen([sys.executable, "-m", "ezpz_llm.check.measurements"],
                                         env=_logging_environment(env), close_fds=False, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._questions, self._answers, self._output = cast(
            "tuple[IO[bytes], IO[bytes], IO[bytes]]",
            (self._process.stdin, self._process.stdout, self._process.stderr))
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the process's answer, or an error with how it ended."""
        line = b""
        with contextlib.suppress(OSError):
            self._questions.write(json.dumps(question).encode() + b"\n")
            self._questions.flush()
            # Skip what Python prints at startup, such as from a site's sitecustomize.
            line = next((text for text in self._answers if text.startswith(b"{")), b"")
        if line:
            if question["ask"] == MPI:
                # MPI ends only when the process has exited normally, and MPICH's launcher treats a rank that exits
                # before that as failed.
                self._process.wait()
            return parse_json(line, "the measuring process")
        self._listener.join(1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return {"error": f"the measuring process {_describe_exit(self._process.returncode)}: "
                         f"{' | '.join(self._last) or 'it printed nothing'}"}

    def network(self) -> dict[str, str]:
        """Return the network that the communication library chose, from its log."""
        return read_network(self._network)

    def end(self) -> None:
        """Let the process exit, and kill it after 3 s."""
        with contextlib.suppress(OSError):
            self._questions.close()
        try:
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _listen(self) -> None:
        for line in self._output:
            text = line.decode(errors="replace").rstrip()
            if is_about_network(text):
                self._network.append(text)
            elif text:
                self._last.append(text)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "does not answer"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _logging_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the rank's environment with NCCL, RCCL and oneCCL set to log the network they choose."""
    log_settings = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "CCL_LOG_LEVEL": "info"}
    return {name: value for name, value in env.items() if name != "NCCL_DEBUG_FILE"} | log_settings


_GRACE_S = 5.0


def run_client(info: RankInfo, env: Mapping[str, str], run_dir: RunDir, rendezvous: Place, limit_s: float) -> int:
    """Run the client side of a rank other than 0 and return exit code 0: rank 0 decides.

    Raises:
        UserError: rank 0 is missing. It could not be reached and wrote no report.
    """
    began, until = time.time(), time.monotonic() + limit_s + _GRACE_S
    path = report_path(run_dir)

    def is_over() -> bool:
        """Return True once rank 0 has written its report or the time is up."""
        # Ignore a report of an earlier preflight in the same directory.
        has_report = path.exists() and path.stat().st_mtime > began - _GRACE_S
        return has_report or time.monotonic() > until

    if connect_and_serve(rendezvous, info, env, run_dir.path, is_over) or time.monotonic() < until:
        return 0
    raise UserError(f"rank {info.rank} on {socket.gethostname()} waited {limit_s:.0f} s for rank 0 at MASTER_ADDR "
                    f"{rendezvous.address}:{rendezvous.port}, but it neither answered nor wrote a report",
                    where="rank 0's node, or the network to it",
                    instead="see logs/rank0000.log in the run directory", exit_code=EXIT_PREFLIGHT)
