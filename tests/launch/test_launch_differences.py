"""Comparison of ranks that are all silent: find the rank that is stopped, in another place, or behind."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ezpz_llm.core.rundir.stop import Stop
from ezpz_llm.launcher.diagnosis.differences import (
    Frame,
    describe_blocking_rank,
    find_blocking_ranks,
    last_calls,
    main_stack,
    minority_ranks,
    stack_in_log,
)
from ezpz_llm.launcher.diagnosis.liveness import RankLife
from ezpz_llm.launcher.diagnosis.verdict_rules import Evidence, Verdict, find_root_cause
from ezpz_llm.launcher.on_nodes.kinds import Kind
from ezpz_llm.launcher.on_nodes.run_facts import RunFacts

_BY_FAULT_HANDLER = """rank 3 on n2
process 7: python3 train.py
Thread 0x00007f1 (most recent call first):
  File "/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2 (most recent call first):
  File "/home/ann/train.py", line {line} in {function}
  File "/home/ann/train.py", line 40 in step
  File "/home/ann/train.py", line 90 in <module>
"""
_BY_PY_SPY = """Process 7: python3 train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    read_batch (train.py:88)
    step (train.py:40)
    <module> (train.py:90)
Thread 9 (idle): "Thread-1"
    wait (threading.py:320)
