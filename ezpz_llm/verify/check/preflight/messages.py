"""Messages between rank 0 and the other ranks of a preflight: JSON over `multiprocessing.connection`.

Nothing is unpickled. Connections are authenticated, but messages are neither signed nor encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TypeVar

from msgspec import Struct

from ezpz_llm.core.base import parse_json
from ezpz_llm.core.base.records import Ranks, Whole, as_plain, as_record
from ezpz_llm.verify.check.facts import Facts, Measurement, StoreLocation

AUTHENTICATE_S = 2.0
"""Time for the peer of a new connection to authenticate."""

FACTS, CLOCK, END = "facts", "clock", "end"
"""Stages besides the measurements: a rank's facts, which are requested first, its time, and the end."""

_MAX_MESSAGE = 1 << 23


class Introduction(Struct, frozen=True, forbid_unknown_fields=True):
    """First message of a rank."""

    rank: Whole
    host: str


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """Request of rank 0 for a stage.

    Attributes:
        serve: in stage READY, create the store for all ranks.
        group, index, size: in an all-reduce, name of the group, this rank's index in it, and its number of ranks.
        store: in an all-reduce, location of the store: a file, or an address and a port.
    """

    stage: str
    serve: bool = False
    group: str = ""
    index: Whole = 0
    size: Ranks = 1
    store: StoreLocation = ""


class Reply(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Reply of a rank for a stage: its facts, its Unix time, or a measurement."""

    stage: str
    answer: Measurement | None = None
    facts: Facts | None = None
    time: float = 0.0


Message = TypeVar("Message", Introduction, Request, Reply)


def send(connection: Connection, message: Introduction | Request | Reply) -> None:
    """Send a message. Raises OSError if the peer has closed the connection."""
    connection.send_bytes(json.dumps(as_plain(message)).encode())


def receive(connection: Connection, kind: type[Message]) -> Message:
    """Wait for a message and return it.

    Raises:
        EOFError, OSError: the peer has closed the connection, or sent a message of more than 8 MiB.
        UserError: the message is invalid.
    """
    return as_record(kind, parse_json(connection.recv_bytes(_MAX_MESSAGE), "a message"), "a message")


def authenticate(peer: socket.socket, secret: bytes, port: int, *, serves: bool) -> Connection | None:
    """Return a connection once both sides have proved that they know the secret, rank 0 first.

    Detaches `peer` from its descriptor. Returns None if the other side does not belong to this run or takes longer
    than AUTHENTICATE_S.

    Args:
        port: port on which rank 0 listens.
        serves: True on rank 0.
    """
    # Each side has its own key, so that a stranger cannot return a proof to the side that sent it. The keys depend
    # on the port, so that a stranger on another port of the node cannot forward rank 0's proof.
    first_key, second_key = (hmac.digest(secret, f"preflight, {side}, port {port}".encode(), "sha256")
                             for side in ("rank 0", "other ranks"))
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(peer.fileno())
    # A time limit per read would not end an exchange with a peer that sends one byte at a time.
    timer = threading.Timer(AUTHENTICATE_S, _shut_down, [peer])
    timer.daemon = True
    timer.start()
    try:
        if serves:
            answer_challenge(connection, first_key)
            deliver_challenge(connection, second_key)
        else:
            deliver_challenge(connection, first_key)
            answer_challenge(connection, second_key)
        is_proven = True
    except (AuthenticationError, AssertionError, EOFError, OSError, ValueError):
        is_proven = False
    timer.cancel()
    peer.detach()
    if is_proven:
        return connection
    connection.close()
    return None


def _shut_down(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
