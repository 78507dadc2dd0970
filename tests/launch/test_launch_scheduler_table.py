"""Every scheduler in the table gives the correct plan or an error that names it, never silently a single rank.

The environments of Slurm and PBS are captured. Those of the others follow their documentation, which each
scheduler's file cites, and `flux`, `jsrun` and `blaunch` are stand-ins (helpers/step_standin.py).
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import step_standin
from hypothesis import given, settings, strategies as st
from launch_runs import CAPTURED, captured_env, launch, need_mpiexec, scheduler as make_program

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics.log_kinds import NOT_STARTED, STEP_CANCELLED, TIME_LIMIT
from ezpz_llm.launcher.basics.ranks import find_rank
from ezpz_llm.launcher.diagnosis.log_patterns import read_messages
from ezpz_llm.launcher.jobs import hostfile
from ezpz_llm.launcher.jobs.schedulers import SCHEDULERS, find_allocation, schedulers
from ezpz_llm.launcher.jobs.schedulers.flux import FluxScheduler, read_resources
from ezpz_llm.launcher.jobs.schedulers.lsf import LsfScheduler, read_time_left
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation, Request
from ezpz_llm.launcher.on_nodes.run_facts import RunFacts

_Hosts = list[tuple[str, int | None]]


@dataclass(frozen=True)
class _Job:
    """A job on two nodes: its variables, in which FILE is a file with `text`, and the nodes with their slots."""

    env: Mapping[str, str]
    hosts: _Hosts
    text: str = ""


_SLURM = captured_env("slurm/env_sbatch_script.txt")
_PBS = captured_env("pbs/env_job_sel2_nc2_mpi2.txt") | {"PBS_NODEFILE": "FILE"}
_TWO: _Hosts = [("h1", 2), ("h2", 2)]
_JOBS = {
    "slurm": _Job(_SLURM, [("n1", 2), ("n2", 2)]),
    "pbs": _Job(_PBS, [("n1", 2), ("n2", 2)], (CAPTURED / "pbs/nodefile_sel2_nc2_mpi2.txt").read_text()),
    "flux": _Job({"FLUX_ENCLOSING_ID": "ƒ2Wx", "FLUX_URI": "local:///x"}, [("h1", None), ("h2", None)]),
    "lsf": _Job({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 2 h2 2", "LSB_HOSTS": "h1 h1 h2 h2"}, _TWO,
                "h1\nh1\nh2\nh2\n"),
    "sge": _Job({"JOB_ID": "7", "NHOSTS": "2", "NSLOTS": "4", "PE_HOSTFILE": "FILE"}, _TWO,
                "h1 2 all.q@h1 UNDEFINED\nh2 1 all.q@h2 UNDEFINED\nh2 1 short.q@h2 UNDEFINED\n"),
    "oar": _Job({"OAR_JOB_ID": "7", "OAR_JOBID": "7", "OAR_NODEFILE": "FILE", "OAR_NODE_FILE": "FILE"},
                [("h1", None), ("h2", None)], "h1\nh1\nh2\nh2\n"),
    "cobalt": _Job({"COBALT_JOBID": "7", "COBALT_NODEFILE": "FILE", "COBALT_JOBSIZE": "2"},
                   [("h1", None), ("h2", None)], "h1\nh2\n"),
    "pjm": _Job({"PJM_JOBID": "7", "PJM_O_NODEINF": "FILE"}, [("10.0.0.1", None), ("10.0.0.2", None)],
                "10.0.0.1\n10.0.0.2\n"),
}
_NAMES = [*_JOBS]
_TRACES = [(scheduler.NAME, trace) for scheduler in SCHEDULERS for trace in scheduler.TRACES]
_TELL_HOSTS = {"SLURM_NODELIST": "n[1-2]", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOBID": "7",
               "LSB_DJOB_HOSTFILE": "FILE", "OAR_FILE_NODES": "FILE", "OAR_RESOURCE_FILE": "FILE"}
"""Variables, besides those of `_JOBS`, whose values lead to the nodes."""
_COUNTS_ONLY = {
    "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE", "SLURM_HET_SIZE", "PBS_ENVIRONMENT", "PBS_NODENUM",
    "FLUX_JOB_SIZE", "LSB_BATCH_JID", "LSB_DJOB_NUMPROC", "LSB_AFFINITY_HOSTFILE", "LSB_DJOB_RANKFILE",
    "COBALT_PARTNAME", "COBALT_JOBSIZE", "PJM_ENVIRONMENT", "PJM_NODE"}
"""Variables from which the suggested command cannot derive the nodes."""


def test_every_scheduler_is_here() -> None:
    assert [scheduler.NAME for scheduler in SCHEDULERS] == _NAMES
    assert {*_COUNTS_ONLY, *_TELL_HOSTS} <= {trace for _, trace in _TRACES}


@pytest.fixture(name="bin_folder", scope="module")
def _bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    resource_set = step_standin.resources("h[1-2]", "0-1")
    script = f"""[ "$1" = kvs ] && echo '{resource_set}' || echo "h1\nh2" """
    return make_program(tmp_path_factory.mktemp("standin"), "flux", script)


@pytest.fixture(name="commands", scope="module")
def _commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the schedulers' commands, which print the nodes of a job whose variables lack them."""
    folder = tmp_path_factory.mktemp("commands")
    for name, script in (
            ("squeue", "echo 'n[1-2]'"), ("scontrol", """[ "$3" = 'n[1-2]' ] && printf 'n1\\nn2\\n'"""),
            ("qstat", f"cat {CAPTURED}/pbs/qstat_f_sel2_nc2_mpi2.txt"), ("bjobs", "echo '2*h1:2*h2'"),
            ("flux", """[ "$1" = hostlist ] && printf 'h1\\nh2\\n'""")):
        make_program(folder, name, script)
    return folder


