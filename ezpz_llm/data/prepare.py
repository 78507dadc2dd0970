"""From a corpus to a folder of token shards, once: later calls, and other processes, use the same folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.data.building import building
from ezpz_llm.data.corpora import Corpus, find_corpus, prepared_folder
from ezpz_llm.data.encode import Encoded, encode_all, token_dtype
from ezpz_llm.data.manifest import FORMAT, MANIFEST, read_manifest
from ezpz_llm.data.progress import progress, say
from ezpz_llm.data.public import writing
from ezpz_llm.data.reader import tasks, texts
from ezpz_llm.data.samples import validation_windows, windows_per_epoch
from ezpz_llm.data.shards import SHARD_TOKENS, TRAIN, VAL, ShardWriter, TokenData
from ezpz_llm.data.tokenizers import (
    GPT2_VOCAB,
    TOKENIZERS,
    CharTokenizer,
    Tokenizer,
    get_tokenizer,
    to_entry,
)
from ezpz_llm.errors import UserError, unknown
from ezpz_llm.resources import cache_dir
from ezpz_llm.rundir import write_json

# Below this a further process costs more to start than it saves.
_BYTES_PER_WORKER = 16 << 20
_MOST_WORKERS = 64


@dataclass(frozen=True)
class Request:
    """What to prepare. Equal requests of unchanged files have equal fingerprints."""

    corpus: Corpus
    tokenizer: str
    val_fraction: float
    shard_tokens: int
    out: Path | None

    @property
    def fingerprint(self) -> str:
        asked = [FORMAT, self.corpus.name, self.corpus.identity, self.tokenizer, self.val_fraction,
                 self.shard_tokens]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    @property
    def folder(self) -> Path:
        """Where the shards go: `out`, else a folder of the cache named after the request."""
        if self.out is not None:
            return self.out
        name = re.sub(r"[^A-Za-z0-9._]+", "-", self.corpus.name).strip("-.") or "corpus"
        return cache_dir() / "shards" / f"{name}-{self.tokenizer}-{self.fingerprint[:12]}"

    @property
    def command(self) -> str:
        """What makes these shards, in whatever folder `--out` names."""
        words = ["python3", "-m", "ezpz_llm.data", "prepare", self.corpus.words, "--tokenizer", self.tokenizer,
                 "--val-fraction", str(self.val_fraction), "--shard-tokens", str(self.shard_tokens)]
        return shlex.join(words)


def prepare(corpus: str, tokenizer: str | None = None, *, out: Path | None = None,
            val_fraction: float | None = None, shard_tokens: int = SHARD_TOKENS, workers: int | None = None,
            progress: bool = True) -> Path:
    """The folder of shards of `corpus`, made if it is not there yet. Safe against two at once.

    Args:
        corpus: "stdlib", "shakespeare", the path of a text or .jsonl file or of a folder of such, or the path of
            a prepared folder, which is used as it is.
        tokenizer: "bytes", "char" or "gpt2"; default: "char" for shakespeare, else "bytes".
        out: the folder to make; default: one in the cache.
        val_fraction: the last part of the token stream to validate on; default 0.1 for one file, 0.02 for many.
        shard_tokens: tokens a shard file.
        workers: processes; default: one for each 16 MB, at most the cores this process may use.
        progress: whether to report on stderr.

    Raises:
        UserError: nothing to read, text that cannot be read, a tokenizer that is not there, no room.
    """
    if folder := prepared_folder(corpus):
        _check_prepared(folder, tokenizer)
        if out is not None or val_fraction is not None:
            raise UserError("this folder is prepared already: its place and its split are what they are",
                            where=str(folder), instead="leave --out and --val-fraction out")
        return folder
    request = _request(corpus, tokenizer, out, val_fraction, shard_tokens)
    if workers is not None and workers < 1:
        raise UserError(f"{workers} workers", where="--workers", instead="give 1 or more")
    folder = request.folder
    if not _ready(request):
        def waiting() -> None:
            if progress:
                say(f"waiting for another process that prepares {folder}")

        with writing(folder), building(folder, lambda: _finished(request), waiting) as hidden:
            if hidden is not None:
                _make(request, hidden, workers or _default_workers(request.corpus.size), progress)
    return folder


def check_corpus(corpus: str, tokenizer: str | None = None, block_size: int | None = None) -> None:
    """Whether `prepare` would find what it needs, without doing it.

    Args:
        block_size: whether shards that are there already are enough for windows of that length, too.

    Raises:
        UserError: as `prepare`, for all that shows without reading the text; a truncated shard; too few tokens.
    """
    if folder := prepared_folder(corpus):
        _check_prepared(folder, tokenizer)
    else:
        request = _request(corpus, tokenizer, None, None, SHARD_TOKENS)
        folder = request.folder if _ready(request) else None
    if folder and block_size is not None:
        data = TokenData.open(folder)
        windows_per_epoch(len(data.split(TRAIN)), block_size)
        validation_windows(data.split(VAL), block_size)


def _request(corpus: str, tokenizer: str | None, out: Path | None, val_fraction: float | None,
             shard_tokens: int) -> Request:
    if tokenizer is not None and tokenizer not in TOKENIZERS:
        raise unknown("tokenizer", tokenizer, TOKENIZERS, where="--tokenizer")
    found = find_corpus(corpus)
    fraction = found.val_fraction if val_fraction is None else val_fraction
    if not 0 <= fraction < 1:
        raise UserError(f"a validation fraction of {fraction}", where="--val-fraction",
                        instead="give a number from 0 up to, not including, 1")
    if shard_tokens < 1:
        raise UserError(f"{shard_tokens} tokens a shard", where="--shard-tokens", instead="give 1 or more")
    return Request(found, tokenizer or found.tokenizer, fraction, shard_tokens,
                   out.expanduser().absolute() if out is not None else None)


def _check_prepared(folder: Path, tokenizer: str | None) -> None:
    found = read_manifest(folder)["tokenizer"]["name"]
    if tokenizer is not None and tokenizer != found:
        raise UserError(f"this folder was prepared with the tokenizer {found}, not {tokenizer}",
                        where=str(folder), instead=f"leave --tokenizer out, or give --tokenizer {found}")


def _finished(request: Request) -> bool:
    """Whether the request's folder stands complete; UserError if something else is in its place."""
    folder = request.folder
    if (folder / MANIFEST).exists():
        if read_manifest(folder)["request"] == request.fingerprint:
            return True
        found = "other shards are here: of another corpus, tokenizer or split, or of files that have changed"
    elif folder.is_dir() and not any(folder.iterdir()):
        return False
    elif folder.exists():
        found = "something else is here"
    else:
        return False
    raise UserError(found, where=str(folder), instead="name another folder with --out, or remove this one first")


