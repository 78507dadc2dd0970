"""The first collective in which hanging ranks differ, from their flight recorders."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_runs import clean_env, launch
from places import HELPERS
from slowness import scaled

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.diagnosis.collective_differences import describe_difference

WORLD, PEERS = ("0", "default_pg"), ("7d1c", "mesh_tp")


def call(number: int, name: str = "all_reduce", size: int = 8, *, group: tuple[str, str] = WORLD, at: int = 0,
         is_p2p: bool = False) -> dict[str, Any]:
    """Return an entry in the form of version 2.10 of the record, with the members that matter."""
    return {"process_group": group, "collective_seq_id": number, "profiling_name": f"nccl:{name}",
            "input_sizes": [[size]], "input_dtypes": ["BFloat16"], "time_created_ns": at or number,
            "is_p2p": is_p2p}


def described(folder: Path, *records: list[dict[str, Any]], members: dict[str, str] | None = None) -> str | None:
    """Write the ranks' records, and return the description."""
    run_dir = RunDir(folder)
    run_dir.create()
    config = {group: {"ranks": ranks} for group, ranks in (members or {}).items()}
    for rank, entries in enumerate(records):
        run_dir.rank_collectives(rank).write_bytes(pickle.dumps(
            {"version": "2.10", "pg_config": config, "entries": entries}, protocol=2))
    return describe_difference(run_dir)


def test_rank_that_did_not_call_a_collective_is_named(tmp_path: Path) -> None:
    usual = [call(1), call(2), call(3, "all_gather")]
    assert described(tmp_path, usual, usual[:2], usual) == (
        "rank 1 did not call collective 3 of all ranks, all_gather(BFloat16 8), which ranks 0,2 called")


@pytest.mark.parametrize(("other", "text"), [
    (call(2, "broadcast"), "ranks 0-1: all_reduce(BFloat16 8); rank 2: broadcast(BFloat16 8)"),
    (call(2, size=9), "ranks 0-1: all_reduce(BFloat16 8); rank 2: all_reduce(BFloat16 9)"),
])
def test_different_calls_are_named(other: dict[str, Any], text: str, tmp_path: Path) -> None:
    usual = [call(1), call(2)]
    differing = [call(1), other]
    assert described(tmp_path, usual, usual, differing) == f"ranks differ in collective 2 of all ranks: {text}"


def test_sizes_of_an_all_to_all_may_differ(tmp_path: Path) -> None:
    text = described(tmp_path, [call(1, "all_to_all", 3)], [call(1, "all_to_all", 5)])
    assert text == "the collectives of ranks 0-1 agree; the last one is all_to_all(BFloat16 3)"


def test_earliest_difference_of_several_groups_is_named(tmp_path: Path) -> None:
    """Rank 3 hangs outside of collectives: its peer waits for it, and then the others wait for the peer."""
    assert described(
        tmp_path,
        *[[call(1, at=10), call(1, group=PEERS, at=20), call(2, at=30)]] * 2,
        [call(1, at=10), call(1, group=("9", "mesh_tp"), at=21)],
        [call(1, at=10)], members={"7d1c": "[0, 1]", "9": "[2, 3]"}) == (
        "rank 3 did not call collective 1 of the group of ranks 2-3, all_reduce(BFloat16 8), which rank 2 called")


def test_records_of_different_lengths_and_sends_are_no_difference(tmp_path: Path) -> None:
    """A record has only the latest calls, and only pipeline stages send."""
    assert described(tmp_path, [call(7), call(8)], [call(8)], [call(8), call(1, "send", is_p2p=True)]) == (
        "the collectives of ranks 0-2 agree; the last one is all_reduce(BFloat16 8)")


class _Planted:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch executed",)


def test_damaged_foreign_and_old_records_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert described(tmp_path, [call(1)], [call(1)]) is not None
    run_dir = RunDir(tmp_path)
    later = run_dir.rank_collectives(0).stat().st_mtime + 60
    assert describe_difference(run_dir, since=later) is None
    run_dir.rank_collectives(1).write_bytes(pickle.dumps(_Planted()))
    run_dir.rank_collectives(2).write_bytes(b"\x80\x02}q\x00")
    run_dir.rank_collectives(3).write_bytes(pickle.dumps({"entries": 5}))
    (run_dir.collectives / "notes").write_text("x")
    assert describe_difference(run_dir) is None
    assert not (tmp_path / "executed").exists()
    assert describe_difference(RunDir(tmp_path / "missing")) is None


def test_hang_names_the_collective_in_which_ranks_differ(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "4", "--idle-timeout", "3", "--run-dir", "r", sys.executable,
                  str(HELPERS / "differing_ranks.py"))
    line = ("  ranks differ in collective 4 of the group of ranks 2-3: rank 2: broadcast(Float 8); rank 3: "
            "all_reduce(Float 8)")
    assert line in done.stderr.splitlines(), done.stderr
    why = subprocess.run([sys.executable, "-m", "ezpz_llm.why", "r", "--json"], cwd=tmp_path, env=clean_env(),
                         capture_output=True, text=True, timeout=scaled(60), check=False)
    assert json.loads(why.stdout)["collectives"] == line.strip()
