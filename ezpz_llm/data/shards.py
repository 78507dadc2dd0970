"""Token shards: raw little-endian uint16 or uint32 files, read by memory map, and the writing of them.

    train_000000.bin, train_000001.bin, …, val_000000.bin, …, counts.npy, manifest.json

A document may cross from one shard to the next, and from the training to the validation split.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np

from ezpz_llm.base import UserError, apportioned, open_regular, unknown
from ezpz_llm.data.downloads import reading
from ezpz_llm.data.manifest import MANIFEST, SHARD, SHARD_TOKENS, TRAIN, VAL, read_manifest, read_part
from ezpz_llm.data.tokenizers import Tokenizer, from_entry
from ezpz_llm.rundir import hash_file

BLOCK = 4096
"""Samples of which each stream of a mixture gives a fixed number."""


class TokenStream:
    """One split's tokens, read by memory map: `len(stream)`, `stream[a:b]`.

    Args:
        shards: path and number of tokens of each, in order.
        where: what to call it in an error.
        offsets: bytes before the first token of each file; none if not given.
        vocab_size: ids that there are, where nobody has read all tokens yet; what is read is looked at then.
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

    def __getitem__(self, place: slice) -> np.ndarray:
        """Tokens [a:b] in the shards' type; a view where they lie in one shard, so not to be written to.

        Raises:
            UserError: one is beyond `vocab_size`.
        """
        start, stop, _ = place.indices(len(self))
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            begin = int(self._starts[first])
            parts.append(self._maps[first][start - begin:stop - begin])
            start = int(self._starts[first + 1])
            first += 1
        found = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])
        if self._vocab_size is None or not found.size:
            return found
        if found.min() < 0 or found.max() >= self._vocab_size:
            at = int(np.flatnonzero((found < 0) | (found >= self._vocab_size))[0])
            raise UserError(f"token {found[at]:,} at place {place.indices(len(self))[0] + at:,}: the tokenizer has "
                            f"only {self._vocab_size:,}", where=self.where,
                            instead="name the tokenizer that made these tokens with --tokenizer")
        return found

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """(len(starts), length) int64: the `length` tokens from each start."""
        out = np.empty((len(starts), length), np.int64)
        for row, start in zip(out, starts.tolist(), strict=True):
            row[:] = self[start:start + length]
        return out


@dataclass(frozen=True)
class Mixture:
    """Token streams and how many of each block of 4096 samples each one gives.

    Attributes:
        streams: one or more.
        counts: 1 or more each, together 4096.
    """

    streams: tuple[TokenStream, ...]
    counts: tuple[int, ...]

    def __len__(self) -> int:
        """Tokens over all streams."""
        return sum(map(len, self.streams))


def shares(names: Sequence[str], weights: Sequence[float]) -> tuple[int, ...]:
    """Each weight's number of 4096 samples, by largest remainders.

    Raises:
        UserError: a weight is not positive, or too small to be given one.
    """
    total = float(sum(weights))
    for name, weight in zip(names, weights, strict=True):
        if not (weight > 0 and np.isfinite(total) and weight / total * BLOCK >= 1):
            raise UserError(f"{name} has the weight {weight:g} of {total:g}; the least is 1 in {BLOCK}",
                            where="--corpus", instead="a larger weight, or leave that part out")
    return tuple(apportioned(weights, BLOCK))


class TokenData:
    """A prepared folder: its own shards, another program's, or a mixture of folders.

    Attributes:
        manifest: see `ezpz_llm.data.manifest`.
        parts: the folders that are mixed, and their weights; empty for a single one.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.parts = [(TokenData(part, read_part(part, folder)), weight) for part, weight in
                      ((Path(one["folder"]), one["weight"]) for one in manifest.get("parts", ()))]

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
            UserError: the one of that name here is another, or its file or library is not on this machine.
        """
        return from_entry(self.manifest["tokenizer"], str(self.folder / MANIFEST), self.folder)

    @property
    def vocab_size(self) -> int:
        """Symbols of the tokenizer."""
        return self.manifest["vocab_size"]

    @property
    def unigram_entropy(self) -> float:
        """Nats per token of the whole corpus: what a model that knows only token frequencies would reach."""
        return self.manifest["unigram_entropy"]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of these tokens in their order: a hash over the hashes of the shards."""
        if self.parts:
            known = [text for part, weight in self.parts for text in (part.fingerprint, f" {weight!r} ")]
        else:
            known = [shard["sha256"] for name in (TRAIN, VAL) for shard in self.manifest["splits"][name]["shards"]]
        return hashlib.sha256("".join(known).encode()).hexdigest()

    def split(self, name: str) -> TokenStream | Mixture:
        """The split "train" or "val"."""
        splits = self.manifest["splits"]
        if name not in splits:
            raise unknown("split", name, splits, where=str(self.folder / MANIFEST))
        if self.parts:
            words = [str(part.folder) for part, _ in self.parts]
            return Mixture(tuple(part._stream(name) for part, _ in self.parts),
                           shares(words, [weight for _, weight in self.parts]))
        return self._stream(name)

    def _stream(self, name: str) -> TokenStream:
        """A split of a folder that is no mixture."""
        shards = self.manifest["splits"][name]["shards"]
        dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        return TokenStream([(self.folder / shard["file"], shard["tokens"]) for shard in shards], dtype,
                           f"split {name!r} of {self.folder}", [shard.get("offset", 0) for shard in shards],
                           self.vocab_size if "document_index" in self.manifest else None)

    def first_tokens(self, count: int) -> np.ndarray:
        """The first tokens to train on; of a mixture, its first part's."""
        data = self.parts[0][0] if self.parts else self
        return data._stream(TRAIN)[:count]


def open_npy(path: Path, what: str, instead: str) -> np.memmap:
    """An array in a file of numpy's, by memory map.

    Raises:
        UserError: it is truncated, or no such file; with `what` it should be, and what to do `instead`.
    """
    with reading(path):
        open_regular(path).close()
        try:
            # Not np.load, which opens archives and pickles, too.
            return np.lib.format.open_memmap(path, mode="r")
        # Of a header that does not parse numpy lets whatever its tokenizer and parser raise out.
        except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError,
                TokenError) as error:
            raise UserError(f"this {what} is truncated, or no {what}: {error}", where=str(path),
                            instead=instead) from error


# Writing a split's stream of tokens as shard files, hashed at the end, to be gone on with after a kill.
_COPY_TOKENS = 4 << 20


class ShardWriter:
    """Writes shards of `shard_tokens` each, the last one shorter: <split>_000000.bin, <split>_000001.bin, …

    Attributes:
        tokens: how many were written.
    """

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

    def go_on(self, tokens: int) -> bool:
        """Take up a folder where `tokens` had been written; False, with no file changed, where fewer are there.

        What was written after them is removed.
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

    def describe(self) -> dict[str, Any]:
        """The split's entry in the manifest; each shard is read once more, for its hash."""
        self.close()
        shards = [{"file": path.name, "tokens": tokens, "sha256": hash_file(path)}
                  for path, _, tokens in self._shards()]
        return {"tokens": self.tokens, "shards": shards}

    def _path(self, index: int) -> Path:
        return self.folder / f"{self.split}_{index:06d}{SHARD}"

    def _shards(self) -> list[tuple[Path, int, int]]:
        """Path, first token and number of tokens of each."""
        return [(self._path(start // self.shard_tokens), start, min(self.shard_tokens, self.tokens - start))
                for start in range(0, self.tokens, self.shard_tokens)]
