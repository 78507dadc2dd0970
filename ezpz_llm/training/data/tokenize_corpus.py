"""Tokenize a corpus to shards with a pool of processes; resume the work of a killed process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET

from ezpz_llm.core.base import UserError, count_noun
from ezpz_llm.training.data.atomic_dir import JOURNAL, InterruptedWriteError, Journal, Written, clear
from ezpz_llm.training.data.corpora import Request
from ezpz_llm.training.data.downloads import print_to_stderr, progress
from ezpz_llm.training.data.formats import TEXT
from ezpz_llm.training.data.hub import resolve_revision
from ezpz_llm.training.data.manifest import (
    COUNTS,
    SHARD,
    TRAIN,
    VAL,
    Broken,
    Manifest,
    Source,
    Splits,
    TokenizerEntry,
)
from ezpz_llm.training.data.reader import Piece, Reading, Task, tasks, texts
from ezpz_llm.training.data.shards import ShardWriter
from ezpz_llm.training.data.special_tokens import check_special_tokens, encoding_special_tokens, special_pattern
from ezpz_llm.training.data.tokenizer_files import copy_files
from ezpz_llm.training.data.tokenizers import CharTokenizer, Tokenizer, from_entry, to_entry

# At most this much work is lost if the process is killed. Saves wait for the disk, so they should not be frequent.
_SECONDS_BETWEEN_SAVES = 2.0
_MAX_BROKEN_LISTED = 100
"""Maximum number of broken documents that the manifest lists."""


@dataclass
class _Work:
    """Unfinished folder of shards."""

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
        """Tokens written so far to both splits."""
        return self.train.tokens + self.val.tokens

    def write(self, tokens: np.ndarray, is_validation: bool) -> None:
        """Append to the token stream.

        Its first `val_tokens` tokens, if set, or the tokens of validation files go to the validation split.
        """
        if is_validation and self.request.validates_on_files:
            self.val.write(tokens)
            return
        if self.request.options.val_tokens is not None:
            remaining = self.request.options.val_tokens - self.val.tokens
            self.val.write(tokens[:remaining])
            tokens = tokens[remaining:]
        self.train.write(tokens)

    def save(self) -> None:
        """Sync the shards, then save the journal that describes them."""
        for writer in (self.train, self.val):
            writer.sync()
            self.journal.written[writer.split] = Written(writer.tokens)
        self.journal.counts = self.counts.tolist()
        self.journal.save(self.folder)

    def resume(self) -> bool:
        """Resume the shards in the journal; return False if some of them are missing or too short."""
        train, val = (self.journal.written[split].tokens for split in (TRAIN, VAL))
        if not self.val.resume_after(val):
            return False
        if not self.journal.read_all:
            return self.train.resume_after(train)
        # A kill may have interrupted the truncation of the training split, which is repeated.
        self.train.tokens = train
        return True

    def split_validation(self) -> None:
        """Move the last `val_fraction` of the stream to the validation split."""
        fraction = self.request.options.val_fraction
        if fraction is None:
            return
        total = self.journal.written[TRAIN].tokens if self.journal.read_all else self.train.tokens
        keep = int(total * (1 - fraction))
        if not self.journal.read_all:
            self.train.copy_tail(keep, self.val)
            self.journal.read_all = True
            self.save()
        self.train.cut(keep)


def write_dataset(request: Request, folder: Path, workers: int, show: bool) -> None:
    """Write the shards and the manifest of `request` to `folder`, which may contain an earlier process's work.

    Raises:
        UserError: an error in the corpus, such as unreadable text; the work is discarded.
        InterruptedWriteError: the disk is full, the network failed, a process was killed, or there are more broken
            documents than --max-broken allows. The journal and its shards are kept.
    """
    began, label = time.monotonic(), f"preparing {request.corpus.words} ({request.tokenizer.name})"
    if show:
        print_to_stderr(f"{label}: {_size(request)}, {workers} {'process' if workers == 1 else 'processes'}")
        for note in request.corpus.notes:
            print_to_stderr(f"note: {note}")
    try:
        work = _start_or_resume(request, folder, show)
        _write_remaining_tokens(work, workers, label, show)
        manifest = _finish(work)
    except OSError as error:
        raise _as_resumable(folder, f"cannot write here: {error.strerror or error}", str(error.filename or folder),
                            "free disk space", error) from error
    except InterruptedWriteError:
        raise
    except UserError as error:
        if isinstance(error.__cause__, OSError):
            raise _as_resumable(folder, error.found, error.where, "fix this error", error) from error
        (folder / JOURNAL).unlink(missing_ok=True)
        raise
    if show:
        for remark in reading_notes(manifest.source):
            print_to_stderr(f"note: {remark}")
        print_to_stderr(f"prepared {manifest.tokens:,} tokens in {time.monotonic() - began:.1f} s: "
                        f"{request.folder}")


def _size(request: Request) -> str:
    files = len(request.corpus.files)
    if not files:
        return "a stream"
    return f"{'1 file' if files == 1 else f'{files:,} files'}, {request.corpus.size / 1e6:,.1f} MB"


def _as_resumable(folder: Path, message: str, where: str | None, instead: str,
                  error: OSError | UserError) -> Exception:
    """Return `error` as `InterruptedWriteError` if there is a journal to resume from, else `error` itself."""
    if not (folder / JOURNAL).exists():
        return error
    return InterruptedWriteError(f"{message}; the completed part is kept", where=where,
                                 instead=f"{instead}, and run the same command again: it continues where it "
                                         "stopped")


def _start_or_resume(request: Request, folder: Path, show: bool) -> _Work:
    journal = Journal.load(folder, request.fingerprint)
    if journal is not None and journal.broken <= request.options.max_broken:
        _copy_tokenizer(request, folder)
        tokenizer = from_entry(journal.tokenizer, str(folder / JOURNAL), folder)
        work = _Work(request, folder, journal, tokenizer, np.array(journal.counts, np.int64))
        if work.resume():
            clear(folder, kept=(JOURNAL, SHARD))
            _copy_tokenizer(request, folder)
            if show:
                print_to_stderr(f"resuming after {journal.documents:,} documents and {work.tokens:,} tokens that "
                                "an earlier process wrote")
            return work
    clear(folder)
    corpus, facts = request.corpus, {}
    if corpus.dataset is not None and (revision := resolve_revision(corpus.dataset)):
        facts["revision"] = revision
    tokenizer = _make_tokenizer(request, facts.get("revision"))
    if request.options.special_tokens:
        check_special_tokens(tokenizer)
    _copy_tokenizer(request, folder)
    journal = Journal(request.fingerprint, to_entry(tokenizer), facts=facts)
    return _Work(request, folder, journal, tokenizer, np.zeros(tokenizer.vocab_size, np.int64))


def _copy_tokenizer(request: Request, folder: Path) -> None:
    """Copy the tokenizer's file, if any, to the folder of the shards."""
    if request.tokenizer.file is not None:
        copy_files(request.tokenizer.file, folder)


