"""Metadata in a folder of nanoGPT's train.bin and val.bin: the table of characters, and the declared token type.

    meta.pkl     nanoGPT's: itos, stoi, vocab_size; forks add dtype
    meta.json    {"dtype": "uint32"}, in which a user declares the token type
"""

from __future__ import annotations

import io
import pickle
import pickletools
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.core.base import UserError, read_bytes, read_json, shorten_value
from ezpz_llm.training.data.downloads import reading

META_PKL, META_JSON = "meta.pkl", "meta.json"
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
"""Token types that can be declared. All are little-endian."""


@dataclass(frozen=True)
class NanogptMeta:
    """Metadata of a folder.

    Attributes:
        characters: the characters in the order of their ids; None if the tokens are not characters.
        dtype: the declared token type; None if there is no declaration.
    """

    characters: str | None = None
    dtype: np.dtype | None = None


def read_meta(folder: Path, *, is_raw: bool) -> NanogptMeta:
    """Read meta.json and meta.pkl, if any. No code in the pickle is executed.

    Args:
        is_raw: the tokens' files do not state their type. Otherwise a declared type is ignored.

    Raises:
        UserError: the characters or the token type are unsupported; or meta.pkl has no characters, and raw tokens
            have no declared type.
    """
    characters, dtype = None, None
    pickled, declared = folder / META_PKL, folder / META_JSON
    if is_raw and declared.is_file():
        content = read_json(declared)
        if isinstance(content, dict) and "dtype" in content:
            dtype = _to_dtype(content["dtype"], declared)
    if pickled.is_file():
        content = _unpickle(pickled)
        if is_raw and dtype is None and "dtype" in content:
            dtype = _to_dtype(content["dtype"], pickled)
        if "itos" in content or (is_raw and dtype is None):
            characters = _characters(content, pickled)
    return NanogptMeta(characters, dtype)


def declare_command(folder: Path, dtype: str) -> str:
    """Return the shell command that declares the type of the tokens in `folder`."""
    return f"echo '{{\"dtype\": \"{dtype}\"}}' > {shlex.quote(str(folder / META_JSON))}"


def _to_dtype(name: Any, where: Path) -> np.dtype:
    if name not in DTYPES:
        raise UserError(f"the token type {shorten_value(name)} is not supported", where=f"{where}, dtype",
                        instead=f"declare one of {', '.join(DTYPES)} as a string")
    return np.dtype(name).newbyteorder("<")


_MAX_OPCODES = 1_000_000
"""Maximum length of a pickle: a table of 50,000 characters has 400,000 opcodes. An opcode creates 64 bytes."""
_MAX_TUPLES = 100
"""Maximum number, and so depth, of tuples. Python's hash of a tuple recurses without a limit."""
_TUPLES = {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_MEMOS = {"PUT", "BINPUT", "LONG_BINPUT"}
_OPCODES = _TUPLES | _MEMOS | {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
    "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS",
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINBYTES", "BINBYTES",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "INST", "STRING", "INT", "UNICODE"}
"""Opcodes of dicts, lists, tuples, strings and numbers of 32 bits. Longer numbers can all have the same hash. Calls
are rejected by `_PlainUnpickler`, whose message names the function."""


def _check_opcodes(content: bytes) -> None:
    """Check a pickle for opcodes that could exhaust the memory, the time, or the stack of this process.

    Raises:
        UnpicklingError, ValueError: it has such an opcode, or is damaged.
    """
    tuples = 0
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        tuples += opcode.name in _TUPLES
        # The memo is an array as long as its largest index.
        if opcode.name not in _OPCODES or (opcode.name in _MEMOS and (argument or 0) > number):
            raise pickle.UnpicklingError(f"it has the opcode {opcode.name}")
        if number > _MAX_OPCODES or tuples > _MAX_TUPLES:
            raise pickle.UnpicklingError("it has too many parts")


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler for numbers, strings, lists and dicts; rejects calls, and imports except of NumPy types."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "numpy" and name in DTYPES:
            return name  # instead of the class: forks store {"dtype": np.uint32}
        raise pickle.UnpicklingError(f"it imports {module}.{name}")


_UNPICKLING_ERRORS = (pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, EOFError,
                      OverflowError, MemoryError)


def _unpickle(path: Path) -> dict[Any, Any]:
    try:
        with reading(path):
            pickled = read_bytes(path)
        _check_opcodes(pickled)
        content = _PlainUnpickler(io.BytesIO(pickled)).load()
        if not isinstance(content, dict):
            raise TypeError("it is not a dict")
    except _UNPICKLING_ERRORS as error:
        raise _no_table_error(path, error) from error
    return content


def _characters(content: dict[Any, Any], path: Path) -> str:
    """Return the characters in nanoGPT's meta.pkl, in the order of their ids."""
    try:
        table = content["itos"]
        characters = [table[number] for number in range(len(table))]
        if characters != sorted(set(characters)) or {*map(len, characters)} != {1}:
            raise ValueError("its symbols are not characters in code point order")
    except _UNPICKLING_ERRORS as error:
        raise _no_table_error(path, error) from error
    return "".join(characters)


def _no_table_error(path: Path, error: Exception) -> UserError:
    return UserError(f"this meta.pkl has no usable table of characters: {error}", where=str(path),
                     instead="for characters, prepare the text itself: python3 -m ezpz_llm.data prepare FILE "
                             "--tokenizer char; for other tokens, remove meta.pkl and declare their type, such as "
                             f"uint16: {declare_command(path.parent, 'uint16')}")
