"""A rank's side: reach rank 0, tell it the facts, and answer what it asks until it says that it is over."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ezpz_llm.base.frames import Frames
from ezpz_llm.base.outside import read_json
from ezpz_llm.base.schema import as_type
from ezpz_llm.errors import UserError
from ezpz_llm.launch.ranks import RankInfo
from ezpz_llm.preflight.facts.environment import environment_facts
from ezpz_llm.preflight.facts.host import host_facts
from ezpz_llm.preflight.facts.network import network_facts
from ezpz_llm.preflight.facts.software import versions
from ezpz_llm.preflight.measuring import Measuring
from ezpz_llm.preflight.wire import FIRST_WORDS_S, Place, candidate_ports
from ezpz_llm.rundir import write_json

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
    """Whether it is rank 0 that listens there, and not somebody who takes his time to say nothing."""
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


class Client:
    """One rank in conversation with rank 0."""

    def __init__(self, connection: Connection, info: RankInfo, env: Mapping[str, str]) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._measuring = Measuring(env, self._answer)
        threading.Thread(target=self._tell_facts, args=(info, env), daemon=True).start()

    def converse(self) -> None:
        """Answer until rank 0 says that it is over, or is gone."""
        try:
            while data := self._connection.socket.recv(1 << 16):
                for message in self._connection.frames.feed(data):
                    if message["ask"] == "end":
                        return
                    self._obey(message)
        except (OSError, ValueError):
            return
        finally:
            self._measuring.end()

    def _obey(self, message: dict[str, Any]) -> None:
        if message["ask"].startswith("clock"):
            self._answer(message["ask"], {"time": time.time()})
        elif message["ask"] == "network":
            self._answer("network", self._measuring.network())
        else:
            self._measuring.ask(message)

    def _tell_facts(self, info: RankInfo, env: Mapping[str, str]) -> None:
        self._send({"facts": gather_facts(info, env)})

    def _answer(self, stage: str, answer: Mapping[str, Any]) -> None:
        self._send({"stage": stage, "answer": answer})

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._connection.socket.sendall(self._connection.frames.pack(message))
