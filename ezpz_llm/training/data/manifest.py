"""Format of `manifest.json` in a folder of token shards (no torch, no NumPy).

    format           "ezpz_llm tokens 1"
    request          hash of the request: corpus, its files, tokenizer, split, shard size
    command          command that creates these shards, without --out
    source           corpus, files, bytes, and for stdlib the Python version
    tokenizer        name and fingerprint; for char, also the table; for a tokenizer of another library, also "kind"
                     (the library), vocab_size and end_of_text. A copy of that tokenizer is beside the manifest.
    vocab_size, dtype, documents, tokens, end_of_text
    unigram_entropy  nats per token, from the token counts of both splits (for Megatron, of a sample of both)
    val_fraction     validation split as a fraction of the token stream, taken from its end; or
    val_tokens       tokens in the validation split, taken from the start of the token stream
    splits           {"train": {"tokens", "shards": [{"file", "tokens", "sha256"}]}, "val": …}

For shards written by another program, "file" is an absolute path, "offset" the size of its header in bytes, and
"written_by" the name of the program. For Megatron, a shard is a part of a file of "file_bytes" bytes, "sha256" is
the hash of some blocks of that file (`sampled_hash`), and "document_index" is the .idx file. A mixture has "parts"
instead of shards: [{"folder", "weight"}].

`counts.npy`, beside the manifest, holds the number of occurrences of each id (int64).
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ezpz_llm.core.base import (
    MAX_IDS,
    MAX_TOKENS,
    UserError,
    did_you_mean,
    join_file_name,
    open_regular,
    parse_json,
    read_json,
    read_own,
    shorten_value,
)
from ezpz_llm.core.base.records import Whole, as_plain, as_record
from ezpz_llm.core.rundir import hash_file, write_json
from ezpz_llm.training.data.downloads import reading

MANIFEST = "manifest.json"
COUNTS = "counts.npy"
TRAIN, VAL = "train", "val"
SHARD = ".bin"
"""Suffix of a shard's file name."""
SHARD_TOKENS = 100_000_000
FORMAT = "ezpz_llm tokens 1"
_ITEM_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8}
"""Bytes per token by data type; only other programs write uint8, int32 and int64."""
_SAMPLED_BLOCKS, _SAMPLED_BYTES = 64, 1 << 14
_MAX_BYTES = 256 << 20
"""Size limit of a manifest, which has about 130 bytes per shard."""
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_Ids = Annotated[int, Meta(ge=1, le=MAX_IDS)]


class Shard(Struct, frozen=True, omit_defaults=True):
    """File of tokens, or a part of one."""

    file: str
    tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    sha256: str
    offset: Count | None = None
    file_bytes: Count | None = None


class Split(Struct, frozen=True):
    """Shards of a split and their total number of tokens."""

    tokens: Count
    shards: list[Shard]


class Splits(Struct, frozen=True):
    """Training and validation splits."""

    train: Split
    val: Split


class Part(Struct, frozen=True):
    """Folder of a mixture, and its weight."""

    folder: str
    weight: Annotated[float, Meta(ge=0, le=1e12)]


class Broken(Struct, frozen=True):
    """Skipped documents: their number, and the errors of the first ones."""

    documents: Count
    first: list[str]


class Source(Struct, frozen=True, omit_defaults=True):
    """Corpus that was read."""

    corpus: str
    files: Count
    bytes: Count
    sampled: Count | None = None
    python: str | None = None
    revision: str | None = None
    text_key: str | None = None
    broken: Broken | None = None
    byte_order_marks: Count | None = None
    special_tokens: Count | None = None
    encodes_special_tokens: bool = False


class TokenizerEntry(Struct, frozen=True, omit_defaults=True):
    """Entry of a tokenizer in a manifest or a checkpoint."""

    name: str
    fingerprint: str
    table: str | None = None
    kind: Literal["tokenizers", "sentencepiece", "tiktoken"] | None = None
    vocab_size: _Ids | None = None
    end_of_text: Whole | None = None

    def has_same_ids(self, other: TokenizerEntry) -> bool:
        """Return True if every id, including the end-of-text token, has the same meaning in both."""
        return (self.fingerprint, self.end_of_text) == (other.fingerprint, other.end_of_text)