def _write_remaining_tokens(work: _Work, workers: int, label: str, show: bool) -> None:
    """Write the remaining tokens of the corpus."""
    journal, corpus = work.journal, work.request.corpus
    saved = time.monotonic()
    if not journal.read_all:
        remaining = tasks(corpus, journal.after, revision=journal.facts.get("revision"),
                          reading=_reading(work.request), cut=work.tokenizer.cut)
        with progress(label, corpus.size, show, journal.source_bytes) as advance:
            for encoded in _encode_all(remaining, work, workers):
                work.write(encoded.tokens, encoded.is_validation)
                work.counts += encoded.counts
                journal.after = encoded.after
                journal.documents += encoded.documents
                journal.source_bytes += encoded.source_bytes
                journal.marks += encoded.marks
                journal.special_tokens += encoded.special_tokens
                _count_broken(work, encoded.broken)
                advance(encoded.source_bytes)
                if time.monotonic() - saved >= _SECONDS_BETWEEN_SAVES:
                    work.save()
                    saved = time.monotonic()
    if not journal.documents:
        raise UserError("nothing to read: no document has any text", where=corpus.words,
                        instead="pass a corpus that contains text")


def _reading(request: Request) -> Reading:
    return Reading(request.options.text_key, skip_broken=request.options.max_broken > 0)


