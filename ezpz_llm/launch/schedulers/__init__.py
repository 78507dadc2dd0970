"""Which reservation are we in? One file a scheduler; this one holds the order in which they are asked."""

from __future__ import annotations

from collections.abc import Mapping

from ezpz_llm.launch.allocation import Allocation
from ezpz_llm.launch.schedulers import local, pbs, slurm, started

_IN_ORDER = (started.detect, slurm.detect, pbs.detect, local.detect)


def find_allocation(env: Mapping[str, str], wanted: str = "auto") -> Allocation:
    """The reservation that `env` describes: of the scheduler `wanted` ("slurm", "pbs", "none"), or ("auto") of the
    one whose job this process is in.

    Raises:
        UserError: the variables of a scheduler contradict each other, or there is no job of the one wanted.
    """
    return next(allocation for detect in _IN_ORDER if (allocation := detect(env)))
