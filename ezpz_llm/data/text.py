"""Text on its way to a tokenizer: characters that no UTF-8 can hold, and where a long text may be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

_CONTEXT = 1024
"""Bytes on either side of a cut that are encoded to check it: many words of any script."""
_TRIES = 32
"""Places looked at of each kind before the text is taken further: a tokenizer that allows a kind allows most."""


def whole_characters(text: str) -> str:
    """`text` with lone surrogates, which no UTF-8 can hold, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def cut_text(data: bytes) -> int:
    """The last place where cutting changes no token of bytes, char and gpt2; 0 where there is none.

    GPT-2's pieces never reach over a single space or newline between two characters that are not white space: a
    space belongs to the word after it, a newline stands alone. So the cut is before such a space, or after such
    a newline. The other two can be cut anywhere.
    """
    return next(_between_words(data, b" ", 0), 0) or next(_between_words(data, b"\n", 1), 0)


def checked_cut(data: bytes, encode: Callable[[str], np.ndarray],
                encode_rest: Callable[[str], np.ndarray]) -> int:
    """A place like `cut_text`'s that keeps the tokens of the text around it, tried with the tokenizer itself.

    The tokens of the kilobyte on either side are compared, so a tokenizer whose choice at one place depends on text
    more than a kilobyte away could be cut wrongly; BPE, WordPiece and unigram models choose within a few words.

    Args:
        encode: gives the ids of a text.
        encode_rest: gives the ids of a text that goes on in the middle of a document.

    Returns:
        A place in `data`; 0 where none is found.
    """
    for separator, shift in ((b" ", 0), (b"\n", 1)):
        places = _between_words(data[:max(0, len(data) - _CONTEXT)], separator, shift)
        for place, _ in zip(places, range(_TRIES), strict=False):
            before = data[max(0, place - _CONTEXT):place].decode("utf-8", "ignore")
            after = data[place:place + _CONTEXT].decode("utf-8", "ignore")
            if np.array_equal(encode(before + after), np.concatenate([encode(before), encode_rest(after)])):
                return place
    return 0


def _between_words(data: bytes, separator: bytes, shift: int) -> Iterator[int]:
    """Each place, from the last, of a separator between two characters that are not white space."""
    place = len(data)
    while (place := data.rfind(separator, 0, place)) > 0:
        # At most four bytes make a character; what is cut off at either end is ignored, not its neighbour.
        before = data[max(0, place - 4):place].decode("utf-8", "ignore")
        after = data[place + 1:place + 5].decode("utf-8", "ignore")
        if before and after and not before[-1].isspace() and not after[0].isspace():
            yield place + shift
