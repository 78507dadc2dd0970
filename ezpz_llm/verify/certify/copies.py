"""Bitwise comparison of weights, moments and full parameters that are replicated on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.optimizer_state import Slice, slice_placement
from ezpz_llm.training.model.parameters import placement_of, size

_BLOCK = 64
"""Elements per checksum."""
Blocks = dict[tuple[str, str, Any, int, int], int]
"""Checksums of a rank, by kind, parameter, its box, and the block's start and stop in the box."""
_BITS = {2: torch.int16, 4: torch.int32}
"""Integer dtype with which to view elements, by element size in bytes."""


def whole_parameters(engine: Engine) -> Iterator[Slice]:
    """Yield the parameters, of any dtype, that this rank computes with and that are not partitioned at the moment.

    Under ZeRO, the slices of the training state are master weights, which are not replicated. Under stage 3 and
    FSDP2, only parameters that the last pass left gathered are yielded.
    """
    for name, parameter in engine.module.named_parameters():
        at, tensor = placement_of(name, parameter), parameter.detach()
        if not isinstance(tensor, DTensor) and tensor.numel() == sum(size(box) for box in at.boxes):
            yield from slice_placement(at, 0, tensor.numel(), {"parameter": tensor.view(-1)})


def differing_copies(engine: Engine, dist: Dist) -> dict[str, dict[str, Any]]:
    """Compare the replicas of each parameter and of its optimizer state bit by bit. Collective.

    Returns:
        By "KIND of NAME": "compared", the number of comparisons of a replica's block with that of the first rank;
        "apart", the number of them that differ; "where", text that names the first pair of ranks whose blocks
        differ. Blocks that only one rank holds are left out.
    """
    checksums: Blocks = {}
    for pieces in (engine.training_state().slices(), whole_parameters(engine)):
        for piece in pieces:
            for kind, tensor in piece.tensors.items():
                # A copy, because fully_shard cannot free storage of which NumPy has a view.
                checksums.update(_checksum_blocks(kind, piece, tensor.detach().cpu().clone()))
    differences: dict[str, dict[str, Any]] = {}
    first: dict[Any, tuple[int, int]] = {}
    for rank, blocks in enumerate(all_gather(dist, checksums)):
        for key, checksum in blocks.items():
            if key not in first:
                first[key] = rank, checksum
                continue
            entry = differences.setdefault(f"{key[0]} of {key[1]}", {"compared": 0, "apart": 0, "where": ""})
            entry["compared"] += 1
            if checksum != first[key][1]:
                entry["apart"] += 1
                entry["where"] = entry["where"] or f" on ranks {first[key][0]} and {rank}"
    return differences


def _checksum_blocks(kind: str, piece: Slice, tensor: Tensor) -> Blocks:
    """Return a checksum of each block of a slice. A change of a single element changes the checksum.

    Blocks begin at multiples of _BLOCK within the box, so that they match on ranks with other slice boundaries.
    """
    odd = np.arange(1, 2 * _BLOCK, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    bits = tensor.contiguous().view(_BITS[tensor.element_size()]).numpy().astype(np.uint64)
    checksums: Blocks = {}
    edges = [piece.start, *range(-(-(piece.start + 1) // _BLOCK) * _BLOCK, piece.stop, _BLOCK), piece.stop]
    for start, stop in pairwise(edges):
        part = bits[start - piece.start:stop - piece.start]
        checksums[kind, piece.name, piece.box, start, stop] = int((part * odd[:len(part)]).sum())
    return checksums
