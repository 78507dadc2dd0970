"""A rank's side of preflight: reach rank 0, send it the facts, and have measured what it asks for."""

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
from ezpz_llm.check.facts import (
    environment_facts,
    host_facts,
    is_about_network,
    network_facts,
    read_network,
    versions,
)
from ezpz_llm.check.judge.gathered import MPI, NETWORK
from ezpz_llm.check.report import report_path
from ezpz_llm.check.server import CLOCK, FACTS, FIRST_WORDS_S, Place, candidate_ports
from ezpz_llm.launch.ranks import RankInfo
from ezpz_llm.rundir import RunDir, write_json

_CONNECT_TIMEOUT_S = 2.0
_SAY_SO_AFTER_S = 8.0
_UNREACHED = "unreached-*.json"
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Connection:
    """A connection to rank 0, which has proven to be it."""

    socket: socket.socket
    frames: Frames


def gather_facts(info: RankInfo, env: Mapping[str, str]) -> dict[str, Any]:
    """All that this rank can tell without torch."""
    return {
        "rank": info.rank, "world_size": info.world_size, "local_rank": info.local_rank,
        "local_size": info.local_size, "node_rank": info.node_rank, "rank_source": info.source,
        "rank_notes": list(info.notes), **host_facts(), **network_facts(env), **environment_facts(env),
        "versions": versions(),
    }


def reach(place: Place, info: RankInfo, folder: Path | None,
          is_over: Callable[[], bool]) -> Connection | None:
    """A connection to rank 0, tried until `is_over()`.

    After some seconds without one, the reason is written into `folder`, once a host: that is how rank 0 hears of
    hosts that cannot reach it.
    """
    began, pause = time.monotonic(), 0.05
    has_said = False
    while not is_over():
        found = _try_ports(place, info)
        if isinstance(found, Connection):
            return found
        if folder and not has_said and time.monotonic() - began > _SAY_SO_AFTER_S:
            has_said = True
            _say_unreached(folder, place, info, found)
        # Thousands of ranks that try again at the same moment would keep each other out.
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
        if _greet(connection, frames, info):
            return Connection(connection, frames)
        connection.close()
        first_reason = first_reason or "answered by another program"
    return first_reason


def _greet(connection: socket.socket, frames: Frames, info: RankInfo) -> bool:
    """True if it is rank 0 that listens there, and not somebody who takes his time to say nothing."""
    deadline, said = time.monotonic() + FIRST_WORDS_S, False
    try:
        connection.sendall(frames.opening)
        while not frames.is_proven:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            data = connection.recv(1 << 12)
            frames.feed(data)
            if not data or time.monotonic() > deadline:
                return False
            if frames.is_open and not said:
                connection.sendall(frames.pack({"rank": info.rank, "host": socket.gethostname()}))
                said = True
        connection.settimeout(None)
    except (OSError, ValueError):
        return False
    return True


def _say_unreached(folder: Path, place: Place, info: RankInfo, reason: str) -> None:
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
    """Where they wrote it."""
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
    """What hosts wrote that could not reach rank 0."""
    found = []
    for path in unreached_files(folder):
        # One that is damaged, or was never ours, is passed over.
        with contextlib.suppress(UserError):
            found.append(as_type(_Unreached, read_json(path, _MOST_BYTES), str(path)))
    return found


def take_part(place: Place, info: RankInfo, env: Mapping[str, str], folder: Path | None,
              is_over: Callable[[], bool]) -> bool:
    """Reach rank 0 (see `reach`), tell it and answer it to the end; False where it was not reached."""
    connection = reach(place, info, folder, is_over)
    if connection is not None:
        converse(connection, info, env)
    return connection is not None


