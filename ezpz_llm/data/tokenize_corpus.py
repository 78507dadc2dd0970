"""Tokenize a corpus into shards in a hidden folder, in a pool; continue where a killed process stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.base import UserError
from ezpz_llm.data.atomic_dir import JOURNAL, Interrupted, Journal, clear
from ezpz_llm.data.corpora import Request
from ezpz_llm.data.downloads import progress, say
from ezpz_llm.data.formats import TEXT
from ezpz_llm.data.hub import resolve_revision
from ezpz_llm.data.manifest import COUNTS, FORMAT, MANIFEST, SHARD, TRAIN, VAL
from ezpz_llm.data.reader import Piece, Reading, Task, tasks, texts
from ezpz_llm.data.shards import ShardWriter
from ezpz_llm.data.tokenizer_files import copy_files
from ezpz_llm.data.tokenizers import CharTokenizer, Tokenizer, from_entry, to_entry
from ezpz_llm.rundir import write_json

# What a kill can cost, at most: a save waits for the disk.
_SECONDS_BETWEEN_SAVES = 2.0
_BROKEN_NAMED = 100
"""Broken documents that the manifest names."""


@dataclass
class _Work:
    """A folder of shards in the making."""

    request: Request
    folder: Path
    journal: Journal
    tokenizer: Tokenizer
    counts: np.ndarray
    train: ShardWriter = field(init=False)
    val: ShardWriter = field(init=False)

    def __post_init__(self) -> None:
        dtype = token_dtype(self.tokenizer.vocab_size)
        self.train, self.val = (ShardWriter(self.folder, split, dtype, self.request.options.shard_tokens)
                                for split in (TRAIN, VAL))

    @property
    def tokens(self) -> int:
        """Tokens written so far, of both splits."""
        return self.train.tokens + self.val.tokens

    def write(self, tokens: np.ndarray) -> None:
        """Append to the stream of tokens; where `val_tokens` is a number, so many at its beginning validate."""
        if self.request.options.val_tokens is not None:
            room = self.request.options.val_tokens - self.val.tokens
            self.val.write(tokens[:room])
            tokens = tokens[room:]
        self.train.write(tokens)

    def save(self) -> None:
        """The journal, after the shards that it speaks of."""
        for writer in (self.train, self.val):
            writer.sync()
            self.journal.written[writer.split] = {"tokens": writer.tokens}
        self.journal.counts = self.counts.tolist()
        self.journal.save(self.folder)

    def go_on(self) -> bool:
        """Take up the shards that the journal speaks of; False if they are not all there."""
        train, val = (self.journal.written[split]["tokens"] for split in (TRAIN, VAL))
        if not self.val.go_on(val):
            return False
        if not self.journal.read_all:
            return self.train.go_on(train)
        # A kill may have come while the training split was being cut, which is done again.
        self.train.tokens = train
        return True

    def divide(self) -> None:
        """Cut the validation split off the end of the stream, if it is the last part of it."""
        fraction = self.request.options.val_fraction
        if fraction is None:
            return
        total = self.journal.written[TRAIN]["tokens"] if self.journal.read_all else self.train.tokens
        keep = int(total * (1 - fraction))
        if not self.journal.read_all:
            self.train.copy_tail(keep, self.val)
            self.journal.read_all = True
            self.save()
        self.train.cut(keep)


def make(request: Request, folder: Path, workers: int, show: bool) -> None:
    """Write the shards and the manifest of `request` into `folder`, which may hold an earlier process's work.

    Raises:
        UserError: text that cannot be read, and the like; nothing is kept.
        Interrupted: no room, no network, a killed process: the journal and its shards are kept.
    """
    began, label = time.monotonic(), f"preparing {request.corpus.words} ({request.tokenizer.name})"
    if show:
        say(f"{label}: {_size(request)}, {workers} {'process' if workers == 1 else 'processes'}")
        for name in request.corpus.left_out:
            say(f"note: left out, since it is no file: {name}")
    try:
        work = _take_up(request, folder, show)
        _encode(work, workers, label, show)
        manifest = _finish(work)
    except OSError as error:
        raise _kept(folder, f"cannot write here: {error.strerror or error}", str(error.filename or folder),
                    "make room", error) from error
    except Interrupted:
        raise
    except UserError as error:
        if isinstance(error.__cause__, OSError):
            raise _kept(folder, error.found, error.where, "mend that", error) from error
        (folder / JOURNAL).unlink(missing_ok=True)
        raise
    if show:
        for remark in remarks(manifest["source"]):
            say(f"note: {remark}")
        say(f"prepared {manifest['tokens']:,} tokens in {time.monotonic() - began:.1f} s: {request.folder}")


def _size(request: Request) -> str:
    files = len(request.corpus.files)
    if not files:
        return "a stream"
    return f"{'1 file' if files == 1 else f'{files:,} files'}, {request.corpus.size / 1e6:,.1f} MB"


def _kept(folder: Path, found: str, where: str | None, instead: str, error: OSError | UserError) -> Exception:
    """Return the message for an error after which the work can be resumed."""
    if not (folder / JOURNAL).exists():
        return error
    return Interrupted(f"{found}; what was prepared so far is kept", where=where,
                       instead=f"{instead}, and give the same command again: it continues where it stopped")


def _take_up(request: Request, folder: Path, show: bool) -> _Work:
    journal = Journal.load(folder, request.fingerprint)
    if journal is not None and journal.broken <= request.options.max_broken:
        _copy_tokenizer(request, folder)
        tokenizer = from_entry(journal.tokenizer, str(folder / JOURNAL), folder)
        work = _Work(request, folder, journal, tokenizer, np.array(journal.counts, np.int64))
        if work.go_on():
            clear(folder, but=(JOURNAL, SHARD))
            _copy_tokenizer(request, folder)
            if show:
                say(f"going on after {journal.documents:,} documents, {work.tokens:,} tokens of an earlier process")
            return work
    clear(folder)
    corpus, facts = request.corpus, {}
    if corpus.dataset is not None and (revision := resolve_revision(corpus.dataset)):
        facts["revision"] = revision
    tokenizer = _tokenizer(request, facts.get("revision"))
    _copy_tokenizer(request, folder)
    journal = Journal(request.fingerprint, to_entry(tokenizer), facts=facts)
    return _Work(request, folder, journal, tokenizer, np.zeros(tokenizer.vocab_size, np.int64))


def _copy_tokenizer(request: Request, folder: Path) -> None:
    """Put the tokenizer's file, if it has one, beside the shards, where those who read them find it."""
    if request.tokenizer.file is not None:
        copy_files(request.tokenizer.file, folder)


