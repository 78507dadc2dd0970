"""Schedulers that list a job's nodes in a file: Grid Engine, OAR, Cobalt, and Fujitsu's PJM.

mpiexec starts the ranks, and the scheduler's remote shell starts mpiexec's daemons. submit does not support these
schedulers. Sources: Grid Engine: sge_pe(5) and submit(1), "ENVIRONMENTAL VARIABLES",
https://manpages.debian.org/testing/gridengine-common/sge_pe.5.en.html; OAR:
https://manpages.ubuntu.com/manpages/bionic/man1/oarsub.1.html; Cobalt: its qsub's man page; PJM: "Job
Operation Software End-user's Guide" of Fujitsu's TCS, whose PJM_O_NODEINF and /bin/pjrsh the job scripts of Kyushu,
Nagoya and Tokyo use with Open MPI and Intel MPI.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from ezpz_llm.core.base import MAX_NODES, UserError, read_text, whole_number
from ezpz_llm.launcher.basics.hostnames import count_repeats, sum_by_node
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation, HostfileCommand, Node, Origin, Place, Scheduler


def parse_slot_columns(text: str) -> tuple[Node, ...]:
    """Parse Grid Engine's file: hostname, slots, queue, processors; one line per node and queue.

    The slots, which are cores, are used as ranks on nodes without accelerators if any node has more than one.
    """
    slots: list[tuple[str, int]] = []
    for line in filter(None, map(str.split, text.splitlines())):
        number = whole_number(line[1]) if len(line) > 1 else None
        if number is None:
            raise UserError(f"a line has no slot count: {' '.join(line)!r}")
        slots.append((line[0], number))
    counts = sum_by_node(slots)
    requests_slots = any(count > 1 for count in counts.values())
    return tuple(Node(name, slots=count if requests_slots else None, slots_count_cores=True)
                 for name, count in counts.items())


def _parse_core_lines(text: str) -> tuple[Node, ...]:
    """Parse OAR's file, which has a line per reserved core."""
    return tuple(Node(name, cores=count) for name, count in count_repeats(text.split()).items())


def _parse_node_lines(text: str) -> tuple[Node, ...]:
    """Parse one hostname per line. If any line is repeated, a node's slots are its number of lines."""
    counts = count_repeats(text.split())
    requests_slots = any(count > 1 for count in counts.values())
    return tuple(Node(name, slots=count if requests_slots else None) for name, count in counts.items())


class _NodeFileScheduler(Scheduler):
    """Scheduler that lists a job's nodes in a file.

    Attributes:
        file_variables: variables with the path of the file. The first that is set is used.
        read: parser of the file.
        needs: if JOB_VARIABLE has a common name, it marks a job only if one of these variables is set too.
        node_count_variable: variable with the number of nodes. If it is 1, the job may have no file.
    """

    SITE_CORES_COUNT = True
    file_variables: tuple[str, ...]
    read: Callable[[str], tuple[Node, ...]]
    needs: tuple[str, ...] = ()
    node_count_variable: str = ""

    def mark(self, env: Mapping[str, str]) -> str | None:
        name = next((name for name in (self.JOB_VARIABLE, *self.ALIASES) if env.get(name)), None)
        return name if not self.needs or any(env.get(needed) for needed in self.needs) else None

    def detect(self, env: Mapping[str, str]) -> Allocation | None:
        """Return the allocation of the job that `env` is in; None outside a job.

        Raises:
            UserError: no variable names the file, or it cannot be read, or it lists no nodes.
        """
        name = self.mark(env)
        if name is None:
            return None
        job_id = env[name]
        variable = next((variable for variable in self.file_variables if env.get(variable)), None)
        if variable is None and self.node_count_variable and env.get(self.node_count_variable) == "1":
            return Allocation(self.NAME, job_id, (Node(socket.gethostname()),), None,
                              f"{self.node_count_variable}=1")
        if variable is None:
            raise self.unknown_nodes_error(job_id, f"{self.file_variables[0]} is not set", f"{name}={job_id}", env)
        where = f"{variable}={env[variable]}"
        try:
            hosts = self.read(read_text(Path(env[variable])))
        except UserError as error:
            raise self.unknown_nodes_error(job_id, error.found, where, env, variable) from error
        if not hosts or len(hosts) > MAX_NODES:
            raise self.unknown_nodes_error(job_id, f"its node file names {len(hosts):,} nodes", where, env,
                                           variable)
        cores_from = Origin(variable, Place.JOB) if any(host.cores for host in hosts) else None
        return Allocation(self.NAME, job_id, hosts, None, variable, cores_from=cores_from)


class _GridEngine(_NodeFileScheduler):
    NAME, TITLE = "sge", "Grid Engine"
    JOB_VARIABLE, TRACES = "JOB_ID", ("PE_HOSTFILE",)
    HOSTFILE_COMMANDS = (HostfileCommand(
        "PE_HOSTFILE", "awk '!n[$1] {o[++k] = $1} {n[$1] += $2} END {for (i = 1; i <= k; i++) print o[i]"
        ' " slots=" n[o[i]]}\' "$PE_HOSTFILE" > hosts', is_file=True),)
    REMOTE_SHELL = ("qrsh", "-inherit")
    file_variables = ("PE_HOSTFILE",)
    read = staticmethod(parse_slot_columns)
    # JOB_ID is a common name; every job of Grid Engine has NHOSTS and NSLOTS too.
    needs = ("NHOSTS", "NSLOTS", "PE_HOSTFILE")
    node_count_variable = "NHOSTS"


class _Oar(_NodeFileScheduler):
    NAME, TITLE = "oar", "OAR"
    JOB_VARIABLE, ALIASES = "OAR_JOB_ID", ("OAR_JOBID",)
    TRACES = file_variables = ("OAR_NODEFILE", "OAR_NODE_FILE", "OAR_FILE_NODES", "OAR_RESOURCE_FILE")
    HOSTFILE_COMMANDS = tuple(HostfileCommand(name, f'uniq "${name}" > hosts', is_file=True) for name in TRACES)
    REMOTE_SHELL = ("oarsh",)
    read = staticmethod(_parse_core_lines)


class _Cobalt(_NodeFileScheduler):
    NAME, TITLE = "cobalt", "Cobalt"
    JOB_VARIABLE, TRACES = "COBALT_JOBID", ("COBALT_NODEFILE", "COBALT_PARTNAME", "COBALT_JOBSIZE")
    HOSTFILE_COMMANDS = (HostfileCommand("COBALT_NODEFILE", 'cp "$COBALT_NODEFILE" hosts', is_file=True),)
    file_variables = ("COBALT_NODEFILE",)
    read = staticmethod(_parse_node_lines)


class _Pjm(_NodeFileScheduler):
    NAME, TITLE = "pjm", "PJM"
    JOB_VARIABLE, TRACES = "PJM_JOBID", ("PJM_O_NODEINF", "PJM_ENVIRONMENT", "PJM_NODE")
    HOSTFILE_COMMANDS = (HostfileCommand("PJM_O_NODEINF", 'cp "$PJM_O_NODEINF" hosts', is_file=True),)
    REMOTE_SHELL = ("pjrsh",)
    file_variables = ("PJM_O_NODEINF",)
    read = staticmethod(_parse_node_lines)


GRID_ENGINE, OAR, COBALT, PJM = _GridEngine(), _Oar(), _Cobalt(), _Pjm()
NODE_FILES: tuple[Scheduler, ...] = (GRID_ENGINE, OAR, COBALT, PJM)
