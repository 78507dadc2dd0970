"""Megatron's tokens, read where they lie: X.bin has the tokens, X.idx says where sequences and documents begin.

The index (`IndexedDataset` of Megatron-LM, `megatron/core/datasets/indexed_dataset.py`, and of Megatron-DeepSpeed),
little endian, n sequences and d ends of documents:

    9 bytes   "MMIDIDX\\0\\0"                   4n   tokens of each sequence, int32
    8         version: 1                       8n   byte offset of each sequence in X.bin, int64
    1         type of a token (see DTYPES)     8d   first sequence of each document, and n, int64 (d is one more
    8, 8      n, d                                  than documents)

Only the index is read, and some of the tokens, to estimate their entropy and to know them again: a file of any size
opens in under a second.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.base import UserError, open_regular, user_path
from ezpz_llm.data.corpora import MANY_FILES_VAL_FRACTION, cached_folder
from ezpz_llm.data.downloads import reading, say
from ezpz_llm.data.file_signatures import TOKENS, check_tokens, find_signature
from ezpz_llm.data.manifest import COUNTS, FORMAT, MANIFEST, TRAIN, VAL, sampled_blocks, sampled_hash
from ezpz_llm.data.token_width import CHECKED_TOKENS, pieces
from ezpz_llm.data.tokenize_corpus import entropy
from ezpz_llm.data.tokenizer_files import copy_files
from ezpz_llm.data.tokenizers import Choice, Tokenizer, gpt2_entry, to_entry
from ezpz_llm.rundir import write_json

WRITTEN_BY = "Megatron"
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
"""Codes of the types that tokens are written in; signed bytes, shorts and floats hold none."""
_GPT2 = (50_257, 50_256)
_AT_ONCE = 1 << 20
"""Entries of an index that are in memory together: there are indexes of gigabytes."""


@dataclass(frozen=True)
class MegatronIndex:
    """An index that fits its tokens.

    Attributes:
        dtype: of a token.
        tokens: how many there are.
        starts: int64, the first token of each document, and the number of tokens.
    """

    dtype: str
    tokens: int
    starts: np.ndarray


@dataclass(frozen=True)
class MegatronData:
    """Tokens of Megatron's that a corpus names: `prefix` with .bin and .idx, and the tokenizer asked for."""

    prefix: Path
    tokenizer: Choice | None

    @property
    def bin(self) -> Path:
        """The file of tokens."""
        return self.prefix.with_name(f"{self.prefix.name}.bin")

    @property
    def idx(self) -> Path:
        """The file that says where sequences and documents begin."""
        return self.prefix.with_name(f"{self.prefix.name}.idx")

    @property
    def fingerprint(self) -> str:
        """Tells these files in their present state, and the tokenizer asked for, from any others."""
        stats = [[found.st_size, found.st_mtime_ns] for found in (self.bin.stat(), self.idx.stat())]
        asked = self.tokenizer and (self.tokenizer.table or self.tokenizer.name)
        return hashlib.sha256(json.dumps([FORMAT, WRITTEN_BY, str(self.prefix), asked, stats]).encode()).hexdigest()

    @property
    def index(self) -> Path:
        """The folder of the cache that their manifest goes to."""
        return cached_folder(self.prefix.name, self.fingerprint)


def find_megatron(corpus: str, tokenizer: Choice | None) -> MegatronData | None:
    """The tokens that `corpus` names: X, X.bin or X.idx, where both files are there.

    Raises:
        UserError: an .idx without its .bin, or one that does not match it.
    """
    path = user_path(corpus).absolute()
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    found = MegatronData(prefix, tokenizer)
    if not os.path.isfile(found.idx):
        return None
    if not os.path.isfile(found.bin):
        if path.suffix != ".idx":
            return None
        raise UserError("an index of Megatron's without its tokens", where=str(found.idx),
                        instead=f"put {found.bin.name} beside it")
    check_tokens(found.bin)
    read_index(found.bin, found.idx)
    return found


def read_index(tokens: Path, index: Path) -> MegatronIndex:
    """Read an index, compared with its tokens; see `_read_index`, whose result is kept while no file changes."""
    for path in (tokens, index):
        if not os.path.isfile(path):  # also False for what is no path
            raise UserError("there is no such file of Megatron's", where=str(path),
                            instead="copy both files again, from the same preparation")
    with reading(index):
        stats = [path.stat() for path in (tokens, index)]
    return _read_index(tokens, index, tuple(found.st_mtime_ns for found in stats), stats[0].st_size)


