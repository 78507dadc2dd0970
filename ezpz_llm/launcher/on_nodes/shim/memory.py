"""Detection of out-of-memory kills, from the kernel's counters before and after a rank, and from its log."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from ezpz_llm.core.base import ask_command, system_text
from ezpz_llm.core.base.memory_groups import kill_counters

_KERNEL_LOG = "/dev/kmsg"
_LARGEST_MESSAGE = 8192
_SLACK_S = 2.0
_DMESG_TIMEOUT_S = 2.0
_KILLED = re.compile(r"(?:Memory cgroup out of memory|Out of memory): Kill(?:ed)? process (\d+) \(.*")
_STAMP = re.compile(r"^\[ *(\d+\.\d+)\] ")

Counts = dict[Path, int]
"""Numbers of out-of-memory kills, by counter file."""


def count_kills() -> Counts:
    """Return the counters of this process's memory cgroup (v2 or v1), as far as there are any."""
    return {path: count for path in kill_counters()
            if (count := read_count(path)) is not None}


def read_count(path: Path) -> int | None:
    """Return the counter `oom_kill` of a memory.events or memory.oom_control file, or None."""
    match = re.search(r"^oom_kill (\d+)$", system_text(path), re.MULTILINE)
    return int(match[1]) if match else None


def find_oom_evidence(before: Counts, pids: Collection[int], since: float, is_killed: bool) -> str | None:
    """Return the kernel's evidence that one of `pids`, or a process in its cgroup, was killed for lack of memory.

    Args:
        since: monotonic time; earlier messages of the kernel are ignored.
        is_killed: True if the rank was killed; the kernel log is searched only then.
    """
    messages = find_kill_messages(_read_kernel_log(since)) if is_killed else {}
    for pid in pids:
        if pid in messages:
            return f"kernel log: {messages[pid]}"
    for path, count in before.items():
        after = read_count(path)
        if after is not None and after > count:
            last = f"; kernel log: {list(messages.values())[-1]}" if messages else ""
            return (f"the out-of-memory killer ended a process: oom_kill in {path} rose from {count} to"
                    f" {after}{last}")
    return None


def find_kill_messages(lines: Collection[str]) -> dict[int, str]:
    """Return the kernel log's messages about out-of-memory kills, by process id."""
    matches = (_KILLED.search(line) for line in lines)
    return {int(match[1]): match[0].strip() for match in matches if match}


def _read_kernel_log(since: float) -> list[str]:
    """Return the kernel's messages since the monotonic time `since`, as far as this user may read them."""
    try:
        return list(_from_device(since))
    except OSError:
        pass
    lines = (ask_command(["dmesg"], os.environ, _DMESG_TIMEOUT_S).text or "").splitlines()
    stamps = (_STAMP.match(line) for line in lines)
    return [line for line, stamp in zip(lines, stamps, strict=True) if stamp and float(stamp[1]) > since - _SLACK_S]


def _from_device(since: float) -> Iterator[str]:
    handle = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    deadline = time.monotonic() + _DMESG_TIMEOUT_S
    try:
        while time.monotonic() < deadline:
            try:
                record = os.read(handle, _LARGEST_MESSAGE).decode(errors="replace")
            except BlockingIOError:
                return
            except BrokenPipeError:
                # The record was overwritten before it was read; the next read continues at the oldest one.
                continue
            head, _, text = record.partition(";")
            if int(head.split(",")[2]) / 1e6 > since - _SLACK_S:
                yield text.partition("\n")[0]
    finally:
        os.close(handle)
