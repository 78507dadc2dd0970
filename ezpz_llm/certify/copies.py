"""Copies of weights, moments and whole parameters on several ranks, which must be the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import all_gather
from ezpz_llm.engine.base import Engine
from ezpz_llm.engine.optimizer_state import Slice, cut
from ezpz_llm.model.parameters import placement_of, size

_BLOCK = 64
"""Elements of a copy that one number stands for."""
Blocks = dict[tuple[str, str, Any, int, int], int]
"""What a rank holds: by kind, parameter, its box and the first and last element of a block, the number."""
_BITS = {2: torch.int16, 4: torch.int32}
"""What the bits of an element are read as, by its bytes."""


def whole_parameters(engine: Engine) -> Iterator[Slice]:
    """The parameters that this rank computes with, of any dtype, as far as it has them whole now.

    In ZeRO the slices of the state are the masters, of which no rank has another's. Stage 3 and FSDP2 have those
    whole that the last pass has left gathered.
    """
    for name, parameter in engine.module.named_parameters():
        at, held = placement_of(name, parameter), parameter.detach()
        if not isinstance(held, DTensor) and held.numel() == sum(size(box) for box in at.boxes):
            yield from cut(at, 0, held.numel(), {"parameter": held.view(-1)})


def copies_apart(engine: Engine, dist: Dist) -> dict[str, dict[str, Any]]:
    """Copies of a parameter and its optimizer state on several ranks that are not the same bits. Collective.

    Returns:
        By "KIND of NAME": "compared", the blocks of elements that several ranks hold; "apart", how many of them are
        not the same on all; "where", the first two ranks that differ, in words. Nothing of what only one rank has.
    """
    mine: Blocks = {}
    for pieces in (engine.training_state().slices(), whole_parameters(engine)):
        for piece in pieces:
            for kind, tensor in piece.tensors.items():
                mine.update(_blocks(kind, piece, tensor.detach().cpu()))
    found: dict[str, dict[str, Any]] = {}
    first: dict[Any, tuple[int, int]] = {}
    for rank, blocks in enumerate(all_gather(dist, mine)):
        for key, number in blocks.items():
            if key not in first:
                first[key] = rank, number
                continue
            entry = found.setdefault(f"{key[0]} of {key[1]}", {"compared": 0, "apart": 0, "where": ""})
            entry["compared"] += 1
            if number != first[key][1]:
                entry["apart"] += 1
                entry["where"] = entry["where"] or f" on ranks {first[key][0]} and {rank}"
    return found


def _blocks(kind: str, piece: Slice, tensor: Tensor) -> Blocks:
    """A number of the bits of each block of a slice, which differs where one element does.

    Blocks begin at multiples of their size in the box, so that ranks whose slices begin elsewhere have the same.
    """
    odd = np.arange(1, 2 * _BLOCK, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    bits = tensor.contiguous().view(_BITS[tensor.element_size()]).numpy().astype(np.uint64)
    found: Blocks = {}
    edges = [piece.start, *range(-(-(piece.start + 1) // _BLOCK) * _BLOCK, piece.stop, _BLOCK), piece.stop]
    for start, stop in pairwise(edges):
        part = bits[start - piece.start:stop - piece.start]
        found[kind, piece.name, piece.box, start, stop] = int((part * odd[:len(part)]).sum())
    return found
