"""Loss of a sequence that is sharded over ranks: the mean of the ranks' parts is the loss over all targets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ezpz_llm.training.data.samples import IGNORED
from ezpz_llm.training.engine.sequence_parallel import _shared

BATCH, LENGTH = 2, 8


def losses(tokens: Tensor, targets: Tensor, first: int) -> Tensor:
    """Return a loss for each token that depends on its position; 0 if its target is ignored."""
    places = torch.arange(first, first + tokens.shape[1])
    return (tokens + 10.0 * places) * (targets != IGNORED)


def inner(tokens: Tensor, targets: Tensor, reduction: str, *, first: int, sequences: Tensor) -> Tensor:
    assert sequences.shape[1] == LENGTH, "the document mask needs whole sequences"
    per_token = losses(tokens, targets, first)
    return per_token.sum(dim=-1) if reduction == "rows" else per_token.sum()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("ignored", [slice(0, 0), slice(0, 3), slice(1, LENGTH)])
def test_parts_of_ranks_are_of_all_targets_however_these_are_ignored(size: int, ignored: slice) -> None:
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    targets = tokens + 1
    targets[0, ignored] = IGNORED
    ranks = [_shared(inner, rank, size, group=None) for rank in range(size)]
    whole = losses(tokens, targets, 0)
    mean = torch.stack([rank(tokens, targets) for rank in ranks]).mean()
    torch.testing.assert_close(mean, whole.sum() / (targets != IGNORED).sum())
    assert sum(rank(tokens, targets, "sum") for rank in ranks) == whole.sum()
    assert torch.equal(sum(rank(tokens, targets, "rows") for rank in ranks), whole.sum(dim=-1))