def _encode(work: _Work, workers: int, label: str, show: bool) -> None:
    """Write the rest of the corpus's tokens."""
    journal, corpus = work.journal, work.request.corpus
    saved = time.monotonic()
    if not journal.read_all:
        waiting = tasks(corpus, journal.after, revision=journal.facts.get("revision"),
                        reading=_reading(work.request), cut=work.tokenizer.cut)
        with progress(label, corpus.size, show, journal.source_bytes) as advance:
            for encoded in encode_all(waiting, journal.tokenizer, workers, work.folder):
                work.write(encoded.tokens)
                work.counts += encoded.counts
                journal.after = encoded.after
                journal.documents += encoded.documents
                journal.source_bytes += encoded.source_bytes
                journal.marks += encoded.marks
                _count_broken(work, encoded.broken)
                advance(encoded.source_bytes)
                if time.monotonic() - saved >= _SECONDS_BETWEEN_SAVES:
                    work.save()
                    saved = time.monotonic()
    if not journal.documents:
        raise UserError("nothing to read: no document has any text", where=corpus.words,
                        instead="name a corpus with text in it")


def _reading(request: Request) -> Reading:
    return Reading(request.options.text_key, skips=request.options.max_broken > 0)


def _count_broken(work: _Work, broken: Sequence[UserError]) -> None:
    """Count documents that were left out.

    Raises:
        Interrupted: they are more than may be.
    """
    journal, most = work.journal, work.request.options.max_broken
    for error in broken:
        if journal.broken >= most:
            raise Interrupted(f"{error.found}; {most} broken documents were left out before it, as many as may be",
                              where=error.where,
                              instead=f"--max-broken {10 * most}: it continues where it stopped")
        journal.broken += 1
        if len(journal.broken_first) < _BROKEN_NAMED:
            journal.broken_first.append(f"{error.where}: {error.found}")


def _tokenizer(request: Request, revision: str | None) -> Tokenizer:
    if request.tokenizer.name != "char" or request.tokenizer.entry is not None:
        return request.tokenizer.make()
    found: set[str] = set()
    for task in tasks(request.corpus, revision=revision, reading=_reading(request)):
        for piece in task.pieces:
            for _, text in texts(piece, task.reading):
                found.update(text)
    return CharTokenizer("".join(sorted(found)))


def _finish(work: _Work) -> dict[str, Any]:
    """Divide the splits and say what there is."""
    request, corpus, journal = work.request, work.request.corpus, work.journal
    if request.options.val_tokens is not None and not work.train.tokens:
        raise UserError(f"nothing is left to train on: the corpus has {work.tokens:,} tokens, and the first "
                        f"{request.options.val_tokens:,} are to validate on", where=corpus.words,
                        instead=f"--val-tokens {work.tokens // 100}")
    work.divide()
    val = ({"val_fraction": request.options.val_fraction} if request.options.val_tokens is None
           else {"val_tokens": request.options.val_tokens})
    manifest = {
        "format": FORMAT,
        "request": request.fingerprint,
        "command": request.command,
        "source": {"corpus": corpus.words, "files": len(corpus.files), "bytes": journal.source_bytes,
                   **corpus.facts, **journal.facts, **_found(work)},
        "tokenizer": journal.tokenizer,
        "vocab_size": work.tokenizer.vocab_size,
        "end_of_text": work.tokenizer.end_of_text,
        "dtype": work.train.dtype.name,
        "documents": journal.documents,
        "tokens": work.tokens,
        "unigram_entropy": entropy(work.counts),
        **val,
        "splits": {TRAIN: work.train.describe(), VAL: work.val.describe()},
    }
    np.save(work.folder / COUNTS, work.counts)
    write_json(work.folder / MANIFEST, manifest)
    return manifest


