"""PBS Pro and OpenPBS: the job's environment and node file, supplemented by qstat.

PBS has no steps: mpiexec starts and ends the ranks. Only operators may requeue a running job.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ezpz_llm.core.base import MAX_NODES, UserError, ask_command, epoch, parse_json, read_text, whole_number
from ezpz_llm.launcher.basics.hostnames import count_repeats, match_names, match_same_nodes
from ezpz_llm.launcher.basics.log_kinds import MEMORY, NODE_FAILED, TIME_LIMIT
from ezpz_llm.launcher.jobs.schedulers.scheduler import (
    Allocation,
    BatchScheduler,
    HostfileCommand,
    Node,
    Origin,
    Place,
    Request,
    clock,
    manual_instructions,
    parse_local_time,
)

_CLOCK_SLACK_S = 120.0
_CORES = ("NCPUS", "PBS_NUM_PPN")
"""Variables with the number of CPUs of this process's chunk, which is on the first node; the second is Torque's."""
_FIELDS = ("stime", "exec_host", "exec_vnode", "run_count", "walltime", "timestamp")


class Job(NamedTuple):
    """Job as qstat reports it; None for missing fields.

    `started` and `asked_at` are in epoch seconds. `cores` maps hostnames to CPUs.
    """

    started: float | None = None
    walltime_s: float | None = None
    hosts: tuple[str, ...] = ()
    cores: Mapping[str, int] = {}
    run_count: int = 1
    asked_at: float | None = None

    @property
    def ends_at(self) -> float | None:
        """Job's end time in epoch seconds; None if its start or walltime is unknown."""
        return None if self.started is None or self.walltime_s is None else self.started + self.walltime_s


