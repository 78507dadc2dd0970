"""Values of a job, of a step, of this node, and of other nodes: each is used only where it holds."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import pytest
from launch_runs import CAPTURED

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics import devices as devices_module
from ezpz_llm.launcher.basics.devices import visible_devices
from ezpz_llm.launcher.basics.node_variables import has_uuids, restore_variables
from ezpz_llm.launcher.jobs.option_parsing import parse
from ezpz_llm.launcher.jobs.schedulers.scheduler import Origin, Place
from ezpz_llm.launcher.planning.environment import variables_of_this_node
from ezpz_llm.launcher.planning.plan import LaunchPlan, build_plan
from ezpz_llm.launcher.planning.plan_text import as_json

_HERE = socket.gethostname()
_UUIDS = "GPU-1f2e3d4c-0000-1111-2222-333344445555,GPU-5f2e3d4c-0000-1111-2222-333344445555"
_SHOW_JOB = (CAPTURED / "slurm/scontrol_show_job_d_gpus.txt").read_text()


def _programs(folder: Path, **bodies: str) -> str:
    folder.mkdir(exist_ok=True)
    for name, body in {"scontrol": "exit 1", "squeue": "exit 1", "qstat": "exit 1", "srun": "exit 1",
                       "mpiexec": "echo HYDRA build details:", **bodies}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(stat.S_IRWXU)
    return f"{folder}:/usr/bin:/bin"


def _plan(words: str, env: dict[str, str]) -> LaunchPlan:
    return build_plan(parse(["--dry-run", *words.split(), "hostname"]), env)


def _counts(plan: LaunchPlan) -> dict[str, int]:
    return {host: sum(place.host == host for place in plan.ranks) for host in plan.hosts}


def _slurm(folder: Path, shown: str = "", nodes: str = "", **variables: str) -> dict[str, str]:
    """Return a job on n1 and n2; `shown` is the output of `scontrol show job -d`, `nodes` of `show node`."""
    folder.mkdir(exist_ok=True)
    (folder / "shown").write_text(shown)
    (folder / "nodes").write_text(nodes)
    answer = f'case "$*" in *node*) cat {folder}/nodes;; *) cat {folder}/shown;; esac'
    return {"PATH": _programs(folder / "bin", scontrol=answer), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2", **{f"SLURM_{name}": value for name, value in variables.items()}}


def _shown(*, held: int, request: str = "", cpus: str = "0-7",
           units: str = "Socks/Node=* ReqB:S:C:T=0:0:*:*") -> str:
    devices = f"gpu:{held}(IDX:0-{held - 1})" if held else ""
    lines = [units, f"  Nodes=n[1-2] CPU_IDs={cpus} Mem=0 GRES={devices}", request]
    return "".join(f"   {line}\n" for line in lines)




@pytest.mark.parametrize(("shown", "variables", "ranks", "options"), [
    # The job holds the devices of its exclusive nodes. The batch script's mask is not that of a step.
    (_shown(held=4), {}, 4, "--gpus-per-node=4"),
    (_shown(held=4, request="TresPerNode=gres:gpu:2"), {}, 2, "--gpus-per-node=2"),
    (_shown(held=4, request="TresPerNode=gres/gpu:a100:2"), {"GPUS_PER_NODE": "a100:2"}, 2,
     "--gpus-per-node=a100:2"),
    (_shown(held=2), {"GPUS": "4"}, 2, "--gpus=4 --gpus-per-node=2"),
    (_shown(held=0), {}, 1, ""),
])
def test_a_slurm_step_requests_the_planned_devices(tmp_path: Path, shown: str, variables: dict[str, str],
                                                   ranks: int, options: str) -> None:
    env = _slurm(tmp_path, shown, **variables)
    mask = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_JOB_GPUS": "0,1,2,3"} if options else {}
    plan = _plan("", env | mask)
    assert _counts(plan) == {"n1": ranks, "n2": ranks}
    assert " ".join(word for word in plan.argv if word.startswith("--gpus")) == options


def test_daemons_of_mpiexec_get_the_devices_too(tmp_path: Path) -> None:
    plan = _plan("--launcher mpiexec", _slurm(tmp_path, _shown(held=4)))
    assert plan.env["HYDRA_LAUNCHER_EXTRA_ARGS"].value == "--overlap --export=ALL --gpus-per-node=4"


@pytest.mark.parametrize(("variables", "expected"), [
    # Numbers of devices, of a rank, and of the ranks' own: n1 has two devices, n2 one.
    ({}, ({"n1": 2, "n2": 1}, "--gpus-per-task=1")),
    ({"NTASKS": "2", "TASKS_PER_NODE": "1(x2)"}, ({"n1": 1, "n2": 1}, "--gpus-per-task=1")),
    ({"NTASKS": "4", "TASKS_PER_NODE": "2(x2)"}, ({"n1": 2, "n2": 2}, "--gpus=2", "--gpus-per-node=1")),
])
def test_unequal_numbers_of_devices(tmp_path: Path, variables: dict[str, str], expected: tuple) -> None:
    shown = (CAPTURED / "slurm/scontrol_show_job_d_gpus_uneven.txt").read_text()
    plan = _plan("", _slurm(tmp_path, shown, GPUS="3", **variables))
    assert (_counts(plan), *(word for word in plan.argv if word.startswith("--gpus"))) == expected
    assert not any("may see fewer" in note for note in plan.notes)
    with pytest.raises(UserError, match="cannot give the nodes"):
        _plan("--launcher mpiexec --ppn 2", _slurm(tmp_path, shown, GPUS="3"))


@pytest.mark.parametrize("request_", [{"GPUS_PER_TASK": "2"}, {"GPUS_PER_TASK": "a100:2"},
                                      {"TRES_PER_TASK": "cpu=4,gres/gpu=2"}, {"TRES_PER_TASK": "gres/gpu:a100=2"}])
def test_devices_of_each_rank(tmp_path: Path, request_: dict[str, str]) -> None:
    env = _slurm(tmp_path, _shown(held=4), NTASKS="4", TASKS_PER_NODE="2(x2)", **request_)
    plan = _plan("", env)
    assert _counts(plan) == {"n1": 2, "n2": 2}
    assert "--gpus-per-task=2" in plan.argv
    assert not any("DEVICES" in note for note in plan.notes)
    # The advice can be followed: ranks that need more devices than the job has share them.
    (note,) = (note for note in _plan("--ppn 1", env).notes if "IDLE" in note)
    assert "--ppn 2 uses all" in note
    four = _plan("--ppn 4", env)
    assert "--gpus-per-node=4" in four.argv
    assert "--gpus-per-task=2" not in four.argv


def test_advice_on_idle_devices_can_be_followed(tmp_path: Path) -> None:
    shown = (CAPTURED / "slurm/scontrol_show_job_d_gpus_uneven.txt").read_text()
    plan = _plan("--ppn 1", _slurm(tmp_path, shown))
    assert any("omitting --ppn uses all" in note for note in plan.notes)
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    plan = _plan(f"--hostfile {tmp_path}/hosts", _slurm(tmp_path, _shown(held=4)))
    assert any("a hostfile with slots for each device uses all" in note for note in plan.notes)


_IMPLIED = ("SLURM_NTASKS=2 is ignored, because Slurm derives it from the requested cores or threads (--ppn sets"
            " ranks)")


@pytest.mark.parametrize(("shown", "variables", "ranks"), [
    # --hint=nomultithread and --threads-per-core: sbatch sets a total of nodes x sockets x cores x threads.
    (_shown(held=4), {"NTASKS": "2", "TASKS_PER_NODE": "1(x2)", "THREADS_PER_CORE": "1"}, 4),
    (_shown(held=4), {"NPROCS": "2", "TASKS_PER_NODE": "1(x2)", "THREADS_PER_CORE": "1"}, 4),
    (_shown(held=4), {"NTASKS": "4", "TASKS_PER_NODE": "2(x2)", "THREADS_PER_CORE": "2"}, 4),
    (_shown(held=4, units="Socks/Node=2 ReqB:S:C:T=0:0:8:1"),
     {"NTASKS": "32", "TASKS_PER_NODE": "16(x2)", "THREADS_PER_CORE": "1"}, 4),
    (_shown(held=4, units="ReqB:S:C:T=0:0:*:* Socks/Node=1"), {"NTASKS": "2", "TASKS_PER_NODE": "1(x2)"}, 4),
    # Slurm 22.05 with --ntasks-per-gpu: the total is still the derived one.
    (_shown(held=2), {"NTASKS": "2", "TASKS_PER_NODE": "2(x2)", "THREADS_PER_CORE": "1", "NTASKS_PER_GPU": "1"},
     2),
    # Without devices there is one rank per node.
    (_shown(held=0), {"NTASKS": "2", "TASKS_PER_NODE": "1(x2)", "THREADS_PER_CORE": "1"}, 1),
    # Requests: another total, or tasks per node.
    (_shown(held=4), {"NTASKS": "4", "TASKS_PER_NODE": "2(x2)", "THREADS_PER_CORE": "1"}, 2),
    (_shown(held=4), {"NTASKS": "2", "TASKS_PER_NODE": "1(x2)", "THREADS_PER_CORE": "1", "NTASKS_PER_NODE": "1"},
     1),
    (_shown(held=4), {"NTASKS": "2", "TASKS_PER_NODE": "1(x2)"}, 1),
])
def test_tasks_that_slurm_derives_are_no_request(tmp_path: Path, shown: str, variables: dict[str, str],
                                                 ranks: int) -> None:
    plan = _plan("", _slurm(tmp_path, shown, **variables))
    assert _counts(plan) == {"n1": ranks, "n2": ranks}


def test_a_note_names_ignored_tasks(tmp_path: Path) -> None:
    variables = {"NTASKS": "2", "TASKS_PER_NODE": "1(x2)", "THREADS_PER_CORE": "1"}
    assert _IMPLIED in _plan("", _slurm(tmp_path, _shown(held=4), **variables)).notes
    assert _IMPLIED not in _plan("", _slurm(tmp_path, _shown(held=0), **variables)).notes


def test_tasks_per_socket(tmp_path: Path) -> None:
    nodes = "".join(f"NodeName=n{number} Arch=x86_64 CPUTot=8 Boards=1 Sockets=2 ThreadsPerCore=1\n"
                    for number in (1, 2))
    plan = _plan("", _slurm(tmp_path, "", nodes, NTASKS_PER_SOCKET="2", TASKS_PER_NODE="8(x2)",
                            JOB_CPUS_PER_NODE="8(x2)"))
    assert _counts(plan) == {"n1": 4, "n2": 4}
    assert plan.ranks_source == "SLURM_NTASKS_PER_SOCKET=2, 2 sockets per node"
    plan = _plan("", _slurm(tmp_path, NTASKS_PER_SOCKET="2"))
    assert "SLURM_NTASKS_PER_SOCKET=2 is ignored: the nodes' sockets are unknown (--ppn sets ranks)" in plan.notes


def test_cpus_that_no_variable_has(tmp_path: Path) -> None:
    """scontrol knows them; without it, ranks share the CPUs of the step."""
    plan = _plan("--ppn 2", _slurm(tmp_path, _shown(held=0)))
    assert plan.argv[plan.argv.index("-c") + 1] == "4"
    assert plan.allocation.cores_from == Origin("scontrol show job", Place.JOB)
    plan = _plan("--ppn 2", _slurm(tmp_path))
    assert "-c" not in plan.argv
    assert "--cpu-bind=none" in plan.argv
    assert plan.binding.source == "the CPUs per node are unknown"


@pytest.mark.parametrize(("words", "shown", "more", "devices"), [
    ("", _shown(held=4), {}, "scontrol show job (each node of the job)"),
    ("", "", {"SLURM_GPUS_PER_NODE": "2"}, "SLURM_GPUS_PER_NODE (each node of the job)"),
    ("", "", {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "4,5"},
     "CUDA_VISIBLE_DEVICES (this node, assumed of the others)"),
    ("", "", {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "0,1", "SLURM_STEP_ID": "0",
              "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_GPUS_PER_NODE": "4"},
     "CUDA_VISIBLE_DEVICES (the step of this process)"),
    ("", _shown(held=4), {"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES (all nodes, chosen by the user)"),
    ("--site perlmutter", "", {}, "site perlmutter (each node of the site)"),
    ("", "", {}, None),
])
def test_the_plan_names_the_place_of_the_devices(tmp_path: Path, words: str, shown: str, more: dict[str, str],
                                                 devices: str | None) -> None:
    sources = as_json(_plan(words, _slurm(tmp_path, shown, JOB_CPUS_PER_NODE="8(x2)") | more))["sources"]
    assert sources.get("devices") == devices
    assert sources["cores"] == "SLURM_JOB_CPUS_PER_NODE (each node of the job)"


@pytest.mark.parametrize("site", ["perlmutter", "lumi", "jupiter"])
def test_cpu_nodes_of_a_site_with_accelerators(tmp_path: Path, site: str) -> None:
    """The job requests no devices, which the site's jobs must. If Slurm does not answer, the site file counts."""
    plan = _plan(f"--site {site}", _slurm(tmp_path, _shown(held=0)))
    assert _counts(plan) == {"n1": 1, "n2": 1}
    assert len(_plan(f"--site {site}", _slurm(tmp_path)).ranks) > 2
    # On a node of the job, its drivers count.
    here = _slurm(tmp_path) | {"SLURM_JOB_NODELIST": _HERE, "SLURM_JOB_NUM_NODES": "1"}
    assert len(_plan(f"--site {site}", here).ranks) == 1




