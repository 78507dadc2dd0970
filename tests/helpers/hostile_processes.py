"""Processes with hostile names, environments and behavior: python3 hostile_processes.py TAG.

Run by a rank, it starts one process of each kind, each in a new session, and exits. TAG is the first argument of
every process.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random

NAMES = [
    # The kernel keeps 15 bytes of a name, which cuts the è in two.
    "evaluation_mod\u00e8le".encode(),
    b"a) R 1 1 1 (b",
    b"))))((((",
    b"line\nfeed\ttab",
    b"\xff\xfe\x80",
    b"\x1b[31mred\x07",
    b" ",
    "\U0001f40d\U0001f40d\U0001f40d\U0001f40d".encode(),
]
RANKS = [b"x", b"", b"-1", b"0x1", b" 1", b"1.5", b"\xff", "\u0661".encode(), "\u00b2".encode(),
         b"9" * 5000, b"1\n2"]
"""Values of EZPZ_LLM_RANK."""
LIFETIME_S = 120
"""Forking processes end after this time, since nothing else would end them if the test is killed."""


def name(rng: Random) -> bytes:
    """Return a random program name."""
    if rng.random() < 0.5:
        return rng.choice(NAMES)
    text = bytes(rng.choice([*range(1, 47), *range(48, 256)]) for _ in range(rng.randrange(1, 40)))
    return text if text.strip(b".") else b"dot"


def environment(rng: Random, whole: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return `whole` with a hostile rank, or without a rank."""
    changed = dict(whole)
    way = rng.randrange(3)
    if way == 0:
        changed.pop(b"EZPZ_LLM_RANK", None)
    else:
        changed[b"EZPZ_LLM_RANK"] = rng.choice(RANKS) if way == 1 else rng.randbytes(9).replace(b"\0", b"1")
    return changed


def start_sleeper(program: bytes, tag: str, env: Mapping[bytes, bytes]) -> None:
    """Start a sleeping process in a new session, as an orphan."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 1000)
            os.execve(program, [tag.encode(), b"600"], dict(env))
        os._exit(0)
    os.wait()


def fork_repeatedly(pause_s: float) -> None:
    """Start a process that forks every `pause_s` for at most LIFETIME_S; each parent exits at once."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    os.closerange(0, 1000)
    end = time.monotonic() + LIFETIME_S
    while time.monotonic() < end:
        if os.fork():
            os._exit(0)
        time.sleep(pause_s)
    os._exit(0)


def main() -> None:
    """Start all hostile processes."""
    tag, folder = sys.argv[1], os.fsencode(os.environ["EZPZ_LLM_RUN_DIR"])
    here = dict(os.environb)
    sleep = shutil.which("sleep")
    for number, text in enumerate(NAMES):
        program = os.path.join(folder, text)
        os.symlink(sleep, program)
        start_sleeper(program, tag, here if number % 2 else {})
    for rank in RANKS:
        start_sleeper(os.fsencode(sleep), tag, {**here, b"EZPZ_LLM_RANK": rank})
    start_sleeper(os.fsencode(sleep), tag, {key: text for key, text in here.items() if key != b"EZPZ_LLM_RANK"})
    for pause_s in (0.002, 0.0005):
        fork_repeatedly(pause_s)
    Path(os.environ["EZPZ_LLM_RUN_DIR"], f"up{os.environ['EZPZ_LLM_RANK']}").touch()


if __name__ == "__main__":
    main()
