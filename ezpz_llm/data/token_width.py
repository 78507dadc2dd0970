"""Detect the token type of a raw file, which has no header, from its values.

Tokens of four or eight bytes have a small upper half, so if they are read as uint16, every second value is small. A
true uint16 stream practically never looks like that: if m of 2n tokens in random order are small, the probability
that all n at every second position are small is at most (m / 2n)^n. Files are rejected if it is below 10^-9.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ezpz_llm.base import UserError
from ezpz_llm.data.downloads import reading

CHECKED_TOKENS = 32 << 20
"""Maximum number of tokens to check before a run starts (well under a second); longer files are sampled."""
_BLOCKS, _BLOCK_BYTES = 64, 1 << 14
_MAX_IDS = 1 << 20
"""Upper limit for plausible ids, four times the largest vocabulary in use."""
_CHANCE = 1e-9
_WIDE = {"<u8": "64-bit integers", ">u8": "big-endian 64-bit integers", "<u4": "uint32 or int32",
         ">u4": "big-endian uint32 or int32"}
_NARROW = {"<u2": "uint16", ">u2": "big-endian uint16"}
_MIN_TEXT = 128
"""Minimum size of a text check in bytes; 64 true uint16 tokens are valid UTF-8 with a probability below 10^-9."""


def check_uint16(path: Path) -> None:
    """Check that a file of raw tokens does not look like wider tokens or bytes.

    Raises:
        UserError: it does; the message names the likely data type and the conversion.
    """
    with reading(path):
        content = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    sample = _sample(content)
    for dtype, name in _WIDE.items():
        if _looks_like_ids(sample.view(dtype)):
            largest = int(_upper_half(sample.view(dtype)).max())
            raise UserError(f"these tokens look like {name}, not uint16: as uint16, every second token would be "
                            f"{largest if largest == 0 else f'at most {largest}'}", where=str(path),
                            instead=_convert_advice(path, dtype))
    if _looks_like_bytes(content[:_BLOCK_BYTES]):
        raise UserError("this file looks like text or one-byte tokens, not uint16", where=str(path),
                        instead="if it is text, rename it to .txt and pass its path; if it contains tokens, "
                                + _convert_advice(path, "u1"))


def other_type_advice(tokens: np.memmap, vocab_size: int) -> str:
    """Return advice to use the first other data type in which all sampled tokens fit the vocabulary, or ""."""
    path = Path(str(tokens.filename))
    sample = _sample(np.memmap(path, np.uint8, "r", tokens.offset))
    types = {**_WIDE, **_NARROW, **({"u1": "uint8"} if vocab_size <= 256 else {})}
    for dtype, name in types.items():
        if np.dtype(dtype) != tokens.dtype and sample.size and sample.view(dtype).max() < vocab_size:
            advice = (_convert_advice(path, dtype) if path.suffix == ".bin"
                      else "write the file again with that type")
            return f"; or, since all tokens fit as {name}, {advice}"
    return ""


def _convert_advice(path: Path, dtype: str) -> str:
    """Return advice to convert the raw tokens in `path`'s folder to .npy files, whose header has the data type."""
    code = (f"import numpy as n; [n.save(f'tokens_{{s}}_000000.npy', n.fromfile(s + '.bin', '{dtype}')"
            f".astype('{'u2' if dtype in ('u1', '>u2') else 'u4'}')) for s in ('train', 'val')]")
    return f'convert them: cd {shlex.quote(str(path.parent))} && python3 -c "{code}"'


def pieces(tokens: np.ndarray, max_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield parts of `tokens` with their positions: all of them up to `max_tokens`, else evenly spread samples."""
    length = max(1, min(tokens.size, _BLOCK_BYTES))
    count = -(-tokens.size // length)
    for number in np.linspace(0, count - 1, min(count, max(2, max_tokens // length))).astype(int).tolist():
        yield number * length, tokens[number * length:(number + 1) * length]


def _sample(content: np.ndarray) -> np.ndarray:
    """Return a multiple of 8 bytes, spread over the file."""
    whole = content[:content.size // 8 * 8]
    return np.concatenate([np.empty(0, np.uint8), *(part for _, part in pieces(whole, _BLOCKS * _BLOCK_BYTES))])


def _upper_half(items: np.ndarray) -> np.ndarray:
    return items >> np.array(4 * items.itemsize, items.dtype)


def _looks_like_ids(items: np.ndarray) -> bool:
    """Return True if wide items look like ids, and narrower tokens would practically never look like this."""
    if not items.size or items.max() >= _MAX_IDS:
        return False
    upper = _upper_half(items)
    largest = upper.max()
    lower = items & np.array((1 << 4 * items.itemsize) - 1, items.dtype)
    small = items.size + np.count_nonzero(lower <= largest)
    # Frequent ids are below 65,536. The factor 16 is for the choice of `largest`.
    return upper.min() == 0 and bool(16 * (small / (2 * items.size)) ** items.size < _CHANCE)


def _looks_like_bytes(content: np.ndarray) -> bool:
    """Return True for UTF-8 text, except uint16 tokens of a small vocabulary, whose upper bytes are small."""
    if content.size < _MIN_TEXT or np.median(content[1::2]) < 16:
        return False
    try:
        content.tobytes().decode()
    except UnicodeDecodeError as error:
        return error.start > content.size - 4  # a character that continues after the block
    return True