def _node_file(folder: Path, name: str, text: str, **more: str) -> dict[str, str]:
    (folder / "nodefile").write_text(text)
    variables = {"pbs": {"PBS_JOBID": "7.x", "PBS_NODEFILE": f"{folder}/nodefile"},
                 "sge": {"JOB_ID": "7", "NHOSTS": "2", "PE_HOSTFILE": f"{folder}/nodefile"},
                 "lsf": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": text}}[name]
    return {"PATH": _programs(folder / "bin"), **variables, **more}


_SGE = "{} {} all.q@x UNDEFINED\n"


@pytest.mark.parametrize(("name", "text", "more", "ranks"), [
    ("sge", _SGE.format("g1", 40) + _SGE.format("g2", 40), {}, 4),
    ("sge", _SGE.format("g1", 2) + _SGE.format("g2", 2), {}, 2),
    ("lsf", "g1 40 g2 40", {}, 4),
    ("lsf", "g1 4 g2 4", {}, 4),
    ("pbs", "g1\n" * 48 + "g2\n" * 48, {"NCPUS": "48"}, 4),
    ("pbs", "g1\n" * 48 + "g2\n" * 48, {"PBS_NUM_PPN": "48"}, 4),
    # mpiprocs=8 of 48 CPUs is a number of ranks.
    ("pbs", "g1\n" * 8 + "g2\n" * 8, {"NCPUS": "48"}, 8),
    ("pbs", "g1\n" * 2 + "g2\n" * 2, {"NCPUS": "2"}, 2),
])
def test_slots_that_count_cores(tmp_path: Path, name: str, text: str, more: dict[str, str], ranks: int) -> None:
    """On nodes with four accelerators there is a rank for each; without any, the slots count."""
    env = _node_file(tmp_path, name, text, **more)
    assert _counts(_plan("", env | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})) == {"g1": ranks, "g2": ranks}
    slots = len(text.splitlines()) // 2 if name == "pbs" else int(text.split()[1])
    assert _counts(_plan("", env)) == {"g1": slots, "g2": slots}
    assert _counts(_plan("--ppn 3", env | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})) == {"g1": 3, "g2": 3}


