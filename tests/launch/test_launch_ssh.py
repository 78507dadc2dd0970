"""Run launch over nodes reached by ssh: every available mpiexec, and a stand-in for PALS in a PBS job.

The site of the PBS job resembles Aurora.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_wheels import REQUIREMENTS, mpi_environment
from places import HELPERS
from simcluster.cluster import Cluster
from slowness import scaled

PALS = HELPERS / "pals_standin"
PROGRAM = (sys.executable, str(HELPERS / "reporting_ranks.py"))
MEET = (sys.executable, str(HELPERS / "connecting_ranks.py"))
WORDS = ("report", "a b", "it's", '"q"', "$(date)", "; exit 9", "x\\ny", "two\nlines", "*", "", "-n", "--", "ü")
PLACES = [(0, "n1", 0), (1, "n1", 1), (2, "n2", 0), (3, "n2", 1)]

# Like Aurora's file, for these nodes: on the network of the rendezvous, their names have another suffix.
_SITE = """
scheduler = "pbs"
launcher = "mpiexec"
dialect = "pals"
cores = [{cores}]
binding = "list"
interface = "eth0"
master_suffix = ".sim"
[env]
SITE_WORD = "from the site"
[options]
mpiexec = ["--pmi=pmix", "--gpu-bind=list:0.0:0.1", "--no-vni", "--line-buffer"]
"""


def _reports(folder: Path, ranks: int) -> list[dict]:
    return [json.loads((folder / f"logs/rank{rank:04d}.log").read_text()) for rank in range(ranks)]


def _places(reports: list[dict]) -> list[tuple[int, str, int]]:
    assert {report["size"] for report in reports} == {len(reports)}
    return [(report["rank"], report["host"], report["local_rank"]) for report in reports]


@pytest.fixture
def pals(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a PBS job on n1 and n2, with the stand-in first on PATH and the site selected."""
    cores = ", ".join(f'"{core}"' for core in sorted(os.sched_getaffinity(0))[:2])
    (tmp_path / "site.toml").write_text(_SITE.format(cores=cores))
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    return {"PATH": os.pathsep.join([str(PALS), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "EZPZ_LLM_SITE": str(tmp_path / "site.toml"), "PBS_JOBID": "7.login",
            "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": str(tmp_path / "nodes")}


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_words_and_variables_reach_other_hosts(host_cluster: Cluster, tmp_path: Path, name: str) -> None:
    done = host_cluster.run("launch", "--hosts", "n1,n2", "--ppn", "2", "--run-dir", "r", *PROGRAM, *WORDS,
                            cwd=tmp_path, EZPZ_LLM_OF_MINE="a 'b' $(c)", **mpi_environment(name))
    assert done.returncode == 0, done.stdout + done.stderr
    reports = _reports(tmp_path / "r", 4)
    assert _places(reports) == PLACES
    assert all(report["argv"] == list(WORDS) for report in reports)
    assert {report["env"]["EZPZ_LLM_OF_MINE"] for report in reports} == {"a 'b' $(c)"}
    assert {report["env"]["MASTER_ADDR"] for report in reports} == {"n1"}


@pytest.mark.parametrize(("mask", "expected"), [("GPU-a1,GPU-b1", ["GPU-a1,GPU-b1", "GPU-a2,GPU-b2"]),
                                                ("0,1", ["0,1", "0,1"])])
def test_each_node_keeps_its_own_mask_of_uuids(host_cluster: Cluster, tmp_path: Path, mask: str,
                                               expected: list[str]) -> None:
    """The remote shell sets a node's mask, as OpenPBS does for each node's tasks; a user's indices hold for all."""
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/bash\nexec ssh "$1" CUDA_VISIBLE_DEVICES=GPU-a${1#n},GPU-b${1#n} "${@:2}"\n')
    shell.chmod(0o755)
    done = host_cluster.run("launch", "--hosts", "n1,n2", "--launcher", "mpiexec", "--run-dir", "r", *PROGRAM,
                            "report", node="n1", cwd=tmp_path, CUDA_VISIBLE_DEVICES=mask, HYDRA_LAUNCHER="rsh",
                            HYDRA_LAUNCHER_EXEC=str(shell))
    assert done.returncode == 0, done.stdout + done.stderr
    reports = _reports(tmp_path / "r", 4)
    assert _places(reports) == PLACES
    assert [report["env"]["CUDA_VISIBLE_DEVICES"] for report in reports] == [
        expected[0], expected[0], expected[1], expected[1]]
    assert not any("EZPZ_LLM_NODE_VARIABLES" in report["env"] for report in reports)


def test_pals_in_a_pbs_job(host_cluster: Cluster, tmp_path: Path, pals: dict[str, str]) -> None:
    done = host_cluster.run("launch", "--run-dir", "r", *PROGRAM, *WORDS, cwd=tmp_path, **pals)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "r/run.json").read_text())["launch"]
    line = " ".join(run["argv"][1:run["argv"].index("ezpz_llm.launcher.on_nodes.shim") - 2])
    cores = sorted(os.sched_getaffinity(0))[:2]
    reports = _reports(tmp_path / "r", 4)
    assert _places(reports) == PLACES
    assert all(report["argv"] == list(WORDS) for report in reports)
    env = [report["env"] for report in reports]
    assert {one["MASTER_ADDR"] for one in env} == {"n1.sim"}
    assert {one["SITE_WORD"] for one in env} == {"from the site"}
    # PMIx, which has no variable for the size, without PMI.
    assert [(one["PMIX_RANK"], one["PMI_RANK"]) for one in env] == [(str(rank), None) for rank in range(4)]
    assert [one["ZE_AFFINITY_MASK"] for one in env] == ["0.0", "0.1"] * 2
    if len(cores) == 2:
        assert line == (f"-n 4 --ppn 2 --hostfile {tmp_path}/r/hostfile --cpu-bind=list:{cores[0]}:{cores[1]}"
                        " --envall --pmi=pmix --gpu-bind=list:0.0:0.1 --no-vni --line-buffer")
        assert [report["cores"] for report in reports] == [[cores[0]], [cores[1]]] * 2


def test_pals_ranks_meet_and_part_of_the_job_is_obeyed(host_cluster: Cluster, tmp_path: Path,
                                                       pals: dict[str, str]) -> None:
    done = host_cluster.run("launch", "--run-dir", "r", *MEET, node="n1", cwd=tmp_path, **pals)
    assert done.returncode == 0, done.stdout + done.stderr
    met = json.loads((tmp_path / "r/met.json").read_text())
    assert [(one["rank"], one["host"], one["local_rank"]) for one in met] == PLACES
    # The stand-in, like PALS, uses PBS's node file by default.
    part = host_cluster.run("launch", "--hosts", "n2", "--run-dir", "p", *PROGRAM, "report", cwd=tmp_path, **pals)
    assert part.returncode == 0, part.stdout + part.stderr
    assert _places(_reports(tmp_path / "p", 2)) == [(0, "n2", 0), (1, "n2", 1)]


@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("SIGKILL", 137), ("SIGSEGV", 139), ("missing", 127)])
def test_codes_under_pals(host_cluster: Cluster, tmp_path: Path, pals: dict[str, str], how: str, code: int) -> None:
    command = (*PROGRAM, how) if how != "missing" else ("no-such-program",)
    done = host_cluster.run("launch", "--run-dir", "r", *command, cwd=tmp_path, **pals)
    assert done.returncode == code, done.stdout + done.stderr
    if how != "missing":
        assert "rank 1 on n1" in done.stderr
        # Its messages are printed unchanged.
        assert f"n1: rank 1 exited with code {code}" in done.stderr
    run_id = json.loads((tmp_path / "r/run.json").read_text())["launch"]["env"]["EZPZ_LLM_RUN_ID"]
    assert host_cluster.processes(run_id) == {}


@pytest.mark.full
def test_torchruns_started_by_pals(host_cluster: Cluster, tmp_path: Path, pals: dict[str, str]) -> None:
    done = host_cluster.run("launch", "--launcher", "torchrun", "--run-dir", "r", *PROGRAM, *WORDS, cwd=tmp_path,
                            timeout=90, **pals)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = _reports(tmp_path / "r", 4)
    assert _places(reports) == PLACES
    assert all(report["argv"] == list(WORDS) for report in reports)
    assert {report["source"] for report in reports} == {"torchrun (RANK)"}
    assert {report["env"]["MASTER_ADDR"] for report in reports} == {"n1.sim"}


@pytest.mark.parametrize("words", ["--host n1", "--hosts n1", "-f file", "--mca a b", "-genvall", "--bind-to none",
                                   "--map-by core", "-x A", "--env A", "--hostfil x", "-hosts n1"])
def test_the_stand_in_refuses_what_is_not_documented(words: str) -> None:
    done = subprocess.run([PALS / "mpiexec", *words.split(), "hostname"], capture_output=True, text=True,
                          timeout=scaled(120), check=False)
    assert (done.returncode, done.stdout) == (255, "")
    assert done.stderr.startswith("mpiexec: ")
