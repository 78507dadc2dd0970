"""The first collective in which hanging ranks differ, from their flight recorders."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launch_runs import clean_env, launch
from places import HELPERS
from slowness import scaled

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.collective_record import record_path, reduce_dumps, timeout_dump_prefix, to_json
from ezpz_llm.launcher.diagnosis.collective_differences import describe_difference

WORLD, PEERS = ("0", "default_pg"), ("7d1c", "mesh_tp")
Entry = dict[str, Any]


def call(number: int, name: str = "all_reduce", size: int = 8, *, group: tuple[str, str] = WORLD, at: int = 0,
         is_p2p: bool = False) -> Entry:
    """Return an entry in the form of version 2.10 of the dump, with the members that matter."""
    return {"process_group": group, "collective_seq_id": number, "profiling_name": f"nccl:{name}",
            "input_sizes": [[size]], "input_dtypes": ["BFloat16"], "time_created_ns": at or number,
            "is_p2p": is_p2p}


def dump(entries: Sequence[Entry], members: dict[str, str] | None = None) -> dict[str, Any]:
    return {"version": "2.10", "entries": list(entries),
            "pg_config": {group: {"ranks": ranks} for group, ranks in (members or {}).items()}}


def described(folder: Path, *records: Sequence[Entry] | None, members: dict[str, str] | None = None,
              tokens: Sequence[str] = (), buffer_size: int = 2000) -> str | None:
    """Write the ranks' records, None for a rank without one, and return the description."""
    run_dir = RunDir(folder)
    run_dir.create()
    for rank, entries in enumerate(records):
        if entries is not None:
            token = tokens[rank] if tokens else "t"
            record = reduce_dumps([dump(entries, members)], token, buffer_size)
            record_path(run_dir, rank).write_text(to_json(record))
            os.utime(record_path(run_dir, rank), (2000 + (token == "t"), 2000 + (token == "t")))
    return describe_difference(run_dir, len(records))


def test_rank_that_did_not_call_a_collective_is_named(tmp_path: Path) -> None:
    three = [call(1), call(2), call(3, "all_gather")]
    assert described(tmp_path, three, three[:2], three) == (
        "rank 1 did not call collective 3 of all ranks, all_gather(BFloat16 8), which ranks 0,2 called")


@pytest.mark.parametrize(("other", "text"), [
    (call(2, "broadcast"), "ranks 0-1: all_reduce(BFloat16 8); rank 2: broadcast(BFloat16 8)"),
    (call(2, size=9), "ranks 0-1: all_reduce(BFloat16 8); rank 2: all_reduce(BFloat16 9)"),
])
def test_different_calls_are_named(other: Entry, text: str, tmp_path: Path) -> None:
    two = [call(1), call(2)]
    differing = [call(1), other]
    assert described(tmp_path, two, two, differing) == f"ranks differ in collective 2 of all ranks: {text}"


def test_sizes_of_an_all_to_all_may_differ(tmp_path: Path) -> None:
    text = described(tmp_path, [call(1, "all_to_all", 3)], [call(1, "all_to_all", 5)])
    assert text == "all ranks called the same collectives, the last one all_to_all(BFloat16 3)"


@pytest.mark.parametrize("later", [30, 15])
def test_cause_is_named_if_several_groups_differ(later: int, tmp_path: Path) -> None:
    """Rank 3 hangs outside of collectives: its peer waits for it, and the others, also if earlier, for both."""
    assert described(
        tmp_path,
        *[[call(1, at=10), call(1, group=PEERS, at=12), call(2, at=later)]] * 2,
        [call(1, at=10), call(1, group=("9", "mesh_tp"), at=21)],
        [call(1, at=10)], members={"7d1c": "[0, 1]", "9": "[2, 3]"}) == (
        "rank 3 did not call collective 1 of the group of ranks 2-3, all_reduce(BFloat16 8), which rank 2 called")


def test_different_calls_are_the_cause_of_missing_ones(tmp_path: Path) -> None:
    """Ranks 0 and 1 reach their next collective before ranks 2 and 3 reach the one in which they differ."""
    pair = ("9", "mesh_tp")
    text = described(tmp_path, *[[call(1, at=10), call(2, at=11)]] * 2,
                     [call(1, at=10), call(1, "broadcast", group=pair, at=20)],
                     [call(1, at=10), call(1, group=pair, at=21)])
    assert text == ("ranks differ in collective 1 of the group of ranks 2-3: rank 2: broadcast(BFloat16 8); "
                    "rank 3: all_reduce(BFloat16 8)")


