"""Load a training state into an engine of any layout: each rank reads the pieces that it holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ezpz_llm.base import UserError
from ezpz_llm.checkpoint import writer
from ezpz_llm.checkpoint.index import Index, Parameter, Part, check_model, common, read_index
from ezpz_llm.checkpoint.manifest import Damaged, damaged, none_whole, read_manifest, read_state, shard_name, verify
from ezpz_llm.checkpoint.retention import candidates
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import broadcast, together
from ezpz_llm.engine.base import Engine

Accept = Callable[[Path, dict[str, Any]], None]
"""Raises a UserError for a checkpoint, and its state, that the run cannot go on from."""


@dataclass(frozen=True)
class Loaded:
    """The checkpoint that was loaded, its state, and newer ones that were passed over, each with its damage."""

    folder: Path
    state: dict[str, Any]
    passed_over: tuple[Damaged, ...]


def load_newest(where: str | Path, engine: Engine, dist: Dist, accept: Accept) -> Loaded:
    """Load the newest undamaged checkpoint of a run directory, or the one that `where` names. Collective.

    Raises:
        UserError: there is none, or all are damaged, or `accept` refuses it. The same on every rank.
    """
    folders = together(dist, lambda: candidates(where), on_main=True)
    passed_over: list[Damaged] = []
    for folder in broadcast(dist, folders):
        try:
            return Loaded(folder, load(folder, engine, dist, accept), tuple(passed_over))
        except Damaged as damage:
            passed_over.append(damage)
    raise none_whole(passed_over)


def load(folder: Path, engine: Engine, dist: Dist, accept: Accept | None = None) -> dict[str, Any]:
    """Put a checkpoint into an engine: weights, moments, optimizer step and loss scale, as saved. Collective.

    Every file's hash is compared with the manifest first, the work shared by the ranks. This rank's random states
    are restored if the ranks that saved were divided in the same way; the returned member rng_restored says so.

    Args:
        folder: a complete checkpoint, such as `find` gives.

    Returns:
        The state that was given to `save`, with the members that it added.

    Raises:
        UserError: the checkpoint is damaged (Damaged), or of another model, or has no optimizer state, or `accept`
            refuses it. The same on every rank; the engine is unchanged.
    """
    training, buffers = engine.training_state(), writer.buffers_of(engine.module)

    def read() -> tuple[dict[str, Any], Index]:
        """State and index of the folder, refused where they are not of this model."""
        state, index = read_state(folder), read_index(folder)
        if accept is not None:
            accept(folder, state)
        check_model(index, training.shapes, folder, training.kinds)
        _check_buffers(folder, buffers)
        return state, index

    # Settled before anything is read: what other ranks have found damaged says nothing.
    together(dist, lambda: _verify_share(folder, dist))
    state, index = together(dist, read)
    alike = (state["world_size"], state.get("degrees")) == (dist.world_size, asdict(dist.mesh.degrees))
    with ExitStack() as stack:
        # Each shard is opened (mapped, not read) when it is first needed.
        open_file = functools.cache(lambda name: stack.enter_context(safe_open(folder / name, framework="pt")))
        for part in training.slices():
            fill(part.tensors, (part.box, part.start, part.stop), index.parameters[part.name], open_file)
        for name, buffer in buffers.items():
            buffer.copy_(open_file(shard_name(0)).get_tensor(f"{writer.BUFFER}{name}").view(buffer.shape))
        if alike:
            writer.restore(_random_states(open_file(shard_name(dist.rank))), engine.device)
    training.loaded(state["optimizer_step"])
    if training.scale is not None and state["loss_scale"] is not None:
        training.scale.load_state_dict(state["loss_scale"])
    return {**state, "rng_restored": alike}


def _check_buffers(folder: Path, buffers: Mapping[str, torch.Tensor]) -> None:
    """
    Raises:
        UserError: the model has a buffer that the checkpoint has not.
    """
    if not buffers:
        return
    with safe_open(folder / shard_name(0), framework="pt") as shard:
        there = set(shard.keys())
    if missing := [name for name in buffers if f"{writer.BUFFER}{name}" not in there]:
        raise UserError(f"the checkpoint is of another model: it has no buffer {missing[0]}", where=str(folder),
                        instead="the model of the run that saved it")


def fill(tensors: Mapping[str, torch.Tensor], part: Part, stored: Parameter,
         open_file: Callable[[str], Any]) -> None:
    """Copy what the pieces of a stored parameter have of `part` into flat tensors of that part, by kind."""
    for piece in stored.pieces:
        pairs = list(common(stored.shape, part, (piece.box, piece.start, piece.stop)))
        if not pairs:
            continue
        # One read a piece: runs of rows may be many and short.
        first, last = pairs[0][1], pairs[-1][1] + pairs[-1][2]
        for kind, tensor in tensors.items():
            values = open_file(piece.file).get_slice(f"{kind}/{piece.key}")[first:last]
            for ours, theirs, length in pairs:
                tensor[ours:ours + length].copy_(values[theirs - first:theirs - first + length])


def _random_states(shard: Any) -> dict[str, torch.Tensor]:
    names = [key for key in shard.keys() if key.startswith("rng/")]  # noqa: SIM118 (it has no __contains__)
    return {name.removeprefix("rng/"): shard.get_tensor(name) for name in names}


def _verify_share(folder: Path, dist: Dist) -> None:
    """Check this rank's share of the files' hashes, and that what should be tensors is."""
    share = read_manifest(folder)[dist.rank::dist.world_size]
    verify(folder, share)
    for record in share:
        if record.name.endswith(".safetensors"):
            try:
                with safe_open(folder / record.name, framework="pt"):
                    pass
            except SafetensorError as error:
                raise damaged(folder, f"{record.name} is not a safetensors file: {error}") from error
