"""Jobs of unsupported schedulers and heterogeneous jobs: rejected by name, with a command that works instead."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from launch_runs import captured_env, launch
from simcluster.cluster import Cluster

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.jobs import hostfile
from ezpz_llm.launcher.jobs.schedulers import find_allocation

_JOB = {"LOADL_STEP_ID": "c1.7.0", "LOADL_PROCESSOR_LIST": "h1 h1 h2 h2"}
"""Variables of a job on h1 and h2, after LoadLeveler's documentation."""


def test_a_job_is_refused_by_name_with_a_line_that_works(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        find_allocation(_JOB)
    assert "launch does not support LoadLeveler" in str(raised.value)
    line, _, rest = (raised.value.instead or "").partition("; launch ")
    assert rest.startswith("--hostfile hosts …")
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, env=_JOB | {"PATH": "/usr/bin:/bin"})
    assert [(host.name, host.slots) for host in hostfile.read(tmp_path / "hosts")] == [("h1", 2), ("h2", 2)]


def test_its_list_alone_and_its_id_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="this is a LoadLeveler job, but launch does not support Load") as raised:
        find_allocation({"LOADL_PROCESSOR_LIST": "h1 h2"})
    assert "$LOADL_PROCESSOR_LIST" in (raised.value.instead or "")
    with pytest.raises(UserError) as raised:
        find_allocation({"LOADL_STEP_ID": "c1.7.0"})
    assert (raised.value.instead or "").startswith("write the job's nodes to a file named hosts, one per line; ")


def test_nodes_given_by_hand_are_used() -> None:
    for found in (find_allocation(_JOB, hosts_from="--hostfile"), find_allocation(_JOB, "none")):
        assert (found.scheduler, len(found.hosts)) == ("none", 1)
        (note,) = found.notes
        assert note.startswith("ignoring LOADL_STEP_ID=c1.7.0 (--")


def test_the_command_is_rejected_unless_nodes_are_given(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "4", "hostname", **_JOB)
    assert done.returncode == 2
    assert "this is LoadLeveler job c1.7.0, but launch does not support LoadLeveler" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = launch(tmp_path, "--hosts", "localhost", "-n", "1", "echo", "here", **_JOB)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr
    assert "note       ignoring LOADL_STEP_ID=c1.7.0 (--hosts)" in done.stderr


@pytest.mark.parametrize("name", ["env_het_salloc", "env_het_batch"])
def test_a_heterogeneous_job_is_refused(name: str) -> None:
    env = captured_env(f"slurm/{name}.txt")
    with pytest.raises(UserError, match=r"is heterogeneous, with 2 components") as raised:
        find_allocation(env)
    assert '"$SLURM_JOB_NODELIST_HET_GROUP_0,$SLURM_JOB_NODELIST_HET_GROUP_1"' in str(raised.value)
    # A step in one of its groups has a node list of its own.
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