def converse(connection: Connection, info: RankInfo, env: Mapping[str, str]) -> None:
    """Tell rank 0 this rank's facts and answer it, until it says that it is over, or is gone."""
    sending, measuring = threading.Lock(), Measuring(env)

    def answer(question: Mapping[str, Any]) -> None:
        """Answer one question of rank 0's: facts, the time, the network, or what the measuring process finds."""
        stage = question["ask"]
        if stage == FACTS:
            found: Mapping[str, Any] = gather_facts(info, env)
        elif stage.startswith(CLOCK):
            found = {"time": time.time()}
        elif stage == NETWORK:
            found = measuring.network()
        else:
            found = measuring.answer(question)
        with sending, contextlib.suppress(OSError):
            connection.socket.sendall(connection.frames.pack({"stage": stage, "answer": found}))

    def begin(question: Mapping[str, Any]) -> None:
        """Answer a question in a thread of its own, since one stage may hang while the next is asked for."""
        # Each in a thread: facts and measuring may hang, and rank 0 asks for other things meanwhile.
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


# The process that measures, seen from its rank: torch, drivers and collectives can hang or abort in there, and
# the rank goes on talking.
_END_WITHIN_S = 3.0
_LAST_LINES = 6


class Measuring:
    """Starts `ezpz_llm.check.measure` and asks it one question at a time."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._network: list[str] = []
        # Descriptors stay open: MPI needs the one that its launcher gave to the rank.
        self._process = subprocess.Popen([sys.executable, "-m", "ezpz_llm.check.measure"], env=_talkative(env),
                                         close_fds=False, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.PIPE)
        self._questions, self._answers, self._output = cast(
            "tuple[IO[bytes], IO[bytes], IO[bytes]]",
            (self._process.stdin, self._process.stdout, self._process.stderr))
        self._words = threading.Thread(target=self._listen, daemon=True)
        self._words.start()

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What the process answers, sooner or later; how it ended, where it has."""
        line = b""
        with contextlib.suppress(OSError):
            self._questions.write(json.dumps(question).encode() + b"\n")
            self._questions.flush()
            # What Python prints while it starts, for a site, is no answer.
            line = next((one for one in self._answers if one.startswith(b"{")), b"")
        if line:
            if question["ask"] == MPI:
                # Until the process has ended in order MPI is not over, and to MPICH's launcher a rank that ends
                # before has failed.
                self._process.wait()
            return parse_json(line, "the measuring process")
        self._words.join(1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return {"error": f"the measuring process {_how(self._process.returncode)}: "
                         f"{' | '.join(self._last) or 'it said nothing'}"}

    def network(self) -> dict[str, str]:
        """What the communication library said about the network it chose."""
        return read_network(self._network)

    def end(self) -> None:
        """Let the process end in order, or end it."""
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


def _how(code: int | None) -> str:
    if code is None:
        return "does not answer"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _talkative(env: Mapping[str, str]) -> dict[str, str]:
    """The rank's environment, with which NCCL, RCCL and oneCCL say what they choose."""
    wanted = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "CCL_LOG_LEVEL": "info"}
    return {name: value for name, value in env.items() if name != "NCCL_DEBUG_FILE"} | wanted


# What every rank but the first does.
_GRACE_S = 5.0


def follow(info: RankInfo, env: Mapping[str, str], run_dir: RunDir, rendezvous: Place, limit_s: float) -> int:
    """Tell rank 0 everything; 0, since the verdict is rank 0's.

    Raises:
        UserError: rank 0 cannot be reached, and gave no verdict about that either: it is rank 0 that is missing.
    """
    began, until = time.time(), time.monotonic() + limit_s + _GRACE_S
    path = report_path(run_dir)

    def is_over() -> bool:
        """True once rank 0 has written its report, or the time is up."""
        # A report of an earlier preflight in the same directory says nothing about this one.
        is_judged = path.exists() and path.stat().st_mtime > began - _GRACE_S
        return is_judged or time.monotonic() > until

    if take_part(rendezvous, info, env, run_dir.path, is_over) or time.monotonic() < until:
        return 0
    raise UserError(f"rank {info.rank} on {socket.gethostname()} waited {limit_s:.0f} s for rank 0 at MASTER_ADDR "
                    f"{rendezvous.address}:{rendezvous.port}, which never gave a report",
                    where="rank 0's host, or the way to it",
                    instead="see logs/rank0000.log in the run directory", exit_code=EXIT_PREFLIGHT)
