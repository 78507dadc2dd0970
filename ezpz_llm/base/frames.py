"""Size-limited TCP messages between the processes of one run, signed with the run's secret.

Each side first sends a random number. The connection's key is derived from both numbers and the secret. A
signature with that key covers the direction, the sequence number, and the body of each frame. This authenticates
the sender and rejects replayed or injected frames. Frames are not encrypted. Before the peer has proved that it
knows the secret (`is_proven`), a server must send only its random number.

A frame consists of its length (4 bytes), a JSON body, and the signature.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from typing import Any

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.untrusted_input import parse_json

OPENING_BYTES = 32

_LENGTH_BYTES, _SIGNATURE_BYTES = 4, 32
_MAX_FIRST_BODY, _MAX_BODY = 4096, 1 << 23


class Frames:
    """Protocol state of a side of a connection, without the socket: packs messages, and parses received bytes."""

    def __init__(self, secret: bytes, *, serves: bool) -> None:
        self.opening = os.urandom(OPENING_BYTES)
        """Random number: the first bytes to send."""
        self._secret = secret
        self._serves = serves
        self._key: bytes | None = None
        self._buffer = bytearray()
        self._sent, self._received = 0, 0

    @property
    def is_open(self) -> bool:
        """True once the peer's random number has arrived. `pack` requires it."""
        return self._key is not None

    @property
    def is_proven(self) -> bool:
        """True once the peer has proved that it knows the secret."""
        return self._received > 0

    def pack(self, message: Mapping[str, Any]) -> bytes:
        """Return a message as a frame."""
        body = json.dumps(message, separators=(",", ":")).encode()
        signature = self._signature(self._serves, self._sent, body)
        self._sent += 1
        return len(body).to_bytes(_LENGTH_BYTES, "big") + body + signature

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add received bytes, and return the messages that they complete.

        Raises:
            ValueError: the peer does not know the secret, or sent a frame that is invalid or too long.
        """
        self._buffer += data
        if self._key is None:
            if len(self._buffer) < OPENING_BYTES:
                return []
            peer_opening = bytes(self._buffer[:OPENING_BYTES])
            del self._buffer[:OPENING_BYTES]
            openings = self.opening + peer_opening if self._serves else peer_opening + self.opening
            self._key = hmac.digest(self._secret, b"ezpz_llm frames" + openings, hashlib.sha256)
        messages, begin = [], 0
        while (body := self._next_body(begin)) is not None:
            begin += _LENGTH_BYTES + len(body) + _SIGNATURE_BYTES
            messages.append(_parse_message(body))
        del self._buffer[:begin]
        return messages

    def _next_body(self, begin: int) -> bytes | None:
        """Return the body of the frame at `begin`, or None if the frame is incomplete."""
        body_start = begin + _LENGTH_BYTES
        if len(self._buffer) < body_start:
            return None
        length = int.from_bytes(self._buffer[begin:body_start], "big")
        if length > (_MAX_BODY if self.is_proven else _MAX_FIRST_BODY):
            raise ValueError("a frame is too long")
        end = body_start + length
        if len(self._buffer) < end + _SIGNATURE_BYTES:
            return None
        body, signature = bytes(self._buffer[body_start:end]), self._buffer[end:end + _SIGNATURE_BYTES]
        if not hmac.compare_digest(signature, self._signature(not self._serves, self._received, body)):
            raise ValueError("a frame is not signed with this run's secret")
        self._received += 1
        return body

    def _signature(self, by_server: bool, count: int, body: bytes) -> bytes:
        if self._key is None:
            raise ValueError("cannot sign a frame before the peer's opening has arrived")
        return hmac.digest(self._key, bytes([by_server]) + count.to_bytes(8, "big") + body, hashlib.sha256)


def _parse_message(body: bytes) -> dict[str, Any]:
    try:
        message = parse_json(body, "a message", _MAX_BODY)
    except UserError as error:
        raise ValueError(error.found) from error
    if not isinstance(message, dict):
        raise ValueError("not a message: the body must be a JSON object")
    return message
