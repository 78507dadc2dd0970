"""Ranks of a process group as threads of one process, to check code that communicates without a launch."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo, ReduceOp

from ezpz_llm.training.dist import Degrees, Mesh
from ezpz_llm.training.dist.degrees import Axis
from ezpz_llm.training.dist.private_names import tree_leaves

_LIMIT_S = 30.0
"""Time limit of a collective, of which each takes milliseconds. Only a rank that hangs reaches it."""
_EQUAL_TENSORS = ("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_coalesced",
                  "broadcast", "reduce", "reduce_scatter", "_reduce_scatter_base")
"""Methods of process groups whose tensors have the same shapes on all ranks."""
_METHODS = (*_EQUAL_TENSORS, "alltoall", "alltoall_base", "gather", "scatter", "barrier")
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
T = TypeVar("T")


class RanksError(RuntimeError):
    """Error of a check on several ranks: a rank failed, or the ranks made different collective calls."""


class _PeerError(Exception):
    """Error of a collective that other ranks do not take part in."""


class _Calls:
    """Collective calls of all ranks, which a rank compares before it enters a collective.

    Without the comparison, ranks would wait for the time limit if a rank has ended or makes another call: its group
    stays open as long as a result or a traceback refers to it.
    """

    def __init__(self, size: int) -> None:
        self._changed = threading.Condition()
        self._by_rank: list[list[str]] = [[] for _ in range(size)]
        self._has_ended = [False] * size

    def agree(self, rank: int, call: str) -> None:
        """Wait until all ranks have made as many calls as `rank`.

        Raises:
            _PeerError: the latest calls differ, or a rank has ended with fewer calls.
        """
        with self._changed:
            self._by_rank[rank].append(call)
            number = len(self._by_rank[rank])
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(has_ended or len(calls) >= number for calls, has_ended
                                               in zip(self._by_rank, self._has_ended, strict=True)), _LIMIT_S)
            calls = {peer: made[number - 1] for peer, made in enumerate(self._by_rank) if len(made) >= number}
            absent = [peer for peer in range(len(self._by_rank)) if peer not in calls]
            if absent:
                end = "ended" if self._has_ended[absent[0]] else f"made no call for {_LIMIT_S:g} s"
                raise _PeerError(f"rank {absent[0]} {end} before collective {number}, {call} on rank {rank}")
            if len(set(calls.values())) > 1:
                raise _PeerError(f"the ranks make different collective calls: call {number} is "
                                 + ", ".join(f"{made} on rank {peer}" for peer, made in calls.items()))

    def end(self, rank: int) -> None:
        """Mark a rank as ended."""
        with self._changed:
            self._has_ended[rank] = True
            self._changed.notify_all()


class _ThreadGroup(ProcessGroupGloo):
    """Group of threads that compare their calls before each collective."""

    def __init__(self, store: HashStore, rank: int, size: int, calls: _Calls) -> None:
        super().__init__(store, rank, size, datetime.timedelta(seconds=_LIMIT_S))
        self.calls = calls


def _add_method(name: str) -> None:
    """Override a method of `_ThreadGroup` to compare the calls first."""
    def call(group: _ThreadGroup, *args: Any, **named: Any) -> Any:
        group.calls.agree(group.rank(), _describe_call(name, (*args, *named.values())))
        return getattr(ProcessGroupGloo, name)(group, *args, **named)

    setattr(_ThreadGroup, name, call)


for _name in _METHODS:
    if hasattr(ProcessGroupGloo, _name):
        _add_method(_name)


def _describe_call(name: str, args: Iterable[Any]) -> str:
    """Return the name of a method, the shapes of its tensors, and its operation and root."""
    words = [name]
    for leaf in tree_leaves(list(args)):
        if name in _EQUAL_TENSORS:
            if isinstance(leaf, torch.Tensor):
                words.append(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}")
            if (reduction := getattr(leaf, "reduceOp", None)) is not None:
                words += [each for each in _REDUCTIONS if reduction == getattr(ReduceOp, each)]
            if (root := getattr(leaf, "rootRank", None)) is not None:
                words.append(f"root {root}")
    return " ".join(words)


class ThreadMesh(Mesh):
    """Mesh of ranks along a single axis, with their group instead of the default group."""

    def __init__(self, degrees: Degrees, rank: int, group: ProcessGroup) -> None:
        super().__init__(degrees, rank)
        self._all_ranks = group

    def group(self, *axes: Axis) -> ProcessGroup | None:
        """Return the group of all ranks if they lie along one of these axes; else None."""
        return self._all_ranks if self.size(*axes) > 1 else None

    def stage_group(self) -> ProcessGroup:
        """Return the group of all ranks."""
        return self._all_ranks


def run_ranks(degrees: Degrees, work: Callable[[ThreadMesh], T], check: str) -> list[T]:
    """Call a function on every rank, each in a thread, and return the results by rank.

    Args:
        degrees: degrees of which only one exceeds 1.
        check: name of the check, for errors.

    Raises:
        RanksError: a rank raised an exception, or the ranks made different collective calls.
    """
    store, size = HashStore(), degrees.dp * degrees.tp * degrees.pp * degrees.sp
    calls = _Calls(size)

    def run(rank: int) -> T:
        """Create the rank's group, and call the function."""
        try:
            return work(ThreadMesh(degrees, rank, _ThreadGroup(store, rank, size, calls)))
        finally:
            calls.end(rank)

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(size)]
    errors = {rank: error for rank, future in enumerate(ranks) if (error := future.exception()) is not None}
    for rank, error in errors.items():
        if not isinstance(error, _PeerError):
            raise RanksError(f"{check}: rank {rank} of {size} failed: {type(error).__name__}: {error}") from error
    for error in errors.values():
        raise RanksError(f"{check}: {error}") from error
    return [future.result() for future in ranks]
