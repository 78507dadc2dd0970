"""The data reader held to the definition of its samples: right as it is, refused with a fault in it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ezpz_llm.base import UserError
from ezpz_llm.certify import sample_order
from ezpz_llm.data import samples
from ezpz_llm.data.samples import Batches, ReadAhead, ValidationWindows

windows, places, micro_batches, batches = (
    samples.sample_windows, samples.draw, Batches.micro_batches, ValidationWindows.batches)


def test_the_reader_is_what_the_definition_says() -> None:
    assert list(sample_order.complaints()) == []


@pytest.mark.parametrize(("of", "name", "fault", "why"), [
    (samples, "sample_windows", lambda length, size, seed, i: windows(length, size, 0, i), "have the same order"),
    (samples, "sample_windows", lambda length, size, seed, i: windows(length, size, seed, i % 7), "comes once"),
    (samples, "sample_windows", lambda length, size, seed, i: np.asarray(i) % 100 * size, "order of the text"),
    (samples, "draw", lambda counts, seed, i: places(counts, seed, i % 4096), "has the epochs of the first"),
    (samples, "part_seed", lambda seed, part: seed, "two streams of one length have the same epochs"),
    (Batches, "micro_batches", lambda self, at: [(tokens, tokens) for tokens, _ in micro_batches(self, at)],
     "the next one of each as its target"),
    (Batches, "micro_batches", lambda self, at: micro_batches(self, at)[:1], "has other samples on 1 ranks"),
    (ReadAhead, "micro_batches", lambda self, at: micro_batches(self, 0), "read ahead, the step from sample 24"),
    (ValidationWindows, "batches", lambda self, micro, rank, size: batches(self, micro), "not each of them once"),
    (ValidationWindows, "batches",
     lambda self, micro, rank, size: list(batches(self, micro, rank, size))[rank > 0:], "batches"),
])
def test_a_fault_of_the_reader_is_named(of: object, name: str, fault: Callable, why: str,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of, name, fault)
    samples._places.cache_clear()
    try:
        found = list(sample_order.complaints())
    finally:
        samples._places.cache_clear()
    assert any(why in one for one in found), found


def test_certify_ends_before_any_layout_where_samples_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_order, "complaints", lambda: iter(["sample 3 is lost", "and more"]))
    sample_order.hold_reader_to_definition.cache_clear()
    with pytest.raises(UserError, match="the definition of the step: data: sample 3 is lost"):
        sample_order.hold_reader_to_definition()
