"""What to prepare, checked."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.data.corpora import Corpus, find_corpus
from ezpz_llm.data.manifest import FORMAT
from ezpz_llm.data.shard_writer import SHARD_TOKENS
from ezpz_llm.data.tokenizers import TOKENIZERS
from ezpz_llm.errors import UserError, unknown
from ezpz_llm.resources import cache_dir


@dataclass(frozen=True)
class Options:
    """How to prepare a corpus; what is None is the corpus's own default.

    Attributes:
        tokenizer: "bytes", "char" or "gpt2".
        val_fraction: the last part of the token stream is the validation split.
        val_tokens: or so many tokens at its beginning are.
        shard_tokens: tokens a shard file.
        out: the folder to make; None for one in the cache.
    """

    tokenizer: str | None = None
    val_fraction: float | None = None
    val_tokens: int | None = None
    shard_tokens: int = SHARD_TOKENS
    out: Path | None = None


@dataclass(frozen=True)
class Request:
    """What to prepare. Equal requests of unchanged files have equal fingerprints."""

    corpus: Corpus
    tokenizer: str
    val_fraction: float | None
    val_tokens: int | None
    shard_tokens: int
    out: Path | None

    @property
    def fingerprint(self) -> str:
        val = self.val_fraction if self.val_tokens is None else [self.val_tokens, "tokens at the beginning"]
        asked = [FORMAT, self.corpus.name, self.corpus.identity, self.tokenizer, val, self.shard_tokens]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    @property
    def folder(self) -> Path:
        """Where the shards go: `out`, else a folder of the cache named after the request."""
        if self.out is not None:
            return self.out
        return cached_folder(f"{self.corpus.name}-{self.tokenizer}", self.fingerprint)

    @property
    def command(self) -> str:
        """What makes these shards, in whatever folder `--out` names."""
        val = (["--val-fraction", str(self.val_fraction)] if self.val_tokens is None
               else ["--val-tokens", str(self.val_tokens)])
        words = ["python3", "-m", "ezpz_llm.data", "prepare", self.corpus.words, "--tokenizer", self.tokenizer,
                 *val, "--shard-tokens", str(self.shard_tokens)]
        return shlex.join([*words, "--download"] if self.corpus.is_remote else words)


def cached_folder(name: str, fingerprint: str) -> Path:
    """The folder of the cache for shards called `name`."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "corpus"
    return cache_dir() / "shards" / f"{plain}-{fingerprint[:12]}"


def make_request(corpus: str, options: Options) -> Request:
    """The request for `corpus`.

    Raises:
        UserError: there is no such corpus or tokenizer, or a number is out of its range.
    """
    if options.tokenizer is not None and options.tokenizer not in TOKENIZERS:
        raise unknown("tokenizer", options.tokenizer, TOKENIZERS, where="--tokenizer")
    found = find_corpus(corpus)
    fraction, val_tokens = options.val_fraction, options.val_tokens
    if fraction is not None and val_tokens is not None:
        raise UserError("two validation splits", where="--val-fraction and --val-tokens",
                        instead="give one of them")
    if fraction is None and val_tokens is None:
        fraction, val_tokens = found.val_fraction, found.val_tokens
    if fraction is not None and not 0 <= fraction < 1:
        raise UserError(f"a validation fraction of {fraction}", where="--val-fraction",
                        instead="give a number from 0 up to, not including, 1")
    if val_tokens is not None and val_tokens < 0:
        raise UserError(f"{val_tokens} validation tokens", where="--val-tokens", instead="give 0 or more")
    if options.shard_tokens < 1:
        raise UserError(f"{options.shard_tokens} tokens a shard", where="--shard-tokens", instead="give 1 or more")
    return Request(found, options.tokenizer or found.tokenizer, fraction, val_tokens, options.shard_tokens,
                   options.out.expanduser().absolute() if options.out is not None else None)
