"""Cray PALS: mpiexec of HPE Cray machines that run PBS.

Uses only options that ALCF's user guides and the launcher's help text document.
"""

from __future__ import annotations

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.planning.dialects.work import Built, Work, validate_command


def build(program: str, work: Work) -> Built:
    """Return a PALS command line, always with a hostfile.

    Without a hostfile, PALS would use PBS's node file, regardless of --hosts and --nodes.

    Raises:
        UserError: a single --ppn, which fills nodes in order, cannot place the ranks.
    """
    validate_command(program, work)
    counts = [count for _, count in work.placement.ranks]
    if any(count != work.placement.most for count in counts[:-1]):
        raise UserError(f"PALS fills nodes in order and cannot place {counts[:8]} ranks per node",
                        where=f"{work.placement.source}", instead="--ppn, with the same number for every node")
    argv = (program, "-n", str(work.placement.world_size), "--ppn", str(work.placement.most),
            "--hostfile", str(work.node_list_path), *_bind(work), "--envall")
    return Built((*argv, *work.site_options, *work.command), files=work.node_list_file(work.hosts))


def _bind(work: Work) -> tuple[str, ...]:
    if work.binding.kind == "list":
        return (f"--cpu-bind=list:{':'.join(work.binding.cores)}",)
    if work.binding.kind == "depth" and work.cores_per_rank is not None:
        return (f"--depth={work.cores_per_rank}", "--cpu-bind=depth")
    # PALS binds each rank to one core by default.
    return ("--cpu-bind=none",)
