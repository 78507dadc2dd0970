"""Messages between the processes of one run over TCP: limited in size, and signed with the run's secret.

Each side opens with a random number. From both numbers and the secret comes the key of this one connection, with
which every frame is signed, together with its direction and its count. So each frame proves its sender, nothing can
be replayed or put in between, and a stranger learns nothing but a random number.

A frame is its length in 4 bytes, JSON, and the signature.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from typing import Any

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.outside import parse_json

OPENING_BYTES = 32

_LENGTH_BYTES, _SIGNATURE_BYTES = 4, 32
_FIRST_LIMIT, _LIMIT = 4096, 1 << 23


class Frames:
    """State of one side of a connection, without its socket: turns received bytes into messages."""

    def __init__(self, secret: bytes, *, serves: bool) -> None:
        self.opening = os.urandom(OPENING_BYTES)
        """First bytes to send, before the peer is known."""
        self._secret = secret
        self._serves = serves
        self._key: bytes | None = None
        self._buffer = bytearray()
        self._sent, self._received = 0, 0

    @property
    def is_open(self) -> bool:
        """Has the other side's opening come? `pack` needs it."""
        return self._key is not None

    @property
    def is_proven(self) -> bool:
        """Has the other side shown that it knows the secret?"""
        return self._received > 0

    def pack(self, message: Mapping[str, Any]) -> bytes:
        """Return a message as a frame."""
        body = json.dumps(message, separators=(",", ":")).encode()
        signature = self._signature(self._serves, self._sent, body)
        self._sent += 1
        return len(body).to_bytes(_LENGTH_BYTES, "big") + body + signature

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes.

        Raises:
            ValueError: the other side does not know the secret, or sends more than it may: not one of ours.
        """
        self._buffer += data
        if self._key is None:
            if len(self._buffer) < OPENING_BYTES:
                return []
            theirs = bytes(self._buffer[:OPENING_BYTES])
            del self._buffer[:OPENING_BYTES]
            both = self.opening + theirs if self._serves else theirs + self.opening
            self._key = hmac.digest(self._secret, b"ezpz_llm frames" + both, hashlib.sha256)
        messages, begin = [], 0
        while (body := self._next(begin)) is not None:
            begin += _LENGTH_BYTES + len(body) + _SIGNATURE_BYTES
            messages.append(_message(body))
        del self._buffer[:begin]
        return messages

    def _next(self, begin: int) -> bytes | None:
        """The body of the frame at `begin`, once all of it is there."""
        start = begin + _LENGTH_BYTES
        if len(self._buffer) < start:
            return None
        length = int.from_bytes(self._buffer[begin:start], "big")
        if length > (_LIMIT if self.is_proven else _FIRST_LIMIT):
            raise ValueError("a frame is too long")
        end = start + length
        if len(self._buffer) < end + _SIGNATURE_BYTES:
            return None
        body, signature = bytes(self._buffer[start:end]), self._buffer[end:end + _SIGNATURE_BYTES]
        if not hmac.compare_digest(signature, self._signature(not self._serves, self._received, body)):
            raise ValueError("a frame is not signed with this run's secret")
        self._received += 1
        return body

    def _signature(self, by_server: bool, count: int, body: bytes) -> bytes:
        if self._key is None:
            raise ValueError("nothing can be signed before the other side's opening")
        return hmac.digest(self._key, bytes([by_server]) + count.to_bytes(8, "big") + body, hashlib.sha256)


def _message(body: bytes) -> dict[str, Any]:
    try:
        message = parse_json(body, "a message", _LIMIT)
    except UserError as error:
        raise ValueError(error.found) from error
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message