def _typed(refusal: UserError, env: Mapping[str, str], cwd: Path) -> list[str] | None:
    """Run the suggested command in the rejected environment. Return its nodes, or None if there is no command."""
    match = re.fullmatch(r"(?:start launch .*elsewhere )?(.*?); launch --hostfile hosts …   .*",
                         refusal.instead or "")
    assert match, refusal.instead
    if match[1] == "write the job's nodes to a file named hosts, one per line":
        return None
    subprocess.run(["bash", "-eu", "-o", "pipefail", "-c", match[1]], cwd=cwd, check=True, env=dict(env))
    return [host.name for host in hostfile.read(cwd / "hosts")]


def _env(name: str, folder: Path, bin_folder: Path) -> dict[str, str]:
    job = _JOBS[name]
    file = folder / f"nodes_{name}"
    file.write_text(job.text)
    env = {name: str(file) if value == "FILE" else value for name, value in job.env.items()}
    return env | {"PATH": f"{bin_folder}:/usr/bin:/bin"}


@pytest.mark.parametrize("name", _NAMES)
def test_its_job_is_read(tmp_path: Path, bin_folder: Path, name: str) -> None:
    env = _env(name, tmp_path, bin_folder)
    allocation = find_allocation(env)
    assert (allocation.scheduler, [(host.name, host.slots) for host in allocation.hosts]) == (
        name, _JOBS[name].hosts)
    mark = schedulers()[name].mark(env)
    assert mark
    assert allocation.job_id == env[mark]
    assert find_allocation(env, name).hosts == allocation.hosts


