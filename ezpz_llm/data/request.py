"""Request to prepare a corpus, validated."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.package_data import cache_dir
from ezpz_llm.data.corpora import Corpus, find_corpus
from ezpz_llm.data.formats import TEXT
from ezpz_llm.data.manifest import FORMAT
from ezpz_llm.data.shard_writer import SHARD_TOKENS
from ezpz_llm.data.tokenizers import Choice, choose

_LONGEST_NAME = 100


@dataclass(frozen=True)
class Options:
    """Settings for preparing a corpus; what is None is the corpus's own default.

    Attributes:
        tokenizer: "bytes", "char", "gpt2" or a folder; see `ezpz_llm.data.tokenizers`.
        val_fraction: the last part of the token stream is the validation split.
        val_tokens: or so many tokens at its beginning are.
        shard_tokens: tokens a shard file.
        out: the folder to make; None for one in the cache.
        text_key: the member of a JSON object, or the column, that has a document's text.
        max_broken: how many broken documents may be left out.
    """

    tokenizer: str | None = None
    val_fraction: float | None = None
    val_tokens: int | None = None
    shard_tokens: int = SHARD_TOKENS
    out: Path | None = None
    text_key: str = TEXT
    max_broken: int = 0


@dataclass(frozen=True)
class Request:
    """A corpus to prepare and how. Equal requests of unchanged files have equal fingerprints.

    How many broken documents may be left out is no part of that: shards that are there were accepted when they were
    made, and say how many were.
    """

    corpus: Corpus
    tokenizer: Choice
    val_fraction: float | None
    val_tokens: int | None
    shard_tokens: int
    out: Path | None
    text_key: str = TEXT
    max_broken: int = 0

    @property
    def fingerprint(self) -> str:
        val = self.val_fraction if self.val_tokens is None else [self.val_tokens, "tokens at the beginning"]
        asked = [FORMAT, self.corpus.name, self.corpus.identity, self.tokenizer.name, val, self.shard_tokens]
        if self.tokenizer.table is not None:
            asked.append(self.tokenizer.table)
        if self.text_key != TEXT:
            asked.append(["text key", self.text_key])
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    @property
    def folder(self) -> Path:
        """Folder of the shards: `out`, else a folder of the cache named after the request."""
        if self.out is not None:
            return self.out
        return cached_folder(f"{self.corpus.name}-{self.tokenizer.name}", self.fingerprint)

    @property
    def command(self) -> str:
        """Identity of these shards, whatever folder `--out` names."""
        val = (["--val-fraction", str(self.val_fraction)] if self.val_tokens is None
               else ["--val-tokens", str(self.val_tokens)])
        words = ["python3", "-m", "ezpz_llm.data", "prepare", self.corpus.words,
                 "--tokenizer", self.tokenizer.words, *val, "--shard-tokens", str(self.shard_tokens),
                 *(["--text-key", self.text_key] if self.text_key != TEXT else []),
                 *(["--max-broken", str(self.max_broken)] if self.max_broken else [])]
        return shlex.join([*words, "--download"] if self.corpus.is_remote else words)


def cached_folder(name: str, fingerprint: str) -> Path:
    """The folder of the cache for shards called `name`."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "corpus"
    # Names have an end, and more is put around this one while it is made.
    return cache_dir() / "shards" / f"{plain[:_LONGEST_NAME]}-{fingerprint[:12]}"


def make_request(corpus: str, options: Options) -> Request:
    """The request for `corpus`.

    Raises:
        UserError: there is no such corpus or tokenizer, or a number is out of its range.
    """
    tokenizer = None if options.tokenizer is None else choose(options.tokenizer)
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
    if options.max_broken < 0:
        raise UserError(f"{options.max_broken} broken documents", where="--max-broken", instead="give 0 or more")
    if not options.text_key:
        raise UserError("the name of the text is empty", where="--text-key", instead="such as content")
    if options.shard_tokens < 1:
        raise UserError(f"{options.shard_tokens} tokens a shard", where="--shard-tokens", instead="give 1 or more")
    return Request(found, tokenizer or choose(found.tokenizer), fraction, val_tokens, options.shard_tokens,
                   options.out.expanduser().absolute() if options.out is not None else None,
                   options.text_key, options.max_broken)
