"""Rank variables that torch reads are always those of the launcher that started the rank.

Values left by the shell or an outer launcher are replaced. Tests on simulated nodes are in test_launch_steps.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from launch_runs import STALE, launch, need_mpiexec

ELASTIC = {"GROUP_RANK": "8", "TORCHELASTIC_USE_AGENT_STORE": "True"}
_REPORT = """
import json, os, sys
from ezpz_llm.launcher.basics.ranks import find_rank
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
said = json.dumps({"place": [os.environ.get(name) for name in names], "source": find_rank(os.environ).source,
                   "found": [find_rank(os.environ).rank, find_rank(os.environ).world_size],
                   "meets": [bool(os.environ.get(name)) for name in ("MASTER_ADDR", "MASTER_PORT")],
                   "store": os.environ.get("TORCHELASTIC_USE_AGENT_STORE")})
# A bare mpiexec mixes the output of its ranks.
if len(sys.argv) > 1:
    open(sys.argv[1] + str(find_rank(os.environ).rank), "w").write(said)
print(said)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "report.py").write_text(_REPORT)
    return str(tmp_path / "report.py")


def _reports(logs: Iterable[Path]) -> list[dict]:
    return [json.loads(log.read_text()) for log in sorted(logs)]


@pytest.mark.parametrize(("launcher", "source"), [("mpiexec", "Hydra (PMI_RANK)"), ("torchrun", "torchrun (RANK)")])
def test_stale_values_reach_no_rank(tmp_path: Path, program: str, launcher: str, source: str) -> None:
    if launcher == "mpiexec":
        need_mpiexec()
    done = launch(tmp_path, "--launcher", launcher, "-n", "2", "--run-dir", "r", sys.executable, program, **STALE,
                  **ELASTIC)
    assert done.returncode == 0, done.stderr
    assert "RANK=7, WORLD_SIZE=9, LOCAL_RANK=5" in done.stderr
    reports = _reports((tmp_path / "r").glob("logs/rank*.log"))
    assert [report["place"] for report in reports] == [["0", "2", "0", "2", "0"], ["1", "2", "1", "2", "0"]]
    assert all(report["source"] == source for report in reports)
    assert all(report["meets"] == [True, True] for report in reports)
    # Without torchrun, rank 0 serves the store itself.
    assert {report["store"] for report in reports} == {"True" if launcher == "torchrun" else None}


def test_stale_values_do_not_reach_a_single_rank(tmp_path: Path, program: str) -> None:
    done = launch(tmp_path, "-n", "1", "--run-dir", "r", sys.executable, program, **STALE, **ELASTIC)
    assert done.returncode == 0, done.stderr
    report, = _reports((tmp_path / "r").glob("logs/rank*.log"))
    assert (report["place"], report["found"], report["store"]) == (["0", "1", "0", "1", "0"], [0, 1], None)


@pytest.mark.parametrize("outer", ["mpiexec", pytest.param("torchrun", marks=pytest.mark.full)])
def test_inside_a_rank(tmp_path: Path, program: str, outer: str) -> None:
    """Neither a launch nor a bare mpiexec inside a rank inherits the outer rank's variables or torchrun's store."""
    need_mpiexec()
    inner = (tmp_path / "inner.sh")
    inner.write_text(f"{sys.executable} -m ezpz_llm.launch --launcher mpiexec -n 2 --run-dir inner"
                     f" {sys.executable} {program} || exit\nmpiexec -n 3 {sys.executable} {program} bare\n")
    done = launch(tmp_path, "--launcher", outer, "-n", "1", "--run-dir", "r", "sh", str(inner), timeout=90)
    assert done.returncode == 0, done.stderr
    reports = _reports((tmp_path / "inner").glob("logs/rank*.log"))
    assert [report["place"] for report in reports] == [["0", "2", "0", "2", "0"], ["1", "2", "1", "2", "0"]]
    assert [(report["found"], report["source"], report["store"]) for report in reports] == [
        ([0, 2], "Hydra (PMI_RANK)", None), ([1, 2], "Hydra (PMI_RANK)", None)]
    bare = _reports(tmp_path.glob("bare*"))
    assert [report["found"] for report in bare] == [[0, 3], [1, 3], [2, 3]]
    assert {report["source"] for report in bare} == {"Hydra (PMI_RANK)"}