@functools.lru_cache(maxsize=8)
def _read_index(tokens: Path, index: Path, times: tuple[int, ...], found: int) -> MegatronIndex:
    """Read an index and compare it with the size of its tokens, `found` bytes.

    Raises:
        UserError: it is truncated, of another format or type, or not the index of these tokens.
    """
    def wrong(found: str, instead: str = "copy both files again, from the same preparation") -> UserError:
        return UserError(found, where=str(index), instead=instead)

    with reading(index):
        size = index.stat().st_size
        with open_regular(index) as file:
            head = file.read(_HEADER.size)
    if not head.startswith(_MAGIC[:len(head)]):
        if (known := find_signature(head, TOKENS)) is not None:
            raise wrong(f"this is no index of Megatron's, but {known.what}", known.instead)
        raise wrong("this is no index of Megatron's: it does not begin with MMIDIDX", "the .idx of the .bin")
    if len(head) < _HEADER.size:
        raise wrong(f"this index is truncated: {len(head)} bytes, of a header of {_HEADER.size}")
    _, version, code, sequences, ends = _HEADER.unpack(head)
    if version != 1:
        raise wrong(f"version {version} of Megatron's index; 1 is known", "a version of Megatron that writes that")
    if code not in DTYPES:
        raise wrong(f"tokens of an unknown type, {code}",
                    "one of " + ", ".join(f"{known} ({name})" for known, name in DTYPES.items()))
    expected = _HEADER.size + 12 * sequences + 8 * ends
    if size not in (expected, expected + sequences):  # with a byte for each sequence's mode
        state = "truncated" if size < expected else "too long"
        raise wrong(f"this index is {state}: {size:,} bytes; {sequences:,} sequences and {ends:,} ends of "
                    f"documents take {expected:,}")
    item = np.dtype(DTYPES[code]).itemsize
    if max(sequences, ends - 1) > found // item:
        raise wrong(f"{sequences:,} sequences and {ends:,} ends of documents are more than the {found // item:,} "
                    f"tokens ({DTYPES[code]}) of {tokens.name}")
    with reading(index):
        content = np.memmap(index, np.uint8, "r", _HEADER.size, (expected - _HEADER.size,))
    lengths, offsets, documents = (part.view(dtype) for part, dtype in zip(
        np.split(content, [4 * sequences, 12 * sequences]), ("<i4", "<i8", "<i8"), strict=True))
    total = 0
    for begin in range(0, sequences, _AT_ONCE):
        part = lengths[begin:begin + _AT_ONCE].astype(np.int64)
        if part.min() < 0:
            raise wrong(f"sequence {begin + int(part.argmin()):,} has {part.min():,} tokens")
        stops = total + np.cumsum(part)
        if not np.array_equal(offsets[begin:begin + _AT_ONCE], (stops - part) * item):
            raise wrong("its sequences do not follow one another in the .bin",
                        "data of Megatron's preprocess_data.py")
        total = int(stops[-1])
    if found != total * item:
        raise wrong(f"the index is of {total * item:,} bytes of tokens ({DTYPES[code]}); {tokens.name} "
                    f"has {found:,}")
    if not _is_in_order(documents, sequences):
        raise wrong("its documents do not hold all sequences in order")
    return MegatronIndex(DTYPES[code], total, _starts(documents, offsets, total, item))


def _is_in_order(documents: np.ndarray, sequences: int) -> bool:
    """True if the ends of documents go up from 0 to the number of sequences."""
    if documents.size < 2 or documents[0] != 0 or documents[-1] != sequences:
        return False
    return not any(np.any(np.diff(documents[begin:begin + _AT_ONCE + 1]) < 0)
                   for begin in range(0, documents.size, _AT_ONCE))


def _starts(documents: np.ndarray, offsets: np.ndarray, total: int, item: int) -> np.ndarray:
    """The first token of each document, and the number of tokens."""
    starts = np.full(documents.size, total)
    for begin in range(0, documents.size, _AT_ONCE):
        part = documents[begin:begin + _AT_ONCE]
        inner = part < offsets.size  # the last ones may begin where all sequences end
        starts[begin:begin + _AT_ONCE][inner] = offsets[part[inner]] // item
    return starts