"""


def _life(rank: int, state: str = "S", step: int | None = None) -> RankLife:
    return RankLife(rank, f"n{rank // 2 + 1}", None if step is None else "training", step,
                    None if step is None else 9.0, 9.0, 0.0, 30.0, state)


def test_the_main_threads_stack() -> None:
    of_handler = main_stack(_BY_FAULT_HANDLER.format(line=88, function="read_batch"))
    assert of_handler == [("/home/ann/train.py", 90, "<module>"), ("/home/ann/train.py", 40, "step"),
                          ("/home/ann/train.py", 88, "read_batch")]
    assert main_stack(_BY_PY_SPY) == [("train.py", 90, "<module>"), ("train.py", 40, "step"),
                                      ("train.py", 88, "read_batch")]
    in_log = f"Fatal Python error: Aborted\n\n{_BY_FAULT_HANDLER.format(line=88, function='read_batch')}"
    assert stack_in_log(f"step 7\n{in_log}\nExtension modules: numpy (total: 1)\n") == of_handler
    assert stack_in_log(in_log.replace("Aborted", "Bus error")) == []
    assert main_stack("process 7: sleep 60\n  (no Python stack: …)\n") == []


def test_the_odd_one_out() -> None:
    outer = [("t.py", 90, "<module>"), ("t.py", 40, "step")]
    waits, reads = [*outer, ("t.py", 7, "all_reduce")], [*outer, ("t.py", 88, "read_batch"),
                                                         ("/usr/lib/python3.11/os.py", 1, "read")]
    assert minority_ranks({0: waits, 1: waits, 2: waits, 3: reads}) == (
        [3], "os.py:1 in read (called from t.py:88 in read_batch)", [0, 1, 2], "t.py:7 in all_reduce")
    # All in one place, without a majority, or too few to compare.
    assert minority_ranks({0: waits, 1: waits, 2: waits}) is None
    assert minority_ranks({0: waits, 1: waits, 2: reads, 3: reads}) is None
    assert minority_ranks({0: waits, 1: reads}) is None
    # A rank that is at an earlier line of the same function.
    assert minority_ranks({0: waits, 1: waits, 2: outer}) == ([2], "t.py:40 in step", [0, 1],
                                                              "t.py:7 in all_reduce")


def test_what_silent_ranks_wait_for() -> None:
    """The cause is a known place in the stacks of the odd ranks, or of all ranks if none is odd."""
    outer = [("/home/ann/t.py", 90, "<module>")]
    lock = [*outer, ("/opt/torch/utils/cpp_extension.py", 2400, "_jit_compile"),
            ("/opt/torch/utils/file_baton.py", 49, "wait")]
    reduces = [*outer, ("/home/ann/t.py", 31, "all_reduce")]
    stop = Stop("idle", "no sign of life for 9 s: rank 0; launch ended the run", ranks=(0, 1, 2, 3))
    facts = RunFacts(4, ("n1", "n1", "n2", "n2"), "mpiexec", 143, 1000.0, stop)

    def judged(stacks: dict[int, list[Frame]]) -> Verdict:
        verdict = find_root_cause(Evidence((), (), facts, stacks=stacks))
        assert verdict is not None
        assert verdict.kind is Kind.IDLE
        return verdict

    held = judged(dict.fromkeys(range(4), lock))
    assert re.fullmatch(r"ranks 0-3: waiting for the lock of a torch extension build, .*: no sign of life"
                        r" for 9 s: rank 0; launch ended the run; ranks 0-3 are at file_baton\.py:49 in wait",
                        held.evidence)
    assert (held.text, held.hosts) == ("extension-lock", ("n1", "n2"))
    assert "remove the file `lock`" in held.advice
    # A rank that waits for a lock delays the ranks in a collective, not the other way round.
    assert judged({0: reduces, 1: reduces, 2: reduces, 3: lock}).evidence.startswith("rank 3: waiting for the lock")
    assert judged({0: lock, 1: lock, 2: lock, 3: reduces}).evidence == (
        f"{stop.text}; rank 3 is at t.py:31 in all_reduce, ranks 0-2 at file_baton.py:49 in wait")
    # A stopped rank is the cause, whatever the others do.
    told = Stop("idle", "rank 3 …; stopped by a signal (state T; kill -CONT continues it)")
    stopped = find_root_cause(Evidence((), (), replace(facts, stopped=told), stacks=dict.fromkeys(range(3), lock)))
    assert stopped.evidence == f"{told.text}; ranks 0-2 are at file_baton.py:49 in wait"
    apart = "rank 0 is at file_baton.py:49 in wait, rank 1 is at t.py:31 in all_reduce"
    for stacks, places in (({}, ""), ({0: lock, 1: reduces}, f"; {apart}")):
        assert (judged(stacks).evidence, judged(stacks).advice) == (f"{stop.text}{places}", "")


def test_a_place_in_a_library_has_the_users_line() -> None:
    outer = [("/home/ann/t.py", 8, "<module>"), ("/usr/lib/python3.11/multiprocessing/pool.py", 367, "map")]
    waits = [*outer, ("/usr/lib/python3.11/threading.py", 327, "wait")]
    assert find_blocking_ranks(dict.fromkeys(range(4), waits)) == (
        [0, 1, 2, 3], "ranks 0-3 are at threading.py:327 in wait (called from t.py:8 in <module>)")
    assert find_blocking_ranks({0: outer[:1]})[1] == "rank 0 is at t.py:8 in <module>"
    assert find_blocking_ranks({0: waits[1:]})[1] == "rank 0 is at threading.py:327 in wait"


def test_in_one_line(tmp_path: Path) -> None:
    stacks = {}
    for rank in range(4):
        stacks[rank] = tmp_path / f"rank{rank}"
        stacks[rank].write_text(_BY_FAULT_HANDLER.format(line=88 if rank == 2 else 7,
                                                         function="read_batch" if rank == 2 else "all_reduce"))
    ranks = [_life(rank) for rank in range(4)]
    assert describe_blocking_rank(ranks, ranks, stacks) == (
        "rank 2 on n2: before its first heartbeat, silent for 9 s; rank 2 is at train.py:88 in read_batch,"
        " ranks 0-1,3 at train.py:7 in all_reduce")
    assert describe_blocking_rank(ranks, ranks,
                                  {}) == "rank 0 on n1: before its first heartbeat, silent for 9 s (and 3 more)"
    stopped = [_life(1, "T"), _life(0), _life(2), _life(3)]
    assert describe_blocking_rank(stopped, stopped, stacks).endswith("continues it), unlike ranks 0,2-3")
    # A state that all ranks share does not single out any of them.
    assert describe_blocking_rank([_life(0, "D"), _life(1, "D")], ranks, {}).endswith("(state D) (and 1 more)")
    behind = [_life(2, step=3), _life(3, step=3), _life(0, step=9), _life(1, step=9)]
    assert describe_blocking_rank(behind, behind,
                                  {}).endswith("; ranks 2-3 (all of n2) are behind, others reached step 9")
    assert describe_blocking_rank(behind[1:], behind[1:], {}).endswith("; rank 3 is behind, others reached step 9")


def test_calls_of_methods_have_no_class() -> None:
    """py-spy prints `FileBaton.wait` since Python 3.11, and `wait` before."""
    stack = [("t.py", 1, "<module>"), ("/x/torch/utils/file_baton.py", 50, "FileBaton.wait")]
    assert last_calls(stack) == ["at /x/torch/utils/file_baton.py:50 in wait", "at t.py:1 in <module>"]