@pytest.mark.parametrize("name", _NAMES)
def test_a_job_that_cannot_be_read_is_refused_by_name(tmp_path: Path, bin_folder: Path, commands: Path,
                                                      name: str) -> None:
    """Only the job id is set; the suggested command creates a hostfile with the scheduler's command."""
    scheduler = schedulers()[name]
    whole = _env(name, tmp_path, bin_folder)
    mark = scheduler.mark(whole) or ""
    lone = {mark: whole[mark], "PATH": str(tmp_path)} | ({"NSLOTS": "2", "PE": "mpi"} if name == "sge" else {})
    expected = {True: [host for host, _ in _JOBS[name].hosts] if name in ("slurm", "pbs", "flux", "lsf") else None,
            False: None}
    for has_commands, hosts in expected.items():
        env = lone | {"PATH": f"{commands}:/usr/bin:/bin" if has_commands else str(tmp_path)}
        with pytest.raises(UserError) as raised:
            find_allocation(env)
        assert f"{scheduler.TITLE} job {whole[mark]}" in str(raised.value)
        assert _typed(raised.value, env, tmp_path) == hosts
    # With nodes given by hand, launch continues, and notes that the job is ignored.
    by_hand = find_allocation(lone, hosts_from="--hostfile")
    assert by_hand.scheduler == "none"
    assert f"ignoring {mark}={whole[mark]} (--hostfile)" in by_hand.notes[0]


@pytest.mark.parametrize(("name", "variable"), [
    *((name, variable) for name, job in _JOBS.items() for variable, value in job.env.items() if value == "FILE"),
    ("lsf", "LSB_DJOB_HOSTFILE")])
def test_a_job_whose_file_is_gone_is_refused_by_name(tmp_path: Path, commands: Path, name: str,
                                                     variable: str) -> None:
    """The suggested command does not read the missing file."""
    scheduler = schedulers()[name]
    env = {scheduler.JOB_VARIABLE: "7", variable: str(tmp_path / "gone"), "PATH": f"{commands}:/usr/bin:/bin"}
    with pytest.raises(UserError, match=f"{scheduler.TITLE} job 7") as raised:
        find_allocation(env)
    known = [host for host, _ in _JOBS[name].hosts] if name in ("pbs", "lsf") else None
    assert _typed(raised.value, env, tmp_path) == known


@pytest.mark.parametrize(("name", "trace"), _TRACES)
def test_hosts_without_a_job_are_refused_by_name(tmp_path: Path, bin_folder: Path, commands: Path, name: str,
                                                 trace: str) -> None:
    """Any single variable of a job suffices, and the suggested command reads no other variable."""
    scheduler = schedulers()[name]
    value = {**_TELL_HOSTS, **_env(name, tmp_path, bin_folder)}.get(trace, "h1")
    env = {trace: str(tmp_path / f"nodes_{name}") if value == "FILE" else value,
           "PATH": f"{commands}:/usr/bin:/bin"}
    article = "an" if name in ("lsf", "oar") else "a"
    with pytest.raises(UserError, match=f"{trace} belongs to {article} {scheduler.TITLE} job") as raised:
        find_allocation(env)
    assert "--scheduler none" in (raised.value.instead or "")
    assert find_allocation(env, "none").scheduler == "none"
    hosts = None if trace in _COUNTS_ONLY else [host for host, _ in _JOBS[name].hosts]
    assert _typed(raised.value, env, tmp_path) == hosts


@pytest.mark.parametrize("path", sorted(str(path.relative_to(CAPTURED)) for path in CAPTURED.glob("*/env_*.txt")))
def test_no_captured_environment_is_taken_for_a_trace(path: str) -> None:
    """Captured jobs and ranks of Slurm, PBS, Flux and MPI have a job id or a rank."""
    result = _found_or_refused(captured_env(path))
    assert not isinstance(result, UserError) or " belongs to a" not in result.found


_MIXED = sorted({*_TRACES, *((name, variable) for name, job in _JOBS.items() for variable in job.env
                 if variable.startswith(("SLURM_JOB", "SLURM_N", "SLURM_T", "PBS_JOBID", "PBS_NODEFILE", "FLUX_",
                                         "LSB_", "JOB_ID", "NHOSTS", "NSLOTS", "PE_", "OAR_", "COBALT_", "PJM_")))})


