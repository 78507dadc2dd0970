"""Server side of preflight: authenticate ranks, receive their facts, and request measurements.

An invalid or slow peer only loses its own connection.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ezpz_llm.base import UserError, escape_control_characters, make_private, run_secret
from ezpz_llm.base.frames import Frames
from ezpz_llm.launch.addresses import describe_port_holder, listen, local_address
from ezpz_llm.launch.master_variables import require_master_address, require_master_port
from ezpz_llm.rundir import RunDir

PORTS_TRIED = 8
"""Number of ports to try, from MASTER_PORT on: torchrun's agent or another program may hold MASTER_PORT."""
AUTHENTICATE_S = 2.0
"""Time for the peer of a new connection to authenticate."""

_SECRET_FILE, _SECRET_BYTES = "preflight-secret", 32


@dataclass(frozen=True)
class Endpoint:
    """Address and port at which rank 0 listens, and the run's shared secret."""

    address: str
    port: int
    secret: bytes


def candidate_ports(port: int) -> list[int]:
    """Return the ports on which rank 0 may listen; it uses the first that it can bind."""
    return [candidate for candidate in range(port, port + PORTS_TRIED) if candidate < 65536]


def rendezvous_point(env: Mapping[str, str], world_size: int) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT, or, for a single rank, the loopback address and any free port.

    Raises:
        UserError: there are several ranks, and a variable is missing or invalid.
    """
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if world_size == 1:
        return "127.0.0.1", 0
    if not address or not port:
        missing = "MASTER_PORT" if address else "MASTER_ADDR"
        raise UserError(f"{missing} is not set for {world_size} ranks", where="environment",
                        instead="launch python3 -m ezpz_llm.preflight, which sets both")
    require_master_address(address)
    return address, require_master_port(port)


def shared_secret(env: Mapping[str, str], run_dir: RunDir) -> bytes:
    """Return the run's shared secret.

    With launch, it is launch's secret. Without launch, the first rank creates it in a file in the run directory
    that only the user can read.

    Raises:
        UserError: the file cannot be created or is incomplete, or other users have access to its folder.
    """
    if (launch_secret := run_secret(env)) is not None:
        return launch_secret
    try:
        run_dir.control.parent.mkdir(parents=True, exist_ok=True)
        with make_private(run_dir.control) as folder:
            with contextlib.suppress(FileExistsError):
                folder.create(_SECRET_FILE, os.urandom(_SECRET_BYTES))
            # Another rank may still be writing it.
            deadline = time.monotonic() + AUTHENTICATE_S
            while len(secret := folder.read(_SECRET_FILE)) < _SECRET_BYTES and time.monotonic() < deadline:
                time.sleep(0.05)
    except OSError as error:
        raise UserError(f"cannot store the ranks' shared secret: {error.strerror}", where=str(error.filename),
                        instead="start with launch, or pass --run-dir with a folder that you own") from error
    if len(secret) < _SECRET_BYTES:
        raise UserError("the file with the ranks' shared secret is incomplete",
                        where=str(run_dir.control / _SECRET_FILE), instead="remove that file")
    return secret


FACTS = "facts"
"""Stage to which each rank replies without a request: all facts that do not need torch."""
CLOCK = "clock"
"""Prefix of stages that request a rank's time."""

_READ_BYTES = 1 << 18
_MAX_UNPROVEN = 1024
"""Maximum number of unauthenticated connections; a further connection drops the oldest."""


@dataclass(eq=False)
class Member:
    """Connection of a rank.

    Attributes:
        prove_by: monotonic time by which the peer must have authenticated.
        rank: -1 before authentication.
        asked: stages that were requested.
        lost_in: stage in which the connection ended; None if it is open.
    """

    connection: socket.socket
    frames: Frames
    prove_by: float
    rank: int = -1
    host: str = ""
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    lost_in: str | None = None

    @property
    def stuck_in(self) -> str | None:
        """First stage without a reply, except for clock stages; None if all have one."""
        open_stages = (stage for stage in self.asked if stage not in self.replies and not stage.startswith(CLOCK))
        return next(open_stages, None)


