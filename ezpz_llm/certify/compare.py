"""Compare what a layout's ranks hold with the reference, slice by slice; only small numbers leave a rank."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from ezpz_llm.certify.reference import Reference, counted
from ezpz_llm.dist import Dist
from ezpz_llm.engine.base import Engine
from ezpz_llm.engine.optimizer_state import Slice, owned
from ezpz_llm.model.config import ModelConfig

Row = list[float]
"""Of one rank and parameter: elements owned, squared difference of these, and of all that the rank holds."""


def compare(engine: Engine, config: ModelConfig, reference: Reference, kind: str, against: str, dist: Dist,
            scale: float = 1.0) -> dict[str, dict[str, float]]:
    """The difference of every parameter from the reference. Collective.

    Args:
        kind: what to read of the engine ("weight" or "exp_avg"), times `scale`.
        against: what of the reference to compare it with: "first", "gradient" or "weight".

    Returns:
        By parameter: "elements" that the ranks own, each counted where it is owned; "difference", the 2-norm over
        the whole parameter; "copy", the largest 2-norm over what one rank holds, whoever owns it, with that "rank";
        infinite where a value is not a number.
    """
    def squared(part: Slice, whole: torch.Tensor) -> float:
        box = tuple(slice(*side) for side in part.box)
        difference = part.tensors[kind].detach().cpu().double() * scale - _cut(whole, box, part).double()
        mask = counted(config, part.name, part.shape) if against != "first" else None
        if mask is not None:
            difference *= _cut(mask, box, part)
        return torch.nan_to_num(difference.square().sum(), nan=torch.inf).item()

    state = engine.training_state()
    rows: dict[str, Row] = {}
    for held, own in owned(state.slices(), state.extents()):
        row = rows.setdefault(held.name, [0.0, 0.0, 0.0])
        whole = reference.tensors[f"{against}/{held.name}"]
        row[2] += squared(held, whole)
        if own is not None:
            row[0] += own.numel
            row[1] += squared(own, whole)
    return _combine(gather(dist, rows))


def gather(dist: Dist, value: Any) -> list[Any]:
    """A small value of every rank, on every rank."""
    values = [value] * dist.world_size
    if dist.world_size > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def _cut(whole: torch.Tensor, box: tuple[slice, ...], part: Slice) -> torch.Tensor:
    return whole[box].flatten()[part.start:part.stop]


def _combine(ranks: list[dict[str, Row]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(
        lambda: {"elements": 0, "difference": 0.0, "copy": 0.0, "rank": 0})
    for rank, rows in enumerate(ranks):
        for name, (elements, own, held) in rows.items():
            entry = found[name]
            entry["elements"] += int(elements)
            entry["difference"] += own
            if held > entry["copy"]:
                entry["copy"], entry["rank"] = held, rank
    for entry in found.values():
        entry["difference"], entry["copy"] = entry["difference"] ** 0.5, entry["copy"] ** 0.5
    return dict(sorted(found.items()))