class Manifest(Struct, frozen=True, kw_only=True):
    """Content of manifest.json."""

    format: str = FORMAT
    request: str
    command: str
    written_by: str | UnsetType = UNSET
    document_index: str | UnsetType = UNSET
    source: Source
    parts: list[Part] | UnsetType = UNSET
    tokenizer: TokenizerEntry
    vocab_size: _Ids
    end_of_text: Whole | None
    dtype: str
    documents: Count
    tokens: Count
    unigram_entropy: float
    val_fraction: float | UnsetType = UNSET
    val_tokens: Count | UnsetType = UNSET
    splits: Splits

    @property
    def shards(self) -> list[Shard]:
        """Shards of both splits."""
        return [*self.splits.train.shards, *self.splits.val.shards]

    @property
    def split_tokens(self) -> dict[str, int]:
        """Number of tokens by split."""
        return {TRAIN: self.splits.train.tokens, VAL: self.splits.val.tokens}

    def write(self, folder: Path) -> None:
        """Write manifest.json."""
        write_json(folder / MANIFEST, as_plain(self))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder of shards, after checking the size of every shard.

    Raises:
        UserError: there is no manifest, it has another format, or a shard is missing or has the wrong size.
    """
    path = folder / MANIFEST
    if not os.path.isfile(path):  # also False for an invalid path
        create = "create one with: python3 -m ezpz_llm.data prepare CORPUS --out DIR"
        raise UserError("not a folder of token shards: it has no manifest.json", where=str(folder),
                        instead=create if os.path.exists(folder) else did_you_mean(folder, create))
    stored = read_json(path, _MAX_BYTES)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise UserError("this manifest.json is not a manifest of token shards, or another version wrote it",
                        where=str(path),
                        instead="prepare the corpus again with: python3 -m ezpz_llm.data prepare CORPUS")
    manifest = as_record(Manifest, stored, str(path))
    if manifest.dtype not in _ITEM_BYTES:
        raise UserError(f"dtype is {shorten_value(manifest.dtype)}, but must be {' or '.join(_ITEM_BYTES)}",
                        where=str(path))
    for shard in manifest.shards:
        _check_size(folder, manifest, shard)
    return manifest


def read_part(folder: Path, mixture: Path) -> Manifest:
    """Return the manifest of a part of a mixture.

    Raises:
        UserError: for the reasons in `read_manifest`, or the part is itself a mixture (it could contain itself).
    """
    manifest = read_manifest(folder)
    if manifest.parts:
        raise UserError(f"a mixture cannot be part of another mixture, but {folder} is one",
                        where=str(mixture / MANIFEST),
                        instead="prepare this mixture again from the parts of the inner one: --corpus A=0.7,B=0.3")
    return manifest


def _check_size(folder: Path, manifest: Manifest, shard: Shard) -> None:
    # Shards of another program have absolute paths outside `folder`.
    path = (join_file_name(folder, shard.file, str(folder / MANIFEST)) if manifest.written_by is UNSET else
            Path(shard.file))
    needed = shard.tokens * _ITEM_BYTES[manifest.dtype] + (shard.offset or 0)
    expected = needed if shard.file_bytes is None else shard.file_bytes
    if needed > expected:
        raise UserError(f"shard {shard.file} ends at byte {needed:,} of a file of {expected:,} bytes",
                        where=str(folder / MANIFEST), instead=_repair_advice(folder, manifest))
    size = path.stat().st_size if os.path.isfile(path) else None
    if size != expected:
        state = "is missing" if size is None else f"has {size:,} bytes"
        raise UserError(f"shard {shard.file} {state}; the manifest expects {expected:,} bytes",
                        where=str(path), instead=_repair_advice(folder, manifest))


def verify(folder: Path) -> int:
    """Check the hash of every shard and return the number of shards.

    Raises:
        UserError: a shard is missing, has the wrong size, or has changed.
    """
    manifest = read_manifest(folder)
    if manifest.parts:
        parts = [Path(part.folder) for part in manifest.parts]
        return sum(_verify(part, read_part(part, folder)) for part in parts)
    return _verify(folder, manifest)


def _verify(folder: Path, manifest: Manifest) -> int:
    for shard in manifest.shards:
        with reading(folder / shard.file):
            sha256 = (sampled_hash if shard.file_bytes is not None else hash_file)(folder / shard.file)
        if sha256 != shard.sha256:
            raise UserError(f"shard {shard.file} has sha256 {sha256}; the manifest expects {shard.sha256}",
                            where=str(folder / shard.file), instead=_repair_advice(folder, manifest))
    return len(manifest.shards)


def sampled_blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes of up to 64 blocks spread over a file, including its first and last block."""
    size = path.stat().st_size
    with reading(path), open_regular(path) as file:
        for number in range(_SAMPLED_BLOCKS):
            # Offsets are multiples of 8 bytes, so that no token is split.
            offset = max(0, size - _SAMPLED_BYTES) * number // (_SAMPLED_BLOCKS - 1) // 8 * 8
            if number and size <= _SAMPLED_BYTES:
                return
            file.seek(offset)
            yield offset, file.read(_SAMPLED_BYTES)


def sampled_hash(path: Path) -> str:
    """Return the sha256 of a file's size and its `sampled_blocks`, for files too large to read completely."""
    blocks = b"".join(block for _, block in sampled_blocks(path))
    return hashlib.sha256(str(path.stat().st_size).encode() + blocks).hexdigest()


def _repair_advice(folder: Path, manifest: Manifest) -> str:
    if manifest.written_by is not UNSET:
        return f"copy that file again from the source of {manifest.source.corpus}"
    quoted = shlex.quote(str(folder.absolute()))
    if (text := read_own(folder / MANIFEST, _MAX_BYTES)) is not None:
        own = as_record(Manifest, parse_json(text, MANIFEST, _MAX_BYTES), MANIFEST)
        return f"create the folder again: rm -r {quoted} && {own.command} --out {quoted}"
    # Another user owns the manifest, so the message does not quote its command, which could be malicious.
    return (f"remove the folder and create it again: python3 -m ezpz_llm.data prepare CORPUS … --out {quoted} "
            '(the manifest has the corpus and options under "command"; check them before you type them)')
