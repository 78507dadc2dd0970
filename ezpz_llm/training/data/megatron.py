"""Megatron's tokens, read in place: X.bin holds the tokens, X.idx the starts of sequences and documents.

Index format (`IndexedDataset` of Megatron-LM, `megatron/core/datasets/indexed_dataset.py`, and of
Megatron-DeepSpeed), little endian, with n sequences and d document ends:

    9 bytes   "MMIDIDX\\0\\0"                   4n   tokens of each sequence, int32
    8         version: 1                       8n   byte offset of each sequence in X.bin, int64
    1         type of a token (see DTYPES)     8d   first sequence of each document, and n, int64 (d is one more
    8, 8      n, d                                  than documents)

Only the index and a sample of the tokens are read, to estimate the entropy and to compute a fingerprint. A .bin
file of any size opens in under a second.
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

import numpy as np

from ezpz_llm.core.base import UserError, open_regular, user_path
from ezpz_llm.training.data.corpora import MANY_FILES_VAL_FRACTION, cached_folder
from ezpz_llm.training.data.downloads import print_to_stderr, reading
from ezpz_llm.training.data.file_signatures import TOKENS, check_tokens, find_signature
from ezpz_llm.training.data.manifest import (
    COUNTS,
    FORMAT,
    Manifest,
    Shard,
    Source,
    Split,
    Splits,
    TokenizerEntry,
    sampled_blocks,
    sampled_hash,
)
from ezpz_llm.training.data.token_width import CHECKED_TOKENS, pieces
from ezpz_llm.training.data.tokenize_corpus import entropy
from ezpz_llm.training.data.tokenizer_files import copy_files
from ezpz_llm.training.data.tokenizers import Choice, Tokenizer, gpt2_entry, to_entry

_WRITTEN_BY = "Megatron"
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
"""Megatron's codes of the token types; its codes for int8, int16 and floats are not used for tokens."""
_GPT2_VOCABULARY = (50_257, 50_256)
_AT_ONCE = 1 << 20
"""Index entries in memory at a time, since an index can have gigabytes."""
_CHECKED_ENDS = 1000
"""Documents of which the last token is read: a second on a network file system with 1 ms per read."""


@dataclass(frozen=True)
class MegatronIndex:
    """Content of an index that matches its .bin file.

    Attributes:
        dtype: type of a token.
        tokens: number of tokens.
        starts: int64, the first token of each document, followed by the number of tokens.
    """

    dtype: str
    tokens: int
    starts: np.ndarray


@dataclass(frozen=True)
class MegatronData:
    """Megatron files `prefix`.bin and `prefix`.idx, and the requested tokenizer."""

    prefix: Path
    tokenizer: Choice | None

    @property
    def bin(self) -> Path:
        """Path of the tokens."""
        return self.prefix.with_name(f"{self.prefix.name}.bin")

    @property
    def idx(self) -> Path:
        """Path of the index."""
        return self.prefix.with_name(f"{self.prefix.name}.idx")

    @property
    def fingerprint(self) -> str:
        """Hash of the files' path, sizes and timestamps, and the requested tokenizer."""
        stats = [[stat.st_size, stat.st_mtime_ns] for stat in (self.bin.stat(), self.idx.stat())]
        tokenizer = self.tokenizer and (self.tokenizer.table or self.tokenizer.name)
        values = [FORMAT, _WRITTEN_BY, str(self.prefix), tokenizer, stats]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    @property
    def index(self) -> Path:
        """Folder in the cache for the manifest."""
        return cached_folder(self.prefix.name, self.fingerprint)


def find_megatron(corpus: str, tokenizer: Choice | None) -> MegatronData | None:
    """Return the Megatron files that `corpus` (X, X.bin or X.idx) names, or None if one is missing.

    Raises:
        UserError: `corpus` names an .idx file without a .bin file, or these files do not match.
    """
    path = user_path(corpus).absolute()
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    data = MegatronData(prefix, tokenizer)
    if not os.path.isfile(data.idx):
        return None
    if not os.path.isfile(data.bin):
        if path.suffix != ".idx":
            return None
        raise UserError("this Megatron index has no tokens beside it", where=str(data.idx),
                        instead=f"put {data.bin.name} beside it")
    check_tokens(data.bin)
    read_index(data.bin, data.idx)
    return data


def read_index(tokens: Path, index: Path) -> MegatronIndex:
    """Read and check an index; see `_read_index`. The result is cached until one of the files changes."""
    for path in (tokens, index):
        if not os.path.isfile(path):  # also False for an invalid path
            raise UserError("this Megatron file is missing", where=str(path),
                            instead="copy both files again, from the same preparation")
    with reading(index):
        stats = [path.stat() for path in (tokens, index)]
    return _read_index(tokens, index, tuple(stat.st_mtime_ns for stat in stats), stats[0].st_size)


