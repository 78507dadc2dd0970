"""Signed messages: what a stranger, a replay, or somebody in between can make of them. Nothing."""

from __future__ import annotations

import json

import pytest

from ezpz_llm.base.frames import OPENING_BYTES, Frames

SECRET, ANOTHER = bytes(range(32)), bytes(32)


def pair(one: bytes = SECRET, other: bytes = SECRET) -> tuple[Frames, Frames]:
    """A server and a client that have each other's openings."""
    server, client = Frames(one, serves=True), Frames(other, serves=False)
    assert server.feed(client.opening) == client.feed(server.opening) == []
    return server, client


def test_messages_arrive_in_order_however_they_are_cut() -> None:
    server, client = Frames(SECRET, serves=True), Frames(SECRET, serves=False)
    client.feed(server.opening)
    messages = [{"n": number, "text": "é" * number} for number in range(50)]
    stream = client.opening + b"".join(map(client.pack, messages))
    found = [message for begin in range(0, len(stream), 7) for message in server.feed(stream[begin:begin + 7])]
    assert found == messages
    assert server.is_proven
    assert client.feed(server.pack({"welcome": 1})) == [{"welcome": 1}]


def test_who_has_another_secret_is_not_believed() -> None:
    server, client = pair(SECRET, ANOTHER)
    with pytest.raises(ValueError, match="not signed"):
        server.feed(client.pack({"rank": 1}))
    assert not server.is_proven
    with pytest.raises(ValueError, match="not signed"):
        client.feed(server.pack({"welcome": 1}))


def test_nothing_is_replayed_reflected_reordered_or_changed() -> None:
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


def test_a_stranger_can_make_it_keep_a_few_kilobytes() -> None:
    for begin in (b"[" * 100_000 + b"\n", b"GET / HTTP/1.0\r\n" * 10, b"\xff" * 10_000):
        with pytest.raises(ValueError):
            Frames(SECRET, serves=True).feed(bytes(OPENING_BYTES) + begin)
    patient = Frames(SECRET, serves=True)
    patient.feed(bytes(OPENING_BYTES) + (4096).to_bytes(4, "big"))
    patient.feed(b"x" * (4096 + 31))
    with pytest.raises(ValueError, match="not signed"):
        patient.feed(b"x")


def test_one_of_ours_sends_nothing_without_end_either() -> None:
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
