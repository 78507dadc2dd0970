"""Read and write token shards: raw little-endian uint16 or uint32 files, memory-mapped for reading.

    train_000000.bin, train_000001.bin, …, val_000000.bin, …, counts.npy, manifest.json

A document may continue in the next shard, and across the boundary between the splits.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

import numpy as np
from msgspec import UNSET

from ezpz_llm.core.base import UserError, apportion, open_regular, unknown_name_error
from ezpz_llm.core.rundir import hash_file
from ezpz_llm.training.data.downloads import reading
from ezpz_llm.training.data.manifest import (
    MANIFEST,
    SHARD,
    SHARD_TOKENS,
    TRAIN,
    VAL,
    Manifest,
    Shard,
    Split,
    read_manifest,
    read_part,
)
from ezpz_llm.training.data.tokenizers import Tokenizer, from_entry

BLOCK = 4096
"""Samples per block, in which each stream of a mixture has a fixed number."""


class TokenStream:
    """Memory-mapped tokens of a split: `len(stream)`, `stream[a:b]`.

    Args:
        shards: path and number of tokens of each shard, in order.
        where: name of the stream in error messages.
        offsets: bytes before the first token of each file; default 0.
        vocab_size: if given, check ids on every read; for tokens that were not all checked during preparation.
    """

    def __init__(self, shards: Sequence[tuple[Path, int]], dtype: np.dtype, where: str,
                 offsets: Sequence[int] | None = None, vocab_size: int | None = None) -> None:
        self._vocab_size = vocab_size
        self.where = where
        self.dtype = dtype
        self._maps = [np.memmap(path, dtype, "r", offset, (tokens,))
                      for (path, tokens), offset in zip(shards, offsets or [0] * len(shards), strict=True)]
        self._starts = np.cumsum([0, *(tokens for _, tokens in shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        """Return tokens [a:b] in the shards' data type; a read-only view if one shard contains them all.

        Raises:
            UserError: a token is outside `vocab_size`.
        """
        start, stop, _ = span.indices(len(self))
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            begin = int(self._starts[first])
            parts.append(self._maps[first][start - begin:stop - begin])
            start = int(self._starts[first + 1])
            first += 1
        tokens = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])
        if self._vocab_size is None or not tokens.size:
            return tokens
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            at = int(np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))[0])
            raise UserError(f"token {tokens[at]:,} at position {span.indices(len(self))[0] + at:,} is outside the "
                            f"tokenizer's vocabulary, which has {self._vocab_size:,} tokens", where=self.where,
                            instead="pass the tokenizer that made these tokens: --tokenizer T")
        return tokens

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens from each start, (len(starts), length) int64."""
        out = np.empty((len(starts), length), np.int64)
        for row, start in zip(out, starts.tolist(), strict=True):
            row[:] = self[start:start + length]
        return out


@dataclass(frozen=True)
class Mixture:
    """Token streams, and the number of samples of each in a block of 4096.

    Attributes:
        streams: one or more.
        counts: 1 or more each; they add up to 4096.
    """

    streams: tuple[TokenStream, ...]
    counts: tuple[int, ...]

    def __len__(self) -> int:
        """Tokens over all streams."""
        return sum(map(len, self.streams))


def samples_per_block(names: Sequence[str], weights: Sequence[float]) -> tuple[int, ...]:
    """Return the number of samples for each weight in a block of 4096, by the largest-remainder method.

    Raises:
        UserError: a weight is not positive, or too small for one sample.
    """
    total = float(sum(weights))
    for name, weight in zip(names, weights, strict=True):
        if not (weight > 0 and np.isfinite(total) and weight / total * BLOCK >= 1):
            raise UserError(f"{name} has a weight of {weight:g} in {total:g}; the minimum is 1 in {BLOCK}",
                            where="--corpus", instead="pass a larger weight, or remove that part")
    return tuple(apportion(weights, BLOCK))


class TokenData:
    """Prepared folder: shards written by `prepare` or another program, or a mixture of folders.

    Attributes:
        manifest: see `ezpz_llm.training.data.manifest`.
        parts: folders and weights of a mixture; empty for a single folder.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.parts = [(TokenData(Path(part.folder), read_part(Path(part.folder), folder)), part.weight)
                      for part in manifest.parts or ()]

    @classmethod
    def open(cls, folder: Path) -> TokenData:
        """Open a prepared folder.

        Raises:
            UserError: not a folder of shards, or a shard is missing or truncated.
        """
        return cls(folder, read_manifest(folder))

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that made the tokens.

        Raises:
            UserError: this version's tokenizer of that name differs, or the tokenizer's file or library is missing.
        """
        return from_entry(self.manifest.tokenizer, str(self.folder / MANIFEST), self.folder)

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer."""
        return self.manifest.vocab_size

    @property
    def unigram_entropy(self) -> float:
        """Unigram entropy in nats per token: the loss of a model that knows only token frequencies."""
        return self.manifest.unigram_entropy

    @property
    def fingerprint(self) -> str:
        """Hash of the shards' hashes, which identifies the tokens and their order."""
        if self.parts:
            hashes = [text for part, weight in self.parts for text in (part.fingerprint, f" {weight!r} ")]
        else:
            hashes = [shard.sha256 for shard in self.manifest.shards]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def split(self, name: str) -> TokenStream | Mixture:
        """Return the split "train" or "val"."""
        if name not in (TRAIN, VAL):
            raise unknown_name_error("split", name, (TRAIN, VAL), where=str(self.folder / MANIFEST))
        if self.parts:
            folders = [str(part.folder) for part, _ in self.parts]
            return Mixture(tuple(part._stream(name) for part, _ in self.parts),
                           samples_per_block(folders, [weight for _, weight in self.parts]))
        return self._stream(name)

    def _stream(self, name: str) -> TokenStream:
        """Return a split of a folder that is not a mixture."""
        shards = (self.manifest.splits.train if name == TRAIN else self.manifest.splits.val).shards
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        return TokenStream([(self.folder / shard.file, shard.tokens) for shard in shards], dtype,
                           f"split {name!r} of {self.folder}", [shard.offset or 0 for shard in shards],
                           self.vocab_size if self.manifest.document_index is not UNSET else None)

    def first_tokens(self, count: int) -> np.ndarray:
        """Return the first training tokens; for a mixture, the tokens of its first part."""
        data = self.parts[0][0] if self.parts else self
        return data._stream(TRAIN)[:count]


