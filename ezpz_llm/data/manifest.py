"""Format of `manifest.json` in a folder of token shards (standard library only).

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
from typing import Annotated, Any, Literal, TypedDict

from ezpz_llm.base import (
    MAX_IDS,
    MAX_TOKENS,
    Range,
    UserError,
    as_type,
    join_file_name,
    open_regular,
    parse_json,
    read_json,
    read_own,
)
from ezpz_llm.data.downloads import reading
from ezpz_llm.rundir import hash_file

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
Count = Annotated[int, Range(0, MAX_TOKENS)]


class _Shard(TypedDict):
    file: str
    tokens: Annotated[int, Range(1, MAX_TOKENS)]
    sha256: str


class Shard(_Shard, total=False):
    """File of tokens, or a part of one."""

    offset: Count
    file_bytes: Count


class Split(TypedDict):
    """Shards of a split and their total number of tokens."""

    tokens: Count
    shards: list[Shard]


class Splits(TypedDict):
    """Training and validation splits."""

    train: Split
    val: Split


class Part(TypedDict):
    """Folder of a mixture, and its weight."""

    folder: str
    weight: Annotated[float, Range(0, 1e12)]


class _Source(TypedDict):
    corpus: str
    files: Count
    bytes: Count


class _Tokenizer(TypedDict):
    name: str
    fingerprint: str


class TokenizerEntry(_Tokenizer, total=False):
    """Entry of a tokenizer in a manifest."""

    table: str
    kind: Literal["tokenizers", "sentencepiece"]
    vocab_size: Annotated[int, Range(1, MAX_IDS)]
    end_of_text: int | None


class _Manifest(TypedDict):
    format: str
    request: str
    command: str
    source: _Source
    tokenizer: TokenizerEntry
    vocab_size: Annotated[int, Range(1, MAX_IDS)]
    end_of_text: int | None
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"]
    documents: Count
    tokens: Count
    unigram_entropy: float
    splits: Splits


class Manifest(_Manifest, total=False):
    """Content of manifest.json."""

    written_by: str
    document_index: str
    parts: list[Part]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder of shards, after checking the size of every shard.

    Raises:
        UserError: there is no manifest, it has another format, or a shard is missing or has the wrong size.
    """
    path = folder / MANIFEST
    if not os.path.isfile(path):  # also False for an invalid path
        raise UserError("not a folder of token shards: it has no manifest.json", where=str(folder),
                        instead="create one with: python3 -m ezpz_llm.data prepare CORPUS --out DIR")
    stored = read_json(path, _MAX_BYTES)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise UserError("this manifest.json is not a manifest of token shards, or another version wrote it",
                        where=str(path),
                        instead="prepare the corpus again with: python3 -m ezpz_llm.data prepare CORPUS")
    manifest = as_type(Manifest, stored, str(path))
    splits = manifest["splits"]
    for shard in (*splits["train"]["shards"], *splits["val"]["shards"]):
        _check_size(folder, manifest, shard)
    return manifest


def read_part(folder: Path, mixture: Path) -> dict[str, Any]:
    """Return the manifest of a part of a mixture.

    Raises:
        UserError: for the reasons in `read_manifest`, or the part is itself a mixture (it could contain itself).
    """
    manifest = read_manifest(folder)
    if "parts" in manifest:
        raise UserError(f"a mixture cannot be part of another mixture, but {folder} is one",
                        where=str(mixture / MANIFEST),
                        instead="prepare this mixture again from the parts of the inner one: --corpus A=0.7,B=0.3")
    return manifest


def _check_size(folder: Path, manifest: dict[str, Any], shard: dict[str, Any]) -> None:
    # Shards of another program have absolute paths outside `folder`.
    path = (Path(shard["file"]) if "written_by" in manifest else
            join_file_name(folder, shard["file"], str(folder / MANIFEST)))
    needed = shard["tokens"] * _ITEM_BYTES[manifest["dtype"]] + shard.get("offset", 0)
    expected = shard.get("file_bytes", needed)
    if needed > expected:
        raise UserError(f"shard {shard['file']} ends at byte {needed:,} of a file of {expected:,} bytes",
                        where=str(folder / MANIFEST), instead=_repair_advice(folder, manifest))
    size = path.stat().st_size if os.path.isfile(path) else None
    if size != expected:
        state = "is missing" if size is None else f"has {size:,} bytes"
        raise UserError(f"shard {shard['file']} {state}; the manifest expects {expected:,} bytes",
                        where=str(path), instead=_repair_advice(folder, manifest))


def verify(folder: Path) -> int:
    """Check the hash of every shard and return the number of shards.

    Raises:
        UserError: a shard is missing, has the wrong size, or has changed.
    """
    manifest = read_manifest(folder)
    if "parts" in manifest:
        parts = [Path(part["folder"]) for part in manifest["parts"]]
        return sum(_verify(part, read_part(part, folder)) for part in parts)
    return _verify(folder, manifest)


def _verify(folder: Path, manifest: dict[str, Any]) -> int:
    shards = [shard for split in manifest["splits"].values() for shard in split["shards"]]
    for shard in shards:
        with reading(folder / shard["file"]):
            sha256 = (sampled_hash if "file_bytes" in shard else hash_file)(folder / shard["file"])
        if sha256 != shard["sha256"]:
            raise UserError(f"shard {shard['file']} has sha256 {sha256}; the manifest expects {shard['sha256']}",
                            where=str(folder / shard["file"]), instead=_repair_advice(folder, manifest))
    return len(shards)


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


def _repair_advice(folder: Path, manifest: dict[str, Any]) -> str:
    if "written_by" in manifest:
        return f"copy that file again from the source of {manifest['source']['corpus']}"
    quoted = shlex.quote(str(folder.absolute()))
    if (text := read_own(folder / MANIFEST, _MAX_BYTES)) is not None:
        stored = as_type(dict[str, Any], parse_json(text, MANIFEST, _MAX_BYTES), MANIFEST)
        return f"create the folder again: rm -r {quoted} && {stored.get('command')} --out {quoted}"
    # Another user owns the manifest, so the message does not quote its command, which could be malicious.
    return (f"remove the folder and create it again: python3 -m ezpz_llm.data prepare CORPUS … --out {quoted} "
            '(the manifest has the corpus and options under "command"; check them before you type them)')