@functools.lru_cache(maxsize=8)
def _read_index(tokens: Path, index: Path, times: tuple[int, ...], token_bytes: int) -> MegatronIndex:
    """Read an index and compare it with the size of its tokens, `token_bytes`.

    Raises:
        UserError: the index is truncated, is not a Megatron index, has an unsupported version or token type, or
            does not match the tokens.
    """
    def error(message: str, instead: str = "copy both files again, from the same preparation") -> UserError:
        return UserError(message, where=str(index), instead=instead)

    with reading(index):
        size = index.stat().st_size
        with open_regular(index) as file:
            head = file.read(_HEADER.size)
    if not head.startswith(_MAGIC[:len(head)]):
        if (signature := find_signature(head, TOKENS)) is not None:
            raise error(f"this is not a Megatron index, but {signature.what}", signature.instead)
        raise error("this is not a Megatron index: it does not start with MMIDIDX",
                    "use the .idx file that belongs to the .bin file")
    if len(head) < _HEADER.size:
        raise error(f"this index is truncated: it has {len(head)} bytes, fewer than its header ({_HEADER.size})")
    _, version, code, sequences, ends = _HEADER.unpack(head)
    if version != 1:
        raise error(f"this Megatron index has version {version}; only version 1 is supported",
                    "write it with a version of Megatron that uses index version 1")
    if code not in DTYPES:
        raise error(f"the token type {code} is not supported",
                    "use one of " + ", ".join(f"{number} ({name})" for number, name in DTYPES.items()))
    expected = _HEADER.size + 12 * sequences + 8 * ends
    if size not in (expected, expected + sequences):  # multimodal indexes have one more byte per sequence
        state = "truncated" if size < expected else "too long"
        raise error(f"this index is {state}: it has {size:,} bytes; {sequences:,} sequences and {ends:,} document "
                    f"ends need {expected:,}")
    item = np.dtype(DTYPES[code]).itemsize
    if max(sequences, ends - 1) > token_bytes // item:
        raise error(f"the index has {sequences:,} sequences and {ends:,} document ends, more than the "
                    f"{token_bytes // item:,} tokens ({DTYPES[code]}) in {tokens.name}")
    with reading(index):
        content = np.memmap(index, np.uint8, "r", _HEADER.size, (expected - _HEADER.size,))
    lengths, offsets, documents = (part.view(dtype) for part, dtype in zip(
        np.split(content, [4 * sequences, 12 * sequences]), ("<i4", "<i8", "<i8"), strict=True))
    total = 0
    for begin in range(0, sequences, _AT_ONCE):
        part = lengths[begin:begin + _AT_ONCE].astype(np.int64)
        if part.min() < 0:
            raise error(f"sequence {begin + int(part.argmin()):,} has {part.min():,} tokens")
        stops = total + np.cumsum(part)
        if not np.array_equal(offsets[begin:begin + _AT_ONCE], (stops - part) * item):
            raise error("the sequences are not contiguous in the .bin file",
                        "use data written by Megatron's preprocess_data.py")
        total = int(stops[-1])
    if token_bytes != total * item:
        raise error(f"the index describes {total * item:,} bytes of tokens ({DTYPES[code]}); {tokens.name} "
                    f"has {token_bytes:,}")
    if not _is_in_order(documents, sequences):
        raise error("the documents do not contain all sequences in order")
    return MegatronIndex(DTYPES[code], total, _document_starts(documents, offsets, total, item))


def _is_in_order(documents: np.ndarray, sequences: int) -> bool:
    """Return True if the document ends increase from 0 to the number of sequences."""
    if documents.size < 2 or documents[0] != 0 or documents[-1] != sequences:
        return False
    return not any(np.any(np.diff(documents[begin:begin + _AT_ONCE + 1]) < 0)
                   for begin in range(0, documents.size, _AT_ONCE))


def _document_starts(documents: np.ndarray, offsets: np.ndarray, total: int, item: int) -> np.ndarray:
    """Return the first token of each document, followed by the number of tokens."""
    starts = np.full(documents.size, total)
    for begin in range(0, documents.size, _AT_ONCE):
        part = documents[begin:begin + _AT_ONCE]
        inner = part < offsets.size  # empty documents at the end start after the last sequence
        starts[begin:begin + _AT_ONCE][inner] = offsets[part[inner]] // item
    return starts