def _found(work: _Work) -> dict[str, Any]:
    """Return the manifest's entries for non-default ways of reading the source."""
    journal, key = work.journal, work.request.options.text_key
    facts: dict[str, Any] = {"text_key": key} if key != TEXT else {}
    if journal.broken:
        facts["broken"] = {"documents": journal.broken, "first": journal.broken_first}
    if journal.marks:
        facts["byte_order_marks"] = journal.marks
    return facts


def remarks(source: Mapping[str, Any], shown: int = 5) -> Iterator[str]:
    """The manifest's entries for documents left out, some of them named, and dropped byte-order marks, in words."""
    if "broken" in source:
        first = source["broken"]["first"]
        named = "".join(f"\n  {one}" for one in first[:shown])
        rest = "\n  …" if 0 < shown < source["broken"]["documents"] else ""
        yield f"{source['broken']['documents']:,} broken documents were left out{named}{rest}"
    if "sampled" in source:
        yield f"the unigram entropy is an estimate, from {source['sampled']:,} tokens"
    if "byte_order_marks" in source:
        yield f"{source['byte_order_marks']:,} byte-order marks at the beginning of files were dropped"


def entropy(counts: np.ndarray) -> float:
    """Nats per draw from a distribution given by its counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


# Tokenising a corpus, in this process or in a pool: results come in the corpus's order, with bounded memory.
_WAITING_PER_WORKER = 2


@dataclass(frozen=True)
class Encoded:
    """The tokens of one task.

    Attributes:
        tokens: 1-d, in the type that shards hold.
        counts: (vocab_size,) how often each id occurs.
        documents: how many begin here.
        source_bytes: bytes read.
        after: the place in the corpus after the task.
        broken: what is wrong with each document that was left out, and where.
        marks: byte-order marks that were dropped.
    """

    tokens: np.ndarray
    counts: np.ndarray
    documents: int
    source_bytes: int
    after: dict[str, Any]
    broken: tuple[UserError, ...] = ()
    marks: int = 0


def token_dtype(vocab_size: int) -> np.dtype:
    """The little-endian type that holds every id: 2 bytes up to 65,536 ids, else 4."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def pack(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """`ids` in the type that shards hold.

    Raises:
        ValueError: an id outside [0, vocab_size), which a cast would turn into another one in silence.
    """
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(f"token ids {ids.min()}..{ids.max()} do not fit a vocabulary of {vocab_size}")
    return ids.astype(token_dtype(vocab_size))


def encode_task(task: Task, tokenizer: Tokenizer) -> Encoded:
    """The tokens of a task's documents, each document preceded by end-of-text where the tokenizer has one."""
    separator = [] if tokenizer.end_of_text is None else [np.array([tokenizer.end_of_text], np.uint32)]
    parts: list[np.ndarray] = [np.empty(0, np.uint32)]
    documents = 0
    broken: list[UserError] = []
    for piece in task.pieces:
        for begins, text in texts(piece, task.reading, broken):
            if begins:
                parts += separator
                documents += 1
            parts.append(tokenizer.encode(text) if begins else tokenizer.encode_rest(text))
    tokens = pack(np.concatenate(parts), tokenizer.vocab_size)
    return Encoded(tokens, np.bincount(tokens, minlength=tokenizer.vocab_size), documents,
                   task.source_bytes, task.after, tuple(broken),
                   sum(isinstance(piece, Piece) and piece.has_mark for piece in task.pieces))


def encode_all(tasks: Iterable[Task], entry: Mapping[str, Any], workers: int, folder: Path) -> Iterator[Encoded]:
    """The tasks' tokens in order; `entry` is the tokenizer's (see `to_entry`), whose file, if any, is in `folder`.

    Raises:
        UserError: text that cannot be read.
        Interrupted: a process was killed.
    """
    if workers == 1:
        tokenizer = from_entry(entry, folder=folder)
        for task in tasks:
            yield encode_task(task, tokenizer)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker)
    waiting: deque = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(_encode_in_worker, task, dict(entry), folder))
            if len(waiting) >= _WAITING_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise Interrupted("a tokenising process was killed, perhaps for want of memory",
                          instead="try fewer at once: --workers 1; it continues where it stopped") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_in_worker(task: Task, entry: Mapping[str, Any], folder: Path) -> Encoded:
    return encode_task(task, from_entry(entry, folder=folder))


def _begin_worker() -> None:
    # Ctrl-C reaches the whole process group: the parent alone answers it, and ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A pool whose parent is killed would wait for work for ever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
