"""What goes into a checkpoint's files: a rank's own part, and what rank 0 adds once every rank has written."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ezpz_llm import __version__
from ezpz_llm.engine.checkpoint import rng
from ezpz_llm.engine.checkpoint.folder import INDEX, STATE, publish, shard_name
from ezpz_llm.engine.checkpoint.index import KINDS, Piece, write_index
from ezpz_llm.engine.checkpoint.manifest import FileRecord, describe, write_manifest
from ezpz_llm.engine.checkpoint.slices import EngineState, owned
from ezpz_llm.engine.checkpoint.tensor_file import write_tensors
from ezpz_llm.rundir import write_json

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist
    from ezpz_llm.engine.base import Engine

Written = tuple[FileRecord, list[tuple[str, Piece]]]
"""What a rank wrote: its file, and (parameter name, piece) for what is in it."""


@dataclass(frozen=True)
class Shard:
    """One rank's part of a checkpoint, to be written once.

    `outline` has for each name in the file a tensor of the right size and type, `tensors` the values in the same
    order; a value may be the engine's own storage, there only until the next one is taken.
    """

    name: str
    outline: dict[str, torch.Tensor]
    pieces: list[tuple[str, Piece]]
    tensors: Iterator[torch.Tensor]


def read_shard(training: EngineState, rank: int, device: torch.device) -> Shard:
    """What `rank` has to write: the tensors that it answers for, and its random states as they are now."""
    name = shard_name(rank)
    outline: dict[str, torch.Tensor] = {}
    pieces = []
    extents = list(training.extents())
    for _, part in owned(extents, extents):
        if part is None:
            continue
        # A rank may hold several boxes of one parameter.
        key = part.name if f"{KINDS[0]}/{part.name}" not in outline else f"{part.name}/{len(pieces)}"
        outline.update({f"{kind}/{key}": torch.empty(part.numel, device="meta") for kind in KINDS})
        pieces.append((part.name, Piece(part.box, part.start, part.stop, file=name, key=key)))
    states = rng.capture(device)
    outline.update({f"rng/{source}": value for source, value in states.items()})
    parts = (part for _, part in owned(training.slices(), extents) if part is not None)
    values = (part.tensors[kind] for part in parts for kind in KINDS)
    return Shard(name, outline, pieces, chain(values, states.values()))


def write_shard(folder: Path, shard: Shard) -> Written:
    """Write a rank's file.

    Raises:
        OSError: the disk is full, or the like.
    """
    return write_tensors(folder / shard.name, shard.outline, shard.tensors), shard.pieces


def facts(engine: Engine, dist: Dist, training: EngineState) -> dict[str, Any]:
    """What state.json says besides the caller's own members."""
    return {
        "optimizer_step": training.optimizer_step,
        "loss_scale": None if training.scale is None else training.scale.state_dict(),
        "world_size": dist.world_size,
        "layout": engine.layout.name,
        "degrees": asdict(dist.mesh.degrees),
        "versions": {"ezpz_llm": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def complete_folder(partial: Path, shapes: dict[str, tuple[int, ...]], written: list[Written],
                    record: dict[str, Any]) -> Path:
    """Rank 0's part, once every rank has written its own: index, state, manifest, then the name.

    Raises:
        OSError: the disk is full, or the like.
    """
    write_index(partial, shapes, [entry for _, pieces in written for entry in pieces])
    write_json(partial / STATE, record)
    records = [file for file, _ in written]
    write_manifest(partial, record["step"], [*records, describe(partial / INDEX), describe(partial / STATE)])
    return publish(partial, record["step"])
