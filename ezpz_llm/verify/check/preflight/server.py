"""Server side of preflight: authenticate ranks, receive their facts, and request measurements.

A thread per connection authenticates the peer and receives its messages, so that an invalid or slow peer does
not delay the others. All state changes in the thread that calls `wait`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from ezpz_llm.core.base import UserError, escape_control_characters
from ezpz_llm.launcher.basics.addresses import describe_port_holder, listen, local_address
from ezpz_llm.launcher.basics.processes import allow_many_files
from ezpz_llm.verify.check.facts import Facts, Measurement
from ezpz_llm.verify.check.preflight.endpoint import Endpoint, candidate_ports
from ezpz_llm.verify.check.preflight.messages import (
    CLOCK,
    END,
    FACTS,
    Introduction,
    Reply,
    Request,
    authenticate,
    receive,
    send,
)

_DISCONNECTED = (EOFError, OSError, UserError)
"""Errors after which a connection ends. UserError is an invalid message."""
_ACCEPT_AGAIN_S = 0.05


@dataclass(eq=False)
class Member:
    """Connection of a rank.

    Attributes:
        asked_at: Unix time of each request, by stage.
        replied: stages with a reply.
        clock: offset of the member's clock and its uncertainty (half the round trip) in seconds; None if unknown.
        lost_in: stage in which the connection ended; None if it is open.
    """

    connection: Connection
    rank: int
    host: str
    asked_at: dict[str, float] = field(default_factory=dict)
    replied: set[str] = field(default_factory=set)
    facts: Facts | None = None
    clock: tuple[float, float] | None = None
    stages: dict[str, Measurement] = field(default_factory=dict)
    lost_in: str | None = None

    @property
    def stuck_in(self) -> str | None:
        """First stage without a reply, except for the clock; None if all have one."""
        return next((stage for stage in self.asked_at if stage not in self.replied and stage != CLOCK), None)


class PreflightServer:
    """Server with a connection per rank. Every wait has a time limit."""

    def __init__(self, endpoint: Endpoint) -> None:
        allow_many_files()
        self._secret = endpoint.secret
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stage = "its introduction"
        self._waiting_for: set[Member] = set()
        self.members: list[Member] = []
        self.accounted: set[int] = set()
        """Ranks that have sent their facts or have disconnected."""
        self.port_error: str | None = None
        self._listener = self._listen(endpoint)
        self.endpoint = Endpoint(local_address(self._listener), self._listener.getsockname()[1], endpoint.secret)
        threading.Thread(target=self._accept, daemon=True).start()

    def _listen(self, endpoint: Endpoint) -> socket.socket:
        ports = candidate_ports(endpoint.port)
        for port in ports:
            try:
                return listen(endpoint.address, port)
            except OSError as error:
                self.port_error = self.port_error or _describe(error, port)
        raise UserError(f"cannot bind any of the ports {ports[0]} to {ports[-1]}: {self.port_error}",
                        where=f"MASTER_PORT={ports[0]} on {socket.gethostname()}",
                        instead="set another MASTER_PORT")

    def wait(self, until: float, done: Callable[[], bool]) -> bool:
        """Serve until `done()` or the monotonic time `until`. Return True if done."""
        while not done():
            remaining_s = until - time.monotonic()
            if remaining_s <= 0:
                return False
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=min(remaining_s, 0.5))()
        return True

    def ask(self, requests: Mapping[Member, Request], until: float) -> None:
        """Send requests of one stage, and wait until `until` for the replies, which are stored in the members."""
        self._waiting_for = {member for member in requests if member.lost_in is None}
        for member in tuple(self._waiting_for):
            self._stage = requests[member].stage
            member.asked_at[self._stage] = time.time()
            self._send(member, requests[member])
        self.wait(until, lambda: not self._waiting_for)

    def dismiss(self) -> None:
        """Tell the ranks that preflight has ended, which makes them disconnect, and stop listening."""
        for member in self.members:
            if member.lost_in is None:
                self._send(member, Request(END))
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()
            except (OSError, RuntimeError) as error:
                if isinstance(error, OSError) and error.errno in (errno.EBADF, errno.EINVAL):
                    return
                time.sleep(_ACCEPT_AGAIN_S)  # too many open files or threads

    def _serve(self, peer: socket.socket) -> None:
        connection = authenticate(peer, self._secret, self.endpoint.port, serves=True)
        if connection is None:
            return
        try:
            introduction = receive(connection, Introduction)
            send(connection, Request(FACTS))
        except _DISCONNECTED:
            connection.close()
            return
        member = Member(connection, introduction.rank, escape_control_characters(introduction.host))
        self._events.put(functools.partial(self.members.append, member))
        with contextlib.suppress(*_DISCONNECTED):
            while True:
                reply = receive(connection, Reply)
                self._events.put(functools.partial(self._take, member, reply, time.time()))
        self._events.put(functools.partial(self._close, member))

    def _take(self, member: Member, reply: Reply, arrived: float) -> None:
        member.replied.add(reply.stage)
        if reply.stage == FACTS:
            member.facts = reply.facts
            self.accounted.add(member.rank)
        elif reply.stage == CLOCK and CLOCK in member.asked_at:
            half = (arrived - member.asked_at[CLOCK]) / 2
            member.clock = (reply.time - member.asked_at[CLOCK] - half, half)
        elif reply.answer:
            member.stages[reply.stage] = reply.answer
        if reply.stage == self._stage:
            self._waiting_for.discard(member)

    def _send(self, member: Member, request: Request) -> None:
        """Send a request. This does not block: a preflight's few short requests fit into any socket's buffer."""
        try:
            send(member.connection, request)
        except OSError:
            self._lose(member)

    def _close(self, member: Member) -> None:
        self._lose(member)
        member.connection.close()

    def _lose(self, member: Member) -> None:
        if member.lost_in is None:
            member.lost_in = self._stage
            self._waiting_for.discard(member)
            self.accounted.add(member.rank)


def _describe(error: OSError, port: int) -> str:
    # Without the address that listen() adds to the message.
    text = os.strerror(error.errno) if error.errno else str(error)
    return f"{text}: {describe_port_holder(port)}" if error.errno == errno.EADDRINUSE else text