def index_megatron(data: MegatronData, folder: Path, show: bool) -> None:
    """Write the manifest of Megatron's tokens to `folder`.

    The validation split is the last 2 % of the tokens, rounded to the start of a document if one is near.

    Raises:
        UserError: `read_index` fails, no tokenizer is given, or a sampled id is outside its vocabulary.
    """
    index = read_index(data.bin, data.idx)
    if show:
        print_to_stderr(f"reading the Megatron index {data.idx}: {index.tokens:,} tokens, "
                        f"{index.starts.size - 1:,} documents")
    entry, vocab_size, end = _tokenizer_facts(data)
    item = np.dtype(index.dtype).itemsize
    counts = _count(data, index, vocab_size)
    train_tokens, digest = _validation_start(index), sampled_hash(data.bin)
    if show and train_tokens not in index.starts:
        print_to_stderr("note: the validation split, the last 2 % of the tokens, begins within a document, since "
                        "none begins near there")
    train, val = (Split(stop - first, [] if first == stop else [
        Shard(str(data.bin), stop - first, digest, first * item, index.tokens * item)])
        for first, stop in ((0, train_tokens), (train_tokens, index.tokens)))
    np.save(folder / COUNTS, counts)
    choice = entry.name if data.tokenizer is None else data.tokenizer.words
    if data.tokenizer is not None and data.tokenizer.file is not None:
        copy_files(data.tokenizer.file, folder)
    Manifest(
        request=data.fingerprint,
        command=shlex.join(["python3", "-m", "ezpz_llm.data", "prepare", str(data.idx), "--tokenizer", choice]),
        written_by=_WRITTEN_BY, document_index=str(data.idx),
        source=Source(str(data.idx), files=1, bytes=index.tokens * item, sampled=int(counts.sum())),
        tokenizer=entry, vocab_size=vocab_size, end_of_text=end, dtype=index.dtype,
        documents=index.starts.size - 1, tokens=index.tokens, unigram_entropy=entropy(counts),
        splits=Splits(train, val),
    ).write(folder)


def find_unmarked_document(tokens: Path, index: Path, end: int) -> int | None:
    """Return the number of a document that does not end with the token `end`; None if there is none.

    Reads up to `_CHECKED_ENDS` documents, spread over the index, except the last one.
    """
    content = read_index(tokens, index)
    stops = content.starts[1:-1]
    documents = np.linspace(0, stops.size - 1, min(stops.size, _CHECKED_ENDS)).astype(np.int64)
    documents = documents[stops[documents] > 0]
    last = np.memmap(tokens, np.dtype(content.dtype).newbyteorder("<"), "r")[stops[documents] - 1]
    unmarked = documents[last != end]
    return int(unmarked[0]) if unmarked.size else None


def check_megatron(data: MegatronData) -> None:
    """Check the index and a sample of up to `CHECKED_TOKENS` ids, without writing anything.

    Raises:
        UserError: for the reasons given in `index_megatron`.
    """
    index, vocab_size = read_index(data.bin, data.idx), _tokenizer_facts(data)[1]
    if index.tokens:
        tokens = np.memmap(data.bin, np.dtype(index.dtype).newbyteorder("<"), "r")
        for first, part in pieces(tokens, CHECKED_TOKENS):
            _check_ids(data, first, part, vocab_size)


def _count(data: MegatronData, index: MegatronIndex, vocab_size: int) -> np.ndarray:
    """Count the occurrences of each id in blocks spread over the tokens.

    Raises:
        UserError: an id is outside the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    item = np.dtype(index.dtype).itemsize
    for offset, block in sampled_blocks(data.bin):
        ids = np.frombuffer(block, np.dtype(index.dtype).newbyteorder("<"), len(block) // item)
        _check_ids(data, offset // item, ids, vocab_size)
        counts += np.bincount(ids.astype(np.int64), minlength=vocab_size)
    return counts


def _check_ids(data: MegatronData, first: int, ids: np.ndarray, vocab_size: int) -> None:
    """Check ids that start at position `first`.

    Raises:
        UserError: an id is outside the vocabulary.
    """
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise UserError(f"token {ids[at]:,} at position {first + at:,} is outside the tokenizer's vocabulary, "
                        f"which has {vocab_size:,} tokens", where=str(data.bin),
                        instead="pass the tokenizer that made these tokens: --tokenizer T")


def _validation_start(index: MegatronIndex) -> int:
    """Return the first validation token.

    This is the start of the first document in the last 2 % of the tokens, or of the last document before them. If
    the split would then have less than 1 % or more than 4 % of the tokens, it is the start of the last 2 %.
    """
    target = int(index.tokens * (1 - MANY_FILES_VAL_FRACTION))
    inner = index.starts[1:-1]
    inner = inner[(inner > 0) & (inner < index.tokens)]
    if not inner.size:
        return target  # one document
    start = int(inner[min(int(np.searchsorted(inner, target)), inner.size - 1)])
    return start if 0.5 <= (index.tokens - start) / (index.tokens - target) <= 2 else target


def _tokenizer_facts(data: MegatronData) -> tuple[TokenizerEntry, int, int | None]:
    """Return the tokenizer's entry, vocabulary size and end-of-text id; does not need gpt2's file."""
    choice = data.tokenizer
    if choice is None or (choice.name == "char" and choice.entry is None):
        raise UserError("Megatron files do not record the tokenizer that made them", where=str(data.idx),
                        instead="pass --tokenizer gpt2, or --tokenizer PATH with the tokenizer's folder, "
                                "tokenizer.json or *.model")
    if choice.name == "gpt2" and choice.file is None:
        return gpt2_entry(), *_GPT2_VOCABULARY
    tokenizer: Tokenizer = choice.load()
    return to_entry(tokenizer), tokenizer.vocab_size, tokenizer.end_of_text
