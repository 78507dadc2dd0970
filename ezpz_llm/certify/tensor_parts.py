"""Parts of tensors, of sequences and of moments in time, held to their definition.

What two parts of a tensor have in common, however each was cut, is what a checkpoint that another layout reads is
made of. Rows are dealt to ranks as torch does it. A copy that is written in the background is of its moment. The
ranks of a sequence give together the loss of all of it, and a tied table stays one tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ezpz_llm.certify.loss_scaling import small_config
from ezpz_llm.certify.plain_step import IGNORED
from ezpz_llm.checkpoint.index import Part, common
from ezpz_llm.checkpoint.saver import HostMemory
from ezpz_llm.checkpoint.writer import read_shard
from ezpz_llm.engine import sequence_parallel
from ezpz_llm.engine.optimizer_state import TorchState
from ezpz_llm.engine.sharded_start import first_element
from ezpz_llm.model.gpt import GPT
from ezpz_llm.model.parameters import Box, size

SHAPE = (4, 3)
BOXES: tuple[Box, ...] = (((0, 4), (0, 3)), ((0, 4), (1, 3)), ((1, 3), (0, 3)))


def complaints() -> Iterator[str]:
    """What is wrong with parts."""
    yield from _of_boxes()
    yield from _of_rows()
    yield from _of_sequences()
    yield from _of_the_tie()
    yield from _of_a_copy()


def _of_boxes() -> Iterator[str]:
    """Parts of a box, however they begin and end in it, with whole boxes and those but for their ends."""
    parts = [(box, start, stop) for box in BOXES for start in range(size(box))
             for stop in range(start + 1, size(box) + 1)]
    elements = {part: _elements(part) for part in parts}
    whole = [part for part in parts if (part[1], size(part[0]) - part[2]) in ((0, 0), (1, 1))]
    for one, other in itertools.chain(itertools.product(parts, whole), itertools.product(whole, parts)):
        ours, theirs = elements[one], elements[other]
        runs = list(common(SHAPE, one, other))
        mine = [element for at, _, length in runs for element in ours[at:at + length]]
        yours = [element for _, at, length in runs for element in theirs[at:at + length]]
        if not mine == yours == sorted(set(ours) & set(theirs)):
            yield f"what {one} and {other} of a tensor {SHAPE} have in common is not {runs}"
            return


def _elements(part: Part) -> list[int]:
    """The numbers of a part's elements in the whole tensor."""
    box, start, stop = part
    numbers = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE)
    return numbers[tuple(slice(*side) for side in box)].flatten()[start:stop].tolist()


def _of_rows() -> Iterator[str]:
    for rows, ranks in itertools.product((4, 7, 61), (1, 2, 3, 4)):
        for rank, part in enumerate(torch.arange(rows * 3).view(rows, 3).chunk(ranks)):
            if (found := first_element((rows, 3), rank, ranks)) != part[0, 0]:
                yield f"rank {rank} of {ranks} begins at element {found} of {rows} rows, not at {part[0, 0]}"
                return


def _of_a_copy() -> Iterator[str]:
    """Weights and moments that change after they were copied are in the copy what they were."""
    model = nn.Linear(30, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(8, 30)).sum().backward()
    optimizer.step()
    state = TorchState(model, optimizer, 0, 1, None)
    expected = [tensor.clone() for tensor in read_shard(state, 0, torch.device("cpu")).tensors]
    copied = HostMemory(torch.device("cpu")).copy(read_shard(state, 0, torch.device("cpu")))
    for piece in state.slices():
        for tensor in piece.tensors.values():
            tensor.fill_(-1.0)
    for mine, theirs in zip(copied.tensors, expected, strict=True):
        if not torch.equal(mine.view(-1), theirs.view(-1)):
            yield "what is written of a checkpoint in the background changes with the training"
            return


def _of_sequences() -> Iterator[str]:
    """The mean, the sum and the rows of a loss over the ranks of a sequence, some or most targets of it ignored."""
    length = 12
    tokens = torch.arange(2 * length).view(2, length)

    def losses(tokens: Tensor, targets: Tensor, first: int) -> Tensor:
        """Of each token, another one at every position."""
        return (tokens + 10.0 * torch.arange(first, first + tokens.shape[1])) * (targets != IGNORED)

    def inner(tokens: Tensor, targets: Tensor, reduction: str, *, first: int) -> Tensor:
        """A model's loss of a share that begins at position `first`."""
        found = losses(tokens, targets, first)
        return found.sum(dim=-1) if reduction == "rows" else found.sum()

    for ranks, ignored in itertools.product((1, 2, 4), (0, 3, length - 1)):
        targets = tokens + 1
        targets[0, :ignored] = IGNORED
        whole = losses(tokens, targets, 0)
        shares = [sequence_parallel._shared(inner, rank, ranks, group=None)
                  for rank in range(ranks)]
        for reduction, expected in (("sum", whole.sum()), ("rows", whole.sum(dim=-1)),
                                    ("mean", whole.sum() / (targets != IGNORED).sum())):
            parts = torch.stack([share(tokens, targets, reduction) for share in shares])
            found = parts.mean(dim=0) if reduction == "mean" else parts.sum(dim=0)
            if not torch.allclose(found, expected, rtol=1e-6):
                yield f"the {reduction} of a loss over {ranks} ranks of a sequence is {found}, not {expected}"
                return


def _of_the_tie() -> Iterator[str]:
    """Through a start on the meta device, and a change of dtype."""
    with torch.device("meta"):
        model = GPT(small_config())
    for what, moved in (("from the meta device", model.to_empty(device="cpu")), ("to bf16", model.bfloat16())):
        if moved.lm_head.weight is not moved.transformer["wte"].weight:
            yield f"after a move {what} the head has another weight than the table that it is tied to"
            return