def _count_broken(work: _Work, broken: Sequence[UserError]) -> None:
    """Count skipped documents.

    Raises:
        InterruptedWriteError: the number exceeds --max-broken.
    """
    journal, limit = work.journal, work.request.options.max_broken
    for error in broken:
        if journal.broken >= limit:
            raise InterruptedWriteError(f"{error.found}; this is one broken document more than --max-broken "
                                        f"{limit} allows", where=error.where,
                                        instead=f"pass --max-broken {10 * limit}: it continues where it stopped")
        journal.broken += 1
        if len(journal.broken_first) < _MAX_BROKEN_LISTED:
            journal.broken_first.append(f"{error.where}: {error.found}")


def _make_tokenizer(request: Request, revision: str | None) -> Tokenizer:
    if request.tokenizer.name != "char" or request.tokenizer.entry is not None:
        return request.tokenizer.load()
    characters: set[str] = set()
    for task in tasks(request.corpus, revision=revision, reading=_reading(request)):
        for piece in task.pieces:
            for _, text in texts(piece, task.reading):
                characters.update(text)
    return CharTokenizer("".join(sorted(characters)))


def _finish(work: _Work) -> Manifest:
    """Split the tokens, write the manifest, and return it."""
    request, corpus, journal = work.request, work.request.corpus, work.journal
    if request.options.val_tokens is not None and not work.train.tokens:
        raise UserError(f"no tokens are left to train on: the corpus has {work.tokens:,} tokens, and the "
                        f"validation split takes the first {request.options.val_tokens:,}", where=corpus.words,
                        instead=f"pass --val-tokens {work.tokens // 100}")
    work.split_validation()
    options, key = request.options, request.options.text_key
    manifest = Manifest(
        request=request.fingerprint,
        command=request.command,
        source=Source(corpus.words, len(corpus.files), journal.source_bytes, python=corpus.python,
                      revision=journal.facts.get("revision"), text_key=None if key == TEXT else key,
                      broken=Broken(journal.broken, journal.broken_first) if journal.broken else None,
                      byte_order_marks=journal.marks or None, special_tokens=journal.special_tokens or None,
                      encodes_special_tokens=options.special_tokens),
        tokenizer=journal.tokenizer,
        vocab_size=work.tokenizer.vocab_size,
        end_of_text=work.tokenizer.end_of_text,
        dtype=work.train.dtype.name,
        documents=journal.documents,
        tokens=work.tokens,
        unigram_entropy=entropy(work.counts),
        val_fraction=UNSET if options.val_fraction is None else options.val_fraction,
        val_tokens=UNSET if options.val_tokens is None else options.val_tokens,
        splits=Splits(work.train.manifest_entry(), work.val.manifest_entry()),
    )
    np.save(work.folder / COUNTS, work.counts)
    manifest.write(work.folder)
    return manifest


def reading_notes(source: Source, shown: int = 5) -> Iterator[str]:
    """Yield notes for the user on a manifest's source: skipped documents, sampling, special tokens, and marks.

    Args:
        shown: number of skipped documents to list.
    """
    if source.broken is not None:
        first = source.broken.first
        listed = "".join(f"\n  {error}" for error in first[:shown])
        ellipsis = "\n  …" if 0 < shown < source.broken.documents else ""
        yield f"skipped {source.broken.documents:,} broken documents{listed}{ellipsis}"
    if source.sampled is not None:
        yield f"the unigram entropy is an estimate from {source.sampled:,} tokens"
    if source.byte_order_marks:
        yield f"dropped {source.byte_order_marks:,} byte-order marks at the start of files"
    if source.special_tokens:
        yield (f"the text has {count_noun(source.special_tokens, 'special token')} of the tokenizer, encoded as "
               + ("tokens" if source.encodes_special_tokens else
                  "ordinary text. To encode them as tokens: ezpz-llm data prepare … --special-tokens true"))


