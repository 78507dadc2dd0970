"""Slurm: the variables of the job, or of the step inside a step, never a mixture of the two."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ezpz_llm.core.base import UserError, ask_command, count_noun, epoch, print_lines, system_text, whole_number
from ezpz_llm.launcher.basics.devices import MASKS
from ezpz_llm.launcher.basics.hostlist import expand_counts, expand_hostlist
from ezpz_llm.launcher.basics.log_kinds import (
    CANCELLED,
    ENDED,
    MEMORY,
    NODE_FAILED,
    NOT_STARTED,
    PREEMPTED,
    REQUEUED,
    STEP_CANCELLED,
    STEP_ENDED,
    TIME_LIMIT,
)
from ezpz_llm.launcher.jobs.schedulers.scheduler import (
    Allocation,
    BatchScheduler,
    HostfileCommand,
    Node,
    Origin,
    Place,
    Request,
    StepLauncher,
    clock_with_days,
    manual_instructions,
)
from ezpz_llm.launcher.jobs.schedulers.slurm_queries import add_end_time, add_resources
from ezpz_llm.launcher.jobs.schedulers.slurm_tasks import (
    Tasks,
    count_devices,
    devices_per_task,
    expand_layout,
    requested_tasks,
)

_MAX_GROUPS = 128
"""Slurm's limit on the components of a heterogeneous job."""
_FIRST_SPECIAL_STEP = 4294967290
"""First special step id in slurm.h: the job's batch script, its shell (salloc under
LaunchParameters=use_interactive_step), and similar steps, which hold none of the job's resources. Slurm 26.05 sets
them as negative numbers."""


class _Names(NamedTuple):
    """Names of the variables with the nodes of a job or of a step."""

    hosts: str
    number_of_nodes: str


_JOB = _Names("SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES")
_STEP = _Names("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES")

_GPUS_PER_NODE, _CPUS_PER_NODE = "SLURM_GPUS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"
_DEVICE_IDS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")

