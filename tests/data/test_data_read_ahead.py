"""Read-ahead: the same samples for any order of requests, and no waiting for a disk that is fast enough."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ezpz_llm.training.data.samples import Batches, ReadAhead
from ezpz_llm.training.data.shards import TokenStream

STEP = {"block_size": 16, "seed": 3, "global_batch": 24, "micro_batch": 4, "dp_rank": 1, "dp_size": 2}


class SlowStream(TokenStream):
    """Stream on a disk with a latency of 20 ms; records the names of the reading threads."""

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


def same(actual: list[tuple[np.ndarray, np.ndarray]], expected: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    return len(actual) == len(expected) and all(
        np.array_equal(a, b) for left, right in zip(actual, expected, strict=True)
        for a, b in zip(left, right, strict=True))


def test_any_step_may_be_asked_for(stream: SlowStream) -> None:
    """Steps in order, a repeated step, an earlier step, and a much later step."""
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
    assert len(stream.threads) == 2  # the caller reads the first step, one thread reads the others


def test_an_error_of_the_reading_thread_reaches_the_step(stream: SlowStream) -> None:
    ahead = ReadAhead(stream, **STEP)
    ahead.micro_batches(0)
    ahead.micro_batches(24)
    time.sleep(0.2)
    stream.broken = True
    ahead.micro_batches(48)  # read before the failure
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.micro_batches(72)
