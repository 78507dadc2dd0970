"""Studies on simulated nodes with real Slurm: parts of one reservation, and one job a point."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launch_runs import record
from scale_runs import TRAIN

from ezpz_llm.scaling.point import Repeat, read_repeats

# One rank a node: two cores are all that the nodes have together.
STUDY = ("--", "launch", "--ppn", "1", "python3", *TRAIN[1:], "--steps", "30", "--trace-steps", "3")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.getbasetemp() / "cluster-cache")


def _hosts(study: Path, one: Repeat) -> list[str]:
    return record(study / one.run_dir)["launch"]["hosts"]


def test_a_point_uses_its_part_of_the_reservation(cluster, tmp_path: Path, cache: str) -> None:
    words = ("ezpz-llm", "scale", "--nodes", "1,2", "--repeats", "2", "--study", "s", "--ds-config", "ddp")
    done = cluster.run("salloc", "-N2", "-t5", *words, "--point", "weak-ddp-n1", *STUDY, cwd=tmp_path, timeout=200,
                       OMP_NUM_THREADS="1", EZPZ_LLM_CACHE=cache)
    # The other point's runs are still to be made, but were not asked for.
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_repeats(tmp_path / "s")
    assert [(one.nodes, one.ranks, _hosts(tmp_path / "s", one), one.slowest_host) for one in found] == [
        (1, 1, ["n1"], "n1"), (1, 1, ["n2"], "n2")]
    assert "run 1  on n2 " in done.stdout
    done = cluster.run("salloc", "-N1", "-t5", "ezpz-llm", "scale", "--study", "s", cwd=tmp_path, timeout=60)
    assert (done.returncode, "point weak-ddp-n2 needs 2 nodes, and there are 1" in done.stderr) == (2, True)


@pytest.mark.slow
def test_one_job_a_point_and_then_the_report(cluster, tmp_path: Path, cache: str) -> None:
    words = ("ezpz-llm", "scale", "--nodes", "1,2", "--repeats", "1", "--study", "s", "--ds-config", "ddp")
    done = cluster.run(*words, "--submit", "--time 0:05:00", *STUDY, cwd=tmp_path, timeout=60, OMP_NUM_THREADS="1",
                       EZPZ_LLM_CACHE=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    deadline = time.monotonic() + 200
    while cluster.run("squeue", "--noheader").stdout.strip():
        assert time.monotonic() < deadline
        time.sleep(1)
    logs = "".join(path.read_text() for path in tmp_path.glob("s/points/*/job/logs/*"))
    found = {one.point: one for one in read_repeats(tmp_path / "s")}
    assert {name: (one.ranks, one.error) for name, one in found.items()} == {
        "weak-ddp-n1": (1, None), "weak-ddp-n2": (2, None)}, logs
    assert len(_hosts(tmp_path / "s", found["weak-ddp-n2"])) == 2
    assert found["weak-ddp-n2"].split["exposed_communication"] > 0
    done = cluster.run("ezpz-llm", "scale", "report", "s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "weak-ddp-n2" in done.stdout
    assert (tmp_path / "s/report.html").exists()
