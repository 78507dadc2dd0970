"""Ranks that launch starts on this node by itself, for machines without mpiexec and torchrun."""

from __future__ import annotations

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.planning.dialects.work import THIS_LAUNCH, Built, Dialect, Work
from ezpz_llm.launcher.planning.rank_binding import CoreOption


def build(python: str, work: Work) -> Built:
    """Return the command line of the ranks' parent.

    Raises:
        UserError: ranks run on other nodes.
    """
    if not work.here:
        raise UserError("cannot start ranks on other nodes: mpiexec is not on PATH", where="PATH",
                        instead="load the site's MPI module, or `pip install mpich`")
    ranks = str(work.placement.world_size)
    return Built((python, "-m", "ezpz_llm.launcher.planning.dialects.local_ranks", ranks, *work.command))


DIALECT = Dialect(THIS_LAUNCH, None, build, cores=CoreOption.NONE)
