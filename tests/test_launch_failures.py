"""Which of several failed ranks is the cause."""

from __future__ import annotations

from ezpz_llm.launch.failures import Failure, first_failure


def _failure(rank: int, ended: float, code: int = 1, signal: str | None = None, *tail: str) -> Failure:
    return Failure(rank, "n1", 10 + rank, code, signal, ended, 1.0, tail, ("x",))


def test_the_earliest_is_the_cause() -> None:
    assert first_failure([]) is None
    late, early = _failure(0, 5.0, 3), _failure(2, 4.0, 7)
    assert first_failure([late, early]) is early


def test_a_rank_that_lost_its_peer_never_is() -> None:
    follower = _failure(0, 3.9, 1, None, "RuntimeError: [/pytorch/gloo/pair.cc:553] Connection closed by peer [n2]")
    cause = _failure(1, 4.0, 137, "SIGKILL", "working")
    assert first_failure([follower, cause]) is cause
    assert first_failure([follower]) is follower