class PreflightServer:
    """Server with a connection per rank. It runs in the caller's thread, and every wait has a time limit."""

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        _allow_many_files()
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self.port_error: str | None = None
        self._listener = self._listen(address, port)
        self.address, self.port = local_address(self._listener), self._listener.getsockname()[1]
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._stage = "its introduction"
        self._waiting_for: set[Member] = set()
        self._unproven: dict[Member, None] = {}
        self.members: list[Member] = []
        self.accounted: set[int] = set()
        """Ranks that have sent their facts or have disconnected."""

    def _listen(self, address: str, port: int) -> socket.socket:
        for candidate in candidate_ports(port):
            try:
                return listen(address, candidate)
            except OSError as error:
                self.port_error = self.port_error or _describe(error, candidate)
        raise UserError(f"cannot bind any of the ports {port} to {candidate_ports(port)[-1]}: {self.port_error}",
                        where=f"MASTER_PORT={port} on {socket.gethostname()}", instead="set another MASTER_PORT")

    def wait(self, until: float, done: Callable[[], bool]) -> bool:
        """Serve until `done()` or the monotonic time `until`. Return True if done."""
        while not done():
            remaining_s = until - time.monotonic()
            if remaining_s <= 0:
                return False
            for key, _ in self._selector.select(min(remaining_s, 0.5)):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            self._drop_unproven()
        return True

    def ask(self, stage: str, requests: Mapping[Member, Mapping[str, Any]], until: float) -> None:
        """Send requests, and wait until `until` for the replies, which are stored in `Member.replies[stage]`."""
        self._stage = stage
        self._waiting_for = {member for member in requests if member.lost_in is None}
        for member in tuple(self._waiting_for):
            member.asked.append(stage)
            self._send(member, member.frames.pack({"ask": stage, **requests[member]}))
        self.wait(until, lambda: not self._waiting_for)

    def clock_of(self, member: Member, until: float) -> tuple[float, float] | None:
        """Return the member's clock offset and its uncertainty (half the fastest round trip) in seconds.

        None if it does not reply.
        """
        best: tuple[float, float] | None = None
        for attempt in range(3):
            stage, sent_at = f"{CLOCK} {attempt}", time.time()
            self.ask(stage, {member: {}}, min(until, time.monotonic() + 1))
            if (answer := member.replies.get(stage)) is None:
                return best
            half = (time.time() - sent_at) / 2
            if best is None or half < best[1]:
                best = (answer["time"] - sent_at - half, half)
        return best

    def dismiss(self) -> None:
        """Tell the ranks that preflight has ended, close all connections, and stop listening."""
        for member in self.members:
            if member.lost_in is None:
                self._send(member, member.frames.pack({"ask": "end"}))
                member.connection.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            member = Member(connection, Frames(self._secret, serves=True), time.monotonic() + AUTHENTICATE_S)
            self._selector.register(connection, selectors.EVENT_READ, member)
            self._unproven[member] = None
            self._send(member, member.frames.opening)

    def _drop_unproven(self) -> None:
        """Drop unauthenticated connections that are late or too many, oldest first."""
        now = time.monotonic()
        for member in list(self._unproven):
            if member.prove_by > now and len(self._unproven) <= _MAX_UNPROVEN:
                break
            self._lose(member)

    def _read(self, member: Member) -> None:
        try:
            data = member.connection.recv(_READ_BYTES)
            for message in member.frames.feed(data):
                self._handle(member, message)
        except BlockingIOError:
            return
        except Exception:  # invalid data must close only the sender's connection
            data = b""
        if not data:
            self._lose(member)

    def _handle(self, member: Member, message: dict[str, Any]) -> None:
        if member.rank < 0:
            rank, member.host = int(message["rank"]), escape_control_characters(str(message["host"]))
            if rank < 0:
                raise ValueError("not a rank")
            member.rank = rank
            del self._unproven[member]
            self.members.append(member)
            self._send(member, member.frames.pack({"welcome": rank}))
            return
        stage = message["stage"]
        member.replies[stage] = dict(message["answer"])
        if stage == FACTS:
            self.accounted.add(member.rank)
        if stage == self._stage:
            self._waiting_for.discard(member)

    def _send(self, member: Member, data: bytes) -> None:
        """Send without blocking: a preflight's few short frames fit into any socket's buffer."""
        try:
            if member.connection.send(data) < len(data):
                self._lose(member)
        except OSError:
            self._lose(member)

    def _lose(self, member: Member) -> None:
        if member.lost_in is None:
            member.lost_in = self._stage
            self._waiting_for.discard(member)
            self._unproven.pop(member, None)
            if member.rank >= 0:
                self.accounted.add(member.rank)
            self._selector.unregister(member.connection)
            member.connection.close()


def _describe(error: OSError, port: int) -> str:
    # Without the address that listen() adds to the message.
    text = os.strerror(error.errno) if error.errno else str(error)
    return f"{text}: {describe_port_holder(port)}" if error.errno == errno.EADDRINUSE else text


def _allow_many_files() -> None:
    # Each rank needs a connection. The usual soft limit of 1024 exists only for programs that use select().
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
