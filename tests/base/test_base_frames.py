"""Signed messages: peers without the secret, replayed frames, and changed frames are rejected."""

from __future__ import annotations

import json

import pytest

from ezpz_llm.base.frames import OPENING_BYTES, Frames

SECRET, ANOTHER = bytes(range(32)), bytes(32)


def pair(server_secret: bytes = SECRET, client_secret: bytes = SECRET) -> tuple[Frames, Frames]:
    """Return a server and a client that have exchanged their openings."""
    server, client = Frames(server_secret, serves=True), Frames(client_secret, serves=False)
    assert server.feed(client.opening) == client.feed(server.opening) == []
    return server, client


def test_messages_in_small_pieces_arrive_in_order() -> None:
    server, client = Frames(SECRET, serves=True), Frames(SECRET, serves=False)
    client.feed(server.opening)
    messages = [{"n": number, "text": "é" * number} for number in range(50)]
    stream = client.opening + b"".join(map(client.pack, messages))
    received = [message for begin in range(0, len(stream), 7) for message in server.feed(stream[begin:begin + 7])]
    assert received == messages
    assert server.is_proven
    assert client.feed(server.pack({"welcome": 1})) == [{"welcome": 1}]


def test_peer_with_another_secret_is_rejected() -> None:
    server, client = pair(SECRET, ANOTHER)
    with pytest.raises(ValueError, match="not signed"):
        server.feed(client.pack({"rank": 1}))
    assert not server.is_proven
    with pytest.raises(ValueError, match="not signed"):
        client.feed(server.pack({"welcome": 1}))


def test_replayed_reflected_reordered_and_changed_frames_are_rejected() -> None:
    server, client = pair()
    first, second = client.pack({"rank": 1}), client.pack({"facts": {}})
    with pytest.raises(ValueError, match="not signed"):
        pair()[0].feed(first)
    with pytest.raises(ValueError, match="not signed"):
        client.feed(first)
    with pytest.raises(ValueError, match="not signed"):
        server.feed(second)
    server, client = pair()
    frame = client.pack({"rank": 1})
    assert server.feed(frame) == [{"rank": 1}]
    with pytest.raises(ValueError, match="not signed"):
        server.feed(frame)
    server, client = pair()
    changed = bytearray(client.pack({"rank": 1}))
    changed[10] ^= 1
    with pytest.raises(ValueError, match="not signed"):
        server.feed(changed)


def test_unauthenticated_peer_can_fill_only_4_kb() -> None:
    for begin in (b"[" * 100_000 + b"\n", b"GET / HTTP/1.0\r\n" * 10, b"\xff" * 10_000):
        with pytest.raises(ValueError):
            Frames(SECRET, serves=True).feed(bytes(OPENING_BYTES) + begin)
    server = Frames(SECRET, serves=True)
    server.feed(bytes(OPENING_BYTES) + (4096).to_bytes(4, "big"))
    server.feed(b"x" * (4096 + 31))
    with pytest.raises(ValueError, match="not signed"):
        server.feed(b"x")


def test_frames_of_an_authenticated_peer_are_limited() -> None:
    server, client = pair()
    server.feed(client.pack({"rank": 1}))
    with pytest.raises(ValueError, match="too long"):
        server.feed((1 << 24).to_bytes(4, "big"))
    server, client = pair()
    deep: list = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        server.feed(client.pack({"facts": deep}))
    server, client = pair()
    with pytest.raises(ValueError, match="not a message"):
        server.feed(client.pack(json.loads("[1]")))
