"""Reservations, read from captured environments of real schedulers (captured/)."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from launch_runs import CAPTURED, captured_env, scheduler as make_program

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics import devices as devices_module
from ezpz_llm.launcher.basics.devices import has_no_accelerator, visible_devices
from ezpz_llm.launcher.basics.hostlist import fold_numbers
from ezpz_llm.launcher.basics.ranks import find_rank
from ezpz_llm.launcher.jobs import hostfile
from ezpz_llm.launcher.jobs.schedulers import find_allocation, local, pbs
from ezpz_llm.launcher.jobs.schedulers.scheduler import Node
from ezpz_llm.launcher.jobs.schedulers.slurm import SlurmScheduler


@pytest.mark.parametrize(("name", "hosts"), [
    ("sel2_nc2_mpi2", [("n1", 2), ("n2", 2)]),
    ("sel2_plain", [("n1", 2)]),
    ("sel2_scatter", [("n3", None), ("n4", None)]),
    ("sel3_ompthreads", [("n1", None), ("n2", None), ("n3", None)]),
    ("mixed", [("n1", 1), ("n2", 2), ("n3", 2)]),
    ("array", [("n1", None)]),
])
def test_pbs_node_files(name: str, hosts: list[tuple[str, int | None]]) -> None:
    hosts_read = pbs.node_file_nodes((CAPTURED / f"pbs/nodefile_{name}.txt").read_text())
    assert [(host.name, host.slots) for host in hosts_read] == hosts


def test_a_pbs_job_without_its_node_file() -> None:
    env = captured_env("pbs/env_job_sel2_nc2_mpi2.txt")
    with pytest.raises(UserError, match=r"cannot read the node file of PBS job 5\.login: No such file"):
        find_allocation(env | {"PBS_NODEFILE": "/nonexistent/5.login"})
    with pytest.raises(UserError, match="PBS_NODEFILE is not set"):
        find_allocation({"PBS_JOBID": "5.login"})


def test_two_spellings_are_one_host() -> None:
    text = "x1.hsn.example\nx1\nx2.hsn.example\n10.0.0.1\n10.0.0.2\n"
    assert [host.name for host in pbs.node_file_nodes(text)] == ["x1.hsn.example", "x2.hsn.example", "10.0.0.1",
                                                                 "10.0.0.2"]


# Every captured environment, with its rank, and its nodes with their slots.
_PAIR = [("n1", 2), ("n2", 2)]
_ENVIRONMENTS = {
    "slurm/env_sbatch_script.txt": ("slurm", _PAIR),
    # Slurm 26.05 sets SLURM_STEP_ID=-5 in a batch script.
    "slurm/env_sbatch_26_05.txt": ("slurm", _PAIR),
    "slurm/env_sbatch_N2_no_ntasks.txt": ("slurm", [("n1", None), ("n2", None)]),
    "slurm/env_sbatch_N3_n5.txt": ("slurm", [("n1", 2), ("n2", 2), ("n3", 1)]),
    "slurm/env_sbatch_gaps_c2.txt": ("slurm", [("n1", 1), ("n3", 1), ("n4", 1)]),
    "slurm/env_salloc_shell.txt": ("slurm", _PAIR),
    "slurm/env_salloc_gpus.txt": ("slurm", [("n1", None), ("n2", None)]),
    "slurm/env_salloc_gpus_uneven.txt": ("slurm", [("n1", None), ("n2", None)]),
    "slurm/env_salloc_uneven.txt": ("slurm", [("n1", 2), ("n2", 1)]),
    # The shell that salloc starts on the first node has a step's variables, but is not a rank.
    "slurm/env_interactive_step.txt": ("slurm", _PAIR),
    # In a step with one task on n1, the job's two nodes and its tasks per node do not apply.
    "slurm/env_srun_one_task_step.txt": ("slurm", [("n1", None)]),
    "slurm/env_srun_pty_one_task.txt": ("slurm", [("n1", None)]),
    # mpiexec -n 1: a world of size 1, in the step of the proxy that started it.
    "slurm/env_hydra_single.txt": ("slurm", [("n3", None)]),
    "slurm/env_hydra_rank3.txt": ("started", "Hydra (PMI_RANK)"),
    **{f"slurm/env_srun_pmi2_rank{rank}.txt": ("started", "srun with PMI (PMI_RANK)") for rank in range(4)},
    **{f"slurm/env_srun_nompi_rank{rank}.txt": ("started", "srun (SLURM_PROCID)") for rank in range(4)},
    # Flux's PMI has ranks, but no local rank, which comes from Flux's variables.
    **{f"flux/env_run_rank{rank}.txt": ("started", "PMI (PMI_RANK)") for rank in (0, 3)},
    "mpi/env_mpich_rank2.txt": ("started", "Hydra (PMI_RANK)"),
    "mpi/env_intelmpi_rank2.txt": ("started", "Hydra (PMI_RANK)"),
    "mpi/env_openmpi_rank3.txt": ("started", "Open MPI (OMPI_COMM_WORLD_RANK)"),
    "pbs/env_job_sel2_nc2_mpi2.txt": ("pbs", _PAIR),
    "pbs/env_job_sel2_plain.txt": ("pbs", [("n1", 2)]),
    "pbs/env_job_sel2_scatter.txt": ("pbs", [("n3", None), ("n4", None)]),
    "pbs/env_job_sel3_ompthreads.txt": ("pbs", [("n1", None), ("n2", None), ("n3", None)]),
    "pbs/env_job_mixed.txt": ("pbs", [("n1", 1), ("n2", 2), ("n3", 2)]),
    "pbs/env_job_array.txt": ("pbs", [("n1", None)]),
}


def _captured(path: str) -> dict[str, str]:
    """Return a captured environment, with its node file."""
    env = captured_env(path)
    if "PBS_NODEFILE" in env:
        name = path.removeprefix("pbs/env_job_")
        env["PBS_NODEFILE"] = str(CAPTURED / "pbs" / f"nodefile_{name}")
    return env


def test_every_captured_environment_is_in_the_table() -> None:
    there = {str(path.relative_to(CAPTURED)) for path in CAPTURED.glob("*/env_*.txt")}
    of_others = {"srun_pty_shell", "array", "het_salloc", "het_batch"}
    of_flux = {"flux/env_batch.txt"}
    assert there - _ENVIRONMENTS.keys() == {f"slurm/env_{name}.txt" for name in of_others} | of_flux


@pytest.mark.parametrize("path", _ENVIRONMENTS)
def test_captured_environments(path: str) -> None:
    scheduler, expected = _ENVIRONMENTS[path]
    allocation = find_allocation(_captured(path))
    assert allocation.scheduler == scheduler
    hosts = [(host.name, host.slots) for host in allocation.hosts]
    assert (allocation.source if scheduler == "started" else hosts) == expected


def _of_words(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def test_processes_inside_a_pbs_job() -> None:
    """Hydra's ranks have the variables of the job's first node; pbsdsh's tasks have no readable node file."""
    text = (CAPTURED / "pbs/hydra_in_pbs_job.txt").read_text()
    by_mpiexec, _, rest = text.partition("=== pbsdsh -- /usr/bin/env\n")
    lines = [line for line in by_mpiexec.splitlines() if line.startswith("rank ")]
    assert len(lines) == 16
    for line in lines:
        # PMI_SIZE and MPI_LOCALNRANKS are in the file's last block, the same for every rank.
        env = _of_words(line) | {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
        assert find_allocation(env).scheduler == "started"
        assert f"rank {find_rank(env).rank}/4" in line
        assert f"local {find_rank(env).local_rank}/2" in line
    # One task per line of the node file; only the second node has the variable, and it does not have the file.
    tasks = [_of_words(part) for part in rest.partition("rc=0")[0].split("PATH=/bin:/usr/bin\n")[1:]]
    assert [task["PBS_NODENUM"] for task in tasks] == ["0", "0", "1", "1"]
    messages = ["PBS_NODEFILE is not set"] * 2 + ["cannot read the node file"] * 2
    for task, message in zip(tasks, messages, strict=True):
        with pytest.raises(UserError, match=message) as raised:
            find_allocation(task)
        assert "the job script" in str(raised.value)


def test_the_shell_of_srun_pty_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is task 0 of four; the others got no terminal and have ended. Steps inside it inherit its variables."""
    env = captured_env("slurm/env_srun_pty_shell.txt")
    monkeypatch.setattr(local, "has_terminal", lambda: True)
    allocation = find_allocation(env)
    assert ([(host.name, host.slots) for host in allocation.hosts], allocation.step_id) == (_PAIR, "0")
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert find_allocation(env | torchrun).scheduler == "started"
    monkeypatch.setattr(local, "has_terminal", lambda: False)
    assert find_allocation(env).scheduler == "started"


def test_a_step_is_told_from_the_job() -> None:
    for name, step in (("sbatch_script", None), ("salloc_shell", None), ("interactive_step", None),
                       ("srun_one_task_step", "3")):
        assert find_allocation(captured_env(f"slurm/env_{name}.txt")).step_id == step
    (note,) = find_allocation(captured_env("slurm/env_srun_one_task_step.txt")).notes
    assert note == "this is step 3 of the job: using its 1 node of the job's 2"


def test_array_jobs_have_their_own_ids() -> None:
    lines = (CAPTURED / "slurm/env_array.txt").read_text().splitlines()
    half = len(lines) // 2
    host = {"SLURM_JOB_NODELIST": "n1"}
    tasks = [dict(line.split("=", 1) for line in part) | host for part in (lines[:half], lines[half:])]
    ids = [(task["SLURM_ARRAY_TASK_ID"], find_allocation(task).job_id) for task in tasks]
    assert ids == [("0", "10"), ("3", "9")]
    assert find_allocation(_captured("pbs/env_job_array.txt")).job_id == "10[1].login"


def test_slurm_end_time_and_cores() -> None:
    env = captured_env("slurm/env_sbatch_N3_n5.txt") | {"SLURM_JOB_END_TIME": "1795240000"}
    allocation = SlurmScheduler().detect(env)
    assert allocation is not None
    assert (allocation.ends_at, [host.cores for host in allocation.hosts]) == (1795240000.0, [2, 2, 1])


def test_contradictions_are_said_with_both_values() -> None:
    env = captured_env("slurm/env_sbatch_N2_no_ntasks.txt")
    (note,) = find_allocation(env | {"SLURM_JOB_NODELIST": "n1"}).notes
    assert note == "SLURM_JOB_NUM_NODES is 2, but SLURM_JOB_NODELIST=n1 names 1 node: using the list"
    with pytest.raises(UserError, match="the task layout has 2 nodes, but the node list has 1"):
        find_allocation(captured_env("slurm/env_sbatch_script.txt") | {"SLURM_JOB_NODELIST": "n1"})
    (note,) = find_allocation(env | {"SLURM_RESTART_COUNT": "1"}).notes
    assert "SLURM_RESTART_COUNT=1" in note
    (note,) = find_allocation(_captured("pbs/env_job_sel2_plain.txt")).notes
    assert note == "PBS placed all 2 chunks or ranks on one node"


def test_two_schedulers_at_once() -> None:
    both = captured_env("slurm/env_sbatch_script.txt") | _captured("pbs/env_job_sel2_nc2_mpi2.txt")
    allocation = find_allocation(both)
    assert (allocation.scheduler, allocation.notes) == (
        "slurm", ("SLURM_JOB_ID=3 and PBS_JOBID=5.login are both set, with the same nodes: using slurm",))
    allocation = find_allocation(both | {"PBS_NODEFILE": "/nonexistent/5.login"})
    assert allocation.scheduler == "slurm"
    assert "SLURM_JOB_ID=3 and PBS_JOBID=5.login are both set; using slurm: cannot read" in allocation.notes[0]
    allocation = find_allocation(both | {"SLURM_JOB_NODELIST": "n["})
    assert (allocation.scheduler, "not a Slurm host list" in allocation.notes[0]) == ("pbs", True)
    other = both | {"PBS_NODEFILE": str(CAPTURED / "pbs/nodefile_sel2_scatter.txt")}
    with pytest.raises(UserError, match=r"are both set, with different nodes: n1, n2 and n3, n4") as raised:
        find_allocation(other)
    assert "--scheduler slurm or --scheduler pbs" in str(raised.value)
    assert "launch --hostfile hosts …" in str(raised.value)
    for wanted, hosts, left in (("slurm", ["n1", "n2"], "PBS_JOBID=5.login"),
                                ("pbs", ["n3", "n4"], "SLURM_JOB_ID=3")):
        allocation = find_allocation(other, wanted)
        assert (allocation.scheduler, [host.name for host in allocation.hosts]) == (wanted, hosts)
        assert allocation.notes == (f"ignoring {left} (--scheduler {wanted})",)


@pytest.mark.parametrize("stale", ["slurm", "pbs"])
def test_of_two_jobs_the_one_with_this_node_is_used(tmp_path: Path, stale: str) -> None:
    """Variables left by an outer shell name nodes that do not include this one."""
    here = socket.gethostname()
    (tmp_path / "nodes").write_text("n3\nn4\n" if stale == "pbs" else f"{here}\nn9\n")
    env = captured_env("slurm/env_sbatch_script.txt")
    env |= {"PBS_JOBID": "5.login", "PBS_NODEFILE": str(tmp_path / "nodes")}
    if stale == "pbs":
        env |= {"SLURM_JOB_NODELIST": f"n9,{here}"}
    allocation = find_allocation(env)
    assert allocation.scheduler == ("pbs" if stale == "slurm" else "slurm")
    assert {host.name for host in allocation.hosts} == {here, "n9"}
    assert allocation.notes[-1] == ("SLURM_JOB_ID=3 and PBS_JOBID=5.login are both set; "
                                    f"using {allocation.scheduler}: only its job has this node")


def test_a_requested_scheduler() -> None:
    allocation = find_allocation(captured_env("slurm/env_sbatch_script.txt"), "none")
    assert (allocation.scheduler, allocation.source, allocation.notes) == (
        "none", "--scheduler none", ("ignoring SLURM_JOB_ID=3 (--scheduler none)",))
    allocation = find_allocation(captured_env("slurm/env_srun_pmi2_rank1.txt"), "slurm")
    assert (allocation.scheduler, allocation.notes) == (
        "slurm", ("ignoring the rank variables of srun with PMI (PMI_RANK) (--scheduler slurm)",))
    assert "an inconsistent set (PMI_RANK=1 is set" in find_allocation({"PMI_RANK": "1"}, "none").notes[0]
    with pytest.raises(UserError, match="--scheduler pbs was given, but PBS_JOBID is not set"):
        find_allocation(captured_env("slurm/env_sbatch_script.txt"), "pbs")


def test_hostfile_forms() -> None:
    text = "# ours\nn1 slots=2   # two\n\nn2:4\nn3\nn4.example\nn4\n10.0.0.1\nn5 slots = 3\n"
    assert hostfile.parse(text, "f") == (Node("n1", 2), Node("n2", 4), Node("n3"), Node("n4.example", 2),
                                         Node("10.0.0.1"), Node("n5", 3))


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
    with pytest.raises(UserError, match="lists no nodes"):
        hostfile.read(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8 text"):
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
    assert fold_numbers((0, 1, 2, 3, 8, 10, 11)) == "0-3,8,10-11"


@pytest.mark.parametrize(("files", "library", "mask", "none"), [
    (("null", "hwrng"), None, None, True),
    (("nvidiactl", "nvidia0"), None, None, False),
    (("nvidiactl", "nvidia0"), None, "", True),
    (("dri", "kfd"), None, None, False),
    (("accel",), None, "", False),
    # The display adapter of a laptop, and an accelerator.
    (("dri",), None, None, True),
    (("dri",), "libze_intel_gpu.so.1", None, False),
])
def test_a_host_without_any_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...],
                                        library: str | None, mask: str | None, none: bool) -> None:
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    if library:
        (tmp_path / library).touch()
    monkeypatch.setattr(devices_module, "_DEV", tmp_path / "dev")
    monkeypatch.setattr(devices_module, "_LIBRARY_PLACES", (str(tmp_path),))
    for name in ("_NVIDIA", "_AMD"):
        monkeypatch.setattr(devices_module, name, tmp_path / "no")
    assert has_no_accelerator({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}) == none


@pytest.mark.parametrize("files", ["StdErr=OUT\n   StdOut=/dev/null", "StdErr=\n   StdOut=OUT"])
def test_the_cancellation_is_read_from_the_jobs_output_file(tmp_path: Path, files: str) -> None:
    """Slurm 25.11 leaves StdErr empty unless it was requested."""
    line = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE to SIGNAL Terminated ***\n"
    (tmp_path / "job.log").write_text(f"loss 2.0\n{line}")
    text = f"JobId=7\n   {files}\n".replace("OUT", str(tmp_path / "job.log"))
    path = make_program(tmp_path / "bin", "scontrol", f"cat <<'END'\n{text}END")
    env = {"SLURM_JOB_ID": "7", "PATH": f"{path}:/usr/bin:/bin"}
    assert SlurmScheduler().cancellations(env) == [line.rstrip()]
