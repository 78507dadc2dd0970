"""Tests that hold for every scheduler in the table.

The jobs follow the schedulers' documentation and use this machine's hostname, so that ranks are real processes,
started by MPICH's mpiexec or by the stand-ins for srun, flux and jsrun (helpers/step_standin.py). Plans for two
nodes start nothing. `-m full` has real runs with all eight schedulers; those of the newest launchers always run.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import step_standin
from launch_runs import captured_env, launch, left_over, need_mpiexec, record, scheduler as make_program

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.jobs.schedulers import SCHEDULERS, find_allocation, schedulers

_SGE = "{0} {1} all.q@{0} UNDEFINED"


@dataclass(frozen=True)
class _Job:
    """Environment of a scheduler's job.

    Attributes:
        variables: function of the nodes and the ranks or CPUs of each.
        lines: content of the file FILE that the variables name.
        starter: program that starts the ranks.
        uneven: ranks on nodes with 1 and 2 slots, or the expected error message.
    """

    starter: str
    variables: Callable[[list[str], list[int]], Mapping[str, str]]
    uneven: list[int] | str
    lines: Callable[[str, int], str] = lambda host, count: f"{host}\n" * count


def _slurm(hosts: list[str], counts: list[int]) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": ",".join(hosts), "SLURM_JOB_NUM_NODES": str(len(hosts)),
            "SLURM_NTASKS": str(sum(counts)), "SLURM_TASKS_PER_NODE": ",".join(map(str, counts)),
            "SLURM_JOB_CPUS_PER_NODE": ",".join(["8"] * len(hosts)), "SLURM_JOB_END_TIME": "4000000000"}


_JOBS = {
    "slurm": _Job("srun", _slurm, [1, 2]),
    "pbs": _Job("mpiexec", lambda hosts, counts: {"PBS_JOBID": "7.x", "PBS_NODEFILE": "FILE"}, [1, 2]),
    "flux": _Job("flux", lambda hosts, counts: {"FLUX_ENCLOSING_ID": "ƒ2"},
                 "Flux spreads ranks over nodes evenly and cannot place [1, 2] ranks per node"),
    "lsf": _Job("jsrun", lambda hosts, counts: {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": " ".join(
        f"{host} {count}" for host, count in zip(hosts, counts, strict=True))},
                "jsrun requires the same number of ranks on every node"),
    "sge": _Job("mpiexec", lambda hosts, counts: {"JOB_ID": "7", "NHOSTS": str(len(hosts)), "PE_HOSTFILE": "FILE"},
                [1, 2], lambda host, count: f"{_SGE.format(host, count)}\n"),
    # A line is a core, not a rank; so lines only give the number of CPUs per node.
    "oar": _Job("mpiexec", lambda hosts, counts: {"OAR_JOB_ID": "7", "OAR_NODEFILE": "FILE"}, [1, 1]),
    "cobalt": _Job("mpiexec", lambda hosts, counts: {"COBALT_JOBID": "7", "COBALT_NODEFILE": "FILE"}, [1, 2]),
    "pjm": _Job("mpiexec", lambda hosts, counts: {"PJM_JOBID": "7", "PJM_O_NODEINF": "FILE"}, [1, 2]),
}
_ALL = [*_JOBS]
_REAL = [name if name in ("flux", "lsf") else pytest.param(name, marks=pytest.mark.full) for name in _ALL]
_RANK_OF = {"srun": "SLURM_PROCID", "mpiexec": "PMI_RANK", "flux": "FLUX_TASK_RANK", "jsrun": "JSM_NAMESPACE_RANK"}


def test_the_table_is_whole() -> None:
    assert [one.NAME for one in SCHEDULERS] == _ALL


def _env(name: str, folder: Path, hosts: list[str], counts: list[int], gpus: str = "") -> dict[str, str]:
    """Return the variables of such a job, with the programs of its starter first on PATH."""
    job = _JOBS[name]
    (folder / "nodes").write_text("".join(map(job.lines, hosts, counts)))
    stand_in = step_standin.resources(",".join(hosts), f"0-{len(hosts) - 1}" if hosts[1:] else "0", gpus)
    names = [one for one in (job.starter,) if one != "mpiexec"]
    programs = step_standin.make(folder / "bin", *names, resources=stand_in)
    if hosts[1:] and job.starter == "mpiexec":
        make_program(programs, "mpiexec", "echo HYDRA build details:")
    own = {variable: str(folder / "nodes") if value == "FILE" else value
           for variable, value in job.variables(hosts, counts).items()}
    return own | {"PATH": f"{programs}:/usr/bin:/bin"}


def _plan(name: str, folder: Path, *words: str, counts: list[int] | None = None, gpus: str = "",
          **more: str) -> dict | str:
    """Return the plan of `launch --dry-run WORDS hostname` on h2 and h1, in that order, or the error message."""
    done = launch(folder, "--dry-run", "--json", *words, "hostname",
                  **_env(name, folder, ["h2", "h1"], counts or [2, 2], gpus) | more)
    assert done.returncode in (0, 2), done.stderr
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def _run(name: str, folder: Path, *words: str, **more: str):
    if _JOBS[name].starter == "mpiexec":
        need_mpiexec()
    return launch(folder, "--run-dir", "r", *words, **_env(name, folder, [socket.gethostname()], [4]) | more)




@pytest.mark.parametrize("name", _ALL)
def test_hosts_keep_their_order(tmp_path: Path, name: str) -> None:
    """Rank 0 is on the job's first node. The user can choose another order, or a note says that it is fixed."""
    plan = _plan(name, tmp_path)
    assert isinstance(plan, dict)
    # jsrun sorts nodes, according to Summit's guide.
    own = ["h1", "h2"] if name == "lsf" else ["h2", "h1"]
    assert plan["hosts"] == own
    of_ranks = [rank["host"] for rank in plan["ranks"]]
    assert of_ranks == sorted(of_ranks, key=own.index)
    other = _plan(name, tmp_path, "--hosts", ",".join(reversed(own)))
    if name == "lsf":
        assert "jsrun starts ranks only on the first nodes of the job" in other
    elif schedulers()[name].KEEPS_NODE_ORDER:
        assert isinstance(other, dict)
        assert other["hosts"] == own
        assert any("numbers nodes in the job's order: rank 0 is on h2" in note for note in other["notes"])
    else:
        assert isinstance(other, dict)
        assert other["hosts"] == own[::-1]


