"""Hash of the consumed samples: it depends on the samples and not on how they were split."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given, strategies as st

from ezpz_llm.training.trainer.run_data import Position, hash_samples

ALONE = SimpleNamespace(world_size=1)
SAMPLES = np.random.default_rng(0).integers(257, size=(60, 9))


def consume(*parts: tuple[int, int]) -> Position:
    """Return the position after samples [first, stop) of each part, one step per part."""
    position = Position()
    for first, stop in parts:
        position = position.advance(stop - first, hash_samples(first, SAMPLES[first:stop]))
    return position.agree(ALONE)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 4))
def test_the_hash_does_not_depend_on_steps_or_saves(cuts: list[int],
                                                    saved: int) -> None:
    position, at = Position(), 0
    for number, cut in enumerate(cuts):
        position = position.advance(cut, hash_samples(at, SAMPLES[at:at + cut]))
        at += cut
        if number == saved:
            agreed = position.agree(ALONE)
            position = Position.at(agreed.consumed, agreed.sample_hash)
    assert position.agree(ALONE) == consume((0, at))


def test_the_hash_does_not_depend_on_the_split_over_ranks() -> None:
    whole = consume((0, 8))
    ranks = [hash_samples(first, SAMPLES[first:first + 2]) for first in (6, 0, 4, 2)]
    assert Position().advance(8, sum(ranks)).agree(ALONE) == whole


def test_lost_repeated_and_swapped_samples_change_the_hash() -> None:
    right = consume((0, 8))
    assert len(right.sample_hash) == 16
    for wrong in (consume((0, 7)), consume((0, 4), (3, 7)), consume((0, 8), (7, 8)), consume((1, 9))):
        assert wrong.sample_hash != right.sample_hash
    # The same tokens with other numbers, and other tokens with the same numbers.
    assert hash_samples(1, SAMPLES[:8]) != hash_samples(0, SAMPLES[:8])
    changed = SAMPLES[:8].copy()
    changed[3, 5] += 1
    assert hash_samples(0, changed) != hash_samples(0, SAMPLES[:8])
    assert hash_samples(0, SAMPLES[:8, ::-1]) != hash_samples(0, SAMPLES[:8])