def test_cpus_of_other_nodes_from_qstat(tmp_path: Path) -> None:
    env = _node_file(tmp_path, "pbs", "g1\n" * 4 + "g2\n" * 6, NCPUS="4", CUDA_VISIBLE_DEVICES="0,1")
    assert _plan("", env).allocation.cores_from == Origin("NCPUS", Place.NODE)
    assert _counts(_plan("", env)) == {"g1": 2, "g2": 6}
    (tmp_path / "answer").write_text('{"Jobs": {"7": {"exec_host": "g1/0*4+g2/0*6",'
                                     ' "exec_vnode": "(g1:ncpus=4)+(g2:ncpus=6)"}}}')
    env["PATH"] = _programs(tmp_path / "bin", qstat=f"cat {tmp_path}/answer")
    assert _counts(_plan("", env)) == {"g1": 2, "g2": 2}




@pytest.mark.parametrize(("env", "ids", "source"), [
    ({"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "0"}, ("0",), "HIP_VISIBLE_DEVICES"),
    ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "3,1"}, ("7", "5"), "HIP_VISIBLE_DEVICES"),
    ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1,2,0"}, ("5",), "HIP_VISIBLE_DEVICES"),
    ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": ""}, (), "HIP_VISIBLE_DEVICES"),
    ({"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}, (), "HIP_VISIBLE_DEVICES"),
    ({"ROCR_VISIBLE_DEVICES": "GPU-ab,GPU-cd", "HIP_VISIBLE_DEVICES": "1"}, ("GPU-cd",), "HIP_VISIBLE_DEVICES"),
    ({"HIP_VISIBLE_DEVICES": "2,3"}, ("2", "3"), "HIP_VISIBLE_DEVICES"),
    # HIP uses CUDA_VISIBLE_DEVICES in the same way, but only on AMD's devices.
    ({"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "1"}, ("5",), "CUDA_VISIBLE_DEVICES"),
    ({"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1"}, ("5",),
     "HIP_VISIBLE_DEVICES"),
])
def test_masks_apply_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str],
                             ids: tuple[str, ...], source: str) -> None:
    monkeypatch.setattr(devices_module, "_NVIDIA", tmp_path / "none")
    if "CUDA_VISIBLE_DEVICES" in env:
        for number in range(8):
            (tmp_path / f"amd/{number}").mkdir(parents=True)
            (tmp_path / f"amd/{number}/gpu_id").write_text("7\n")
        monkeypatch.setattr(devices_module, "_AMD", tmp_path / "amd")
    visible = visible_devices(env)
    assert (visible.ids, visible.source) == (ids, source)


@pytest.mark.parametrize(("env", "ids"), [
    ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, ("0", "1")), ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, ("1",)),
    ({"CUDA_VISIBLE_DEVICES": "GPU-ab,1"}, ("GPU-ab", "1")), ({"CUDA_VISIBLE_DEVICES": "4"}, ()),
    ({"CUDA_VISIBLE_DEVICES": ""}, ()), ({}, ("0", "1"))])
