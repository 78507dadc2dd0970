"""Checks of the data reader: they pass, and they notice faults."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ezpz_llm.core.base import UserError
from ezpz_llm.training.data import samples
from ezpz_llm.training.data.samples import Batches, ReadAhead, ValidationWindows
from ezpz_llm.verify.certify import sample_order

windows, places, micro_batches, batches = (
    samples.sample_windows, samples.draw_streams, Batches.micro_batches, ValidationWindows.batches)


def test_the_reader_passes_its_checks() -> None:
    assert list(sample_order.find_problems()) == []


@pytest.mark.parametrize(("of", "name", "fault", "reason"), [
    (samples, "sample_windows", lambda length, size, seed, i: windows(length, size, 0, i), "have the same order"),
    (samples, "sample_windows", lambda length, size, seed, i: windows(length, size, seed, i % 7),
     "do not occur exactly once"),
    (samples, "sample_windows", lambda length, size, seed, i: np.asarray(i) % 100 * size, "are not shuffled"),
    (samples, "draw_streams", lambda counts, seed, i: places(counts, seed, i % 4096),
     "repeats the epochs of the first"),
    (samples, "part_seed", lambda seed, part: seed, "two streams of equal length have the same epochs"),
    (Batches, "micro_batches", lambda self, at: [(tokens, tokens) for tokens, _ in micro_batches(self, at)],
     "the next token of each as its target"),
    (Batches, "micro_batches", lambda self, at: micro_batches(self, at)[:1], "has different samples on 1 ranks"),
    (ReadAhead, "micro_batches", lambda self, at: micro_batches(self, 0),
     "the step from sample 24 has different samples with reading ahead"),
    (ValidationWindows, "batches", lambda self, micro, rank, size: batches(self, micro),
     "does not have each exactly once"),
    (ValidationWindows, "batches",
     lambda self, micro, rank, size: list(batches(self, micro, rank, size))[rank > 0:], "batches"),
])
def test_a_fault_of_the_reader_is_named(of: object, name: str, fault: Callable, reason: str,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of, name, fault)
    samples._places.cache_clear()
    try:
        problems = list(sample_order.find_problems())
    finally:
        samples._places.cache_clear()
    assert any(reason in problem for problem in problems), problems


def test_certify_ends_before_any_layout_if_samples_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(sample_order, "find_problems", lambda: iter(["sample 3 is lost", "and more"]))
    sample_order.check_reader.cache_clear()
    with pytest.raises(UserError, match="the definition of the step: data: sample 3 is lost"):
        sample_order.check_reader()