def open_npy(path: Path, what: str, instead: str) -> np.memmap:
    """Map an array from a .npy file.

    Args:
        what: noun for the file in the error message.
        instead: advice in the error message.

    Raises:
        UserError: the file is truncated or not a .npy file.
    """
    with reading(path):
        open_regular(path).close()
        try:
            # np.load would also open archives and pickles.
            return np.lib.format.open_memmap(path, mode="r")
        # For an invalid header, NumPy propagates the errors of Python's tokenizer and parser.
        except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError,
                TokenError) as error:
            article = "an" if what[0] in "aeiou" else "a"
            raise UserError(f"this {what} is truncated, or not {article} {what}: {error}", where=str(path),
                            instead=instead) from error


_COPY_TOKENS = 4 << 20


class ShardWriter:
    """Writer of <split>_000000.bin, <split>_000001.bin, …, with `shard_tokens` each; can resume after being killed.

    Attributes:
        tokens: number of tokens written.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.tokens = 0
        self._file: BinaryIO | None = None

    def write(self, tokens: np.ndarray) -> None:
        """Append `tokens`, which must have the shards' type.

        Raises:
            OSError: for example if the disk is full.
        """
        while tokens.size:
            free = self.shard_tokens - self.tokens % self.shard_tokens
            if self._file is None:
                self._file = self._path(self.tokens // self.shard_tokens).open("wb")
            part, tokens = tokens[:free], tokens[free:]
            self._file.write(part.data)
            self.tokens += part.size
            if part.size == free:
                self.close()

    def sync(self) -> None:
        """Flush the open shard to disk (fsync). A full disk may raise an error only here."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the open shard."""
        if self._file is not None:
            with self._file:
                self.sync()
            self._file = None

    def resume_after(self, tokens: int) -> bool:
        """Resume after `tokens` written tokens, and remove later ones.

        Returns False, without changing a file, if the shards contain fewer tokens.
        """
        self.tokens = tokens
        sizes = {path: count * self.dtype.itemsize for path, _, count in self._shards()}
        if any(not path.is_file() or path.stat().st_size < size for path, size in sizes.items()):
            return False
        for path in self.folder.glob(f"{self.split}_*{SHARD}"):
            if path not in sizes:
                path.unlink()
        for path, size in sizes.items():
            os.truncate(path, size)
        if tokens % self.shard_tokens:
            self._file = [*sizes][-1].open("ab")
        return True

    def copy_tail(self, keep: int, other: ShardWriter) -> None:
        """Copy all but the first `keep` tokens to `other`; the boundary is known only after the last document."""
        self.close()
        for path, start, tokens in self._shards():
            shard = np.memmap(path, self.dtype, "r")
            for first in range(max(0, keep - start), tokens, _COPY_TOKENS):
                other.write(shard[first:first + _COPY_TOKENS])
        other.close()

    def cut(self, keep: int) -> None:
        """Remove all but the first `keep` tokens. Idempotent, so that a resumed process can repeat it."""
        self.close()
        for path, start, tokens in self._shards():
            remaining = min(tokens, max(0, keep - start))
            if not remaining:
                path.unlink(missing_ok=True)
            elif remaining < tokens:
                os.truncate(path, remaining * self.dtype.itemsize)
        self.tokens = min(self.tokens, keep)

    def manifest_entry(self) -> Split:
        """Return the split's entry in the manifest; reads each shard once more to hash it."""
        self.close()
        return Split(self.tokens, [Shard(path.name, tokens, hash_file(path)) for path, _, tokens in self._shards()])

    def _path(self, index: int) -> Path:
        return self.folder / f"{self.split}_{index:06d}{SHARD}"

    def _shards(self) -> list[tuple[Path, int, int]]:
        """Return path, first token and number of tokens of each shard."""
        return [(self._path(start // self.shard_tokens), start, min(self.shard_tokens, self.tokens - start))
                for start in range(0, self.tokens, self.shard_tokens)]