@settings(max_examples=150, deadline=None)
@given(chosen=st.sets(st.sampled_from(_MIXED), min_size=1), stale=st.sets(st.sampled_from(_NAMES)),
       broken=st.booleans())
def test_mixtures_of_variables(tmp_path_factory: pytest.TempPathFactory, bin_folder: Path,
                               chosen: set[tuple[str, str]], stale: set[str], broken: bool) -> None:
    """Combine variables of any schedulers, some left over from ended jobs, whose files no longer exist."""
    folder = tmp_path_factory.getbasetemp()
    env = {"PATH": "/usr/bin:/bin" if broken else f"{bin_folder}:/usr/bin:/bin"}
    whole = {name: _env(name, folder, bin_folder) for name in _NAMES}
    for name, variable in chosen:
        value = whole[name].get(variable, "1")
        env[variable] = f"{value}.gone" if name in stale and value.startswith("/") else value
    marked = [scheduler for scheduler in schedulers().values() if scheduler.mark(env)]
    traced = [scheduler for scheduler in schedulers().values() if any(env.get(trace) for trace in scheduler.TRACES)]
    result = _found_or_refused(env)
    if isinstance(result, UserError):
        # The error names a scheduler whose variables are set, and a command to type.
        assert any(scheduler.TITLE in str(result) or (scheduler.mark(env) or "?") in str(result)
                   for scheduler in [*marked, *traced])
        assert "launch --hostfile hosts …" in (result.instead or "")
    elif marked:
        assert result.scheduler in {scheduler.NAME for scheduler in marked}
        assert [host.name for host in result.hosts] == [host for host, _ in _JOBS[result.scheduler].hosts]
    else:
        assert (traced, result.scheduler) == ([], "none")


def _found_or_refused(env: Mapping[str, str]) -> Allocation | UserError:
    try:
        return find_allocation(env)
    except UserError as error:
        return error



def test_flux_resources() -> None:
    text = step_standin.resources("tuolumne[1001-1002,1007]", "0-2", "0-3", expiration=1795240000.5)
    hosts, ends_at = read_resources(text)
    assert [(host.name, host.devices) for host in hosts] == [("tuolumne1001", 4), ("tuolumne1002", 4),
                                                             ("tuolumne1007", 4)]
    assert ends_at == 1795240000.5
    # The ranks of brokers may be in any order.
    resource_set = json.loads(text)
    resource_set["execution"]["R_lite"] = [{"rank": "2", "children": {"core": "0"}},
                                    {"rank": "0-1", "children": {"core": "0", "gpu": "0-1"}}]
    assert [host.devices for host in read_resources(json.dumps(resource_set))[0]] == [2, 2, None]
    for text, why in (("{}", "RFC 20"), ("[]", "RFC 20"), (step_standin.resources("vm,vm", "0-1"), "on one node"),
                      (step_standin.resources("h1", "0-1"), r"2 brokers on 1")):
        with pytest.raises(UserError, match=why):
            read_resources(text)


def test_what_flux_itself_wrote(tmp_path: Path) -> None:
    """Read captured/flux: a batch job on two nodes, its resources, its ranks, and the messages of `flux run`."""
    text = (CAPTURED / "flux/resource_R.json").read_text()
    hosts, ends_at = read_resources(text)
    assert [host.name for host in hosts] == ["n1", "n2"]
    assert ends_at == json.loads(text)["execution"]["expiration"]
    folder = make_program(tmp_path, "flux", f"cat {CAPTURED}/flux/resource_R.json")
    env = captured_env("flux/env_batch.txt")
    allocation = find_allocation(env | {"PATH": f"{folder}:/usr/bin:/bin"})
    assert (allocation.scheduler, allocation.job_id, allocation.ends_at) == (
        "flux", env["FLUX_ENCLOSING_ID"], ends_at)
    rank = find_rank(captured_env("flux/env_run_rank3.txt"))
    assert (rank.rank, rank.world_size, rank.local_rank, rank.local_size, rank.node_rank) == (3, 4, 1, 2, 1)
    matches = read_messages((CAPTURED / "flux/flux_run.txt").read_text(),
                            RunFacts(4, ("n1", "n2"), "flux", None, 0.0))
    assert [(match.kind, match.host, match.ranks) for match in matches] == [
        (NOT_STARTED, "n1", (0,)), (NOT_STARTED, "n2", (2,)), (TIME_LIMIT, None, ()), (NOT_STARTED, None, ()),
        (NOT_STARTED, None, ()), (STEP_CANCELLED, None, ())]


