"""Reading ahead: the same samples, whatever is asked for, and no waiting for a disk that keeps up."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ezpz_llm.data.samples import Batches, ReadAhead
from ezpz_llm.data.shards import TokenStream

STEP = {"block_size": 16, "seed": 3, "global_batch": 24, "micro_batch": 4, "dp_rank": 1, "dp_size": 2}


class SlowStream(TokenStream):
    """A stream on a disk that takes 20 ms to find a step's windows; remembers which thread read."""

    threads: set[str]
    broken = False

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        self.threads.add(threading.current_thread().name)
        if self.broken:
            raise OSError("the disk is gone")
        time.sleep(0.02)
        return super().windows(starts, length)


@pytest.fixture
def stream(tmp_path: Path) -> SlowStream:
    (tmp_path / "0.bin").write_bytes(np.arange(5000, dtype="<u2").tobytes())
    stream = SlowStream([(tmp_path / "0.bin", 5000)], np.dtype("<u2"), "the test's stream")
    stream.threads = set()
    return stream


def same(found: list[tuple[np.ndarray, np.ndarray]], expected: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    return len(found) == len(expected) and all(
        np.array_equal(a, b) for ours, theirs in zip(found, expected, strict=True)
        for a, b in zip(ours, theirs, strict=True))


def test_any_step_may_be_asked_for(stream: SlowStream) -> None:
    """In order, one twice (a step that is taken again), back to an earlier one, and far ahead."""
    ahead, plain = ReadAhead(stream, **STEP), Batches(stream, **STEP)
    for consumed in (0, 24, 48, 48, 72, 24, 48, 10_000, 10_024):
        assert same(ahead.micro_batches(consumed), plain.micro_batches(consumed))


def test_a_step_does_not_wait_for_a_disk_that_keeps_up(stream: SlowStream) -> None:
    def waited(batches: Batches) -> float:
        total = 0.0
        for step in range(10):
            began = time.perf_counter()
            batches.micro_batches(24 * step)
            total += time.perf_counter() - began if step else 0.0
            time.sleep(0.06)  # the device computes
        return total

    assert waited(Batches(stream, **STEP)) > 9 * 0.02
    assert stream.threads == {"MainThread"}
    assert waited(ReadAhead(stream, **STEP)) < 0.5 * 9 * 0.02
    assert len(stream.threads) == 2  # the first step by the caller, the others by one thread


def test_an_error_of_the_reading_thread_reaches_the_step(stream: SlowStream) -> None:
    ahead = ReadAhead(stream, **STEP)
    ahead.micro_batches(0)
    ahead.micro_batches(24)
    time.sleep(0.2)
    stream.broken = True
    ahead.micro_batches(48)  # was read before
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.micro_batches(72)