class PbsScheduler(BatchScheduler):
    """PBS: mpiexec starts the ranks, since PBS has no steps."""

    NAME = "pbs"
    TITLE = "PBS"
    JOB_VARIABLE = "PBS_JOBID"
    TRACES = ("PBS_NODEFILE", "PBS_ENVIRONMENT", "PBS_NODENUM")
    JOB_PREFIXES = ("PBS_",)
    USER_VARIABLES = ("PBS_EXEC", "PBS_SERVER", "PBS_CONF_FILE", "PBS_DEFAULT")
    SITE_VARIABLES = ("PBS_O_HOST", "PBS_JOBID")
    COMMANDS = ("qsub", "qstat")
    HOSTFILE_COMMANDS = (
        HostfileCommand("PBS_NODEFILE", 'cp "$PBS_NODEFILE" hosts', is_file=True),
        # qstat wraps long lines and writes "exec_host = n1/0*2+n2/0*2".
        HostfileCommand(JOB_VARIABLE,
                        """qstat -f "$PBS_JOBID" | tr -d '\\n\\t' | sed 's/.* exec_host = \\([^ ]*\\).*/\\1/'"""
                        """ | tr + '\\n' | sed 's|/.*||' | uniq > hosts""", "qstat"),
    )
    SITE_CORES_COUNT = True
    """NCPUS is the number of CPUs of a chunk. At sites that allocate whole nodes, few users request CPUs."""
    PATTERNS = (
        (TIME_LIMIT, r"^=>> PBS: job killed: walltime .*"),
        (MEMORY, r"^=>> PBS: job killed: v?mem .*"),
        (NODE_FAILED, r"^=>> PBS: job killed: node .*"),
    )
    PROGRAM, TEMPLATE, DIRECTIVE = "qsub", "pbs.sh", "#PBS"
    ARRAY_SUFFIX = "${PBS_ARRAY_INDEX:+-$PBS_ARRAY_INDEX}"
    HINTS = ((r"account|project|allocation", "--account"), (r"queue", "--queue"), (r"walltime", "--time"),
             (r"select|nodes|nodect", "--nodes"))

    def detect(self, env: Mapping[str, str]) -> Allocation | None:
        """Return the allocation of the job that this process is in; None outside a job.

        Raises:
            UserError: the job has no readable node file.
        """
        job_id = env.get(self.JOB_VARIABLE)
        if not job_id:
            return None
        path = env.get("PBS_NODEFILE")
        instead = ("start launch in the job script or in the interactive job's own shell; elsewhere "
                   + manual_instructions(self.HOSTFILE_COMMANDS, env, failed="PBS_NODEFILE"))
        if not path:
            raise UserError(f"PBS_NODEFILE is not set in PBS job {job_id}", where="the environment",
                            instead=instead)
        try:
            text = read_text(Path(path))
        except UserError as error:
            # PBS writes the file on the job's first node only, but sets the variable on the other nodes too.
            raise UserError(f"cannot read the node file of PBS job {job_id}: {error.found}",
                            where=f"PBS_NODEFILE={path}", instead=instead) from error
        hosts = node_file_nodes(text)
        if len(hosts) > MAX_NODES:
            raise UserError(f"the node file of PBS job {job_id} names {len(hosts):,} nodes",
                            where=f"PBS_NODEFILE={path}", instead=f"at most {MAX_NODES:,} nodes")
        if not hosts:
            raise UserError(f"the node file of PBS job {job_id} is empty", where=f"PBS_NODEFILE={path}",
                            instead=instead)
        lines = sum(host.slots or 1 for host in hosts)
        shared = len(hosts) == 1 and lines > 1
        notes = (f"PBS placed all {lines} chunks or ranks on one node",) if shared else ()
        # Nodes with the same slots are assumed to have the same chunks as this node, the first.
        variable = next((name for name in _CORES if whole_number(env.get(name, ""))), None)
        cores = whole_number(env[variable]) if variable else None
        hosts = tuple(_with_cores(host, cores if host.slots == hosts[0].slots else None) for host in hosts)
        return Allocation(scheduler=self.NAME, job_id=job_id, hosts=hosts, ends_at=None, source="PBS_NODEFILE",
                          notes=notes, cores_from=Origin(variable, Place.NODE) if variable else None)

    def supplement(self, allocation: Allocation, env: Mapping[str, str], limit_s: float, tries: int) -> Allocation:
        """Add the job's end time and the nodes' CPUs, which only qstat reports.

        Adds a note if qstat fails or contradicts the node file.
        """
        answer = ask_command(["qstat", "-f", "-F", "json", str(allocation.job_id)], env, limit_s, tries)
        if answer.text is None:
            return allocation.with_notes(f"the job's end time is unknown: {answer.complaint}")
        job = read_job(answer.text, str(allocation.job_id))
        notes = []
        ends_at = job.ends_at
        now = job.asked_at or time.time()
        is_running = (job.started or 0.0) <= now + _CLOCK_SLACK_S and (ends_at or now) >= now - _CLOCK_SLACK_S
        if ends_at is not None and not is_running:
            notes.append(f"the job's end time is unknown: qstat's start, {time.ctime(job.started)}, and walltime do"
                         f" not match its current time, {time.ctime(now)} (another time zone?)")
            ends_at = None
        elif ends_at is None:
            notes.append("the job's end time is unknown: qstat reports no start or no walltime")
        if job.run_count > 1:
            notes.append(f"PBS has started this job {job.run_count} times (run_count)")
        hosts = allocation.hosts
        in_file = [host.name for host in hosts]
        matches = match_same_nodes(in_file, job.hosts)
        if job.hosts and matches is None:
            notes.append(f"the node file has {', '.join(sorted(in_file))}, but qstat's exec_host has "
                         f"{', '.join(job.hosts)}: using the node file")
        elif matches is not None:
            notes += matches.notes("the node file", "qstat's exec_host")
        if match_same_nodes(in_file, with_cores := list(job.cores)):
            places = match_names(in_file, with_cores).places
            hosts = tuple(_with_cores(host, job.cores[with_cores[place]])
                          for host, place in zip(hosts, places, strict=True) if place is not None)
            allocation = allocation._replace(cores_from=Origin("qstat's exec_vnode", Place.JOB))
        return allocation._replace(ends_at=ends_at, hosts=hosts).with_notes(*notes)

    def sets_variable(self, name: str, env: Mapping[str, str]) -> bool:
        """Return True for OMP_NUM_THREADS with the number of cores of the job, which PBS exports."""
        return name == "OMP_NUM_THREADS" and bool(env.get(self.JOB_VARIABLE)) and env.get(name) == env.get("NCPUS")

    def directives(self, request: Request) -> list[str]:
        """Return the directive lines of a job, without those of the site.

        `place=scatter`, because PBS may otherwise put several chunks on one node.

        Raises:
            UserError: a name or folder that PBS does not accept, or both a queue and a reservation.
        """
        if request.queue and request.reservation:
            raise UserError(f"PBS cannot combine queue {request.queue} and reservation {request.reservation}",
                            where="--queue, --reservation",
                            instead="only --reservation: in PBS it is a queue itself")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.+-]{0,229}", request.name):
            raise UserError(f"PBS does not accept the job name {request.name!r}", where="--name",
                            instead="a letter, and then letters, digits and _ . + -")
        if not re.fullmatch(r"[A-Za-z0-9_./@%+=~-]+", str(request.output)):
            # In -o, a colon ends a hostname, and a blank ends the path.
            raise UserError(f"PBS cannot write a job's output to {str(request.output)!r}",
                            where="the run directory",
                            instead="--run-dir with only letters, digits and _ . / @ % + = ~ -")
        options = [
            # PBS uses the user's login shell by default.
            "-S /bin/bash",
            f"-N {request.name}",
            f"-l select={request.nodes}" + (f":ngpus={request.gpus_per_node}" if request.gpus_per_node else ""),
            "-l place=scatter:excl",
            f"-l walltime={clock(request.time_s)}",
            # stdout and stderr in one file, written while the job runs instead of at its end.
            "-j oe",
            "-k doe",
            f"-o {request.output}/",
            f"-r {'y' if request.requeue else 'n'}",
        ]
        options += [f"{option} {value}" for option, value in (
            ("-A", request.account), ("-q", request.reservation or request.queue)) if value]
        return [f"{self.DIRECTIVE} {word}" for word in options]

    def subjects(self, line: str) -> set[str]:
        """Return the option, or for -l each resource that it requests."""
        fields = line.split()
        if fields[1] != "-l":
            return {fields[1]}
        # One -l may request several resources. The chunks of a select contain no comma that a name follows.
        return {f"-l {name}" for name in re.findall(r"(?:^|,)(\w+)=", fields[2] if len(fields) > 2 else "")}

    def submission(self, script: str, after: str | None) -> list[str]:
        dependency = ["-W", f"depend=afterany:{after}"] if after else []
        return [self.PROGRAM, *dependency, script]

    def job_id(self, line: str) -> str | None:
        """Return the id in a line that qsub printed (`5.login`, `10[].login`), or None."""
        return line if re.fullmatch(r"\d+(\[\d*\])?(\.[\w.-]+)?", line, re.ASCII) else None

    def variables_of_jobs(self, submit_host: str) -> dict[str, str]:
        """Return PBS_O_HOST, which qsub sets to the submitting host."""
        return {"PBS_O_HOST": submit_host}

    def watch(self, ids: list[str]) -> str:
        return f"qstat {shlex.join(ids)}"

    def cancel(self, ids: list[str]) -> str:
        return f"qdel {shlex.join(ids)}"

    def output_file(self, request: Request, job: str) -> str:
        """Return the path of the job's output file. Given a folder, PBS names the file after the job."""
        return str(request.output / f"{job}.OU")