_SCONTROL_TIMEOUT_S, _STEP_TIMEOUT_S = 3.0, 10.0
_TAIL_BYTES = 1 << 16
EXTERNAL_LAUNCHER = "--external-launcher"
"""Option of srun that Slurm 23.02 and newer pass in a job's variables to the srun of mpiexec."""
_HYDRA_OPTIONS = ("HYDRA_LAUNCHER_EXTRA_ARGS", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")
_RDZV_NETWORK = "disable_rdzv_get"
"""--network option that FI_CXI_RDZV_PROTO=alt_read requires: OLCF's "PyTorch on Frontier" sets both or neither.
Slurm puts a job's --network into SLURM_NETWORK."""

_SHORT = {"-A": "--account", "-C": "--constraint", "-J": "--job-name", "-N": "--nodes", "-o": "--output",
          "-p": "--partition", "-q": "--qos", "-t": "--time"}

# The first node of a job need not be a node of the run. Jobs in arrays may have an id with an underscore.
_OF_JOB, _OF_STEP = r"JOB (?:(?P<job>\d+)|\S+) ON \S+", r"STEP (?:(?P<step>\d+\.\d+)|\S+) ON (?P<reporter>\S+)"
_ANY = f"(?:{_OF_JOB}|{_OF_STEP})"
_BY_USER = r"(?:DUE to SIGNAL [\w ]+ )?\*\*\*"
"""Slurm 25.05 and newer name the signal."""


# Slurm 26.05 prints the time in place of slurmstepd's name.
_STEPD = r"(?:slurmstepd\S*:|\[[\d.:T-]+\]) error: \*\*\* "


def _cancelled(what: str, why: str) -> str:
    return rf"{_STEPD}{what} CANCELLED AT (?P<time>\S+) {why}"


class SlurmScheduler(BatchScheduler):
    """Slurm: `srun` starts the ranks, in steps of the job."""

    NAME = "slurm"
    TITLE = "Slurm"
    JOB_VARIABLE = "SLURM_JOB_ID"
    TRACES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_JOBID", "SLURM_STEP_NODELIST", "SLURM_JOB_NUM_NODES",
              "SLURM_TASKS_PER_NODE", "SLURM_HET_SIZE")
    JOB_PREFIXES = ("SLURM_",)
    USER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")
    # srun reads these as options. It rejects them together with launch's options, or binds ranks by them to
    # devices that the step does not have. launch states the tasks and the devices of its steps instead.
    CONFLICTING = ("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES", "SLURM_NTASKS_PER_SOCKET",
                   "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND")
    SITE_VARIABLES = ("SLURM_CLUSTER_NAME",)
    COMMANDS = ("sbatch", "srun")
    HOSTFILE_COMMANDS = (
        *(HostfileCommand(name, f'scontrol show hostnames "$(squeue -h -j ${name} -o %N)" > hosts', "squeue")
          for name in (JOB_VARIABLE, "SLURM_JOBID")),
        *(HostfileCommand(name, f'scontrol show hostnames "${name}" > hosts', "scontrol")
          for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")),
    )
    KEEPS_NODE_ORDER = STARTS_MPI_DAEMONS = True
    COPIER = "sbcast"
    PATTERNS = (
        (TIME_LIMIT, _cancelled(_ANY, "DUE TO TIME LIMIT")),
        (NODE_FAILED, _cancelled(_ANY, "DUE TO NODE FAILURE")),
        (NODE_FAILED, r"^srun: error: Node failure on (?P<host>\S+)"),
        (REQUEUED, _cancelled(_ANY, "DUE TO JOB REQUEUE")),
        (PREEMPTED, _cancelled(_ANY, "DUE TO PREEMPTION")),
        (STEP_ENDED, r"^srun: launch/slurm: _step_signal: Terminating StepId=(?P<step>\d+\.\d+)"),
        (CANCELLED, _cancelled(_OF_JOB, _BY_USER)),
        (STEP_CANCELLED, _cancelled(_OF_STEP, _BY_USER)),
        (MEMORY, r"error: Detected \d+ oom[-_]kill event"),
        (MEMORY, r"^srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,-]+): Out Of Memory"),
        (ENDED, r"^srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,-]+): "
                r"(?:Exited with exit code (?P<code>\d+)|(?P<signal>[A-Z][A-Za-z ]+?))"
                r"(?: \(core dumped\))?$"),
        (NOT_STARTED, r"^srun: error: (?:Unable to create step|Unable to confirm allocation"
                      r"|Couldn't load specified plugin).*"),
        (NOT_STARTED, r"^srun: error: Task launch for \S+ failed on node (?P<host>[^:\s]+): .*"),
        (NOT_STARTED, r"^slurmstepd(?:-(?P<host>[^:\s]+))?: error: execve\(\): .*"),
    )
    """Written from captured output; the memory limit and preemption from Slurm's source code."""
    PROGRAM, TEMPLATE, DIRECTIVE = "sbatch", "slurm.sh", "#SBATCH"
    ARRAY_SUFFIX = "${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}"
    # The id of an array's last task is also the id of the whole array.
    AGAIN = MappingProxyType({
        "scontrol": "scontrol", "requeue": "requeue",
        "JOB": '"${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"'})
    HINTS = ((r"account|project", "--account"), (r"partition|qos", "--queue"), (r"time limit", "--time"),
             (r"node count|node configuration|[Nn]odes", "--nodes"), (r"reservation", "--reservation"))

    def detect(self, env: Mapping[str, str]) -> Allocation | None:
        """Return the allocation of the job (batch script, salloc shell) or step (an interactive `srun --pty`).

        Raises:
            UserError: the node list or the tasks per node are invalid, or the job is heterogeneous.
        """
        job_id = env.get(self.JOB_VARIABLE)
        if not job_id:
            return None
        step_id = _own_step(env)
        if step_id is None:
            self._reject_heterogeneous(env, job_id)
        names = _STEP if step_id else _JOB
        hosts = expand_hostlist(env.get(names.hosts, ""))
        if not hosts:
            raise UserError(f"the node list of Slurm job {job_id} is empty or not set", where=names.hosts,
                            instead="start launch inside sbatch, salloc or srun; elsewhere "
                            + manual_instructions(self.HOSTFILE_COMMANDS, env))
        cores = _cores(env)
        minimum_cores = min(cores.values(), default=None)
        devices = count_devices(env.get(_GPUS_PER_NODE, ""))
        where = f"{names.hosts}={env.get(names.hosts)}"
        tasks = (_step_tasks(env, len(hosts), where) if step_id
                 else requested_tasks(env, [devices] * len(hosts), where))
        return Allocation(
            scheduler=self.NAME,
            job_id=job_id,
            hosts=tuple(Node(name, slots, devices, cores.get(name, minimum_cores))
                        for name, slots in zip(hosts, tasks.counts, strict=True)),
            ends_at=epoch(env.get("SLURM_JOB_END_TIME", "")),
            source=names.hosts,
            # The job's request. A step gets no more, even if the job holds all devices of exclusive nodes.
            devices_from=None if devices is None else Origin(_GPUS_PER_NODE, Place.JOB),
            notes=(*_notes(env, names, hosts), *tasks.notes),
            step_id=step_id,
            slots_from=Origin(f"slots of {names.hosts}", Place.STEP) if step_id else tasks.origin,
            cores_from=Origin(_CPUS_PER_NODE, Place.JOB) if cores else None,
            devices_per_rank=devices_per_task(env),
        )

    def _reject_heterogeneous(self, env: Mapping[str, str], job_id: str) -> None:
        """Reject a heterogeneous job: srun with one set of options starts ranks on only one of its components.

        Raises:
            UserError: the job has several components.
        """
        groups = whole_number(env.get("SLURM_HET_SIZE", "")) or 0
        if groups > 1:
            lists = ",".join(f"$SLURM_JOB_NODELIST_HET_GROUP_{group}" for group in range(min(groups, _MAX_GROUPS)))
            raise UserError(f"Slurm job {job_id} is heterogeneous, with {groups} components, and launch can start"
                            " ranks with srun on only one of them", where=f"SLURM_HET_SIZE={groups}",
                            instead=f'scontrol show hostnames "{lists}" > hosts; HYDRA_LAUNCHER=ssh launch'
                                    " --scheduler none --hostfile hosts …   (MPICH's mpiexec, over ssh)")

    def supplement(self, allocation: Allocation, env: Mapping[str, str], limit_s: float, tries: int) -> Allocation:
        """Add the resources of each node, which this node's variables do not have, and the job's end time.

        Adds a note if squeue fails or contradicts the job's variables.
        """
        return add_end_time(add_resources(allocation, env, limit_s, tries), env, limit_s, tries)

    def cancellations(self, env: Mapping[str, str]) -> list[str]:
        """Return lines about the end of this job from its output file, to which a requeued job appends.

        Slurm writes lines such as `slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T03:04:05 ***` there,
        and launch does not see them. Empty outside a batch job.
        """
        job = env.get(self.JOB_VARIABLE)
        if not job:
            return []
        description = ask_command(("scontrol", "show", "job", job), env, _SCONTROL_TIMEOUT_S, tries=1).text or ""
        # Slurm 25.11 and newer leave StdErr empty if it is the same file as StdOut.
        path = (re.search(r"^[ \t]*StdErr=(\S.*)$", description, re.MULTILINE)
                or re.search(r"^[ \t]*StdOut=(\S.*)$", description, re.MULTILINE))
        if path is None:
            return []
        return re.findall(rf"{_STEPD}JOB {re.escape(job)} ON \S+ CANCELLED AT .*",
                          system_text(path[1], _TAIL_BYTES))

    def step_launcher(self) -> StepLauncher | None:
        """Return srun."""
        return StepLauncher("srun", "Slurm")

    def site_notes(self, env: Mapping[str, str], of_site: Mapping[str, str]) -> tuple[str, ...]:
        """Return a note if the site's variables require a --network option that the job lacks."""
        protocol = env.get("FI_CXI_RDZV_PROTO", of_site.get("FI_CXI_RDZV_PROTO"))
        if protocol != "alt_read" or _RDZV_NETWORK in env.get("SLURM_NETWORK", ""):
            return ()
        return (f"FI_CXI_RDZV_PROTO=alt_read requires a job with --network={_RDZV_NETWORK}, which this job lacks:"
                " add it (salloc, sbatch, #SBATCH), or export FI_CXI_RDZV_PROTO=default",)

    def restart_count(self, env: Mapping[str, str]) -> int:
        """Return how often Slurm has requeued the job."""
        return whole_number(env.get("SLURM_RESTART_COUNT", "")) or 0

    def sets_variable(self, name: str, env: Mapping[str, str]) -> bool:
        """Return True for Hydra's options with Slurm's value, and for a device mask of Slurm.

        Slurm numbers the devices as the driver does, or from 0 if a control group hides the others.
        """
        if name in MASKS:
            for ids in filter(None, map(env.get, _DEVICE_IDS)):
                count = len(ids.split(","))
                if env.get(name) in (ids, ",".join(map(str, range(count)))):
                    return True
        return name in _HYDRA_OPTIONS and env.get(name) == EXTERNAL_LAUNCHER

    def local_folder(self, env: Mapping[str, str]) -> Path | None:
        """Return SLURM_TMPDIR, which some sites set."""
        return Path(env["SLURM_TMPDIR"]) if env.get("SLURM_TMPDIR") else None

    def mpi_advice(self, env: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the reason and the fix if srun started this rank without PMI variables."""
        if _own_step(env) is None or any(name.startswith(("PMI_", "PMIX_")) for name in env):
            return None
        plugin = env.get("SLURM_MPI_TYPE", "not set")
        return (f"srun set no PMI or PMIx variables, and SLURM_MPI_TYPE is {plugin}",
                "SLURM_MPI_TYPE=pmi2 launch …, or pmix, if srun --mpi=list and this MPI support it")

    def own_step(self, env: Mapping[str, str]) -> str | None:
        """Return the id of this process's step as "JOB.STEP", or None."""
        job, step = env.get(self.JOB_VARIABLE), _own_step(env)
        return f"{job}.{step}" if job and step else None

    def kill_steps(self, steps: Sequence[str]) -> None:
        """Send SIGKILL to all processes of these steps, including launch's agents."""
        ask_command(("scancel", "--signal=KILL", *steps), os.environ, _STEP_TIMEOUT_S)

    def steps_are_over(self, steps: Sequence[str]) -> bool:
        """Return True if squeue lists none of these steps: it lists a step until its last process has ended."""
        # squeue lists a step of an array task under a name other than the queried one, so names are not compared.
        answer = ask_command(("squeue", "--noheader", f"--steps={','.join(steps)}"), os.environ, _STEP_TIMEOUT_S)
        return "code 0," in answer.complaint  # squeue printed nothing

    def copy_to_nodes(self, source: Path, target: str) -> bool:
        """Copy a file to each node with sbcast. Print its errors to stderr."""
        result = subprocess.run(["sbcast", "--force", str(source), target], stdin=subprocess.DEVNULL,
                                capture_output=True, text=True, errors="replace", check=False)
        print_lines(result.stderr, end="", file=sys.stderr)
        return result.returncode == 0

    def time_limit(self, seconds: int) -> str:
        """Format a time limit for `--time`."""
        return clock_with_days(seconds)

    def directives(self, request: Request) -> list[str]:
        """Return the directive lines of a job, without those of the site.

        `--exclusive`, because with --nodes alone Slurm may allocate one core per node.
        """
        # sbatch removes quotes as a shell does, but has no escape for control characters.
        for value in (request.name, str(request.output)):
            if not value.isprintable():
                raise UserError(f"the job name or run directory has a control character: {value!r}",
                                instead="--name or --run-dir with printable characters only")
        output = str(request.output).replace("%", "%%")
        options = [
            f"--job-name={shlex.quote(request.name)}",
            f"--nodes={request.nodes}",
            "--exclusive",
            f"--time={self.time_limit(request.time_s)}",
            # A requeued job appends to its earlier output.
            f"--output={shlex.quote(output + '/job-%j.log')}",
            "--open-mode=append",
            "--requeue" if request.requeue else "--no-requeue",
        ]
        options += [f"--{option}={value}" for option, value in (
            ("account", request.account), ("partition", request.queue),
            ("reservation", request.reservation), ("gpus-per-node", request.gpus_per_node)) if value]
        return [f"{self.DIRECTIVE} {word}" for word in options]

    def subjects(self, line: str) -> set[str]:
        """Return the long form of the option."""
        word = re.split(r"[=\s]", line.split()[1])[0]
        return {_SHORT.get(word, word)}

    def submission(self, script: str, after: str | None) -> list[str]:
        dependency = [f"--dependency=afterany:{after}"] if after else []
        return [self.PROGRAM, "--parsable", *dependency, script]

    def job_id(self, line: str) -> str | None:
        """Return the id in a line that sbatch printed (`123`, `123;cluster`), or None."""
        match = re.fullmatch(r"(\d+)(;[\w.-]+)?", line, re.ASCII)
        return match[1] if match else None

    def watch(self, ids: list[str]) -> str:
        return f"squeue -j {','.join(ids)}"

    def cancel(self, ids: list[str]) -> str:
        return f"scancel {' '.join(ids)}"


def _own_step(env: Mapping[str, str]) -> str | None:
    number = whole_number(env.get("SLURM_STEP_ID", ""))
    return None if number is None or number >= _FIRST_SPECIAL_STEP else str(number)


def _cores(env: Mapping[str, str]) -> dict[str, int]:
    """Return the CPUs of each node of the job, or of some nodes if the lists differ in length (in some steps)."""
    text = env.get(_CPUS_PER_NODE)
    return dict(zip(expand_hostlist(env.get(_JOB.hosts, "")), expand_counts(text), strict=False)) if text else {}


def _step_tasks(env: Mapping[str, str], hosts: int, where: str) -> Tasks:
    # An interactive shell is a step with a single task, which is not a request for ranks.
    tasks, layout = env.get("SLURM_STEP_NUM_TASKS"), env.get("SLURM_STEP_TASKS_PER_NODE")
    if not tasks or not layout or tasks == "1":
        return Tasks((None,) * hosts)
    return Tasks(expand_layout(layout, hosts, f"SLURM_STEP_TASKS_PER_NODE={layout}, {where}"))


def _notes(env: Mapping[str, str], names: _Names, hosts: list[str]) -> list[str]:
    notes = []
    number, in_job = (whole_number(env.get(name, "")) for name in (names.number_of_nodes, _JOB.number_of_nodes))
    if number is not None and number != len(hosts):
        notes.append(f"{names.number_of_nodes} is {number}, but {names.hosts}={env.get(names.hosts)} names "
                     f"{count_noun(len(hosts), 'node')}: using the list")
    if names is _STEP and in_job is not None and in_job > len(hosts):
        notes.append(f"this is step {env.get('SLURM_STEP_ID')} of the job: using its "
                     f"{count_noun(len(hosts), 'node')} of the job's {in_job}")
    if env.get("SLURM_RESTART_COUNT", "0") not in ("", "0"):
        notes.append(f"Slurm has restarted this job: SLURM_RESTART_COUNT={env['SLURM_RESTART_COUNT']}")
    return notes
