"""Save a training state: each rank writes its part, rank 0 the rest, and the folder appears whole or not at all."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ezpz_llm import __version__
from ezpz_llm.engine.checkpoint import rng
from ezpz_llm.engine.checkpoint.agree import broadcast, gather, raise_together
from ezpz_llm.engine.checkpoint.folder import (
    INDEX,
    STATE,
    FileRecord,
    complete,
    describe,
    publish,
    shard_name,
    start_partial,
    write_manifest,
)
from ezpz_llm.engine.checkpoint.index import KINDS, Piece, write_index
from ezpz_llm.engine.checkpoint.slices import EngineState, owned
from ezpz_llm.engine.checkpoint.tensor_file import write_tensors
from ezpz_llm.errors import UserError
from ezpz_llm.rundir import RunDir, write_json

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist
    from ezpz_llm.engine.base import Engine

Written = tuple[FileRecord, list[tuple[str, Piece]]]
"""What a rank wrote: its file, and (parameter name, piece) for what is in it."""


def save(engine: Engine, dist: Dist, run_dir: RunDir, state: dict[str, Any]) -> Path:
    """Write the checkpoint of `state["step"]` and let `latest` name it. Collective.

    Args:
        state: what the caller needs to go on, in JSON's types; rank 0's is kept. The members optimizer_step,
            loss_scale, world_size, layout and versions are added.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: it could not be written (a full disk, say). Nothing of it is left, and the checkpoints there were
            before are as they were. The same on every rank.
    """
    step = state["step"]
    training = engine.training_state()
    partial = _together(dist, run_dir, step, dist.is_main, lambda: start_partial(run_dir.checkpoints, step))
    partial = broadcast(dist, partial)
    try:
        written = _together(dist, run_dir, step, True,
                            lambda: _write_shard(partial, dist.rank, training, engine.device))
        everything = gather(dist, written)
        record = {**state, **_facts(engine, dist, training)}
        final = _together(dist, run_dir, step, dist.is_main,
                          lambda: _finish(partial, training, everything or [], record))
    except UserError:
        if dist.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return broadcast(dist, final)


def _together(dist: Dist, run_dir: RunDir, step: int, here: bool, action: Callable[[], Any]) -> Any:
    """What `action` gives, on ranks that are `here`; an OSError on any rank becomes a UserError on all."""
    result, error = None, None
    try:
        result = action() if here else None
    except OSError as failure:
        before = complete(run_dir.checkpoints)
        stands = f"; {before[-1].name} stands" if before else ""
        error = UserError(f"the checkpoint of step {step} could not be written: {failure.strerror}{stands}",
                          where=f"rank {dist.rank}, {failure.filename or run_dir.checkpoints}",
                          instead="make room there, or name another place with --run-dir DIR", exit_code=1)
    raise_together(dist, error)
    return result


def _write_shard(folder: Path, rank: int, training: EngineState, device: torch.device) -> Written:
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
    state = (part.tensors[kind] for part in parts for kind in KINDS)
    return write_tensors(folder / name, outline, chain(state, states.values())), pieces


def _facts(engine: Engine, dist: Dist, training: EngineState) -> dict[str, Any]:
    return {
        "optimizer_step": training.optimizer_step,
        "loss_scale": None if training.scale is None else training.scale.state_dict(),
        "world_size": dist.world_size,
        "layout": engine.layout.name,
        "versions": {"ezpz_llm": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _finish(partial: Path, training: EngineState, written: list[Written], record: dict[str, Any]) -> Path:
    """Rank 0's part, once every rank has written its own: index, state, manifest, then the name."""
    write_index(partial, training.shapes, [entry for _, pieces in written for entry in pieces])
    write_json(partial / STATE, record)
    records = [file for file, _ in written]
    write_manifest(partial, record["step"], [*records, describe(partial / INDEX), describe(partial / STATE)])
    return publish(partial, record["step"])
