"""Messages about a start that takes long."""

from __future__ import annotations

from ezpz_llm.launcher.basics.variables import COMPILING, LOADING, RENDEZVOUS, TRAINING
from ezpz_llm.launcher.diagnosis.liveness import RankLife
from ezpz_llm.launcher.diagnosis.start_progress import StartProgress


def lives(*phases: str | None) -> list[RankLife]:
    return [RankLife(rank, f"n{rank // 2}", phase, None, 1.0, 1.0, 1.0, 30.0) for rank, phase in enumerate(phases)]


def test_ranks_are_named_by_phase_until_the_first_step() -> None:
    progress = StartProgress()
    assert progress.message(lives(RENDEZVOUS, RENDEZVOUS, None, RENDEZVOUS), 10.0) is None
    assert progress.message(lives(RENDEZVOUS, RENDEZVOUS, None, RENDEZVOUS), 31.0) == (
        "no step after 31 s; rank 2: importing packages, ranks 0-1,3: rendezvous")
    assert progress.message(lives(LOADING, LOADING, LOADING, LOADING), 40.0) is None
    assert progress.message(lives(LOADING, LOADING, LOADING, LOADING), 65.0) == (
        "no step after 65 s; all 4 ranks: loading data")
    assert progress.message(lives(LOADING, LOADING, LOADING, LOADING), 200.0) is None
    assert progress.message(lives(COMPILING, LOADING, COMPILING, COMPILING), 201.0) == (
        "no step after 201 s; rank 1: loading data, ranks 0,2-3: compiling")
    assert progress.message(lives(TRAINING, COMPILING, COMPILING, COMPILING), 300.0) is None
    assert progress.message(lives(None, None, None, None), 400.0) is None


def test_quick_start_has_no_message() -> None:
    progress = StartProgress()
    assert progress.message(lives(TRAINING, TRAINING), 8.0) is None
    assert progress.message([], 100.0) is None