def test_a_task_of_flux_is_refused_and_a_rank_of_it_goes_on(bin_folder: Path) -> None:
    task = {"FLUX_JOB_ID": "ƒ7", "FLUX_ENCLOSING_ID": "ƒ2", "FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1",
            "FLUX_TASK_LOCAL_ID": "0", "PATH": str(bin_folder)}
    with pytest.raises(UserError, match=r"Flux job ƒ7.*`flux batch` or a shell of `flux alloc`"):
        find_allocation(task)
    rank = task | {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}
    assert find_allocation(rank).scheduler == "started"
    assert (find_rank(rank).local_rank, find_rank(rank).node_rank) == (1, 1)


def test_flux_job_ids() -> None:
    """Check the example of flux-batch(1), and the number that it encodes."""
    assert [FluxScheduler().job_id(line) for line in ("ƒM7Zq9AKHno", "fM7Zq9AKHno", "submitted", "7")] == [
        "ƒM7Zq9AKHno", "fM7Zq9AKHno", None, None]
    request = Request("x", 1, 60, Path("/r"), None, None, None, False, None)
    assert FluxScheduler().output_file(request, "ƒ21") == "/r/job-58.log"


def test_lsf_on_summit(tmp_path: Path) -> None:
    """Slots are cores under jsrun, and the launch node gets no rank."""
    env = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch5 1 h41n13 42 h41n08 42", "PATH": "/usr/bin:/bin"}
    plain = find_allocation(env)
    assert [(host.name, host.slots) for host in plain.hosts] == [("batch5", 1), ("h41n13", 42), ("h41n08", 42)]
    env["PATH"] = f"{step_standin.make(tmp_path, 'jsrun')}:/usr/bin:/bin"
    allocation = find_allocation(env)
    assert [(host.name, host.slots, host.cores) for host in allocation.hosts] == [("h41n08", None, 42),
                                                                             ("h41n13", None, 42)]
    assert allocation.notes == ("batch5 is the launch node: ranks run on the 2 other nodes",)


