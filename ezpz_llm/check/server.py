"""Rank 0's side: each rank that connects proves that it is of this run, tells its facts and answers what it is
asked, or is late. A bad peer is lost, and nothing else."""

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

from ezpz_llm.base import UserError, cleaned, make_private, run_secret
from ezpz_llm.base.frames import Frames
from ezpz_llm.launch.addresses import holder, listen, own_end
from ezpz_llm.launch.master_variables import require_master_address, require_master_port
from ezpz_llm.rundir import RunDir

PORTS_TRIED = 8
"""MASTER_PORT and the numbers after it: the port itself may be held, by torchrun's agent or by a stranger."""
FIRST_WORDS_S = 2.0
"""So long one side of a new connection waits for the other's proof."""

_SECRET_FILE, _SECRET_BYTES = "preflight-secret", 32


@dataclass(frozen=True)
class Place:
    """Where rank 0 listens, and the secret by which it is told from strangers."""

    address: str
    port: int
    secret: bytes


def candidate_ports(port: int) -> list[int]:
    """Where rank 0 listens: the first of these that it can bind."""
    return [one for one in range(port, port + PORTS_TRIED) if one < 65536]


def rendezvous_point(env: Mapping[str, str], world_size: int) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT; the loopback and any port for a single rank.

    Raises:
        UserError: several ranks and no address, or no number.
    """
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if world_size == 1:
        return "127.0.0.1", 0
    if not address or not port:
        missing = "MASTER_PORT" if address else "MASTER_ADDR"
        raise UserError(f"{world_size} ranks have no {missing} to meet at", where="environment",
                        instead="launch python3 -m ezpz_llm.preflight, which sets both")
    require_master_address(address)
    return address, require_master_port(port)


def secret_of(env: Mapping[str, str], run_dir: RunDir) -> bytes:
    """By what the ranks of one run know each other: launch's secret, else one that the first of them puts into a
    file of the run directory, which the user alone can read.

    Raises:
        UserError: that file cannot be made, or is not the user's alone.
    """
    if (known := run_secret(env)) is not None:
        return known
    try:
        run_dir.control.parent.mkdir(parents=True, exist_ok=True)
        with make_private(run_dir.control) as folder:
            with contextlib.suppress(FileExistsError):
                folder.create(_SECRET_FILE, os.urandom(_SECRET_BYTES))
            # Another rank may be about to write it.
            deadline = time.monotonic() + FIRST_WORDS_S
            while len(found := folder.read(_SECRET_FILE)) < _SECRET_BYTES and time.monotonic() < deadline:
                time.sleep(0.05)
    except OSError as error:
        raise UserError(f"the ranks' common secret cannot be kept: {error.strerror}", where=str(error.filename),
                        instead="start with launch, or --run-dir with a folder of yours") from error
    if len(found) < _SECRET_BYTES:
        raise UserError("the ranks' common secret was never written to its end",
                        where=str(run_dir.control / _SECRET_FILE), instead="remove that file")
    return found


FACTS = "facts"
"""The stage that each rank answers unasked: all that it can tell without torch."""
CLOCK = "clock"
"""Stages in which a rank is asked for its time begin with this."""

_READ_BYTES = 1 << 18
_MOST_UNPROVEN = 1024
"""Connections that have not yet proven to be of this run; one more ends the oldest of them."""


@dataclass(eq=False)
class Member:
    """One connected rank. `lost_in` is the stage in which its connection ended."""

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
        """The first question, other than for its clock, that it has not answered."""
        open_stages = (stage for stage in self.asked if stage not in self.replies and not stage.startswith(CLOCK))
        return next(open_stages, None)


class Board:
    """Listens for the ranks. One thread, one connection a rank; nothing here waits longer than it is told to."""

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        _allow_many_files()
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self.port_error: str | None = None
        self._listener = self._listen(address, port)
        self.address, self.port = own_end(self._listener), self._listener.getsockname()[1]
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._stage = "its first words"
        self._waiting_for: set[Member] = set()
        self._unproven: dict[Member, None] = {}
        self.members: list[Member] = []
        self.accounted: set[int] = set()
        """Ranks that have told their facts, or are gone."""

    def _listen(self, address: str, port: int) -> socket.socket:
        for candidate in candidate_ports(port):
            try:
                return listen(address, candidate)
            except OSError as error:
                self.port_error = self.port_error or _why(error, candidate)
        raise UserError(f"none of the ports {port} to {candidate_ports(port)[-1]} can be bound: {self.port_error}",
                        where=f"MASTER_PORT={port} on {socket.gethostname()}", instead="another MASTER_PORT")

    def wait(self, until: float, done: Callable[[], bool]) -> bool:
        """Listen until `done()` or the monotonic time `until`; whether it was done."""
        while not done():
            left = until - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self._selector.select(min(left, 0.5)):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            self._drop_unproven()
        return True

    def ask(self, stage: str, questions: Mapping[Member, Mapping[str, Any]], until: float) -> None:
        """Ask members something and wait for the answers, which are then in `Member.replies[stage]`."""
        self._stage = stage
        self._waiting_for = {member for member in questions if member.lost_in is None}
        for member in tuple(self._waiting_for):
            member.asked.append(stage)
            self._send(member, member.frames.pack({"ask": stage, **questions[member]}))
        self.wait(until, lambda: not self._waiting_for)

    def clock_of(self, member: Member, until: float) -> tuple[float, float] | None:
        """The member's clock minus this one in seconds, and how far that may be off (half the fastest round trip);
        None where it does not answer."""
        found: tuple[float, float] | None = None
        for turn in range(3):
            stage, sent = f"{CLOCK} {turn}", time.time()
            self.ask(stage, {member: {}}, min(until, time.monotonic() + 1))
            if (answer := member.replies.get(stage)) is None:
                return found
            half = (time.time() - sent) / 2
            if found is None or half < found[1]:
                found = (answer["time"] - sent - half, half)
        return found

    def dismiss(self) -> None:
        """Tell everybody that it is over, and close."""
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
            member = Member(connection, Frames(self._secret, serves=True), time.monotonic() + FIRST_WORDS_S)
            self._selector.register(connection, selectors.EVENT_READ, member)
            self._unproven[member] = None
            self._send(member, member.frames.opening)

    def _drop_unproven(self) -> None:
        """Those who are late, or too many: the oldest come first."""
        now = time.monotonic()
        for member in list(self._unproven):
            if member.prove_by > now and len(self._unproven) <= _MOST_UNPROVEN:
                break
            self._lose(member)

    def _read(self, member: Member) -> None:
        try:
            data = member.connection.recv(_READ_BYTES)
            for message in member.frames.feed(data):
                self._take(member, message)
        except BlockingIOError:
            return
        except Exception:  # whatever one of them sends, it costs that one alone
            data = b""
        if not data:
            self._lose(member)

    def _take(self, member: Member, message: dict[str, Any]) -> None:
        if member.rank < 0:
            rank, member.host = int(message["rank"]), cleaned(str(message["host"]))
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
        """Without waiting: the few short frames of a preflight find room in the buffer of any socket."""
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


def _why(error: OSError, port: int) -> str:
    # listen() lengthens the message with the address.
    text = os.strerror(error.errno) if error.errno else str(error)
    return f"{text}: {holder(port)}" if error.errno == errno.EADDRINUSE else text


def _allow_many_files() -> None:
    # A connection a rank: the usual soft limit of 1024 is for programs that use select().
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
