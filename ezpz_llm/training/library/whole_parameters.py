"""Whole fp32 parameters of a model under any layout: reading, writing, and the call on a single rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.torch_internals import default_store
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.engine.optimizer_state import EngineState
from ezpz_llm.training.library.replicas import fingerprint

_PATIENCE_S = 300.0
"""Seconds to wait for the other ranks before a call that every rank must make."""
_calls: dict[str, int] = {}


def require_all_ranks(dist: Dist, call: str) -> None:
    """Wait until every rank has made this call. Does not use the process group, in which others may wait.

    Raises:
        UserError: another rank has not made the call within _PATIENCE_S.
    """
    if dist.world_size == 1:
        return
    number = _calls[call] = _calls.get(call, 0) + 1
    store, keys = default_store(), [f"ezpz_llm/{call}/{number}/{rank}" for rank in range(dist.world_size)]
    store.set(keys[dist.rank], b"1")
    if number > 2:  # a rank that has set its next key has seen all keys of the call before
        store.delete_key(f"ezpz_llm/{call}/{number - 2}/{dist.rank}")
    try:
        store.wait(keys, timedelta(seconds=_PATIENCE_S))
    except torch_dist.DistStoreError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise UserError(f"model.{call} was called on rank {dist.rank}, but not on rank {missing[0]} within "
                        f"{_PATIENCE_S:g} s", where="Wrapped", exit_code=1,
                        instead=f"model.{call} on every rank; write files on one, if run.is_main") from error


@contextmanager
def whole_parameters(engine: MicroStepEngine, dist: Dist, part: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Replace parameters by whole fp32 parameters, and keep what is written to them. Collective.

    The values of rank 0 are kept.

    Args:
        part: the model, or a module of it, whose parameters are gathered.

    Yields:
        The whole parameters by name.
    """
    state = engine.training_state()
    state.adopt_parameters()
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    whole = _gather(state, dist, {names[parameter] for parameter in part.parameters()})
    fingerprints = {name: int(fingerprint(tensor)) for name, tensor in whole.items()}
    shown = {name: nn.Parameter(tensor) for name, tensor in whole.items()}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in engine.module.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if (name := names[parameter]) in shown:
                replaced.append((module, leaf, parameter))
                setattr(module, leaf, shown[name].requires_grad_(parameter.requires_grad))
    try:
        yield shown
    finally:
        for module, leaf, parameter in replaced:
            setattr(module, leaf, parameter)
    changed = torch.tensor([int(fingerprint(parameter)) != fingerprints[name]
                            for name, parameter in shown.items()], dtype=torch.uint8, device=dist.device)
    if dist.world_size > 1:
        torch_dist.all_reduce(changed, torch_dist.ReduceOp.MAX)
    _write_back(state, dist, {name: parameter.detach() for (name, parameter), is_changed
                              in zip(shown.items(), changed.tolist(), strict=True) if is_changed})


@torch.no_grad()
def _gather(state: EngineState, dist: Dist, names: set[str]) -> dict[str, Tensor]:
    whole = {name: torch.zeros(shape, device=dist.device) for name, shape in state.shapes.items() if name in names}
    pieces = list(state.raw_slices())
    is_replicated = all(piece.replicas == dist.world_size for piece in pieces)
    for piece in pieces:
        if piece.name in whole and (is_replicated or (piece.primary and not piece.replica)):
            box = whole[piece.name][tuple(slice(*side) for side in piece.box)]
            elements = box.reshape(-1)  # a copy unless the box has whole rows
            elements[piece.start:piece.stop] = piece.tensors["weight"]
            box.copy_(elements.view(box.shape))
    if not is_replicated:
        for tensor in whole.values():
            # Every element has one owner, whose value is added to zeros.
            torch_dist.all_reduce(tensor)
    return whole


@torch.no_grad()
def _write_back(state: EngineState, dist: Dist, written: dict[str, Tensor]) -> None:
    """Copy rank 0's values to all ranks' slices."""
    if not written:
        return
    if dist.world_size > 1:
        for tensor in written.values():
            torch_dist.broadcast(tensor, src=0)
    for piece in state.raw_slices():
        if piece.name in written:
            box = written[piece.name][tuple(slice(*side) for side in piece.box)]
            piece.tensors["weight"].copy_(box.reshape(-1)[piece.start:piece.stop])
    state.refresh()
