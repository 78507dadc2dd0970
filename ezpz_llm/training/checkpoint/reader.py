"""Loading of a checkpoint into an engine of any layout: each rank reads only its own slices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ezpz_llm.core.base import UserError
from ezpz_llm.training.checkpoint.chain import continue_from
from ezpz_llm.training.checkpoint.index import BUFFER, Index, Parameter, Part, check_model, common, read_index
from ezpz_llm.training.checkpoint.manifest import (
    DamagedCheckpointError,
    all_damaged_error,
    damaged_error,
    read_manifest,
    shard_name,
    verify,
)
from ezpz_llm.training.checkpoint.retention import candidates
from ezpz_llm.training.checkpoint.state import State, read_state
from ezpz_llm.training.checkpoint.writer import Trained, buffer_places, restore_rng_states
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import broadcast, run_together
from ezpz_llm.training.engine.optimizer_state import EngineState

Accept = Callable[[Path, State, Index, EngineState], None]
"""Callback that raises a UserError if the run cannot resume from a checkpoint: (folder, its state, its index, the
engine's state)."""


@dataclass(frozen=True)
class Loaded:
    """Loaded checkpoint.

    Attributes:
        rng_restored: True if the RNG states were restored, because the number of ranks and the layout's degrees
            equal those of the run that saved them.
        skipped: errors of newer, damaged checkpoints.
    """

    folder: Path
    state: State
    rng_restored: bool
    skipped: tuple[DamagedCheckpointError, ...] = ()


def load_newest(where: str | Path, engine: Trained, dist: Dist, accept: Accept) -> Loaded:
    """Load the newest undamaged checkpoint of a run directory, or the one that `where` names. Collective.

    Raises:
        UserError: there is no checkpoint, all are damaged, or the newest undamaged one does not fit the engine or
            `accept` rejects it. The error is the same on every rank.
    """
    folders = run_together(dist, lambda: candidates(where), on_main=True)
    skipped: list[DamagedCheckpointError] = []
    for folder in broadcast(dist, folders):
        try:
            return replace(load(folder, engine, dist, accept), skipped=tuple(skipped))
        except DamagedCheckpointError as error:
            skipped.append(error)
    raise all_damaged_error(skipped)


def load(folder: Path, engine: Trained, dist: Dist, accept: Accept | None = None) -> Loaded:
    """Load a checkpoint into an engine: weights, moments, optimizer step and loss scale. Collective.

    First, the ranks share the work of checking every file's hash. `latest` of this run's directory then names the
    checkpoint, if it is one of its own.

    Args:
        folder: a complete checkpoint, for example from `find`.

    Raises:
        UserError: the checkpoint is damaged (DamagedCheckpointError), or of another model, or has no optimizer
            state, or `accept` rejects it. The error is the same on every rank; the engine is unchanged.
    """
    training, places = engine.training_state(), buffer_places(engine.module)

    def read() -> tuple[State, Index]:
        """Return state and index of the checkpoint after checking that `accept` and the engine allow them."""
        state, index = read_state(folder), read_index(folder)
        if accept is not None:
            accept(folder, state, index, training)
        check_model(index, training.shapes, folder, training.kinds)
        _check_buffers(folder, places)
        return state, index

    # Agree on the hashes before reading: the content of a damaged file is meaningless.
    run_together(dist, lambda: _verify_share(folder, dist))
    state, index = run_together(dist, read)
    same_split = (state.world_size, state.degrees) == (dist.world_size, asdict(dist.mesh.degrees))
    with ExitStack() as stack:
        # Shards are memory-mapped on first use.
        open_file = functools.cache(lambda name: stack.enter_context(safe_open(folder / name, framework="pt")))
        for part in training.slices():
            fill(part.tensors, (part.box, part.start, part.stop), index.parameters[part.name], open_file)
        if places:
            _load_buffers(open_file(shard_name(0)), places, engine.device)
        if same_split:
            restore_rng_states(_read_rng_states(open_file(shard_name(dist.rank))), engine.device)
    training.loaded(state.optimizer_step)
    if training.scale is not None and state.loss_scale is not None:
        training.scale.restore(state.loss_scale)
    run_together(dist, lambda: continue_from(dist, folder, state), on_main=True)
    return Loaded(folder, state, same_split)


def _check_buffers(folder: Path, places: Mapping[str, tuple[nn.Module, str]]) -> None:
    """Check that checkpoint and model have the same buffers. One that is None in the model may have a value.

    Raises:
        UserError: a buffer is missing, or has another shape or dtype.
    """
    with safe_open(folder / shard_name(0), framework="pt") as shard:
        stored = {name.removeprefix(BUFFER): shard.get_tensor(name) for name in shard.keys()  # noqa: SIM118
                  if name.startswith(BUFFER)}
    for name in [*places, *stored]:
        buffer = getattr(*places[name]) if name in places else None
        in_model = _form(buffer) if name in places else "no such buffer"
        in_file = _form(stored.get(name))
        if in_model != in_file and not (name in places and buffer is None):
            raise UserError(f"the checkpoint is of another model: the buffer {name} is {in_file} in the "
                            f"checkpoint, {in_model} in the model", where=str(folder),
                            instead="use the model of the run that saved it; register_buffer(name, None) for a "
                                    "buffer that gets its value in training")


def _form(buffer: torch.Tensor | None) -> str:
    """Return the shape and the dtype of a buffer as text."""
    return "None" if buffer is None else f"{list(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')}"


def _load_buffers(shard: Any, places: Mapping[str, tuple[nn.Module, str]], device: torch.device) -> None:
    """Set buffers to those of rank 0's file."""
    stored = set(shard.keys())
    for name, (part, leaf) in places.items():
        if f"{BUFFER}{name}" not in stored:
            continue
        value = shard.get_tensor(f"{BUFFER}{name}")
        if (buffer := getattr(part, leaf)) is None:
            setattr(part, leaf, value.to(device))
        else:
            buffer.copy_(value)


def fill(tensors: Mapping[str, torch.Tensor], part: Part, stored: Parameter,
         open_file: Callable[[str], Any]) -> None:
    """Copy the elements of `part` from the pieces of a stored parameter into one flat tensor per kind."""
    for piece in stored.pieces:
        pairs = list(common(stored.shape, part, (piece.box, piece.start, piece.stop)))
        if not pairs:
            continue
        # Read each piece once: its runs may be many and short.
        first, last = pairs[0][1], pairs[-1][1] + pairs[-1][2]
        for kind, tensor in tensors.items():
            values = open_file(piece.file).get_slice(f"{kind}/{piece.key}")[first:last]
            for target, source, length in pairs:
                tensor[target:target + length].copy_(values[source - first:source - first + length])


def _read_rng_states(shard: Any) -> dict[str, torch.Tensor]:
    names = [key for key in shard.keys() if key.startswith("rng/")]  # noqa: SIM118 (not a mapping)
    return {name.removeprefix("rng/"): shard.get_tensor(name) for name in names}


def _verify_share(folder: Path, dist: Dist) -> None:
    """Check the hashes of this rank's share of the files, and that tensor files are safetensors."""
    share = read_manifest(folder)[dist.rank::dist.world_size]
    verify(folder, share)
    for record in share:
        if record.name.endswith(".safetensors"):
            try:
                with safe_open(folder / record.name, framework="pt"):
                    pass
            except SafetensorError as error:
                raise damaged_error(folder, f"{record.name} is not a safetensors file: {error}") from error