def test_lsf_forms(tmp_path: Path) -> None:
    assert [read_time_left(text) for text in ("1:05 L\n", "0:00 L", "-", "2:00 E", "x")] == [
        3900.0, 0.0, None, None, None]
    (tmp_path / "hosts").write_text("h1\nh1\nh2\n")
    env = {"LSB_JOBID": "7", "LSB_JOBINDEX": "3", "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}
    allocation = find_allocation(env)
    assert (allocation.job_id, [(host.name, host.slots) for host in allocation.hosts]) == (
        "7[3]", [("h1", 2), ("h2", 1)])
    for index, job in (("10", "7[10]"), ("100", "7[100]"), ("0", "7"), ("", "7")):
        assert find_allocation(env | {"LSB_JOBINDEX": index}).job_id == job
    with pytest.raises(UserError, match=r"LSF job 7: .*not a list of hostnames, each with a slot"):
        find_allocation({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 h2"})
    assert LsfScheduler().job_id("Job <12> is submitted to default queue <normal>.") == "12"
    assert LsfScheduler().job_id("Job <12> is submitted to queue <gpu>.") == "12"


def test_a_lone_job_of_grid_engine() -> None:
    assert find_allocation({"JOB_ID": "7"}).notes == ()  # a name that anybody may use
    allocation = find_allocation({"JOB_ID": "7", "NHOSTS": "1"})
    assert (allocation.scheduler, [host.name for host in allocation.hosts]) == ("sge", [socket.gethostname()])



def _plan(cwd: Path, *words: str, **env: str) -> dict:
    done = launch(cwd, "--dry-run", "--json", *words, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_line_of_flux_run(tmp_path: Path) -> None:
    resources = step_standin.resources("h[1-2]", "0-1", "0-3", expiration=4e9)
    folder = step_standin.make(tmp_path / "bin", "flux", resources=resources)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "FLUX_ENCLOSING_ID": "ƒ2", "FLUX_URI": "local:///x"}
    plan = _plan(tmp_path, "hostname", **env)
    assert (plan["launcher"], plan["hosts"]) == ("flux", ["h1", "h2"])
    assert plan["env"]["EZPZ_LLM_ENDS_AT"].startswith("4000000000")
    words = plan["argv"][:plan["argv"].index("-m") - 1]
    assert words == [str(folder / "flux"), "run", "--nodes=2", "--tasks-per-node=4", "--exclusive",
                     "--requires=hosts:h[1-2]", "-o", "cpu-affinity=off", "-o", "gpu-affinity=off", "-o",
                     "exit-timeout=none", "--input=0"]
    assert "--ntasks=7" in _plan(tmp_path, "-n", "7", "--ppn", "4", "hostname", **env)["argv"]
    refused = launch(tmp_path, "--dry-run", "-n", "5", "--ppn", "4", "hostname", **env)
    assert refused.returncode == 2
    assert "Flux spreads ranks over nodes evenly and cannot place [4, 1] ranks per node" in refused.stderr
    assert "--requires=hosts:h2" in _plan(tmp_path, "--hosts", "h2", "hostname", **env)["argv"]


def test_ranks_by_flux_run(tmp_path: Path) -> None:
    here = step_standin.resources(socket.gethostname(), "0")
    folder = step_standin.make(tmp_path / "bin", "flux", resources=here)
    done = launch(tmp_path, "-n", "2", "--tee", "all", "bash", "-c", "echo $RANK of $WORLD_SIZE",
                  PATH=f"{folder}:/usr/bin:/bin", FLUX_ENCLOSING_ID="ƒ2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]


def test_ranks_by_jsrun(tmp_path: Path) -> None:
    folder = step_standin.make(tmp_path / "bin", "jsrun")
    env = {"PATH": f"{folder}:/usr/bin:/bin", "LSB_JOBID": "7"}
    plan = _plan(tmp_path, "--ppn", "6", "hostname", **env, LSB_MCPU_HOSTS="batch1 1 h1 42 h2 42")
    assert plan["argv"][1:15] == [
        "--nrs", "2", "--rs_per_host", "1", "--tasks_per_rs", "6", "--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs",
        "ALL_GPUS", "--launch_distribution", "packed", "--bind", "none"]
    refused = launch(tmp_path, "--dry-run", "--hosts", "h2", "hostname", **env,
                     LSB_MCPU_HOSTS="batch1 1 h1 42 h2 42")
    assert "jsrun starts ranks only on the first nodes of the job, which are h1" in refused.stderr
    done = launch(tmp_path, "-n", "2", "--tee", "all", "bash", "-c", "echo $RANK of $WORLD_SIZE", **env,
                  LSB_MCPU_HOSTS=f"batch1 1 {socket.gethostname()} 42")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]


def test_mpiexec_starts_its_daemons_by_blaunch(tmp_path: Path) -> None:
    """Use another name for this machine, to which an ssh connection would fail."""
    need_mpiexec()
    folder = step_standin.make(tmp_path / "bin", "blaunch")
    done = launch(tmp_path, "--launcher", "mpiexec", "-n", "2", "--tee", "all", "bash", "-c", "echo $RANK",
                  PATH=f"{folder}:/usr/bin:/bin", LSB_JOBID="7", LSB_MCPU_HOSTS="h1.invalid 2")
    assert (folder / "calls").read_text().startswith("blaunch h1.invalid "), done.stderr