def entropy(counts: np.ndarray) -> float:
    """Return the entropy in nats of a distribution given by its counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


_QUEUED_TASKS_PER_WORKER = 2


@dataclass(frozen=True)
class Encoded:
    """Tokens of one task.

    Attributes:
        tokens: 1-d, in the shards' data type.
        counts: (vocab_size,), occurrences of each id.
        documents: number of documents that start in the task.
        source_bytes: bytes read.
        after: position in the corpus after the task.
        broken: errors of the skipped documents.
        marks: byte-order marks dropped.
        is_validation: True if the task is of the validation split.
        special_tokens: number of special tokens in the text.
    """

    tokens: np.ndarray
    counts: np.ndarray
    documents: int
    source_bytes: int
    after: dict[str, Any]
    broken: tuple[UserError, ...] = ()
    marks: int = 0
    is_validation: bool = False
    special_tokens: int = 0


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the shards' little-endian data type: uint16 for up to 65,536 ids, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def pack(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Cast `ids` to the shards' data type.

    Raises:
        ValueError: an id is outside [0, vocab_size); a cast alone would silently change it.
    """
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(f"token ids {ids.min()}..{ids.max()} do not fit a vocabulary of {vocab_size}")
    return ids.astype(token_dtype(vocab_size))


def encode_task(task: Task, tokenizer: Tokenizer, special_tokens: bool = False) -> Encoded:
    """Encode a task's documents, each preceded by the end-of-text token if the tokenizer has one.

    Args:
        special_tokens: encode special tokens in the text as tokens.
    """
    with encoding_special_tokens(tokenizer, special_tokens):
        return _encode_task(task, tokenizer)


def _encode_task(task: Task, tokenizer: Tokenizer) -> Encoded:
    pattern, found = special_pattern(tokenizer), 0
    separator = [] if tokenizer.end_of_text is None else [np.array([tokenizer.end_of_text], np.uint32)]
    parts: list[np.ndarray] = [np.empty(0, np.uint32)]
    documents = 0
    broken: list[UserError] = []
    for piece in task.pieces:
        documents_of_piece: list[str] = []
        for begins, text in texts(piece, task.reading, broken):
            found += 0 if pattern is None else sum(1 for _ in pattern.finditer(text))
            if begins:
                documents_of_piece.append(text)
            else:  # a piece of text, which has only this part of a document
                parts.append(tokenizer.encode_rest(text))
        for ids in tokenizer.encode_batch(documents_of_piece):
            parts += [*separator, ids]
        documents += len(documents_of_piece)
    tokens = pack(np.concatenate(parts), tokenizer.vocab_size)
    return Encoded(tokens, np.bincount(tokens, minlength=tokenizer.vocab_size), documents,
                   task.source_bytes, task.after, tuple(broken),
                   sum(isinstance(piece, Piece) and piece.has_mark for piece in task.pieces), task.is_validation,
                   found)


def _encode_all(tasks: Iterable[Task], work: _Work, workers: int) -> Iterator[Encoded]:
    """Yield the tasks' tokens in order, encoded in this process or in a pool with bounded memory.

    Raises:
        UserError: unreadable text.
        InterruptedWriteError: a process was killed.
    """
    if workers == 1:
        for task in tasks:
            yield encode_task(task, work.tokenizer, work.request.options.special_tokens)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_init_worker)
    waiting: deque = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(_encode_in_worker, task, work.journal.tokenizer, work.folder,
                                       work.request.options.special_tokens))
            if len(waiting) >= _QUEUED_TASKS_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise InterruptedWriteError("a tokenizer process was killed, perhaps because memory ran out",
                                    instead="use fewer processes: --workers 1; it continues where it "
                                            "stopped") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_in_worker(task: Task, entry: TokenizerEntry, folder: Path, special_tokens: bool) -> Encoded:
    return encode_task(task, from_entry(entry, folder=folder), special_tokens)


def _init_worker() -> None:
    # Ctrl-C signals the whole process group; only the parent handles it, and shuts down the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    # Without this, the workers of a killed parent would wait forever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
