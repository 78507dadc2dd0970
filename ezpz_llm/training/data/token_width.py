"""Find the token type of a raw file: in llm.c's header, or detect from the values that it is not as declared.

Tokens of four or eight bytes have a small upper half, so if they are read as uint16, every second value is small. A
true uint16 stream practically never looks like that: if m of 2n tokens in random order are small, the probability
that all n at every second position are small is at most (m / 2n)^n. Files are rejected if it is below 10^-9.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ezpz_llm.core.base import UserError, open_regular
from ezpz_llm.training.data.downloads import reading
from ezpz_llm.training.data.nanogpt_meta import declare_command

CHECKED_TOKENS = 32 << 20
"""Maximum number of tokens to check before a run starts (well under a second); longer files are sampled."""
_BLOCKS, _BLOCK_BYTES = 64, 1 << 14
_MAX_IDS = 1 << 20
"""Upper limit for plausible ids, four times the largest vocabulary in use."""
_CHANCE = 1e-9
_WIDE = {"<u8": "64-bit integers", ">u8": "big-endian 64-bit integers", "<u4": "uint32 or int32",
         ">u4": "big-endian uint32 or int32"}
_FLOATS = {"<f4": "float32", "<f8": "float64"}
_NARROW = {"<u2": "uint16", ">u2": "big-endian uint16"}
_MIN_FLOATS = 16
_MIN_TEXT = 128
"""Minimum size of a text check in bytes; 64 true uint16 tokens are valid UTF-8 with a probability below 10^-9."""


LLM_C_HEADER_BYTES = 1024
"""Size of the header of llm.c's tokens: 256 int32, of which the first three are magic, version and token count."""
_LLM_C_DTYPES = {20240520: "<u2", 20240801: "<u4"}


def find_llm_c_dtype(path: Path) -> np.dtype | None:
    """Return the token type in the header of an llm.c file, or None if the file has no such header."""
    with reading(path), open_regular(path) as file:
        magic = file.read(4)
    dtype = _LLM_C_DTYPES.get(int.from_bytes(magic, "little"))
    return None if dtype is None else np.dtype(dtype)


def check_llm_c_size(path: Path, dtype: np.dtype) -> None:
    """Check that an llm.c file has version 1 and as many tokens as its header says.

    Raises:
        UserError: it has not.
    """
    with reading(path), open_regular(path) as file:
        version, tokens = np.frombuffer(file.read(12).ljust(12, b"\0"), "<i4").tolist()[1:]
        found, expected = os.fstat(file.fileno()).st_size, LLM_C_HEADER_BYTES + tokens * dtype.itemsize
    if version != 1:
        raise UserError(f"these llm.c tokens have version {version}; only version 1 is supported", where=str(path),
                        instead="write them with llm.c's dev/data/data_common.py")
    if found != expected or tokens < 1:
        raise UserError(f"this file has {found:,} bytes, but {tokens:,} tokens according to its header, which need "
                        f"{expected:,}", where=str(path), instead="copy or download that file again")


def check_width(path: Path, dtype: np.dtype) -> None:
    """Check that a file of raw tokens of type `dtype` does not look like wider tokens or bytes.

    Raises:
        UserError: it does; the message names the likely type, its declaration and the conversion.
    """
    with reading(path):
        content = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    sample = _sample(content)
    for number, name in _FLOATS.items():
        if _looks_like_float_ids(sample.view(number)):
            raise UserError(f"these tokens look like {name}, not {dtype.name}", where=str(path),
                            instead=_declare_advice(path, number))
    for wide, name in _WIDE.items():
        if np.dtype(wide).itemsize > dtype.itemsize > 1 and _looks_like_ids(sample.view(wide)):
            largest = int(_upper_half(sample.view(wide)).max())
            raise UserError(f"these tokens look like {name}, not {dtype.name}: as {dtype.name}, every second token "
                            f"would be {largest if largest == 0 else f'at most {largest}'}", where=str(path),
                            instead=_declare_advice(path, wide))
    if dtype.itemsize == 2 and _looks_like_bytes(content[:_BLOCK_BYTES]):
        raise UserError("this file looks like text or one-byte tokens, not uint16", where=str(path),
                        instead="if it is text, rename it to .txt and pass its path; if it contains tokens, "
                                + _declare_advice(path, "u1"))


def other_type_advice(tokens: np.memmap, vocab_size: int) -> str:
    """Return advice to use the first other data type in which all sampled tokens fit the vocabulary, or ""."""
    path = Path(str(tokens.filename))
    sample = _sample(np.memmap(path, np.uint8, "r", tokens.offset))
    types = {**_WIDE, **_NARROW, **({"u1": "uint8"} if vocab_size <= 256 else {})}
    for dtype, name in types.items():
        if np.dtype(dtype) != tokens.dtype and sample.size and sample.view(dtype).max() < vocab_size:
            advice = (_declare_advice(path, dtype) if path.suffix == ".bin" and not tokens.offset
                      else "write the file again with that type")
            return f"; or, since all tokens fit as {name}, {advice}"
    return ""


_DECLARED = {"<u8": "int64", "<u4": "uint32", "<u2": "uint16", "u1": "uint8"}


def _declare_advice(path: Path, dtype: str) -> str:
    """Return advice to declare the type of the raw tokens in `path`'s folder, or to convert them to .npy files."""
    folder = shlex.quote(str(path.parent))
    code = (f"import numpy as n; [n.save(f'tokens_{{s}}_000000.npy', n.fromfile(s + '.bin', '{dtype}')"
            f".astype('{'u2' if dtype in ('u1', '>u2') else 'u4'}')) for s in ('train', 'val')]")
    convert = f'convert them: cd {folder} && python3 -c "{code}"'
    if dtype not in _DECLARED:
        return convert
    return f"declare it: {declare_command(path.parent, _DECLARED[dtype])}; or {convert}"


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


def _looks_like_float_ids(items: np.ndarray) -> bool:
    """Return True if all items are whole numbers from 0 to `_MAX_IDS`, which integers are practically never."""
    is_zero = items.view(f"<u{items.itemsize}") == 0
    with np.errstate(all="ignore"):  # integers may look like NaN
        is_id = (items >= 1) & (items < _MAX_IDS) & (items == np.floor(items))
    return items.size >= _MIN_FLOATS and bool(is_id.any() and (is_id | is_zero).all())


def _looks_like_bytes(content: np.ndarray) -> bool:
    """Return True for UTF-8 text, except uint16 tokens of a small vocabulary, whose upper bytes are small."""
    if content.size < _MIN_TEXT or np.median(content[1::2]) < 16:
        return False
    try:
        content.tobytes().decode()
    except UnicodeDecodeError as error:
        return error.start > content.size - 4  # a character that continues after the block
    return True
