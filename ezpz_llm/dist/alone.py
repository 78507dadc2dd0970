"""A single process in a job of several hosts: most often somebody forgot to launch it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence

from ezpz_llm.errors import UserError
from ezpz_llm.launch.ranks import ALONE, RankInfo
from ezpz_llm.launch.schedulers import find_allocation
from ezpz_llm.launch.variables import RUN_ID_VARIABLE
from ezpz_llm.rundir.secrets import redact_words


def say_if_alone(info: RankInfo, env: Mapping[str, str], command: Sequence[str] = tuple(sys.orig_argv)) -> None:
    """Say on standard error how to start ranks on all hosts of the job, where nothing has started this process as
    one of them. `command` is what was typed."""
    if info.source != ALONE or RUN_ID_VARIABLE in env:
        return
    try:
        job = find_allocation(env)
    except UserError:
        # Whoever is content with one process needs no job that can be read.
        return
    if len(job.hosts) > 1:
        print(f"one process on one of the {len(job.hosts)} hosts of {job.scheduler} job {job.job_id}; for ranks on"
              f" all of them: launch {shlex.join(redact_words(command))}", file=sys.stderr, flush=True)