def test_a_mask_from_a_larger_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str],
                                   ids: tuple[str, ...]) -> None:
    """CUDA ignores the first number that this node does not have, and all that follow."""
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "nvidia" / name).mkdir(parents=True)
    monkeypatch.setattr(devices_module, "_NVIDIA", tmp_path / "nvidia")
    assert visible_devices(env).ids == ids


@pytest.mark.parametrize(("env", "names"), [
    ({"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "8"}, set()),
    ({"CUDA_VISIBLE_DEVICES": _UUIDS}, {"CUDA_VISIBLE_DEVICES"}),
    ({"CUDA_VISIBLE_DEVICES": "MIG-41b36d1a-1111-2222-3333-444455556666"}, {"CUDA_VISIBLE_DEVICES"}),
    ({"ROCR_VISIBLE_DEVICES": "GPU-5f2e3d4c00001111"}, {"ROCR_VISIBLE_DEVICES"}),
    ({"ZE_AFFINITY_MASK": "0.0,0.1,1"}, set()),
    # Set by the schedulers for this node.
    ({"CUDA_VISIBLE_DEVICES": "2,3", "ROCR_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "2,3"},
     {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}),
    ({"CUDA_VISIBLE_DEVICES": "3", "SLURM_JOB_GPUS": "2,3"}, set()),
    ({"PBS_JOBID": "7", "NCPUS": "8", "OMP_NUM_THREADS": "8"}, {"OMP_NUM_THREADS"}),
])
def test_variables_of_this_node(env: dict[str, str], names: set[str]) -> None:
    assert variables_of_this_node(env).keys() == names


def test_a_mask_with_uuids_stays_on_its_node(tmp_path: Path) -> None:
    """The ranks of other nodes keep the values of their own daemons; those of this node get the mask back."""
    env = _node_file(tmp_path, "pbs", f"{_HERE}\nn2\n", CUDA_VISIBLE_DEVICES=_UUIDS, MASTER_ADDR="10.0.0.1")
    plan = _plan("", env)
    assert _counts(plan) == {_HERE: 2, "n2": 2}
    # n2's devices are not this node's.
    assert {place.device for place in plan.ranks} == {None}
    assert plan.removed == ("CUDA_VISIBLE_DEVICES",)
    packed = plan.env["EZPZ_LLM_NODE_VARIABLES"].value
    for own, expected in (({}, _UUIDS), ({"CUDA_VISIBLE_DEVICES": "GPU-other"}, "GPU-other")):
        rank = {"EZPZ_LLM_NODE_VARIABLES": packed, **own}
        restore_variables(rank)
        assert rank == {"CUDA_VISIBLE_DEVICES": expected}
    rank = {"EZPZ_LLM_NODE_VARIABLES": json.dumps({"node": "n2", "variables": {"CUDA_VISIBLE_DEVICES": "GPU-n2"}})}
    restore_variables(rank)
    assert rank == {}
    # A user's indices hold for all nodes, and a single node needs no decision.
    assert not _plan("", env | {"CUDA_VISIBLE_DEVICES": "0,1"}).removed
    del env["MASTER_ADDR"]
    alone = _plan("--nodes 1", env)
    assert not alone.removed
    assert [place.device for place in alone.ranks] == _UUIDS.split(",")
    # Open MPI passes only named variables.
    env["PATH"] = _programs(tmp_path / "bin", mpiexec="echo mpiexec '(Open MPI) 5.0.11'")
    named = _plan("", env | {"MASTER_ADDR": "10.0.0.1"}).argv
    assert "CUDA_VISIBLE_DEVICES" not in named
    assert "EZPZ_LLM_NODE_VARIABLES" in named


def test_uuids() -> None:
    assert has_uuids(_UUIDS)
    assert not has_uuids("0, 1.0,-1")
    assert not has_uuids("")