@pytest.mark.parametrize("name", _ALL)
def test_uneven_hosts_get_what_the_job_has_there(tmp_path: Path, name: str) -> None:
    expected = _JOBS[name].uneven
    if isinstance(expected, str):
        few, many = ("h2", "h1") if name == "flux" else ("h1", "h2")
        (tmp_path / "hosts").write_text(f"{few} slots=1\n{many} slots=2\n")
        assert expected in _plan(name, tmp_path, "--hostfile", str(tmp_path / "hosts"))
        return
    plan = _plan(name, tmp_path, counts=[1, 2])
    assert isinstance(plan, dict)
    assert [sum(rank["host"] == host for rank in plan["ranks"]) for host in ("h2", "h1")] == expected
    if name == "oar":
        assert any("nodes differ: 1 CPU" in note for note in plan["notes"])


@pytest.mark.parametrize("name", _ALL)
def test_idle_devices_are_reported(tmp_path: Path, name: str) -> None:
    """The number of devices comes from the scheduler if it counts them, else from the mask on this node."""
    plan = _plan(name, tmp_path, "--ppn", "1", CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert isinstance(plan, dict)
    assert any(note.startswith("IDLE DEVICES: 1 rank for the 4 devices of h") for note in plan["notes"])
    if name == "flux":
        counted = _plan(name, tmp_path, "--ppn", "1", gpus="0-3")
        assert isinstance(counted, dict)
        assert any("--ppn 4 uses all (Flux)" in note for note in counted["notes"])


@pytest.mark.parametrize(("name", "shell"), [
    ("lsf", ["blaunch"]), ("sge", ["qrsh", "-inherit"]), ("oar", ["oarsh"]), ("pjm", ["pjrsh"])])
def test_daemons_start_by_the_schedulers_remote_shell(tmp_path: Path, name: str, shell: list[str]) -> None:
    """Use the scheduler's remote shell if it is on PATH, else ssh."""
    env = _env(name, tmp_path, ["h2", "h1"], [2, 2])
    programs = make_program(tmp_path / "bin", "mpiexec", "echo HYDRA build details:")

    def plan() -> tuple[list[str], str | None]:
        done = launch(tmp_path, "--dry-run", "--json", "--launcher", "mpiexec", "hostname", **env)
        found = json.loads(done.stdout)
        return found["argv"], found["env"].get("HYDRA_LAUNCHER_EXTRA_ARGS")

    words, extra = plan()
    assert "-launcher-exec" not in words
    assert extra is None
    make_program(programs, shell[0], "exit 1")
    words, extra = plan()
    at = words.index("-launcher")
    assert words[at:at + 4] == ["-launcher", "rsh", "-launcher-exec", str(programs / shell[0])]
    assert extra == (" ".join(shell[1:]) or None)


@pytest.mark.parametrize("name", _ALL)
def test_a_job_that_is_heterogeneous_or_a_part_of_one(tmp_path: Path, name: str) -> None:
    """Reject Slurm's heterogeneous jobs, whose groups one srun cannot span.

    With other schedulers, different chunks are in one list of nodes, which all get ranks.
    """
    if name == "slurm":
        with pytest.raises(UserError, match="is heterogeneous, with 2 components") as raised:
            find_allocation(captured_env("slurm/env_het_batch.txt"))
        assert "--hostfile hosts …" in (raised.value.instead or "")
        return
    plan = _plan(name, tmp_path, "--ppn", "1", counts=[1, 2])
    assert isinstance(plan, dict)
    # In LSF, a first node with one slot, while the others have more, is the launch node.
    hosts = ["h1"] if name == "lsf" else ["h1", "h2"]
    assert sorted(rank["host"] for rank in plan["ranks"]) == hosts




@pytest.mark.parametrize("name", _REAL)
def test_every_rank_is_shown_and_knows_its_place(tmp_path: Path, name: str) -> None:
    """Check labelled output, the output of all ranks without options, and the variables that other scripts read."""
    (tmp_path / "script.py").write_text(
        "import os; print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE',"
        " 'MASTER_ADDR')), os.environ['MASTER_PORT'].isdigit())\n")
    done = _run(name, tmp_path, "-n", "3", sys.executable, "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 3 0 3 127.0.0.1 True\n"
    shown = [line for line in done.stderr.splitlines() if re.match(r"\[\d\]", line)]
    assert shown == ["[1] 1 3 1 3 127.0.0.1 True", "[2] 2 3 2 3 127.0.0.1 True"]
    assert record(tmp_path / "r")["launch"]["scheduler"] == name
    labelled = _run(name, tmp_path, "-n", "3", "--tee", "all", "hostname")
    assert sorted(labelled.stdout.splitlines()) == [f"[{rank}] {socket.gethostname()}" for rank in range(3)]


_LATE = """
import os, sys, time
if "ezpz_llm.launcher.on_nodes.shim" in sys.orig_argv and os.environ.get("{variable}") == "1":
    time.sleep(1000)
"""


@pytest.mark.full
@pytest.mark.parametrize("name", _ALL)
def test_a_rank_that_never_starts(tmp_path: Path, name: str) -> None:
    (tmp_path / "late").mkdir()
    (tmp_path / "late/sitecustomize.py").write_text(_LATE.format(variable=_RANK_OF[_JOBS[name].starter]))
    late = {"PYTHONPATH": str(tmp_path / "late")}
    done = _run(name, tmp_path, "-n", "2", "--start-timeout", "4", "sleep", "100", **late)
    assert done.returncode == 124, done.stderr
    assert "the launcher could not start the ranks: rank 1 on" in done.stderr
    assert "did not start within 4 s (--start-timeout)" in done.stderr
    assert left_over(tmp_path / "r") == {}


@pytest.mark.parametrize("name", _REAL)
def test_a_rank_that_leaves_early_is_the_cause(tmp_path: Path, name: str) -> None:
    """The peers' lost connections are only the symptom."""
    (tmp_path / "leaves.py").write_text("""
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(0)
time.sleep(1.5)
raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
""")
    done = _run(name, tmp_path, "-n", "3", sys.executable, "leaves.py")
    assert done.returncode == 1, done.stderr
    assert re.search(r"rank 1 on \S+ ended with code 0 after \d\.\d s while", done.stderr), done.stderr