def test_records_of_different_lengths_and_sends_are_no_difference(tmp_path: Path) -> None:
    """A record has only the last calls, and only pipeline stages send."""
    assert described(tmp_path, [call(7), call(8)], [call(8)], [call(8), call(1, "send", is_p2p=True)]) == (
        "all ranks called the same collectives, the last one all_reduce(BFloat16 8)")


def test_group_whose_calls_a_recorder_has_dropped_is_no_difference(tmp_path: Path) -> None:
    """Rank 1 makes more calls per step, so that its recorder no longer has the last evaluation."""
    steps = [call(number, group=("5", "mesh_dp"), at=100 + number) for number in range(1, 4)]
    assert described(tmp_path, [call(5, at=100)], steps, buffer_size=3) == (
        "all ranks called the same collectives, the last one all_reduce(BFloat16 8)")


def test_calls_of_two_backends_of_a_group_are_compared_apart(tmp_path: Path) -> None:
    messages = [{**call(number), "profiling_name": "gloo:broadcast"} for number in range(1, 100)]
    text = described(tmp_path, [call(1), call(2), *messages], [call(1), *messages])
    assert text == "rank 1 did not call collective 2 of all ranks, all_reduce(BFloat16 8), which rank 0 called"


def test_rank_far_behind_misses_the_first_collective_after_its_last_one(tmp_path: Path) -> None:
    ahead = [call(number) for number in range(300, 305)]
    assert described(tmp_path, ahead, [call(199), call(200)]) == (
        "rank 1 did not call collective 201 of all ranks, which rank 0 called")


def test_rank_without_a_record_is_named(tmp_path: Path) -> None:
    assert described(tmp_path, [call(1)], None, [call(1)], [call(1)]) == (
        "rank 1 wrote no record of collectives; those of ranks 0,2-3 agree")


def test_records_of_an_earlier_order_are_not_compared(tmp_path: Path) -> None:
    assert described(tmp_path, [call(7)], [call(3)], [call(7)], tokens=("t", "earlier", "t")) == (
        "rank 1 wrote no record of collectives; those of ranks 0,2 agree")


class _Planted:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch executed",)


def test_dumps_of_a_timeout_are_compared_without_running_their_code(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = RunDir(tmp_path)
    run_dir.create()
    contents = [pickle.dumps(dump([call(1)]), protocol=2), pickle.dumps(dump([]), protocol=2),
                pickle.dumps(_Planted()), b"\x80\x02}q\x00",
                pickle.dumps({"entries": [{"process_group": [[], []]}]})]
    for rank, content in enumerate(contents):
        Path(f"{timeout_dump_prefix(run_dir)}{rank}").write_bytes(content)
    assert describe_difference(run_dir, 2, of_timeout=True) == (
        "rank 1 did not call collective 1 of all ranks, all_reduce(BFloat16 8), which rank 0 called")
    assert not (tmp_path / "executed").exists()
    assert describe_difference(run_dir, 2) is None
    later = (tmp_path / "collectives" / "nccl_rank0").stat().st_mtime + 60
    assert describe_difference(run_dir, 2, since=later, of_timeout=True) is None
    assert describe_difference(RunDir(tmp_path / "missing"), 2) is None


def test_damaged_records_are_skipped(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert described(tmp_path, [call(1)], [call(1)]) is not None
    for rank, content in enumerate(("{", "[]", '{"groups": 5}', '{"groups": {"0": {"calls": [{"number": "x"}]}}}')):
        record_path(run_dir, rank).write_text(content)
    (run_dir.collectives / "notes").write_text("x")
    assert describe_difference(run_dir, 2) is None


def test_hang_names_the_collective_in_which_ranks_differ(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "4", "--idle-timeout", "3", "--run-dir", "r", sys.executable,
                  str(HELPERS / "differing_ranks.py"))
    line = ("  ranks differ in collective 4 of the group of ranks 2-3: rank 2: broadcast(Float 8); rank 3: "
            "all_reduce(Float 8)")
    assert line in done.stderr.splitlines(), done.stderr
    why = subprocess.run([sys.executable, "-m", "ezpz_llm.why", "r", "--json"], cwd=tmp_path, env=clean_env(),
                         capture_output=True, text=True, timeout=scaled(60), check=False)
    assert json.loads(why.stdout)["collectives"] == line.strip()
