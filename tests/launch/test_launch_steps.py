"""Steps of a real Slurm job and torchruns on several nodes: placement, concurrency, nesting, arguments, exit codes.

One job runs them, most at the same time; each test checks the results of one of them.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from places import HELPERS
from simcluster.cluster import Cluster

pytestmark = pytest.mark.full
"""Mark of steps that only `-m full` runs; by default, test_cluster_launch.py and the faults cover each launcher."""

PROGRAM = [sys.executable, str(HELPERS / "reporting_ranks.py")]
WORDS = ("report", "a b", "it's", '"q"', "$(date)", "; exit 9", "x\\ny", "two\nlines", "*", "", "-n", "--", "ü")


def _line(*options: str, words: tuple[str, ...] = ("report",)) -> str:
    return shlex.join([*options, *PROGRAM, *words])


# Name, and arguments after `launch --run-dir NAME`.
_RUNS = {
    "half1": _line("--hosts", "n1,n2", words=("await", "half2/here")),
    "half2": _line("--hosts", "n[3-4]", words=("await", "half1/here")),
    "uneven": _line("--hostfile", "uneven.txt"),
    "last": _line("--nodes", "2", words=("last", "7")),
    "read": _line("--stdin", "--nodes", "2", words=("read",)) + " < big",
    "srun": _line("--nodes", "2", words=WORDS),
    "mpiexec": _line("--nodes", "2", "--launcher", "mpiexec", words=WORDS),
    "torchrun": _line("--nodes", "2", "--launcher", "torchrun", words=WORDS),
    "away": _line("--hosts", "n3", "--launcher", "torchrun"),
    "missing": "--nodes 2 no-such-program",
    **{f"srun-{how}": _line("--nodes", "2", words=(how,)) for how in ("exit", "SIGKILL", "SIGSEGV")},
    **{f"torchrun-{how}": _line("--nodes", "2", "--launcher", "torchrun", words=(how,))
       for how in ("exit", "SIGKILL")},
}
# The same, inside a step that uses all CPUs of its node.
_INSIDE = {
    "inside-srun": _line("-n", "2"),
    "inside-mpiexec": _line("-n", "2", "--launcher", "mpiexec"),
    "inside-torchrun": _line("-n", "2", "--launcher", "torchrun"),
}

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")

# SLURM_EXPORT_ENV as after `sbatch --export=NONE`, SLURM_DISTRIBUTION as inside an outer step, and RANK and others
# as if exported for another program.
_SCRIPT = """
export SLURM_EXPORT_ENV=NONE SLURM_DISTRIBUTION=cyclic MY_OWN=mine
export RANK=7 WORLD_SIZE=9 LOCAL_RANK=5 LOCAL_WORLD_SIZE=6 NODE_RANK=8 GROUP_RANK=8
head -c 2000000 /dev/zero > big
printf 'n1 slots=1\\nn2 slots=2\\n' > uneven.txt
run() { local name=$1; shift; timeout 80 "$@" > $name.out 2> $name.err; echo $? > $name.rc; }
"""


@pytest.fixture(scope="module")
def job(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    script = _SCRIPT
    for name, typed in _RUNS.items():
        script += f"run {name} launch --run-dir {name} {typed} &\n"
        if name in ("torchrun", "away"):
            # Two cores import torch.
            script += "wait\n"
    for name, typed in _INSIDE.items():
        script += f"run {name} srun -N1 -n1 -c2 --export=ALL launch --run-dir {name} {typed}\n"
    (folder / "job.sh").write_text(script + "wait\n")
    done = cluster.run("salloc", "--quiet", "-N4", "--ntasks-per-node=2", "bash", "job.sh", cwd=folder, timeout=200,
                       OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _ended(job: Path, name: str) -> tuple[int, str]:
    return int((job / f"{name}.rc").read_text()), (job / f"{name}.err").read_text()


def _reports(job: Path, name: str, ranks: int) -> list[dict]:
    code, said = _ended(job, name)
    assert code == 0, said
    reports = [json.loads((job / name / f"logs/rank{rank:04d}.log").read_text()) for rank in range(ranks)]
    for report in reports:
        own = (report["rank"], report["size"], report["local_rank"], report["local_size"], report["node_rank"])
        assert [report["env"][variable] for variable in _PLACE] == [str(number) for number in own]
        assert report["env"]["GROUP_RANK"] in (None, report["env"]["NODE_RANK"])
        assert report["source"].startswith("torchrun") == ("torchrun" in name or name == "away")
    return reports


def _places(reports: list[dict]) -> list[tuple[int, str, int]]:
    assert [report["size"] for report in reports] == [len(reports)] * len(reports)
    return [(report["rank"], report["host"], report["local_rank"]) for report in reports]


def test_two_launches_on_different_hosts_run_at_once(job: Path) -> None:
    assert _places(_reports(job, "half1", 4)) == [(0, "n1", 0), (1, "n1", 1), (2, "n2", 0), (3, "n2", 1)]
    assert _places(_reports(job, "half2", 4)) == [(0, "n3", 0), (1, "n3", 1), (2, "n4", 0), (3, "n4", 1)]


@pytest.mark.parametrize("launcher", ["srun", "mpiexec", "torchrun"])
def test_words_and_variables_arrive_as_they_were_written(job: Path, launcher: str) -> None:
    reports = _reports(job, launcher, 4)
    assert _places(reports) == [(0, "n1", 0), (1, "n1", 1), (2, "n2", 0), (3, "n2", 1)]
    assert all(report["argv"] == list(WORDS) for report in reports)
    assert all(report["env"]["MY_OWN"] == "mine" for report in reports)


def test_torchruns_are_told_where_to_meet_and_which_host_they_are_on(job: Path) -> None:
    reports = _reports(job, "torchrun", 4)
    assert [report["node_rank"] for report in reports] == [0, 0, 1, 1]
    assert {report["source"] for report in reports} == {"torchrun (RANK)"}
    assert {report["env"]["MASTER_ADDR"] for report in reports} == {"n1"}
    # The variables of torchrun as srun's task, and its log level, are not passed to the ranks.
    assert {report["env"]["PMI_RANK"] for report in reports} == {None}
    assert {report["env"]["TORCH_CPP_LOG_LEVEL"] for report in reports} == {None}
    run = json.loads((job / "torchrun/run.json").read_text())["launch"]
    assert " ".join(run["argv"][:7]).endswith("/srun -N 2 -n 2 --ntasks-per-node 1")
    assert "localhost" not in " ".join(run["argv"])
    assert _places(_reports(job, "away", 2)) == [(0, "n3", 0), (1, "n3", 1)]


def test_unequal_ranks(job: Path) -> None:
    reports = _reports(job, "uneven", 3)
    assert _places(reports) == [(0, "n1", 0), (1, "n2", 0), (2, "n2", 1)]
    assert [report["node_rank"] for report in reports] == [0, 1, 1]


@pytest.mark.parametrize("launcher", ["srun", "mpiexec", "torchrun"])
def test_inside_an_interactive_step(job: Path, launcher: str) -> None:
    reports = _reports(job, f"inside-{launcher}", 2)
    assert len({report["host"] for report in reports}) == 1
    assert [report["local_rank"] for report in reports] == [0, 1]


def test_ranks_may_end_long_before_others(job: Path) -> None:
    """The cluster's WaitTime would end the others after 5 s without --wait."""
    assert len(_reports(job, "last", 4)) == 4


def test_only_rank_0_reads(job: Path) -> None:
    assert [report["read"] for report in _reports(job, "read", 4)] == [2_000_000, 0, 0, 0]


@pytest.mark.parametrize(("name", "code", "said"), [
    ("srun-exit", 7, "exit code 7"), ("srun-SIGKILL", 137, "SIGKILL"), ("srun-SIGSEGV", 139, "SIGSEGV"),
    ("torchrun-exit", 7, "exit code 7"), ("torchrun-SIGKILL", 137, "SIGKILL"),
    ("missing", 127, "cannot run 'no-such-program'"),
])
def test_codes_are_the_ranks_own(job: Path, cluster: Cluster, name: str, code: int, said: str) -> None:
    """The launchers' exit codes would be 143 or 137 (srun), 1 (torchrun), 2 (srun, for a missing program)."""
    found, text = _ended(job, name)
    assert found == code, text
    assert said in text
    if name != "missing":
        assert "rank 1 on n1" in text
    run = json.loads((job / name / "run.json").read_text())
    assert run["exit"]["code"] == code
    assert cluster.processes(run["launch"]["env"]["EZPZ_LLM_RUN_ID"]) == {}