def _ready(request: Request) -> bool:
    """Whether there is nothing to do; else that the tokenizer's file is there is made sure of."""
    ready = _finished(request)
    if not ready and request.tokenizer == "gpt2":
        GPT2_VOCAB.find()
    return ready


def _default_workers(size: int) -> int:
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _MOST_WORKERS, size // _BYTES_PER_WORKER))


def _make(request: Request, folder: Path, workers: int, show: bool) -> None:
    corpus, began = request.corpus, time.monotonic()
    label = f"preparing {corpus.words} ({request.tokenizer})"
    if show:
        files = "1 file" if len(corpus.files) == 1 else f"{len(corpus.files):,} files"
        say(f"{label}: {files}, {corpus.size / 1e6:,.1f} MB, {workers} "
            f"{'process' if workers == 1 else 'processes'}")
    tokenizer = _tokenizer(request)
    writer = ShardWriter(folder, TRAIN, token_dtype(tokenizer.vocab_size), request.shard_tokens)
    counts, documents = np.zeros(tokenizer.vocab_size, np.int64), 0
    with progress(label, corpus.size, show) as advance:
        encoded: Encoded
        for encoded in encode_all(tasks(corpus.files), to_entry(tokenizer), workers):
            writer.write(encoded.tokens)
            counts += encoded.counts
            documents += encoded.documents
            advance(encoded.source_bytes)
    if not documents:
        raise UserError("nothing to read: no document has any text", where=corpus.words,
                        instead="name a corpus with text in it")
    manifest = _manifest(request, tokenizer, writer, counts, documents)
    write_json(folder / MANIFEST, manifest)
    if show:
        say(f"prepared {manifest['tokens']:,} tokens in {time.monotonic() - began:.1f} s: {request.folder}")


def _tokenizer(request: Request) -> Tokenizer:
    if request.tokenizer != "char":
        return get_tokenizer(request.tokenizer)
    found: set[str] = set()
    for task in tasks(request.corpus.files):
        for piece in task:
            for _, text in texts(piece):
                found.update(text)
    return CharTokenizer("".join(sorted(found)))


def _manifest(request: Request, tokenizer: Tokenizer, train: ShardWriter, counts: np.ndarray,
              documents: int) -> dict[str, Any]:
    """Cut the validation split off the written tokens and say what there is."""
    corpus, tokens = request.corpus, train.tokens
    val = ShardWriter(train.folder, VAL, train.dtype, train.shard_tokens)
    train.move_tail(int(tokens * (1 - request.val_fraction)), val)
    return {
        "format": FORMAT,
        "request": request.fingerprint,
        "command": request.command,
        "source": {"corpus": corpus.words, "files": len(corpus.files), "bytes": corpus.size, **corpus.facts},
        "tokenizer": to_entry(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "dtype": train.dtype.name,
        "documents": documents,
        "tokens": tokens,
        "unigram_entropy": entropy(counts),
        "val_fraction": request.val_fraction,
        "splits": {TRAIN: train.describe(), VAL: val.describe()},
    }


def entropy(counts: np.ndarray) -> float:
    """Nats per draw from a distribution given by its counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
