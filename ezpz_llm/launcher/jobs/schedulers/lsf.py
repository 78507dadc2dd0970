"""LSF: nodes from the job's environment; the job's end time from bjobs.

A job's slots are its MPI tasks, as in LSF's own MPI integrations, or on nodes with accelerators the cores that it
requests. If IBM's Job Step Manager starts the ranks (jsrun
on machines such as Summit and Sierra), slots are cores, and the first node is the launch node, which gets no rank.
Sources: IBM Spectrum LSF 10.1, "Environment variables set for job execution"
(https://www.ibm.com/support/knowledgecenter/en/SSWRJV_10.1.0/lsf_config_ref/lsf_envars_job_exec.html), bsub and
bjobs in its command reference, https://docs.olcf.ornl.gov/systems/summit_user_guide.html (launch nodes, jsrun).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from ezpz_llm.core.base import MAX_NODES, UserError, ask_command, count_noun, read_text, whole_number
from ezpz_llm.launcher.basics.hostnames import count_repeats, sum_by_node
from ezpz_llm.launcher.jobs.schedulers.scheduler import (
    Allocation,
    BatchScheduler,
    HostfileCommand,
    Node,
    Origin,
    Place,
    Request,
    StepLauncher,
)

_STEP_LAUNCHER = "jsrun"
_SPREAD = "-R span"


class LsfScheduler(BatchScheduler):
    """LSF: jsrun starts the ranks, else mpiexec, and blaunch mpiexec's daemons."""

    NAME = "lsf"
    TITLE = "LSF"
    JOB_VARIABLE = "LSB_JOBID"
    TRACES = ("LSB_MCPU_HOSTS", "LSB_HOSTS", "LSB_DJOB_HOSTFILE", "LSB_BATCH_JID", "LSB_DJOB_NUMPROC",
              "LSB_AFFINITY_HOSTFILE", "LSB_DJOB_RANKFILE")
    JOB_PREFIXES = ("LSB_", "LSF_JOB")
    COMMANDS = ("bsub", "bjobs")
    HOSTFILE_COMMANDS = (
        HostfileCommand("LSB_MCPU_HOSTS", "echo $LSB_MCPU_HOSTS | xargs -n 2 printf '%s slots=%s\\n' > hosts"),
        HostfileCommand("LSB_HOSTS", "printf '%s\\n' $LSB_HOSTS > hosts"),
        HostfileCommand("LSB_DJOB_HOSTFILE", 'cp "$LSB_DJOB_HOSTFILE" hosts', is_file=True),
        # bjobs writes "2*h1:h2".
        HostfileCommand(JOB_VARIABLE,
                        "bjobs -noheader -o exec_host $LSB_JOBID | tr ':' '\\n' | sed 's/.*[*]//' > hosts",
                        "bjobs"),
    )
    REMOTE_SHELL = ("blaunch",)
    SITE_CORES_COUNT = True
    # bsub reads a script's directives from standard input, and from a file only if LSB_BSUB_PARSE_SCRIPT is set.
    PROGRAM, TEMPLATE, DIRECTIVE, TAKES_STDIN = "bsub", "lsf.sh", "#BSUB", True
    # The index is 0 outside an array.
    ARRAY_SUFFIX = '$([[ ${LSB_JOBINDEX:-0} == 0 ]] || echo "-$LSB_JOBINDEX")'
    HINTS = ((r"project|account", "--account"), (r"queue", "--queue"), (r"run ?limit|RUNLIMIT", "--time"),
             (r"reservation", "--reservation"), (r"host|processor|slot", "--nodes"))

    def detect(self, env: Mapping[str, str]) -> Allocation | None:
        """Return the allocation of the job that this process is in; None outside a job.

        Raises:
            UserError: no variable names the nodes.
        """
        job_id = env.get(self.JOB_VARIABLE)
        if not job_id:
            return None
        counts, source = self._read_slots(env, job_id)
        if not counts or len(counts) > MAX_NODES:
            raise self.unknown_nodes_error(job_id, f"{source} names {len(counts):,} nodes", source, env, source)
        if (index := env.get("LSB_JOBINDEX", "0")) not in ("", "0"):
            job_id = f"{job_id}[{index}]"
        if shutil.which(_STEP_LAUNCHER, path=env.get("PATH", os.defpath)):
            return self._jsrun_allocation(job_id, counts, source)
        # One slot on every node is LSF's default, not a request for one rank per node.
        requests_slots = any(count > 1 for count in counts.values())
        hosts = tuple(Node(name, slots=count if requests_slots else None, slots_count_cores=True)
                      for name, count in counts.items())
        return Allocation(scheduler=self.NAME, job_id=job_id, hosts=hosts, ends_at=None, source=source)

    def _read_slots(self, env: Mapping[str, str], job_id: str) -> tuple[dict[str, int], str]:
        """Return the slots of each node, and their variable. LSF does not set LSB_HOSTS in very large jobs."""
        if text := env.get("LSB_MCPU_HOSTS"):
            fields = text.split()
            numbers = [whole_number(word) for word in fields[1::2]]
            if len(fields) % 2 or None in numbers:
                raise self.unknown_nodes_error(job_id,
                                               "LSB_MCPU_HOSTS is not a list of hostnames, each with a slot count",
                                               f"LSB_MCPU_HOSTS={text[:80]}", env, "LSB_MCPU_HOSTS")
            pairs = zip(fields[::2], numbers, strict=True)
            return sum_by_node([(name, number or 0) for name, number in pairs]), "LSB_MCPU_HOSTS"
        if text := env.get("LSB_HOSTS"):
            return count_repeats(text.split()), "LSB_HOSTS"
        path = env.get("LSB_DJOB_HOSTFILE")
        if not path:
            raise self.unknown_nodes_error(job_id, "LSB_MCPU_HOSTS, LSB_HOSTS and LSB_DJOB_HOSTFILE are not set",
                                           f"LSB_JOBID={job_id}", env)
        try:
            return count_repeats(read_text(Path(path)).split()), "LSB_DJOB_HOSTFILE"
        except UserError as error:
            raise self.unknown_nodes_error(job_id, error.found, f"LSB_DJOB_HOSTFILE={path}", env,
                                           "LSB_DJOB_HOSTFILE") from error

    def _jsrun_allocation(self, job_id: str, counts: Mapping[str, int], source: str) -> Allocation:
        """Return the nodes that jsrun starts ranks on. Summit's guide sorts them to find rank 0's node."""
        first, *compute_nodes = counts
        notes: tuple[str, ...] = ()
        if compute_nodes and counts[first] == 1 < min(counts[name] for name in compute_nodes):
            others = count_noun(len(compute_nodes), "other node")
            notes = (f"{first} is the launch node: ranks run on the {others}",)
        else:
            compute_nodes = [first, *compute_nodes]
        hosts = tuple(Node(name, cores=counts[name]) for name in sorted(compute_nodes))
        return Allocation(scheduler=self.NAME, job_id=job_id, hosts=hosts, ends_at=None, source=source, notes=notes,
                          cores_from=Origin(source, Place.JOB))

    def supplement(self, allocation: Allocation, env: Mapping[str, str], limit_s: float, tries: int) -> Allocation:
        """Add the job's end time, from the run limit that only bjobs reports, or a note if it is unknown."""
        command = ["bjobs", "-noheader", "-o", "time_left", str(allocation.job_id)]
        answer = ask_command(command, env, limit_s, tries)
        if answer.text is None:
            return allocation.with_notes(f"the job's end time is unknown: {answer.complaint}")
        seconds_left = read_time_left(answer.text)
        if seconds_left is None:
            return allocation.with_notes("the job's end time is unknown: bjobs reports no run limit")
        return allocation._replace(ends_at=time.time() + seconds_left)

    def step_launcher(self) -> StepLauncher | None:
        """Return jsrun, which is optional: without it, mpiexec starts the ranks, and blaunch mpiexec's daemons."""
        return StepLauncher(_STEP_LAUNCHER, "IBM JSM", optional=True)

    def time_limit(self, seconds: int) -> str:
        """Format a time limit for `-W`: hours and minutes, rounded up."""
        minutes = -(-seconds // 60)
        return f"{minutes // 60}:{minutes % 60:02d}"

    def directives(self, request: Request) -> list[str]:
        """Return the directive lines of a job, without the site's: one slot on each node, exclusive nodes.

        Raises:
            UserError: a name or folder that a directive cannot hold.
        """
        for value in (request.name, str(request.output)):
            if not re.fullmatch(r"[A-Za-z0-9_./@+=~-]+", value):
                raise UserError(f"LSF does not accept {value!r} as a job name or output path",
                                where="--name, --run-dir", instead="only letters, digits and _ . / @ + = ~ -")
        options = [f"-J {request.name}", f"-n {request.nodes}", '-R "span[ptile=1]"', "-x",
                   f"-W {self.time_limit(request.time_s)}", f"-o {request.output}/job-%J.log",
                   "-r" if request.requeue else "-rn"]
        options += [f"{option} {value}" for option, value in (
            ("-P", request.account), ("-q", request.queue), ("-U", request.reservation),
            ("-gpu", request.gpus_per_node and f'"num={request.gpus_per_node}/host"')) if value]
        return [f"{self.DIRECTIVE} {word}" for word in options]

    def subjects(self, line: str) -> set[str]:
        """Return the option, or for options that exclude each other, all of them."""
        _, word, *value = line.split(maxsplit=2)
        if word == "-R":
            # bsub combines several -R, but accepts only one span.
            return {_SPREAD if "span[" in line else f"-R {''.join(value)}"}
        if word == "-nnodes":
            return {"-n", "-nnodes", _SPREAD}
        return {"-r", "-rn"} if word in ("-r", "-rn") else {word}

    def submission(self, script: str, after: str | None) -> list[str]:
        """Return the command that submits `script`, to start after the job `after` has ended in any way.

        bsub reads the script from standard input.
        """
        return [self.PROGRAM, *(["-w", f"ended({after})"] if after else []), script]

    def job_id(self, line: str) -> str | None:
        """Return the id in `Job <7> is submitted to queue <normal>.`, or None."""
        match = re.match(r"Job <(\d+)> is submitted to (?:default )?queue <", line, re.ASCII)
        return match[1] if match else None

    def watch(self, ids: list[str]) -> str:
        return f"bjobs {shlex.join(ids)}"

    def cancel(self, ids: list[str]) -> str:
        return f"bkill {shlex.join(ids)}"


def read_time_left(text: str) -> float | None:
    """Parse "1:05 L", the hours and minutes until the run limit, into seconds.

    Return None for "-" and for estimates, which bjobs marks with E or X.
    """
    match = re.fullmatch(r"([0-9]{1,6}):([0-5][0-9]) L", text.strip())
    return float(3600 * int(match[1]) + 60 * int(match[2])) if match else None
