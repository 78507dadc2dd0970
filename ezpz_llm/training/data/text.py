"""Prepare text for a tokenizer: replace lone surrogates, and cut long texts without changing their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

_CONTEXT = 1024
"""Bytes on each side of a cut that are tokenized to check it: enough for many words in any script."""
_TRIES = 32
"""Candidate positions to try per separator.

A tokenizer that can be cut at a separator at all can be cut at most of its occurrences.
"""


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, with U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def find_cut(data: bytes) -> int:
    """Return a position near the end where a cut changes no token of bytes, char and gpt2.

    It is before the last suitable space, else after the last suitable newline; 0 if there is none. No pre-token of
    GPT-2 contains text on both sides of a single space or newline between two non-whitespace characters: a space
    belongs to the next word, and a newline is a separate pre-token. The other two tokenizers can be cut anywhere.
    """
    return next(_positions_between_words(data, b" ", 0), 0) or next(_positions_between_words(data, b"\n", 1), 0)


def find_checked_cut(data: bytes, encode: Callable[[str], np.ndarray],
                encode_rest: Callable[[str], np.ndarray]) -> int:
    """Do the same as `find_cut` for any tokenizer, by trying positions with the tokenizer itself.

    The check tokenizes the 1 KiB before and after the position, together and separately, and compares the tokens.
    So the cut could be wrong for a tokenizer whose tokens depend on text more than 1 KiB away; BPE, WordPiece and
    unigram models depend on a few words.

    Args:
        encode: returns the ids of a text.
        encode_rest: returns the ids of a text that continues a document.

    Returns:
        A position in `data`; 0 if there is none.
    """
    for separator, shift in ((b" ", 0), (b"\n", 1)):
        positions = _positions_between_words(data[:max(0, len(data) - _CONTEXT)], separator, shift)
        for place, _ in zip(positions, range(_TRIES), strict=False):
            before = data[max(0, place - _CONTEXT):place].decode("utf-8", "ignore")
            after = data[place:place + _CONTEXT].decode("utf-8", "ignore")
            if np.array_equal(encode(before + after), np.concatenate([encode(before), encode_rest(after)])):
                return place
    return 0


def _positions_between_words(data: bytes, separator: bytes, shift: int) -> Iterator[int]:
    """Yield the cuts at separators between two non-whitespace characters, from the last to the first.

    A cut is before the separator (shift 0) or after it (shift 1).
    """
    place = len(data)
    while (place := data.rfind(separator, 0, place)) > 0:
        # A character has at most four bytes; the decoder ignores an incomplete one at the outer end.
        before = data[max(0, place - 4):place].decode("utf-8", "ignore")
        after = data[place + 1:place + 5].decode("utf-8", "ignore")
        if before and after and not before[-1].isspace() and not after[0].isspace():
            yield place + shift
