"""Ranks as threads: a rank that fails, ends early, or makes another collective call is named at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from slowness import scaled
from torch import Tensor
from torch.distributed import ReduceOp

from ezpz_llm.training.dist import Degrees
from ezpz_llm.verify.certify import thread_ranks
from ezpz_llm.verify.certify.thread_ranks import RanksError, ThreadMesh, run_ranks


@pytest.fixture(autouse=True)
def _long_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit, so that an error after the limit is not mistaken for one at once."""
    monkeypatch.setattr(thread_ranks, "_LIMIT_S", scaled(600))


def run_with(last: Callable[[ThreadMesh, Tensor], object]) -> list[float]:
    """Sum a tensor on three ranks, twice on all but the last one, which calls `last` after its first sum."""
    def work(mesh: ThreadMesh) -> float:
        values, group = torch.ones(4), mesh.group("dp")
        torch.distributed.all_reduce(values, group=group)
        if mesh.dp_rank == 2:
            last(mesh, values)
        else:
            torch.distributed.all_reduce(values, group=group)
        return values.sum().item()

    return run_ranks(Degrees(dp=3), work, "two sums")


def fail(mesh: ThreadMesh, values: Tensor) -> None:
    raise ValueError("no second sum")


def test_equal_calls_pass() -> None:
    assert run_with(lambda mesh, values: torch.distributed.all_reduce(values, group=mesh.group("dp"))) == [36.0] * 3


@pytest.mark.parametrize(("last", "reason"), [
    (fail, "two sums: rank 2 of 3 failed: ValueError: no second sum"),
    (lambda mesh, values: None, "two sums: rank 2 ended before collective 2, allreduce float32[4] SUM on rank 0"),
    (lambda mesh, values: torch.distributed.broadcast(values, group=mesh.group("dp"), group_src=0),
     "two sums: the ranks make different collective calls: call 2 is allreduce float32[4] SUM on rank 0, "
     "allreduce float32[4] SUM on rank 1, broadcast float32[4] root 0 on rank 2"),
    (lambda mesh, values: torch.distributed.all_reduce(values[1:], group=mesh.group("dp")),
     "allreduce float32[4] SUM on rank 1, allreduce float32[3] SUM on rank 2"),
    (lambda mesh, values: torch.distributed.all_reduce(values, ReduceOp.MAX, group=mesh.group("dp")),
     "allreduce float32[4] SUM on rank 1, allreduce float32[4] MAX on rank 2"),
], ids=["fails", "ends early", "another call", "another size", "another operation"])
def test_the_rank_or_the_calls_are_named(last: Callable[[ThreadMesh, Tensor], object], reason: str) -> None:
    with pytest.raises(RanksError) as error:
        run_with(last)
    assert reason in str(error.value)


def test_a_rank_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_ranks, "_LIMIT_S", 0.01)
    with pytest.raises(thread_ranks._PeerError, match=r"rank 1 made no call for 0\.01 s before collective 1"):
        thread_ranks._Calls(2).agree(0, "barrier")
