"""Checks of tensor slices, sequence-parallel losses, checkpoints, and tied weights.

Loading a checkpoint into another layout relies on the intersection of two slices of a tensor. Rows are assigned to
ranks as torch.chunk does. A checkpoint that is written in the background must keep the state at the time of the
copy. A resumed CPU Adam must have the same powers of its betas as an uninterrupted one. The losses of
sequence-parallel ranks must add up to the loss of the full sequence. Tied weights must stay one tensor, and the
gradients of their copies in a pipeline must be summed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.training.checkpoint.index import Part, common
from ezpz_llm.training.checkpoint.saver import CpuMemory
from ezpz_llm.training.checkpoint.writer import read_shard
from ezpz_llm.training.dist import Degrees
from ezpz_llm.training.engine import sequence_parallel
from ezpz_llm.training.engine.optimizer_state import TorchState
from ezpz_llm.training.engine.pipeline_engine import PipelineEngine
from ezpz_llm.training.engine.sharded_start import first_element
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.parameters import Box, size
from ezpz_llm.verify.certify.loss_scaling import small_config
from ezpz_llm.verify.certify.plain_step import IGNORED
from ezpz_llm.verify.certify.thread_ranks import ThreadMesh, run_ranks

SHAPE = (4, 3)
_BOXES: tuple[Box, ...] = (((0, 4), (0, 3)), ((0, 4), (1, 3)), ((1, 3), (0, 3)))


def find_problems() -> Iterator[str]:
    """Yield a message for each failed check."""
    yield from _check_boxes()
    yield from _check_rows()
    yield from _check_sequences()
    yield from _check_tie()
    yield from _check_tables()
    yield from _check_background_copy()
    yield from _check_cpu_adam()


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
    length, lengths = 12, set()
    tokens = torch.arange(2 * length).view(2, length)

    def losses(tokens: Tensor, targets: Tensor, first: int) -> Tensor:
        """Return a loss per token that depends on its position."""
        return (tokens + 10.0 * torch.arange(first, first + tokens.shape[1])) * (targets != IGNORED)

    def inner(tokens: Tensor, targets: Tensor, reduction: str, *, first: int, sequences: Tensor) -> Tensor:
        """Return the loss of a rank's part of the sequence, which begins at position `first`."""
        lengths.add(sequences.shape[1])
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
    if lengths != {length}:
        yield "sequence-parallel ranks do not get whole sequences for the document mask"


def _check_tie() -> Iterator[str]:
    """Check that weights stay tied after materialization from the meta device and a change of dtype."""
    with torch.device("meta"):
        model = GPT(small_config())
    for move, moved in (("from the meta device", model.to_empty(device="cpu")), ("to bf16", model.bfloat16())):
        if moved.lm_head.weight is not moved.transformer["wte"].weight:
            yield f"after a move {move} the head is no longer tied to the embedding"
            return


def _check_tables() -> Iterator[str]:
    """Check the gradients of a tied embedding over three pipelines, which DeepSpeed sums once more."""
    gradients = torch.randint(100, (3, 5, 2), generator=torch.Generator().manual_seed(0)).float()
    for dtype, name in ((torch.float32, "grad"), (torch.bfloat16, "_hp_grad")):
        def sum_on_rank(mesh: ThreadMesh, dtype: torch.dtype = dtype, name: str = name) -> Tensor:
            """Return the rank's gradient after the first sum."""
            weight: Any = nn.Parameter(torch.zeros(5, 2))
            setattr(weight, name, gradients[mesh.dp_rank].clone())
            engine: Any = SimpleNamespace(module=SimpleNamespace(table=SimpleNamespace(weight=weight)), _mesh=mesh,
                                          _replica=mesh.place("dp", "sp"), _dtype=dtype)
            PipelineEngine._sum_over_replicas(engine)
            total: Tensor = getattr(weight, name)
            return total

        shares = torch.stack(run_ranks(Degrees(dp=3), sum_on_rank, "a tied embedding over three pipelines"))
        total = shares.sum(dim=0)
        if not torch.equal(total, gradients.sum(dim=0)):
            yield (f"the {dtype} gradients of a tied embedding over three pipelines add up to {total.sum():g}, "
                   f"not {gradients.sum():g}")
        if (shares.count_nonzero(dim=0) > 1).any():  # the order of the second sum would affect its rounding
            yield f"several pipelines have a part of the {dtype} gradient of a tied embedding"


def _check_cpu_adam() -> Iterator[str]:
    """Check that a resume brings DeepSpeed's CPU Adam to the powers of its betas after as many steps."""
    steps, betas = 40, (0.9, 0.95)
    optimizer: Any = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], betas=betas)
    optimizer.param_groups[0]["bias_correction"] = True
    optimizer.ds_opt_adam, optimizer.opt_id = _BetaPowers(), 0
    optimizer.ds_opt_adam.adam_update(0, 70, 0.0, *betas)  # steps before the resume
    TorchState(nn.Module(), optimizer, 0, 1, None).loaded(steps)
    uninterrupted = _BetaPowers()
    for step in range(steps + 2):
        uninterrupted.adam_update(0, step, 0.0, *betas)
    optimizer.ds_opt_adam.adam_update(0, steps + 1, 0.0, *betas)
    if not torch.equal(optimizer.ds_opt_adam.powers, uninterrupted.powers):
        yield f"CPU Adam resumed at step {steps} has other powers of its betas than an uninterrupted one"


class _BetaPowers:
    """Powers of the betas in DeepSpeed's C++ Adam (csrc/includes/cpu_adam.h, IncrementStep), in fp32."""

    def __init__(self) -> None:
        self.powers, self._step = torch.ones(2), 0

    def adam_update(self, _: int, step: int, rate: float, beta1: float, beta2: float, *others: Any) -> None:
        """Multiply the powers in the step after the previous one; compute them directly after a jump."""
        betas = torch.tensor((beta1, beta2))
        if step != self._step:
            self.powers = self.powers * betas if step == self._step + 1 else betas ** step
            self._step = step