def _with_cores(host: Node, cores: int | None) -> Node:
    # With mpiprocs equal to ncpus, as is the default of some sites, the lines of the node file count cores.
    return host._replace(cores=cores, slots_count_cores=cores is not None and host.slots == cores)


def node_file_nodes(text: str) -> tuple[Node, ...]:
    """Return the distinct nodes in order. A node's slots are its number of lines.

    PBS also writes one line for a chunk without mpiprocs. So slots are None if each node has a single line:
    the user may not have requested any number of ranks.
    """
    counts = count_repeats(text.split())
    requests_slots = any(count > 1 for count in counts.values())
    return tuple(Node(name, slots=count if requests_slots else None) for name, count in counts.items())


def read_job(text: str, job_id: str) -> Job:
    """Parse the output of `qstat -f -F json`.

    Also handles the invalid JSON that qstat writes for environments with quotes, backslashes or leading zeros
    (openpbs/openpbs#2541, #1255, #2049).
    """
    try:
        fields = _fields_of_json(parse_json(text, "qstat", strict=False), job_id)
    except UserError:
        fields = _fields_of_lines(text)
    run_count = whole_number(str(fields.get("run_count", "")))
    return Job(
        started=parse_local_time(str(fields.get("stime", "")), "%a %b %d %H:%M:%S %Y"),
        walltime_s=_duration(str(fields.get("walltime", ""))),
        hosts=tuple(dict.fromkeys(part.split("/")[0]
                                  for part in str(fields.get("exec_host", "")).split("+") if part)),
        cores=_cores(str(fields.get("exec_vnode", ""))),
        run_count=1 if run_count is None else run_count,
        asked_at=epoch(str(fields.get("timestamp", ""))),
    )


def _fields_of_json(reply: Any, job_id: str) -> dict[str, Any]:
    jobs = reply.get("Jobs") if isinstance(reply, dict) else None
    if not isinstance(jobs, dict):
        return {}
    # The server part of the id may be a full name in one place and a short name in the other.
    number = job_id.split(".", 1)[0]
    job: Any = next((fields for name, fields in jobs.items() if name.split(".", 1)[0] == number), {})
    if not isinstance(job, dict):
        return {}
    resources = job.get("Resource_List")
    walltime = resources.get("walltime") if isinstance(resources, dict) else None
    return {**job, "walltime": walltime or "", "timestamp": reply.get("timestamp", "")}


def _fields_of_lines(text: str) -> dict[str, str]:
    # One field per line. The first match wins: the job's Variable_List, which comes last, may hold any text.
    return {name: match[1] for name in _FIELDS
            if (match := re.search(rf'^\s*"{name}":\s*"?([^"\n]*?)"?,?\s*$', text, re.MULTILINE))}


def _cores(exec_vnode: str) -> dict[str, int]:
    """Return the CPUs per node in "(n1:ncpus=2)+(n2[0]:ncpus=4+n2[1]:ncpus=4)". n2[0] is a virtual node of n2."""
    cpus_of: dict[str, int] = {}
    for chunk in exec_vnode.split("+"):
        vnode, *resources = chunk.strip("()").split(":")
        count = next((text.removeprefix("ncpus=") for text in resources if text.startswith("ncpus=")), "")
        if (name := vnode.partition("[")[0]) and (cpus := whole_number(count)) is not None:
            cpus_of[name] = cpus_of.get(name, 0) + cpus
    return cpus_of


def _duration(text: str) -> float | None:
    """Parse `01:30:00`, `5400` or `1:06:00:00` (days first) into seconds."""
    if not re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9}){0,3}", text):
        return None
    parts = [int(part) for part in reversed(text.split(":"))]
    return float(sum(count * unit for count, unit in zip(parts, (1, 60, 3600, 86400), strict=False)))
