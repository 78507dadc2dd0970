"""PBS Pro and OpenPBS: the job's environment and its node file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ezpz_llm.errors import UserError
from ezpz_llm.launch.allocation import Allocation, Host, count_repeats

NAME = "pbs"


def detect(env: Mapping[str, str]) -> Allocation | None:
    """The job we are in; None outside one.

    Raises:
        UserError: a job without a readable node file.
    """
    job_id = env.get("PBS_JOBID")
    if not job_id:
        return None
    path = env.get("PBS_NODEFILE")
    here = "start launch in the job script or in the interactive job's own shell"
    if not path:
        raise UserError(f"PBS job {job_id} has no PBS_NODEFILE", where="the environment", instead=here)
    try:
        text = Path(path).read_text()
    except OSError as error:
        # PBS writes the file on the job's first host only, and exports its name on the others too.
        raise UserError(f"cannot read the node file of PBS job {job_id}: {error.strerror}",
                        where=f"PBS_NODEFILE={path}", instead=here) from error
    hosts = node_file_hosts(text)
    if not hosts:
        raise UserError(f"the node file of PBS job {job_id} names no host", where=f"PBS_NODEFILE={path}",
                        instead=here)
    lines = sum(host.slots or 1 for host in hosts)
    shared = len(hosts) == 1 and lines > 1
    notes = (f"all {lines} chunks or ranks that PBS placed are on one host",) if shared else ()
    return Allocation(scheduler=NAME, job_id=job_id, hosts=hosts, ends_at=None, source="PBS_NODEFILE",
                      notes=notes)


def node_file_hosts(text: str) -> tuple[Host, ...]:
    """Distinct hosts in order; slots are the repeats of a line.

    PBS writes one line for a chunk that asked for nothing too, so where every host has a single line nobody
    has said how many ranks it should get: slots are None then.
    """
    counts = count_repeats(text.split())
    asked = any(count > 1 for count in counts.values())
    return tuple(Host(name, slots=count if asked else None) for name, count in counts.items())
