"""Jobs of schedulers that launch does not speak, and heterogeneous ones: refused by name, with what to type."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from launch_runs import captured_env, launch
from simcluster.cluster import Cluster

from ezpz_llm.base.errors import UserError
from ezpz_llm.launch import host_selection
from ezpz_llm.launch.schedulers import find_allocation
from ezpz_llm.launch.schedulers.local import FOREIGN

# What each scheduler's documentation says of a job on h1 and h2: variables, and the file or program that they name.
_JOBS = {
    "LSF": ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 2 h2 2"}, ""),
    "Flux": ({"FLUX_JOB_ID": "f7abc"}, ""),
    "Cobalt": ({"COBALT_JOBID": "7", "COBALT_NODEFILE": "file"}, "h1\nh2\n"),
    "Grid Engine": ({"JOB_ID": "7", "PE_HOSTFILE": "file"}, "h1 2 all.q@h1 UNDEFINED\nh2 2 all.q@h2 UNDEFINED\n"),
    "OAR": ({"OAR_JOBID": "7", "OAR_NODEFILE": "file"}, "h1\nh1\nh2\nh2\n"),
    "PJM": ({"PJM_JOBID": "7", "PJM_O_NODEINF": "file"}, "10.0.0.1\n10.0.0.2\n"),
}
_HOSTS = {"LSF": [("h1", 2), ("h2", 2)], "Grid Engine": [("h1", 2), ("h2", 2)],
          "PJM": [("10.0.0.1", None), ("10.0.0.2", None)]}


def test_every_scheduler_is_tested() -> None:
    assert [one.name for one in FOREIGN] == list(_JOBS)


@pytest.mark.parametrize("name", _JOBS)
def test_a_job_is_refused_by_name_with_a_line_that_works(tmp_path: Path, name: str) -> None:
    env, text = _JOBS[name]
    with pytest.raises(UserError) as raised:
        find_allocation(env)
    assert f"launch does not speak {name}" in str(raised.value)
    line, _, rest = (raised.value.instead or "").partition("; launch ")
    assert rest.startswith("--hostfile hosts …")
    (tmp_path / "file").write_text(text)
    (tmp_path / "flux").write_text('#!/bin/sh\n[ "$*" = "hostlist --expand local" ] && echo h1 h2\n')
    (tmp_path / "flux").chmod(0o755)
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, env=env | {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    found = [(host.name, host.slots) for host in host_selection.read(tmp_path / "hosts")]
    assert found == _HOSTS.get(name, [("h1", None), ("h2", None)])


@pytest.mark.parametrize("name", _JOBS)
def test_who_names_the_hosts_goes_on(name: str) -> None:
    env, _ = _JOBS[name]
    number = next(iter(env))
    for found in (find_allocation(env, hosts_from="--hostfile"), find_allocation(env, "none")):
        assert (found.scheduler, len(found.hosts)) == ("none", 1)
        (note,) = found.notes
        assert note.startswith(f"{number}={env[number]} left aside (--")


def test_what_is_no_job_of_theirs() -> None:
    assert find_allocation({"JOB_ID": "7"}).notes == ()  # a name that anybody may use
    assert find_allocation({"LSB_JOBID": ""}).notes == ()
    slurm = captured_env("slurm/env_sbatch_script.txt") | {"FLUX_JOB_ID": "f7"}
    assert find_allocation(slurm).scheduler == "slurm"
    # A task that Flux has started is a rank already.
    rank = {"FLUX_JOB_ID": "f7", "FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"}
    assert find_allocation(rank).scheduler == "started"


def test_the_command_refuses_and_goes_on_where_hosts_are_named(tmp_path: Path) -> None:
    env = _JOBS["LSF"][0]
    done = launch(tmp_path, "-n", "4", "hostname", **env)
    assert done.returncode == 2
    assert "this is LSF job 7, and launch does not speak LSF" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = launch(tmp_path, "--hosts", "localhost", "-n", "1", "echo", "here", **env)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr
    assert "note       LSB_JOBID=7 left aside (--hosts)" in done.stderr


@pytest.mark.parametrize("name", ["env_het_salloc", "env_het_batch"])
def test_a_heterogeneous_job_is_refused(name: str) -> None:
    env = captured_env(f"slurm/{name}.txt")
    with pytest.raises(UserError, match=r"is heterogeneous, with 2 groups of hosts") as raised:
        find_allocation(env)
    assert '"$SLURM_JOB_NODELIST_HET_GROUP_0,$SLURM_JOB_NODELIST_HET_GROUP_1"' in str(raised.value)
    # A step in one of its groups has hosts of its own.
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[2-3]", "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert [host.name for host in find_allocation(env | step).hosts] == ["n2", "n3"]


def test_what_is_typed_instead_in_a_heterogeneous_job(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "try.sh").write_text(r"""
launch hostname 2> refused; echo rc=$?
eval "$(sed -n 's/^ *instead: //p' refused | sed 's/;.*//')"
HYDRA_LAUNCHER=ssh launch --scheduler none --hostfile hosts --tee all hostname
""")
    done = cluster.run("salloc", "--quiet", "-N1", "-n1", ":", "-N2", "-n2", "bash", "try.sh", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rc=2" in done.stdout
    assert (tmp_path / "hosts").read_text() == "n1\nn2\nn3\n"
    assert sorted(done.stdout.split()[-6:]) == ["[0]", "[1]", "[2]", "n1", "n2", "n3"]
