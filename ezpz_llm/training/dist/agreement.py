"""Collectives for Python objects and small values, and for raising one rank's error on all ranks.

They use `Dist.control`, and so neither wait for the work queued on a device nor add to it.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as torch_dist

from ezpz_llm.core.base import UserError

if TYPE_CHECKING:
    from ezpz_llm.training.dist import Dist

T = TypeVar("T")

_LONG = datetime.timedelta(days=7)
"""Time limit for an action of rank 0 in `run_long_on_main`."""


class PeerFailedError(UserError):
    """Error on a rank if another rank failed with an exception that is not a UserError."""


def gather(dist: Dist, value: Any) -> list[Any] | None:
    """Return every rank's value on rank 0, and None on other ranks. Collective."""
    if dist.world_size == 1:
        return [value]
    values: list[Any] | None = [None] * dist.world_size if dist.rank == 0 else None
    torch_dist.gather_object(value, values, dst=0, group=dist.control)
    return values


def all_gather(dist: Dist, value: Any) -> list[Any]:
    """Return every rank's value on every rank. Only for small values, since they are pickled. Collective."""
    values = [value] * dist.world_size
    if dist.world_size > 1:
        torch_dist.all_gather_object(values, value, group=dist.control)
    return values


def all_gather_number(dist: Dist, value: float) -> list[float]:
    """Return every rank's number, rounded to fp32, on every rank. Sends 4 bytes per rank. Collective."""
    if dist.world_size == 1:
        return [value]
    values = torch.empty(dist.world_size)
    # torch 2.13 renamed all_gather_into_tensor, and warns about the old name.
    all_gather_tensor = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
    all_gather_tensor(values, torch.tensor([value]), group=dist.control)
    return values.tolist()


def all_reduce(dist: Dist, values: torch.Tensor, op: torch_dist.ReduceOp = torch_dist.ReduceOp.SUM) -> torch.Tensor:
    """All-reduce a copy of `values` in CPU memory, and return the result. Collective.

    Overwrites `values` if they are in CPU memory. With a single rank, returns `values` unchanged.
    """
    if dist.world_size == 1:
        return values
    values = values.cpu()
    torch_dist.all_reduce(values, op=op, group=dist.control)
    return values


def broadcast(dist: Dist, value: Any) -> Any:
    """Return rank 0's value on every rank. Collective."""
    if dist.world_size == 1:
        return value
    values = [value]
    torch_dist.broadcast_object_list(values, src=0, group=dist.control)
    return values[0]


def first_value(dist: Dist, value: T | None) -> T | None:
    """Return the value of the lowest rank that has one, on every rank; None if no rank has one. Collective.

    The usual case, no value, costs one all-reduce of a single integer.
    """
    if dist.world_size == 1:
        return value
    rank = torch.tensor(dist.world_size if value is None else dist.rank)
    first = int(all_reduce(dist, rank, torch_dist.ReduceOp.MIN))
    if first == dist.world_size:
        return None
    values = [value]
    torch_dist.broadcast_object_list(values, src=first, group=dist.control)
    return values[0]


def run_together(dist: Dist, action: Callable[[], T], *, on_main: bool = False) -> T:
    """Run `action`, which must not communicate, on every rank, or on rank 0 only. Collective.

    With `on_main`, the other ranks return None. A rank whose action raises another exception than UserError raises
    that exception itself.

    Raises:
        UserError: the action raised it on a rank. Every rank raises the error of the lowest such rank.
        PeerFailedError: the action raised another exception on another rank.
    """
    result: Any = None
    error: Exception | None = None
    try:
        if dist.is_main or not on_main:
            result = action()
    except Exception as own_error:
        error = own_error
    if error is None or isinstance(error, UserError):
        raise_together(dist, error)
        return result
    with contextlib.suppress(Exception):  # this rank's exception is the cause, even if telling the others fails
        raise_together(dist, PeerFailedError(
            f"stopping, because rank {dist.rank} failed with an exception ({type(error).__name__})",
            instead=f"see the output of rank {dist.rank}", exit_code=1))
    raise error


def run_long_on_main(dist: Dist, action: Callable[[], T]) -> T | None:
    """Run `action` as `run_together` does, on rank 0 only, for longer than the timeout of a collective. Collective.

    The other ranks wait on the store of `setup`. If the program has created the process group itself, there is no
    such store, and the timeout of collectives applies.
    """
    store = dist.optional.store
    if store is None or dist.world_size == 1:
        return run_together(dist, action, on_main=True)
    dist.long_actions += 1
    key = f"long/{dist.long_actions}"

    def run_and_release() -> T:
        """Run the action, then release the other ranks, also after an exception."""
        try:
            return action()
        finally:
            store.set(key, "")

    if not dist.is_main:
        store.wait([key], _LONG)
    return run_together(dist, run_and_release, on_main=True)


def raise_together(dist: Dist, error: UserError | None) -> None:
    """Raise the error of the lowest rank that has one on every rank, with its type. Collective."""
    fields = None if error is None else (type(error), error.found, error.where, error.instead, error.exit_code)
    first = first_value(dist, fields)
    if first is not None:
        kind, found, where, instead, exit_code = first
        raise kind(found, where=where, instead=instead, exit_code=exit_code)
