"""Reservations, read from what real schedulers wrote (captured/)."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_runs import CAPTURED, captured_env

from ezpz_llm.errors import UserError
from ezpz_llm.launch.allocation import Host
from ezpz_llm.launch.devices import core_ranges, visible_devices
from ezpz_llm.launch.hostlist import expand_counts, expand_hosts
from ezpz_llm.launch.schedulers import find_allocation, hostfile, pbs, slurm


@pytest.mark.parametrize(("name", "hosts"), [
    ("sel2_nc2_mpi2", [("n1", 2), ("n2", 2)]),
    ("sel2_plain", [("n1", 2)]),
    ("sel2_scatter", [("n3", None), ("n4", None)]),
    ("sel3_ompthreads", [("n1", None), ("n2", None), ("n3", None)]),
    ("mixed", [("n1", 1), ("n2", 2), ("n3", 2)]),
    ("array", [("n1", None)]),
])
def test_pbs_node_files(name: str, hosts: list[tuple[str, int | None]]) -> None:
    found = pbs.node_file_hosts((CAPTURED / f"pbs/nodefile_{name}.txt").read_text())
    assert [(host.name, host.slots) for host in found] == hosts


def test_pbs_job() -> None:
    env = captured_env("pbs/env_job_sel2_nc2_mpi2.txt")
    node_file = CAPTURED / "pbs/nodefile_sel2_nc2_mpi2.txt"
    found = find_allocation(env | {"PBS_NODEFILE": str(node_file)})
    assert (found.scheduler, found.job_id, [host.name for host in found.hosts]) == ("pbs", "5.login", ["n1", "n2"])
    with pytest.raises(UserError, match=r"node file of PBS job 5\.login"):
        find_allocation(env | {"PBS_NODEFILE": "/nonexistent/5.login"})


def test_two_spellings_are_one_host() -> None:
    text = "x1.hsn.example\nx1\nx2.hsn.example\n10.0.0.1\n10.0.0.2\n"
    assert [host.name for host in pbs.node_file_hosts(text)] == ["x1.hsn.example", "x2.hsn.example", "10.0.0.1",
                                                                 "10.0.0.2"]


@pytest.mark.parametrize(("name", "hosts"), [
    ("env_sbatch_script", [("n1", 2), ("n2", 2)]),
    ("env_sbatch_N2_no_ntasks", [("n1", None), ("n2", None)]),
    ("env_sbatch_N3_n5", [("n1", 2), ("n2", 2), ("n3", 1)]),
    ("env_sbatch_gaps_c2", [("n1", 1), ("n3", 1), ("n4", 1)]),
    ("env_salloc_shell", [("n1", 2), ("n2", 2)]),
    # In a step of one task on n1, the job's two nodes and its tasks a node say nothing.
    ("env_srun_one_task_step", [("n1", None)]),
])
def test_slurm_jobs_and_steps(name: str, hosts: list[tuple[str, int | None]]) -> None:
    found = find_allocation(captured_env(f"slurm/{name}.txt"))
    assert found.scheduler == "slurm"
    assert [(host.name, host.slots) for host in found.hosts] == hosts


def test_an_srun_task_is_started_already() -> None:
    found = find_allocation(captured_env("slurm/env_srun_pmi2_rank2.txt"))
    assert found.scheduler == "started"


def test_slurm_end_time_and_cores() -> None:
    env = captured_env("slurm/env_sbatch_N3_n5.txt") | {"SLURM_JOB_END_TIME": "1795240000"}
    found = slurm.detect(env)
    assert found is not None
    assert (found.ends_at, found.cores_per_host) == (1795240000.0, 1)


# Ours, where Slurm 22.05 refuses (text after a bracket is harmless) or prints what is no host list.
_OURS = {
    "n[1-3]-ib": "n1-ib n2-ib n3-ib", "n[1-2]x,m5": "n1x n2x m5", "a[1-2]b[3-4]c": "a1b3c a1b4c a2b3c a2b4c",
    "(null)": "", "n[3-1]": None, "[n1-n2]": None, "n[1-2": None, "n[]": None, "n[1-]": None,
}


def test_slurm_host_lists() -> None:
    rows = [line.split("\t") for line in
            (CAPTURED / "slurm/nodelist_expansions.tsv").read_text().splitlines()[1:]]
    assert len(rows) == 30
    for text, by_slurm in rows:
        expected = _OURS.get(text, by_slurm)
        if expected is None:
            with pytest.raises(UserError) as raised:
                expand_hosts(text)
            assert repr(text) in str(raised.value)
        else:
            assert " ".join(expand_hosts(text)) == expected, text


def test_slurm_counts() -> None:
    assert expand_counts("2(x2),1") == [2, 2, 1]
    assert expand_counts("1(x3)") == [1, 1, 1]
    with pytest.raises(UserError, match="2x3"):
        expand_counts("2x3")


def test_hostfile_forms() -> None:
    text = "# ours\nn1 slots=2   # two\n\nn2:4\nn3\nn4.example\nn4\n10.0.0.1\nn5 slots = 3\n"
    assert hostfile.parse(text, "f") == (Host("n1", 2), Host("n2", 4), Host("n3"), Host("n4.example", 2),
                                         Host("10.0.0.1"), Host("n5", 3))


@pytest.mark.parametrize(("text", "line", "quoted"), [
    ("n1\nn2 slots=two\n", "line 2", "n2 slots=two"),
    ("n1 slots=0\n", "line 1", "n1 slots=0"),
    ("\n\nn1 n2\n", "line 3", "n1 n2"),
    ("n1:2\nn1 slots=2\n", "line 2", "n1 slots=2"),
    ("n1:2\nn1.example\n", "line 2", "n1.example"),
    ("n1:\n", "line 1", "n1:"),
])
def test_hostfile_errors_name_line_and_text(text: str, line: str, quoted: str) -> None:
    with pytest.raises(UserError) as raised:
        hostfile.parse(text, "hosts.txt")
    assert f"hosts.txt, {line}" in str(raised.value)
    assert repr(quoted) in str(raised.value)


def test_hostfile_must_exist_and_name_hosts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file") as raised:
        hostfile.read(tmp_path / "missing")
    assert "host slots=N" in str(raised.value)
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(UserError, match="names no host"):
        hostfile.read(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text"):
        hostfile.read(tmp_path / "binary")


@pytest.mark.parametrize(("mask", "ids"), [
    ({"CUDA_VISIBLE_DEVICES": "0,3"}, ("0", "3")),
    ({"CUDA_VISIBLE_DEVICES": ""}, ()),
    ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
    ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, ("1",)),
    ({"ROCR_VISIBLE_DEVICES": "0"}, ("0",)),
    ({"ZE_AFFINITY_MASK": "0.0,0.1,1.0"}, ("0.0", "0.1", "1.0")),
])
def test_masks_decide_which_devices_are_visible(mask: dict[str, str], ids: tuple[str, ...]) -> None:
    assert visible_devices(mask).ids == ids


def test_core_ranges() -> None:
    assert core_ranges((0, 1, 2, 3, 8, 10, 11)) == "0-3,8,10-11"
