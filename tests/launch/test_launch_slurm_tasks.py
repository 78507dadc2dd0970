"""Number of ranks requested by a Slurm job, from any of its variables."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from launch_runs import CAPTURED, launch

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.jobs.schedulers import QUICK, find_allocation, supplement
from ezpz_llm.launcher.jobs.schedulers.scheduler import Origin, Place

_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(("variables", "slots", "source"), [
    ({"NTASKS_PER_NODE": "4", "TASKS_PER_NODE": "4(x2)"}, (4, 4), "SLURM_NTASKS_PER_NODE=4"),
    ({"NTASKS_PER_NODE": "4", "GPUS_PER_NODE": "8"}, (4, 4), "SLURM_NTASKS_PER_NODE=4"),
    ({"TASKS_PER_NODE": "4,2"}, (4, 2), "SLURM_TASKS_PER_NODE=4,2"),
    ({"TASKS_PER_NODE": "4(x2)", "JOB_CPUS_PER_NODE": "64(x2)"}, (4, 4), "SLURM_TASKS_PER_NODE=4(x2)"),
    ({"NPROCS": "6", "TASKS_PER_NODE": "4,2"}, (4, 2), "SLURM_NPROCS=6 and SLURM_TASKS_PER_NODE=4,2"),
    ({"NPROCS": "5"}, (3, 2), "SLURM_NPROCS=5, spread evenly"),
    ({"NTASKS": "8"}, (4, 4), "SLURM_NTASKS=8, spread evenly"),
    ({"NTASKS_PER_GPU": "2", "GPUS_PER_NODE": "a100:4"}, (8, 8), "SLURM_NTASKS_PER_GPU=2, 4 GPUs per node"),
    ({"NTASKS_PER_GPU": "1", "GPUS": "8"}, (4, 4), "SLURM_NTASKS_PER_GPU=1, 4 GPUs per node"),
    ({"NTASKS_PER_GPU": "1", "GPUS_ON_NODE": "4"}, (4, 4), "SLURM_NTASKS_PER_GPU=1, 4 GPUs per node"),
    # Not requested: Slurm writes 1, or the number of tasks that fit the CPUs.
    ({"TASKS_PER_NODE": "1(x2)"}, (None, None), ""),
    ({"TASKS_PER_NODE": "8(x2)", "JOB_CPUS_PER_NODE": "8(x2)"}, (None, None), ""),
    ({"TASKS_PER_NODE": "8(x2)", "JOB_CPUS_PER_NODE": "64(x2)", "CPUS_PER_TASK": "8"}, (None, None), ""),
])
def test_tasks_of_a_job(variables: dict[str, str], slots: tuple[int | None, ...], source: str) -> None:
    found = find_allocation({**_JOB, **{f"SLURM_{name}": value for name, value in variables.items()}})
    assert (tuple(host.slots for host in found.hosts), found.slots_from) == (
        slots, Origin(source, Place.JOB) if source else None)


@pytest.mark.parametrize("name", ["SLURM_NTASKS_PER_NODE", "SLURM_NPROCS", "SLURM_NTASKS_PER_GPU"])
@pytest.mark.parametrize("value", ["0", "many", "-1"])
def test_values_that_are_not_numbers(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name}='{value}' is not a number of tasks"):
        find_allocation({**_JOB, name: value})


def test_what_is_ignored_has_a_note() -> None:
    (note,) = find_allocation({**_JOB, "SLURM_NTASKS_PER_GPU": "2"}).notes
    assert note == "SLURM_NTASKS_PER_GPU=2 is ignored: the job's GPUs per node are unknown (--ppn sets ranks)"
    (note,) = find_allocation({**_JOB, "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_JOB_CPUS_PER_NODE": "8(x2)"}).notes
    assert note.startswith("SLURM_TASKS_PER_NODE=8(x2) only counts CPUs")


def _programs(folder: Path, **bodies: str) -> str:
    for name, body in {"scontrol": "exit 1", "srun": "exit 1", "squeue": "exit 1", **bodies}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(stat.S_IRWXU)
    return f"{folder}:/usr/bin:/bin"


def test_devices_that_only_scontrol_knows(tmp_path: Path) -> None:
    shown = CAPTURED / "slurm/scontrol_show_job_d_gpus_uneven.txt"
    env = {**_JOB, "SLURM_NTASKS_PER_GPU": "2", "PATH": _programs(tmp_path, scontrol=f"cat {shown}")}
    found = supplement(find_allocation(env), env, QUICK)
    assert [host.slots for host in found.hosts] == [4, 2]
    assert found.slots_from == Origin("SLURM_NTASKS_PER_GPU=2, each node's GPUs", Place.JOB)
    assert not any("is ignored" in note for note in found.notes)


def test_the_plan_names_the_variable(tmp_path: Path) -> None:
    env = {**_JOB, "SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4(x2)", "PATH": _programs(tmp_path)}
    done = launch(tmp_path, "--dry-run", "--json", "python3", "x.py", **env)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (len(plan["ranks"]), plan["sources"]["ranks"]) == (8, "SLURM_NTASKS_PER_NODE=4")
    # The user's slots have another source.
    (tmp_path / "hosts").write_text("n2 slots=3\n")
    done = launch(tmp_path, "--dry-run", "--hostfile", "hosts", "hostname", **env)
    assert "3 on 1 node: n2 (slots of --hostfile hosts)" in done.stdout
