"""Check of the limit on open files, which each rank and the pipes of Hydra need."""

from __future__ import annotations

import resource
from collections import Counter

from ezpz_llm.core.base import EXIT_PREFLIGHT, UserError
from ezpz_llm.launcher.planning.plan import LaunchPlan

_FILES_OF_A_PROCESS = 28
"""Files that a Python rank and its shim have open at the same time."""
_HYDRA, _FILES_OF_HYDRA, _FILES_PER_RANK = "MPICH/Hydra", 20, 4
"""Files of Hydra's proxy, and its pipes per rank of the node. Measured with 2 and 8 ranks under MPICH 5."""


def check_open_files(plan: LaunchPlan) -> None:
    """Check that this process may open the files that the ranks of a node need. The ranks inherit the limit.

    Raises:
        UserError: the limit is too low. Otherwise the launcher or each rank would fail with messages of its own.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = max(Counter(place.host for place in plan.ranks).values())
    pipes = _FILES_OF_HYDRA + _FILES_PER_RANK * ranks if plan.launcher.dialect.title == _HYDRA else 0
    needed = max(_FILES_OF_A_PROCESS, pipes)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise UserError(f"a process may open {allowed} files, but {ranks} ranks per node need {needed}",
                        where="ulimit -n", instead="run ulimit -n 65536 before the command (in the job script); if "
                        "the hard limit is lower, ask the site", exit_code=EXIT_PREFLIGHT)
