"""Tokenising a corpus, in this process or in a pool: results come in the corpus's order, with bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np

from ezpz_llm.data.journal import Interrupted
from ezpz_llm.data.reader import Piece, Task, texts
from ezpz_llm.data.tokenizers import Tokenizer, from_entry
from ezpz_llm.errors import UserError

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
            parts.append(tokenizer.encode(text))
    tokens = pack(np.concatenate(parts), tokenizer.vocab_size)
    return Encoded(tokens, np.bincount(tokens, minlength=tokenizer.vocab_size), documents,
                   task.source_bytes, task.after, tuple(broken),
                   sum(isinstance(piece, Piece) and piece.has_mark for piece in task.pieces))


def encode_all(tasks: Iterable[Task], entry: Mapping[str, Any], workers: int) -> Iterator[Encoded]:
    """The tasks' tokens in order; `entry` is the tokenizer's (see `to_entry`).

    Raises:
        UserError: text that cannot be read.
        Interrupted: a process was killed.
    """
    if workers == 1:
        tokenizer = from_entry(entry)
        for task in tasks:
            yield encode_task(task, tokenizer)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker)
    waiting: deque = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(_encode_in_worker, task, dict(entry)))
            if len(waiting) >= _WAITING_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise Interrupted("a tokenising process was killed, perhaps for want of memory",
                          instead="try fewer at once: --workers 1; it goes on where it stopped") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_in_worker(task: Task, entry: Mapping[str, Any]) -> Encoded:
    return encode_task(task, from_entry(entry))


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
