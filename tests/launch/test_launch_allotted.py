"""Devices and CPUs of an allocation, by node: how launch detects them, and the ranks' share."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from launch_runs import CAPTURED, captured_env
from simcluster.cluster import Cluster

from ezpz_llm.launcher.jobs.option_parsing import parse
from ezpz_llm.launcher.jobs.schedulers import pbs
from ezpz_llm.launcher.jobs.schedulers.slurm_queries import read_job
from ezpz_llm.launcher.planning.plan import LaunchPlan, build_plan

_EXEC_VNODE = '{"Jobs": {"1": {"exec_host": "n1/0+n2/0*2", "exec_vnode": "%s"}}}'


def _programs(folder: Path, **bodies: str) -> str:
    """Return a PATH with only these programs, since a real scontrol would wait for a missing controller."""
    for name, body in {"scontrol": "exit 1", **bodies}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(stat.S_IRWXU)
    return f"{folder}:/usr/bin:/bin"


def _plan(words: str, env: dict[str, str]) -> LaunchPlan:
    return build_plan(parse(["--dry-run", *words.split()]), env)


def _counts(plan: LaunchPlan) -> dict[str, int]:
    return {host: sum(place.host == host for place in plan.ranks) for host in plan.hosts}


def _shown(name: str) -> str:
    return (CAPTURED / f"slurm/scontrol_show_job_d_{name}.txt").read_text()




def test_devices_that_scontrol_shows() -> None:
    assert read_job(_shown("gpus")).devices == {"n1": 4, "n2": 4}
    assert read_job(_shown("gpus_uneven")).devices == {"n1": 2, "n2": 1}
    assert read_job((CAPTURED / "slurm/scontrol_show_job.txt").read_text()).devices == {}


@pytest.mark.parametrize(("gres", "count"), [
    ("gpu:4(IDX:0-3)", 4), ("gpu:a100:4(IDX:0-1,4-5)", 4), ("gpu:2", 2), ("", 0), ("nvme:1", 0),
    ("gpu:a100:2(IDX:0-1),gpu:v100:1(IDX:2),nvme:1", 3), ("gpu:1g.5gb:3(IDX:0-2)", 3), ("craynetwork:4", 0),
])
def test_forms_of_gres(gres: str, count: int) -> None:
    job = read_job(f"   Nodes=n[1-2] CPU_IDs=0-3,6 Mem=0 GRES={gres}\n")
    assert (job.devices, job.cores) == ({"n1": count, "n2": count}, {"n1": 5, "n2": 5})


@pytest.mark.parametrize(("text", "cores"), [
    ("(n1:ncpus=1)+(n2:ncpus=2)", {"n1": 1, "n2": 2}),
    ("(n1:ncpus=1)+(n1:ncpus=1)", {"n1": 2}),
    ("(n1[0]:ncpus=8:mem=5kb+n1[1]:ncpus=8)+(n2.hsn.example:ngpus=4:ncpus=64)", {"n1": 16, "n2.hsn.example": 64}),
    ("", {}),
])
def test_cpus_in_exec_vnode(text: str, cores: dict[str, int]) -> None:
    assert pbs.read_job(_EXEC_VNODE % text, "1").cores == cores




@pytest.mark.parametrize(("job", "asked", "expected"), [
    # The variable suffices. If it is missing, or nodes may differ, launch queries scontrol.
    ("gpus", None, {"n1": 4, "n2": 4}),
    ("gpus", "gpus", {"n1": 4, "n2": 4}),
    ("gpus_uneven", "gpus_uneven", {"n1": 2, "n2": 1}),
    ("gpus_uneven", None, {"n1": 1, "n2": 1}),
])
def test_ranks_of_an_salloc_on_the_login_node(tmp_path: Path, job: str, asked: str | None,
                                              expected: dict[str, int]) -> None:
    env = captured_env(f"slurm/env_salloc_{job}.txt")
    answers = {"scontrol": f"cat {CAPTURED}/slurm/scontrol_show_job_d_{asked}.txt"} if asked else {}
    env["PATH"] = _programs(tmp_path, srun="exit 1", **answers)
    plan = _plan("hostname", env)
    assert _counts(plan) == expected
    assert not any("DEVICES" in note for note in plan.notes)
    if asked or job == "gpus":
        assert [place.device for place in plan.ranks if place.host == "n1"] == [*map(str, range(expected["n1"]))]


def test_a_mask_of_the_users_counts_for_every_host(tmp_path: Path) -> None:
    env = captured_env("slurm/env_salloc_gpus.txt") | {"PATH": _programs(tmp_path, srun="exit 1")}
    assert _counts(_plan("hostname", env | {"CUDA_VISIBLE_DEVICES": "0,2"})) == {"n1": 2, "n2": 2}
    assert _counts(_plan("hostname", env | {"CUDA_VISIBLE_DEVICES": ""})) == {"n1": 1, "n2": 1}


def test_idle_and_shared_devices_are_reported(tmp_path: Path) -> None:
    env = captured_env("slurm/env_salloc_gpus.txt") | {"PATH": _programs(tmp_path, srun="exit 1")}
    assert ("IDLE DEVICES: 1 rank for the 4 devices of n1 (and 1 more node); --ppn 4 uses all"
            " (SLURM_GPUS_PER_NODE)") in _plan("--ppn 1 hostname", env).notes
    # PBS's slots have priority over devices; a note reports the idle devices.
    (tmp_path / "nodes").write_text("n1\n" * 8)
    job = {"PBS_JOBID": "1.x", "PBS_NODEFILE": str(tmp_path / "nodes"), "CUDA_VISIBLE_DEVICES": "0,1",
           "PATH": _programs(tmp_path, mpiexec="echo HYDRA build details:")}
    plan = _plan("hostname", job)
    assert _counts(plan) == {"n1": 8}
    assert ("8 ranks for the 2 devices of n1: some ranks share a device or have none; --ppn 2 starts one rank per"
            " device (CUDA_VISIBLE_DEVICES)") in plan.notes


def test_uneven_cpus_are_counted_by_host(tmp_path: Path) -> None:
    env = captured_env("slurm/env_salloc_uneven.txt") | {"PATH": _programs(tmp_path, srun="exit 1")}
    plan = _plan("hostname", env)
    assert _counts(plan) == {"n1": 2, "n2": 1}
    assert not [note for note in plan.notes if "share" in note]
    assert "--overcommit" not in plan.argv
    # Launchers take one number of cores for all nodes: the smallest, that of n2's rank.
    plan = _plan("hostname", env | {"SLURM_JOB_CPUS_PER_NODE": "16,4"})
    assert plan.env["OMP_NUM_THREADS"].value == "4"
    assert plan.argv[plan.argv.index("-c") + 1] == "4"
    assert "nodes differ: 4 CPUs for 1 rank on n2, 16 for 2 on n1; every rank gets 4" in plan.notes
    # If ranks do share devices, the warning is the same as before.
    plan = _plan("--ppn 4 hostname", env)
    assert "4 ranks share 1 CPU per node" in plan.notes
    assert "--overcommit" in plan.argv


def test_uneven_chunks_of_pbs(tmp_path: Path) -> None:
    """NCPUS is only valid for the first node: select=1:ncpus=1+1:ncpus=2:mpiprocs=2."""
    (tmp_path / "nodes").write_text("n1\nn2\nn2\n")
    env = {"PBS_JOBID": "1.x", "PBS_NODEFILE": str(tmp_path / "nodes"), "NCPUS": "1", "OMP_NUM_THREADS": "1"}
    env["PATH"] = _programs(tmp_path, mpiexec="echo HYDRA build details:")
    assert not [note for note in _plan("hostname", env).notes if "share" in note]
    answer = tmp_path / "answer"
    answer.write_text(_EXEC_VNODE % "(n1:ncpus=4)+(n2:ncpus=16)")
    env["PATH"] = _programs(tmp_path, mpiexec="echo HYDRA build details:", qstat=f"cat {answer}")
    plan = _plan("hostname", env)
    assert _counts(plan) == {"n1": 1, "n2": 2}
    assert plan.env["OMP_NUM_THREADS"].value == "4"




_GPU_JOBS = (("even", "--gpus-per-node=2"), ("gres", "--gres=gpu:2"), ("total", "-G 4"), ("uneven", "-G 3"))


def test_salloc_and_sbatch_give_the_same_ranks(gpu_cluster: Cluster, tmp_path: Path) -> None:
    for name, asked in _GPU_JOBS:
        line = "launch --dry-run --json hostname"
        done = gpu_cluster.run("salloc", "--quiet", "-N2", *asked.split(), *line.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (tmp_path / "job.sh").write_text(f"#!/bin/bash\n#SBATCH -N2 {asked} -o {name}.json\n{line} 2> err\n")
        gpu_cluster.batch("job.sh", cwd=tmp_path)
        by_salloc, by_sbatch = json.loads(done.stdout), json.loads((tmp_path / f"{name}.json").read_text())
        places = [[(rank["host"], rank["local_rank"]) for rank in plan["ranks"]] for plan in (by_salloc, by_sbatch)]
        expected = [("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1)][:3 if name == "uneven" else 4]
        assert places == [expected, expected], name
        assert any("unequal numbers of devices" in note for note in by_salloc["notes"]) is (name == "uneven")


def test_ranks_of_a_job_with_a_number_of_devices_see_them_all(gpu_cluster: Cluster, tmp_path: Path) -> None:
    """Run with `-G 4` on two nodes, and on one of them."""
    (tmp_path / "see.sh").write_text("echo $CUDA_VISIBLE_DEVICES on $(hostname)")
    (tmp_path / "job.sh").write_text("launch --tee all bash see.sh; launch --nodes 1 --tee all bash see.sh")
    done = gpu_cluster.run("salloc", "--quiet", "-N2", "-G4", "bash", "job.sh", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one_host = ["[0] 0,1 on n1", "[1] 0,1 on n1"]
    assert sorted(done.stdout.splitlines()) == sorted([*one_host, *one_host, "[2] 0,1 on n2", "[3] 0,1 on n2"])


def test_an_uneven_job_runs_without_overcommit(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run("salloc", "--quiet", "-N2", "-n3", "launch", "--tee", "all", "hostname", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] n1", "[1] n1", "[2] n2"]
    assert "share" not in done.stderr
    assert "--overcommit" not in done.stderr
