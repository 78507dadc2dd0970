"""`manifest.json` of a folder of token shards (standard library only).

    format           "ezpz_llm tokens 1"
    request          hash of what was asked for: corpus, its files, tokenizer, split, shard size
    command          the command that makes these shards, but for --out
    source           corpus, files, bytes, and for stdlib the Python version
    tokenizer        name, fingerprint and, for characters, the table; of another library's, "kind" (the library),
                     vocab_size and end_of_text: a copy of its file lies beside the manifest
    vocab_size, dtype, documents, tokens, end_of_text
    unigram_entropy  nats per token, from the exact histogram of the whole corpus (both splits)
    val_fraction     the last part of the token stream that is the validation split; or
    val_tokens       how many tokens at its beginning are
    splits           {"train": {"tokens", "shards": [{"file", "tokens", "sha256"}]}, "val": …}

Shards that another program wrote lie elsewhere: "file" is an absolute path, "offset" the bytes of its header, and
"written_by" names the program. Of Megatron's, a shard is a part of a file of "file_bytes", "sha256" is of some
blocks of that (`sampled_hash`), and "document_index" is the .idx that says where documents begin. Of a mixture
there are "parts" instead of shards: [{"folder", "weight"}].

Beside it lies `counts.npy`, int64: how often each id occurs.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from ezpz_llm.base import (
    MOST_IDS,
    MOST_TOKENS,
    Range,
    UserError,
    as_type,
    file_in,
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
"""Ending of a shard's file name."""
SHARD_TOKENS = 100_000_000
FORMAT = "ezpz_llm tokens 1"
ITEM_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8}
"""The last two, and uint8, are other programs' only."""
_SAMPLED_BLOCKS, _SAMPLED_BYTES = 64, 1 << 14
_MOST_BYTES = 256 << 20
"""A shard takes 130 bytes."""
Count = Annotated[int, Range(0, MOST_TOKENS)]


class _Shard(TypedDict):
    file: str
    tokens: Annotated[int, Range(1, MOST_TOKENS)]
    sha256: str


class Shard(_Shard, total=False):
    """A file of tokens, or a part of one."""

    offset: Count
    file_bytes: Count


class Split(TypedDict):
    """The tokens of a split."""

    tokens: Count
    shards: list[Shard]


class Splits(TypedDict):
    """Both splits."""

    train: Split
    val: Split


class Part(TypedDict):
    """A part of a mixture."""

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
    """A tokenizer's entry in a manifest."""

    table: str
    kind: Literal["tokenizers", "sentencepiece"]
    vocab_size: Annotated[int, Range(1, MOST_IDS)]
    end_of_text: int | None


class _Manifest(TypedDict):
    format: str
    request: str
    command: str
    source: _Source
    tokenizer: TokenizerEntry
    vocab_size: Annotated[int, Range(1, MOST_IDS)]
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
    """The manifest of a folder of shards, every shard of which is there with the size it should have.

    Raises:
        UserError: no manifest, another format, or a shard missing or of the wrong size.
    """
    path = folder / MANIFEST
    if not os.path.isfile(path):  # also False for what is no path
        raise UserError("not a folder of token shards: it has no manifest.json", where=str(folder),
                        instead="make one with: python3 -m ezpz_llm.data prepare CORPUS --out DIR")
    stored = read_json(path, _MOST_BYTES)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise UserError("this manifest.json does not describe token shards of this version", where=str(path),
                        instead="prepare the corpus again with: python3 -m ezpz_llm.data prepare CORPUS")
    manifest = as_type(Manifest, stored, str(path))
    splits = manifest["splits"]
    for shard in (*splits["train"]["shards"], *splits["val"]["shards"]):
        _check_size(folder, manifest, shard)
    return manifest


def read_part(folder: Path, mixture: Path) -> dict[str, Any]:
    """The manifest of a part of a mixture.

    Raises:
        UserError: as `read_manifest`; the part is a mixture as well, which could have itself as a part.
    """
    manifest = read_manifest(folder)
    if "parts" in manifest:
        raise UserError(f"a mixture cannot be part of another: {folder} is one", where=str(mixture / MANIFEST),
                        instead="prepare it again, from the parts of both: --corpus A=0.7,B=0.3")
    return manifest


def _check_size(folder: Path, manifest: dict[str, Any], shard: dict[str, Any]) -> None:
    # Another program's shards lie where it wrote them.
    path = (Path(shard["file"]) if "written_by" in manifest else
            file_in(folder, shard["file"], str(folder / MANIFEST)))
    needed = shard["tokens"] * ITEM_BYTES[manifest["dtype"]] + shard.get("offset", 0)
    expected = shard.get("file_bytes", needed)
    if needed > expected:
        raise UserError(f"shard {shard['file']} ends at byte {needed:,} of a file of {expected:,} bytes",
                        where=str(folder / MANIFEST), instead=_mend(folder, manifest))
    found = path.stat().st_size if os.path.isfile(path) else None
    if found != expected:
        state = "is missing" if found is None else f"has {found:,} bytes"
        raise UserError(f"shard {shard['file']} {state}; the manifest expects {expected:,} bytes",
                        where=str(path), instead=_mend(folder, manifest))


def verify(folder: Path) -> int:
    """Check the sha256 of every shard; returns how many there are.

    Raises:
        UserError: a shard is missing, of the wrong size, or not the one that was written.
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
            found = (sampled_hash if "file_bytes" in shard else hash_file)(folder / shard["file"])
        if found != shard["sha256"]:
            raise UserError(f"shard {shard['file']} has sha256 {found}, the manifest says {shard['sha256']}",
                            where=str(folder / shard["file"]), instead=_mend(folder, manifest))
    return len(shards)


def sampled_blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Blocks of a file that together are its first, its last and some between: the offset and the bytes of each."""
    size = path.stat().st_size
    with reading(path), open_regular(path) as file:
        for number in range(_SAMPLED_BLOCKS):
            # Each begins at a multiple of 8 bytes, so of a token.
            offset = max(0, size - _SAMPLED_BYTES) * number // (_SAMPLED_BLOCKS - 1) // 8 * 8
            if number and size <= _SAMPLED_BYTES:
                return
            file.seek(offset)
            yield offset, file.read(_SAMPLED_BYTES)


def sampled_hash(path: Path) -> str:
    """A sha256 of a file's size and of 64 blocks of it: of a file too large to be read whole."""
    blocks = b"".join(block for _, block in sampled_blocks(path))
    return hashlib.sha256(str(path.stat().st_size).encode() + blocks).hexdigest()


def _mend(folder: Path, manifest: dict[str, Any]) -> str:
    if "written_by" in manifest:
        return f"copy that file again from where {manifest['source']['corpus']} came from"
    place = shlex.quote(str(folder.absolute()))
    if (own := read_own(folder / MANIFEST, _MOST_BYTES)) is not None:
        stored = as_type(dict[str, Any], parse_json(own, MANIFEST, _MOST_BYTES), MANIFEST)
        return f"make the folder again: rm -r {place} && {stored.get('command')} --out {place}"
    # Not the command that it has: whoever wrote that could have anything typed.
    return (f"remove the folder and make it again: python3 -m ezpz_llm.data prepare CORPUS … --out {place} "
            '(its manifest has the corpus and options under "command": look before you type them)')
