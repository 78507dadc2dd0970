"""Token shards: raw little-endian uint16 or uint32 files, written in order and read by memory map.

    train_000000.bin, train_000001.bin, …, val_000000.bin, …, manifest.json

A document may cross from one shard to the next, and from the training to the validation split.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ezpz_llm.data.manifest import MANIFEST, read_manifest, sha256_of
from ezpz_llm.data.tokenizers import Tokenizer, from_entry
from ezpz_llm.errors import unknown

SHARD_TOKENS = 100_000_000
TRAIN, VAL = "train", "val"


class ShardWriter:
    """Writes one split's stream of tokens as shards of `shard_tokens` each, the last one shorter."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.tokens = 0
        self._file: BinaryIO | None = None

    def write(self, tokens: np.ndarray) -> None:
        """Append `tokens`, already of the shards' type.

        Raises:
            OSError: the disk is full, or the like.
        """
        while tokens.size:
            room = self.shard_tokens - self.tokens % self.shard_tokens
            if self._file is None:
                self._file = self._path(self.tokens // self.shard_tokens).open("wb")
            part, tokens = tokens[:room], tokens[room:]
            self._file.write(part.data)
            self.tokens += part.size
            if part.size == room:
                self.close()

    def close(self) -> None:
        """End the open shard, on the disk and not only in memory: a full disk may show only now."""
        if self._file is not None:
            file, self._file = self._file, None
            with file:
                file.flush()
                os.fsync(file.fileno())

    def move_tail(self, keep: int, other: ShardWriter) -> None:
        """Hand all but the first `keep` tokens to `other`: where to split is known only at the stream's end."""
        self.close()
        for path, start, tokens in self._shards():
            kept = min(tokens, max(0, keep - start))
            if kept == tokens:
                continue
            other.write(np.memmap(path, self.dtype, "r")[kept:])
            if kept:
                os.truncate(path, kept * self.dtype.itemsize)
            else:
                path.unlink()
        self.tokens = min(self.tokens, keep)
        other.close()

    def describe(self) -> dict[str, Any]:
        """The split's entry in the manifest; hashes what was written."""
        shards = [{"file": path.name, "tokens": tokens, "sha256": sha256_of(path)}
                  for path, _, tokens in self._shards()]
        return {"tokens": self.tokens, "shards": shards}

    def _path(self, index: int) -> Path:
        return self.folder / f"{self.split}_{index:06d}.bin"

    def _shards(self) -> list[tuple[Path, int, int]]:
        """Path, first token and number of tokens of each."""
        return [(self._path(start // self.shard_tokens), start, min(self.shard_tokens, self.tokens - start))
                for start in range(0, self.tokens, self.shard_tokens)]


class TokenStream:
    """One split's tokens, read by memory map: `len(stream)`, `stream[a:b]`.

    Args:
        shards: path and number of tokens of each, in order.
        where: what to call it in an error.
    """

    def __init__(self, shards: Sequence[tuple[Path, int]], dtype: np.dtype, where: str) -> None:
        self.where = where
        self.dtype = dtype
        self._maps = [np.memmap(path, dtype, "r", shape=(tokens,)) for path, tokens in shards]
        self._starts = np.cumsum([0, *(tokens for _, tokens in shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, place: slice) -> np.ndarray:
        """Tokens [a:b] in the shards' type; a view where they lie in one shard, so not to be written to."""
        start, stop, _ = place.indices(len(self))
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            begin = int(self._starts[first])
            parts.append(self._maps[first][start - begin:stop - begin])
            start = int(self._starts[first + 1])
            first += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """(len(starts), length) int64: the `length` tokens from each start."""
        out = np.empty((len(starts), length), np.int64)
        for row, start in zip(out, starts.tolist(), strict=True):
            row[:] = self[start:start + length]
        return out


class TokenData:
    """A prepared folder.

    Attributes:
        manifest: see `ezpz_llm.data.manifest`.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: Path) -> TokenData:
        """Open `folder`.

        Raises:
            UserError: not a folder of shards, or a shard is missing or truncated.
        """
        return cls(folder, read_manifest(folder))

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            UserError: the one of that name here is another, or its file is not on this machine.
        """
        return from_entry(self.manifest["tokenizer"], str(self.folder / MANIFEST))

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def unigram_entropy(self) -> float:
        """Nats per token of the whole corpus: what a model that knows only token frequencies would reach."""
        return self.manifest["unigram_entropy"]

    @property
    def fingerprint(self) -> str:
        """What tells these tokens and their order from any others: a hash over the hashes of the shards."""
        hashes = [shard["sha256"] for split in (TRAIN, VAL) for shard in self.manifest["splits"][split]["shards"]]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def split(self, name: str) -> TokenStream:
        """The split "train" or "val"."""
        splits = self.manifest["splits"]
        if name not in splits:
            raise unknown("split", name, splits, where=str(self.folder / MANIFEST))
        shards = [(self.folder / shard["file"], shard["tokens"]) for shard in splits[name]["shards"]]
        dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        return TokenStream(shards, dtype, f"split {name!r} of {self.folder}")
