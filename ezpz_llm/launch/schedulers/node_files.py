"""Schedulers that name a job's hosts in a file: Grid Engine, OAR, Cobalt, and Fujitsu's PJM.

Their ranks are started by an mpiexec, whose daemons they start by a remote shell of their own. Submit writes no
scripts for them. Sources: Grid Engine: sge_pe(5) and submit(1), "ENVIRONMENTAL VARIABLES",
https://manpages.debian.org/testing/gridengine-common/sge_pe.5.en.html; OAR:
https://manpages.ubuntu.com/manpages/bionic/man1/oarsub.1.html; Cobalt: its qsub's man page; PJM: "Job
Operation Software End-user's Guide" of Fujitsu's TCS, whose PJM_O_NODEINF and /bin/pjrsh the job scripts of Kyushu,
Nagoya and Tokyo use with Open MPI and Intel MPI.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.base import MOST_HOSTS, UserError, read_text, whole_number
from ezpz_llm.launch.hostnames import count_repeats, sum_by_node
from ezpz_llm.launch.schedulers.scheduler import Allocation, Host, HostsLine, Scheduler, by_hand, unspoken


def slots_in_columns(text: str) -> tuple[Host, ...]:
    """Grid Engine's file: host, slots, queue, processors; a host has a line for each queue that gave slots. These
    are ranks where any host has several."""
    slots: list[tuple[str, int]] = []
    for line in filter(None, map(str.split, text.splitlines())):
        number = whole_number(line[1]) if len(line) > 1 else None
        if number is None:
            raise UserError(f"a line without a number of slots: {' '.join(line)!r}")
        slots.append((line[0], number))
    counts = sum_by_node(slots)
    asked = any(count > 1 for count in counts.values())
    return tuple(Host(name, slots=count if asked else None) for name, count in counts.items())


def lines_are_cores(text: str) -> tuple[Host, ...]:
    """OAR's file has a line for each core that was reserved."""
    return tuple(Host(name, cores=count) for name, count in count_repeats(text.split()).items())


def lines_are_hosts(text: str) -> tuple[Host, ...]:
    """One host a line; several lines of one host are ranks."""
    counts = count_repeats(text.split())
    asked = any(count > 1 for count in counts.values())
    return tuple(Host(name, slots=count if asked else None) for name, count in counts.items())


@dataclass(frozen=True)
class NodeFileScheduler(Scheduler):
    """One of them. `file_variables` name the file, the first that is set; `read` is its form. A job of one host may
    have no file where `lone_hosts` names a variable with the number of its hosts. JOB_VARIABLE counts only beside
    one of `needs`, where it has a name that others use too."""

    NAME: str
    TITLE: str
    JOB_VARIABLE: str
    file_variables: tuple[str, ...]
    read: Callable[[str], tuple[Host, ...]]
    HOSTS_LINES: tuple[HostsLine, ...]
    ALIASES: tuple[str, ...] = ()
    TRACES: tuple[str, ...] = ()
    REMOTE_SHELL: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    lone_hosts: str = ""
    SITE_CORES_COUNT: bool = True

    def mark(self, env: Mapping[str, str]) -> str | None:
        """The variable that says that `env` is in its job."""
        name = next((name for name in (self.JOB_VARIABLE, *self.ALIASES) if env.get(name)), None)
        return name if not self.needs or any(env.get(one) for one in self.needs) else None

    def detect(self, env: Mapping[str, str]) -> Allocation | None:
        """The job that `env` is in.

        Raises:
            UserError: its file is not named, cannot be read, or names no host.
        """
        name = self.mark(env)
        if name is None:
            return None
        job_id = env[name]
        variable = next((one for one in self.file_variables if env.get(one)), None)
        if variable is None and self.lone_hosts and env.get(self.lone_hosts) == "1":
            return Allocation(self.NAME, job_id, (Host(socket.gethostname()),), None, f"{self.lone_hosts}=1")
        if variable is None:
            raise unspoken(self.TITLE, job_id, f"{self.file_variables[0]} is not set", f"{name}={job_id}",
                           by_hand(self.HOSTS_LINES, env))
        where, instead = f"{variable}={env[variable]}", by_hand(self.HOSTS_LINES, env, failed=variable)
        try:
            hosts = self.read(read_text(Path(env[variable])))
        except UserError as error:
            raise unspoken(self.TITLE, job_id, error.found, where, instead) from error
        if not hosts or len(hosts) > MOST_HOSTS:
            raise unspoken(self.TITLE, job_id, f"its node file names {len(hosts):,} hosts", where, instead)
        return Allocation(self.NAME, job_id, hosts, None, variable)


GRID_ENGINE = NodeFileScheduler(
    "sge", "Grid Engine", "JOB_ID", ("PE_HOSTFILE",), slots_in_columns,
    (HostsLine("PE_HOSTFILE", "awk '!n[$1] {o[++k] = $1} {n[$1] += $2} END {for (i = 1; i <= k; i++) print o[i]"
               ' " slots=" n[o[i]]}\' "$PE_HOSTFILE" > hosts', is_file=True),),
    # NHOSTS and NSLOTS are set in all of its jobs.
    needs=("NHOSTS", "NSLOTS", "PE_HOSTFILE"), lone_hosts="NHOSTS", TRACES=("PE_HOSTFILE",),
    REMOTE_SHELL=("qrsh", "-inherit"))

_OAR_FILES = ("OAR_NODEFILE", "OAR_NODE_FILE", "OAR_FILE_NODES", "OAR_RESOURCE_FILE")

OAR = NodeFileScheduler(
    "oar", "OAR", "OAR_JOB_ID", _OAR_FILES, lines_are_cores,
    tuple(HostsLine(name, f'uniq "${name}" > hosts', is_file=True) for name in _OAR_FILES),
    ALIASES=("OAR_JOBID",), TRACES=_OAR_FILES, REMOTE_SHELL=("oarsh",))

COBALT = NodeFileScheduler(
    "cobalt", "Cobalt", "COBALT_JOBID", ("COBALT_NODEFILE",), lines_are_hosts,
    (HostsLine("COBALT_NODEFILE", 'cp "$COBALT_NODEFILE" hosts', is_file=True),),
    TRACES=("COBALT_NODEFILE", "COBALT_PARTNAME", "COBALT_JOBSIZE"))

PJM = NodeFileScheduler(
    "pjm", "PJM", "PJM_JOBID", ("PJM_O_NODEINF",), lines_are_hosts,
    (HostsLine("PJM_O_NODEINF", 'cp "$PJM_O_NODEINF" hosts', is_file=True),),
    TRACES=("PJM_O_NODEINF", "PJM_ENVIRONMENT", "PJM_NODE"), REMOTE_SHELL=("pjrsh",))

NODE_FILES: tuple[Scheduler, ...] = (GRID_ENGINE, OAR, COBALT, PJM)
