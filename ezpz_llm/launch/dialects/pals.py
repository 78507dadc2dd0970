"""Cray PALS: mpiexec of the HPE Cray machines that run PBS.

Only options that ALCF's user guides and the launcher's own help document are used.
"""

from __future__ import annotations

from ezpz_llm.base import UserError
from ezpz_llm.launch.dialects.work import Built, Work, refuse_unspeakable


def build(program: str, work: Work) -> Built:
    """Hosts always come from a file of ours: without one it reads PBS's own node file, whatever was narrowed.

    Raises:
        UserError: ranks a host that a single --ppn, filling hosts in order, cannot give.
    """
    refuse_unspeakable(program, work)
    counts = [count for _, count in work.placement.ranks]
    if any(count != work.placement.most for count in counts[:-1]):
        raise UserError(f"PALS takes one number of ranks a host, and these hosts would get {counts[:8]}",
                        where=f"{work.placement.source}", instead="--ppn, with the same number for every host")
    argv = (program, "-n", str(work.placement.world_size), "--ppn", str(work.placement.most),
            "--hostfile", str(work.hosts_file), *_bind(work), "--envall")
    return Built((*argv, *work.site_options, *work.command), files=work.file_of_hosts(work.hosts))


def _bind(work: Work) -> tuple[str, ...]:
    if work.binding.kind == "list":
        return (f"--cpu-bind=list:{':'.join(work.binding.cores)}",)
    if work.binding.kind == "depth" and work.cores_per_rank is not None:
        return (f"--depth={work.cores_per_rank}", "--cpu-bind=depth")
    # By itself it binds a rank to one core.
    return ("--cpu-bind=none",)
