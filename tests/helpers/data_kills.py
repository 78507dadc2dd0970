"""Run by test_data_scale.py: prepare a corpus repeatedly, killed at each file-system operation in turn.

    python data_kills.py CORPUS FOLDER [TOKENIZER]

A child process is killed before, or just after, its N-th operation that changes the disk; the next child runs to
the end. Prints one JSON object: the number of operations, and for each kill whether the shards are byte-identical
to those of an undisturbed run, and how many documents were not read again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from ezpz_llm.training.data import tokenize_corpus
from ezpz_llm.training.data.atomic_dir import JOURNAL
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.reader import tasks

OPERATIONS = ("fsync", "truncate", "replace", "rename", "unlink")


def child(corpus: str, tokenizer: str, out: Path, kill_at: int | None = None, after: bool = False) -> int:
    """Prepare in a child process. Return its number of operations, or -1 if it was killed."""
    sent, received = os.pipe()
    pid = os.fork()
    if pid:
        os.close(received)
        with os.fdopen(sent) as pipe:
            reply = pipe.read()
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return -1
        assert status == 0, (status, kill_at)
        return int(reply)
    os.close(sent)
    made = 0

    def counted(operation: Callable) -> Callable:
        @functools.wraps(operation)
        def call(*args: object, **kwargs: object) -> object:
            nonlocal made
            made += 1
            if made == kill_at and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = operation(*args, **kwargs)
            if made == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    tokenize_corpus._SECONDS_BETWEEN_SAVES = 0.0
    tokenize_corpus.tasks = functools.partial(tasks, size=1 << 12)
    code = 1
    try:
        prepare(corpus, tokenizer, out=out, shard_tokens=9_000, val_fraction=0.4, workers=1, progress=False)
        code = 0
    finally:
        os.write(received, str(made).encode())
        os._exit(code)


def content(folder: Path) -> dict[str, str]:
    """Return name and hash of each shard file. Locks and journals left by a late kill are not included."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("[!.]*"))}


def main(corpus: str, folder: Path, tokenizer: str = "bytes") -> None:
    operations = child(corpus, tokenizer, folder / "whole")
    expected = content(folder / "whole")
    # A run that is killed at the 20th operation of every attempt must also finish.
    kills = 0
    while child(corpus, tokenizer, folder / "often", kill_at=20) < 0:
        kills += 1
        assert kills < operations
    results = [{"kill": "often", "kills": kills, "same": content(folder / "often") == expected, "kept": None}]
    for number in range(1, operations + 1):
        out = folder / f"out-{number}"
        assert child(corpus, tokenizer, out, number, after=number % 2 == 0) == -1
        journals = [json.loads(path.read_text()) for path in folder.glob(f".{out.name}.partial-*/{JOURNAL}")]
        child(corpus, tokenizer, out)
        results.append({"kill": number, "same": content(out) == expected,
                        "kept": sum(journal["documents"] for journal in journals)})
        shutil.rmtree(out)
    print(json.dumps({"operations": operations, "names": sorted(expected), "results": results,
                      "left": sorted(path.name for path in folder.iterdir())}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
