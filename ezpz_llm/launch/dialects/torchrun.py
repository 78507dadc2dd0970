"""torchrun, on one host."""

from __future__ import annotations

from ezpz_llm.errors import UserError
from ezpz_llm.launch.dialects.work import Built, Work


def build(program: str, work: Work) -> Built:
    """Port 0 of the rendezvous lets two runs share a host. Without `--`, torchrun would take the command's own
    options for abbreviations of its own. Its own logs, which are empty, would go to the host's temporary folder.

    Raises:
        UserError: ranks on several hosts, or on another host than this.
    """
    if len(work.placement.ranks) > 1:
        raise UserError(f"torchrun is started on one host, but the ranks are on {len(work.placement.ranks)}",
                        where="--launcher torchrun", instead="--launcher mpiexec or srun, or fewer hosts")
    if not work.here:
        raise UserError(f"torchrun starts ranks on this host, not on {work.placement.ranks[0][0]}",
                        where="--launcher torchrun", instead="--launcher mpiexec or srun")
    return Built((program, "--nnodes", "1", "--nproc-per-node", str(work.placement.world_size),
                  "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
                  "--log-dir", str(work.hosts_file.with_name("torchrun")), "--no-python", "--", *work.command))
