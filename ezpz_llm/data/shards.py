"""Token shards: raw little-endian uint16 or uint32 files, read by memory map.

    train_000000.bin, train_000001.bin, …, val_000000.bin, …, counts.npy, manifest.json

A document may cross from one shard to the next, and from the training to the validation split.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.base.errors import unknown
from ezpz_llm.data.manifest import MANIFEST, TRAIN, VAL, read_manifest
from ezpz_llm.data.order import shares
from ezpz_llm.data.tokenizers import Tokenizer, from_entry


class TokenStream:
    """One split's tokens, read by memory map: `len(stream)`, `stream[a:b]`.

    Args:
        shards: path and number of tokens of each, in order.
        where: what to call it in an error.
        offsets: bytes before the first token of each file; none if not given.
    """

    def __init__(self, shards: Sequence[tuple[Path, int]], dtype: np.dtype, where: str,
                 offsets: Sequence[int] | None = None) -> None:
        self.where = where
        self.dtype = dtype
        self._maps = [np.memmap(path, dtype, "r", offset, (tokens,))
                      for (path, tokens), offset in zip(shards, offsets or [0] * len(shards), strict=True)]
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


class TokenData:
    """A prepared folder: its own shards, another program's, or a mixture of folders.

    Attributes:
        manifest: see `ezpz_llm.data.manifest`.
        parts: the folders that are mixed, and their weights; empty for a single one.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.parts = [(TokenData.open(Path(part["folder"])), part["weight"]) for part in manifest.get("parts", ())]

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
                           f"split {name!r} of {self.folder}", [shard.get("offset", 0) for shard in shards])

    def first_tokens(self, count: int) -> np.ndarray:
        """The first tokens to train on; of a mixture, its first part's."""
        data = self.parts[0][0] if self.parts else self
        return data._stream(TRAIN)[:count]


