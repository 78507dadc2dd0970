"""Checks of tensor slices, sequence-parallel losses, background checkpoints, and tied weights.

Loading a checkpoint into another layout relies on the intersection of two slices of a tensor. Rows are assigned to
ranks as torch.chunk does. A checkpoint that is written in the background must keep the state at the time of the
copy. The losses of sequence-parallel ranks must add up to the loss of the full sequence, and tied weights must stay
one tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ezpz_llm.certify.loss_scaling import small_config
from ezpz_llm.certify.plain_step import IGNORED
from ezpz_llm.checkpoint.index import Part, common
from ezpz_llm.checkpoint.saver import CpuMemory
from ezpz_llm.checkpoint.writer import read_shard
from ezpz_llm.engine import sequence_parallel
from ezpz_llm.engine.optimizer_state import TorchState
from ezpz_llm.engine.sharded_start import first_element
from ezpz_llm.model.gpt import GPT
from ezpz_llm.model.parameters import Box, size

SHAPE = (4, 3)
_BOXES: tuple[Box, ...] = (((0, 4), (0, 3)), ((0, 4), (1, 3)), ((1, 3), (0, 3)))


def find_problems() -> Iterator[str]:
    """Yield a message for each failed check."""
    yield from _check_boxes()
    yield from _check_rows()
    yield from _check_sequences()
    yield from _check_tie()
    yield from _check_background_copy()


def _check_boxes() -> Iterator[str]:
    """Check the intersections of slices of boxes. One slice is a box, or all but its first and last element."""
    parts = [(box, start, stop) for box in _BOXES for start in range(size(box))
             for stop in range(start + 1, size(box) + 1)]
    elements = {part: _elements(part) for part in parts}
    whole = [part for part in parts if (part[1], size(part[0]) - part[2]) in ((0, 0), (1, 1))]
    for first, second in itertools.chain(itertools.product(parts, whole), itertools.product(whole, parts)):
        in_first, in_second = elements[first], elements[second]
        runs = list(common(SHAPE, first, second))
        from_first = [element for at, _, length in runs for element in in_first[at:at + length]]
        from_second = [element for _, at, length in runs for element in in_second[at:at + length]]
        if not from_first == from_second == sorted(set(in_first) & set(in_second)):
            yield f"the intersection of slices {first} and {second} of a tensor {SHAPE} is not {runs}"
            return


def _elements(part: Part) -> list[int]:
    """Return the indices of a part's elements in the full tensor."""
    box, start, stop = part
    numbers = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE)
    return numbers[tuple(slice(*side) for side in box)].flatten()[start:stop].tolist()


def _check_rows() -> Iterator[str]:
    for rows, ranks in itertools.product((4, 7, 61), (1, 2, 3, 4)):
        for rank, part in enumerate(torch.arange(rows * 3).view(rows, 3).chunk(ranks)):
            if (start := first_element((rows, 3), rank, ranks)) != part[0, 0]:
                yield f"rank {rank} of {ranks} begins at element {start} of {rows} rows, not at {part[0, 0]}"
                return


def _check_background_copy() -> Iterator[str]:
    """Check that the copy of the state for a checkpoint does not change when weights and moments change."""
    model = nn.Linear(30, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(8, 30)).sum().backward()
    optimizer.step()
    state = TorchState(model, optimizer, 0, 1, None)
    expected = [tensor.clone() for tensor in read_shard(state, 0, torch.device("cpu")).tensors]
    copied = CpuMemory(torch.device("cpu")).copy(read_shard(state, 0, torch.device("cpu")))
    for piece in state.slices():
        for tensor in piece.tensors.values():
            tensor.fill_(-1.0)
    for actual, original in zip(copied.tensors, expected, strict=True):
        if not torch.equal(actual.view(-1), original.view(-1)):
            yield "a checkpoint that is written in the background changes with the training"
            return


def _check_sequences() -> Iterator[str]:
    """Check mean, sum and per-row losses over sequence-parallel ranks, with some or most targets ignored."""
    length = 12
    tokens = torch.arange(2 * length).view(2, length)

    def losses(tokens: Tensor, targets: Tensor, first: int) -> Tensor:
        """Return a loss per token that depends on its position."""
        return (tokens + 10.0 * torch.arange(first, first + tokens.shape[1])) * (targets != IGNORED)

    def inner(tokens: Tensor, targets: Tensor, reduction: str, *, first: int, sequences: Tensor) -> Tensor:
        """Return the loss of a rank's part of the sequence, which begins at position `first`."""
        each = losses(tokens, targets, first)
        return each.sum(dim=-1) if reduction == "rows" else each.sum()

    for ranks, ignored in itertools.product((1, 2, 4), (0, 3, length - 1)):
        targets = tokens + 1
        targets[0, :ignored] = IGNORED
        whole = losses(tokens, targets, 0)
        shares = [sequence_parallel._shared(inner, rank, ranks, group=None)
                  for rank in range(ranks)]
        for reduction, expected in (("sum", whole.sum()), ("rows", whole.sum(dim=-1)),
                                    ("mean", whole.sum() / (targets != IGNORED).sum())):
            parts = torch.stack([share(tokens, targets, reduction) for share in shares])
            total = parts.mean(dim=0) if reduction == "mean" else parts.sum(dim=0)
            if not torch.allclose(total, expected, rtol=1e-6):
                yield f"the {reduction} of a loss over {ranks} sequence-parallel ranks is {total}, not {expected}"
                return


def _check_tie() -> Iterator[str]:
    """Check that weights stay tied after materialization from the meta device and a change of dtype."""
    with torch.device("meta"):
        model = GPT(small_config())
    for move, moved in (("from the meta device", model.to_empty(device="cpu")), ("to bf16", model.bfloat16())):
        if moved.lm_head.weight is not moved.transformer["wte"].weight:
            yield f"after a move {move} the head is no longer tied to the embedding"
            return
