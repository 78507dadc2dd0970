"""Default number of logits in a chunk of the loss, for trainer and memory estimate (imports no torch)."""

from __future__ import annotations

_ON_CPU, _LEAST, _UNKNOWN, _MOST = 2 ** 26, 2 ** 26, 2 ** 27, 2 ** 29
"""Logits of a chunk that is chosen here. Fewer make the sum of the chunks' weight gradients costly, and matrix
products of few rows slow: of 131,072 columns 2^27 logits are 1024 tokens, and each chunk moves 12 bytes of every
element of the head's weight gradient."""
_SHARE, _LOGIT_BYTES = 24, 6
"""Part of a device's memory that a chunk may take; bytes of a logit, in bf16 and beside it in fp32."""
_ROWS = 64
"""A chosen chunk is a multiple of so many tokens, which matrix units want."""


def most_logits(device_type: str, memory: int | None) -> int:
    """The most logits of a chunk: on devices the largest power of two that takes at most a 24th of their memory.

    From 2^26 to 2^29, which is reached with 78 GB.

    Args:
        memory: bytes of the device's own, None where that is not known.
    """
    if device_type == "cpu":
        return _ON_CPU
    if memory is None:
        return _UNKNOWN
    fit = memory // (_SHARE * _LOGIT_BYTES)
    return min(_MOST, max(_LEAST, 1 << (max(1, fit).bit_length() - 1)))


def chosen_chunk(tokens: int, columns: int, most: int) -> int:
    """How many tokens to take at once, where nobody said: equal chunks of at most so many logits."""
    most = max(_ROWS, most // columns // _ROWS * _ROWS)
    chunks = -(-tokens // most)
    return -(-tokens // chunks // _ROWS) * _ROWS
