"""Writing a split's stream of tokens as shard files, hashed on the way, to be gone on with after a kill."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ezpz_llm.data.manifest import SHARD, SHARD_TOKENS, sha256_of

_COPY_TOKENS = 4 << 20


class ShardWriter:
    """Writes shards of `shard_tokens` each, the last one shorter: <split>_000000.bin, <split>_000001.bin, …

    Attributes:
        tokens: how many were written.
        hashes: sha256 of each shard that is full.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.tokens = 0
        self.hashes: list[str] = []
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def write(self, tokens: np.ndarray) -> None:
        """Append `tokens`, already of the shards' type.

        Raises:
            OSError: the disk is full, or the like.
        """
        while tokens.size:
            room = self.shard_tokens - self.tokens % self.shard_tokens
            if self._file is None:
                self._file = self._path(self.tokens // self.shard_tokens).open("wb")
                self._digest = hashlib.sha256()
            part, tokens = tokens[:room], tokens[room:]
            self._file.write(part.data)
            self._digest.update(part.data)
            self.tokens += part.size
            if part.size == room:
                self.close()
                self.hashes.append(self._digest.hexdigest())

    def sync(self) -> None:
        """Flush what was written to disk (fsync): a full disk may show only now."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """End the open shard."""
        if self._file is not None:
            with self._file:
                self.sync()
            self._file = None

    def go_on(self, tokens: int, hashes: list[str]) -> bool:
        """Take up a folder where `tokens` had been written; False, with nothing changed, where fewer are there.

        What was written after them is removed.
        """
        full, rest = divmod(tokens, self.shard_tokens)
        bytes_of = [*[self.shard_tokens * self.dtype.itemsize] * full, *[rest * self.dtype.itemsize] * (rest > 0)]
        paths = [self._path(index) for index in range(len(bytes_of))]
        if any(not path.is_file() or path.stat().st_size < size
               for path, size in zip(paths, bytes_of, strict=True)):
            return False
        for path in self.folder.glob(f"{self.split}_*{SHARD}"):
            if path not in paths:
                path.unlink()
        for path, size in zip(paths, bytes_of, strict=True):
            os.truncate(path, size)
        self.tokens, self.hashes = tokens, list(hashes)
        if rest:
            # A hash cannot be kept half done: the part shard's is taken again.
            self._digest = hashlib.sha256()
            with paths[-1].open("rb") as file:
                while block := file.read(1 << 20):
                    self._digest.update(block)
            self._file = paths[-1].open("ab")
        return True

    def copy_tail(self, keep: int, other: ShardWriter) -> None:
        """Give all but the first `keep` tokens to `other`, too: where to split may be known only at the end."""
        self.close()
        for path, start, tokens in self._shards():
            shard = np.memmap(path, self.dtype, "r")
            for first in range(max(0, keep - start), tokens, _COPY_TOKENS):
                other.write(shard[first:first + _COPY_TOKENS])
        other.close()

    def cut(self, keep: int) -> None:
        """Remove all but the first `keep` tokens. Doing so again, after a kill, ends in the same files."""
        self.close()
        for path, start, tokens in self._shards():
            kept = min(tokens, max(0, keep - start))
            if not kept:
                path.unlink(missing_ok=True)
            elif kept < tokens:
                os.truncate(path, kept * self.dtype.itemsize)
        self.tokens = min(self.tokens, keep)
        self.hashes = self.hashes[:self.tokens // self.shard_tokens]

    def describe(self) -> dict[str, Any]:
        """The split's entry in the manifest."""
        self.close()
        shards = [{"file": path.name, "tokens": tokens,
                   "sha256": self.hashes[index] if index < len(self.hashes) else sha256_of(path)}
                  for index, (path, _, tokens) in enumerate(self._shards())]
        return {"tokens": self.tokens, "shards": shards}

    def _path(self, index: int) -> Path:
        return self.folder / f"{self.split}_{index:06d}{SHARD}"

    def _shards(self) -> list[tuple[Path, int, int]]:
        """Path, first token and number of tokens of each."""
        return [(self._path(start // self.shard_tokens), start, min(self.shard_tokens, self.tokens - start))
                for start in range(0, self.tokens, self.shard_tokens)]