def index_megatron(data: MegatronData, folder: Path, show: bool) -> None:
    """Write the manifest of Megatron's tokens into `folder`.

    The last 2 % of the tokens are for validation, from the beginning of a document on.

    Raises:
        UserError: as `read_index`; no tokenizer is named, or it has not all ids that are looked at.
    """
    index = read_index(data.bin, data.idx)
    if show:
        say(f"reading Megatron's index: {data.idx}, {index.tokens:,} tokens, {index.starts.size - 1:,} documents")
    entry, vocab_size, end = _tokenizer(data)
    item = np.dtype(index.dtype).itemsize
    counts = _count(data, index, vocab_size)
    keep, digest = _first_validated(index), sampled_hash(data.bin)
    splits = {name: {"tokens": stop - first, "shards": [] if first == stop else [
        {"file": str(data.bin), "tokens": stop - first, "offset": first * item, "sha256": digest,
         "file_bytes": index.tokens * item}]}
        for name, first, stop in ((TRAIN, 0, keep), (VAL, keep, index.tokens))}
    np.save(folder / COUNTS, counts)
    words = entry["name"] if data.tokenizer is None else data.tokenizer.words
    if data.tokenizer is not None and data.tokenizer.file is not None:
        copy_files(data.tokenizer.file, folder)
    write_json(folder / MANIFEST, {
        "format": FORMAT, "request": data.fingerprint,
        "command": shlex.join(["python3", "-m", "ezpz_llm.data", "prepare", str(data.idx), "--tokenizer", words]),
        "written_by": WRITTEN_BY, "document_index": str(data.idx),
        "source": {"corpus": str(data.idx), "files": 1, "bytes": index.tokens * item, "sampled": int(counts.sum())},
        "tokenizer": entry, "vocab_size": vocab_size, "end_of_text": end, "dtype": index.dtype,
        "documents": index.starts.size - 1, "tokens": index.tokens, "unigram_entropy": entropy(counts),
        "splits": splits,
    })


def check_megatron(data: MegatronData) -> None:
    """Check the index and as many ids as can be read at once, without writing anything.

    Raises:
        UserError: as `index_megatron`.
    """
    index, vocab_size = read_index(data.bin, data.idx), _tokenizer(data)[1]
    if index.tokens:
        tokens = np.memmap(data.bin, np.dtype(index.dtype).newbyteorder("<"), "r")
        for first, part in pieces(tokens, CHECKED_TOKENS):
            _check_ids(data, first, part, vocab_size)


def _count(data: MegatronData, index: MegatronIndex, vocab_size: int) -> np.ndarray:
    """How often each id occurs in blocks from all over the tokens.

    Raises:
        UserError: one is beyond the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    item = np.dtype(index.dtype).itemsize
    for offset, block in sampled_blocks(data.bin):
        ids = np.frombuffer(block, np.dtype(index.dtype).newbyteorder("<"), len(block) // item)
        _check_ids(data, offset // item, ids, vocab_size)
        counts += np.bincount(ids.astype(np.int64), minlength=vocab_size)
    return counts


def _check_ids(data: MegatronData, first: int, ids: np.ndarray, vocab_size: int) -> None:
    """Check ids that begin at token `first`.

    Raises:
        UserError: one is beyond the vocabulary.
    """
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise UserError(f"token {ids[at]:,} at place {first + at:,}: the tokenizer has only {vocab_size:,}",
                        where=str(data.bin),
                        instead="name the tokenizer that made these tokens with --tokenizer")


def _first_validated(index: MegatronIndex) -> int:
    """The first token to validate on: the document's that begins first in the last 2 %, or before, if none does."""
    wanted = int(index.tokens * (1 - MANY_FILES_VAL_FRACTION))
    inner = index.starts[1:-1]
    inner = inner[(inner > 0) & (inner < index.tokens)]
    if not inner.size:
        return wanted  # one document
    return int(inner[min(int(np.searchsorted(inner, wanted)), inner.size - 1)])


def _tokenizer(data: MegatronData) -> tuple[dict[str, Any], int, int | None]:
    """The tokenizer's entry, its tokens, and the end of text; gpt2's need no file here."""
    choice = data.tokenizer
    if choice is None or (choice.name == "char" and choice.entry is None):
        raise UserError("Megatron's files do not say which tokenizer made them", where=str(data.idx),
                        instead="--tokenizer gpt2, or the tokenizer's folder, tokenizer.json or *.model")
    if choice.name == "gpt2" and choice.file is None:
        return gpt2_entry(), *_GPT2
    made: Tokenizer = choice.make()
    return to_entry(made), made.vocab_size, made.end_of_text
