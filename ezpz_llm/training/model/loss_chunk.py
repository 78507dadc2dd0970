"""Default chunk size of the loss, for the trainer and the memory estimate (imports no torch)."""

from __future__ import annotations

_ON_CPU, _LEAST, _UNKNOWN, _MOST = 2 ** 26, 2 ** 26, 2 ** 27, 2 ** 29
"""Numbers of logits in a default chunk. With fewer logits, the sum of the chunks' weight gradients is costly, and
matmuls with few rows are slow: with 131,072 columns, 2^27 logits are 1024 tokens, and each chunk moves 8 to 12
bytes per element of the head's weight gradient."""
_SHARE, _LOGIT_BYTES = 24, 6
"""A chunk may use 1/_SHARE of the device's memory, with _LOGIT_BYTES per logit (bf16 plus fp32)."""
_ROWS = 64
"""Multiple of tokens in a default chunk, for tensor cores."""


def max_logits(device_type: str, memory: int | None) -> int:
    """Return the maximum number of logits in a chunk.

    This is 2^26 on CPU, and 2^27 for an unknown memory. On other devices, it is the largest power of two that uses
    at most 1/24 of the memory, between 2^26 and 2^29 (from 78 GB).

    Args:
        memory: bytes of device memory; None if unknown.
    """
    if device_type == "cpu":
        return _ON_CPU
    if memory is None:
        return _UNKNOWN
    fit = memory // (_SHARE * _LOGIT_BYTES)
    return min(_MOST, max(_LEAST, 1 << (max(1, fit).bit_length() - 1)))


def choose_chunk(tokens: int, columns: int, most: int) -> int:
    """Return the default number of tokens per chunk: equal chunks with at most `most` logits."""
    most = max(_ROWS, most // columns // _ROWS * _ROWS)
    chunks = -(-tokens // most)
    return -(-tokens // chunks // _ROWS) * _ROWS
