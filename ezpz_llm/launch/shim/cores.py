"""Keeping a rank to its cores where the launcher has no option for that."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from ezpz_llm.launch.devices import expand
from ezpz_llm.launch.ranks import RankInfo
from ezpz_llm.launch.variables import BIND_VARIABLE


def keep_to_cores(info: RankInfo, env: MutableMapping[str, str]) -> None:
    """Bind this process, and so the rank that it starts, to the cores that EZPZ_LLM_BIND has for its local rank;
    the variable goes, since a launch inside the rank would hand it on. A host without these cores is told of, and
    the rank runs unbound."""
    wanted = env.pop(BIND_VARIABLE, "")
    if not wanted:
        return
    cores = wanted.split(":")[info.local_rank]
    try:
        os.sched_setaffinity(0, expand(cores))
    except OSError as error:
        print(f"launch: rank {info.rank} on {os.uname().nodename} is not bound to cores {cores}: {error.strerror}",
              file=sys.stderr, flush=True)
