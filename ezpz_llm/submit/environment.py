"""The lines that give a job the environment of the shell that submitted it. PBS hands nothing on, and Slurm not on
every site; so the script itself says what a run depends on. Secrets are left out."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from ezpz_llm.base.secret import SECRET_VARIABLE
from ezpz_llm.launch.devices import MASKS
from ezpz_llm.launch.variables import (
    ENDS_AT_VARIABLE,
    FORWARDED,
    FORWARDED_PREFIXES,
    RANKS_OWN,
    RANKS_PER_NODE_VARIABLE,
    RUN_ID_VARIABLE,
    SITE_VARIABLE,
    TORCHS_OWN,
    WORLD_SIZE_VARIABLE,
)
from ezpz_llm.rundir import RUN_DIR_VARIABLE, redact
from ezpz_llm.rundir.secrets import hide, secret_values

_RESERVE_S, _RESERVED_PART = 60, 6
"""What may pass between a job's start, as its scheduler counts, and the first line of its script; of a short job no
more than this part."""

_OF_A_LAUNCH = (*MASKS, *RANKS_OWN, *TORCHS_OWN, RUN_DIR_VARIABLE, RUN_ID_VARIABLE, SECRET_VARIABLE,
                WORLD_SIZE_VARIABLE, RANKS_PER_NODE_VARIABLE, ENDS_AT_VARIABLE)
# The job has its own home, and PATH and the site get lines of their own.
_LEFT_OUT = ("HOME", "PATH", SITE_VARIABLE, *_OF_A_LAUNCH)
_OF_THE_ENVIRONMENT = ("CONDA_PREFIX", "MPI4PY_LIBMPI")
_OF_A_JOB = ("SLURM_", "PBS_", "PMI_", "PMIX_", "PALS_", "OMPI_", "HYDRA_")


def environment_lines(env: Mapping[str, str], folder: Path, setup: tuple[str, ...], time_s: int) -> list[str]:
    """The job's environment as shell lines: the variables a run depends on, the site's own lines, and this Python
    first on PATH.

    Args:
        folder: the working directory.
        setup: the site's lines, as they are.
        time_s: the job's limit in seconds.
    """
    secrets = secret_values(env)
    lines = [f"cd {shlex.quote(str(folder))} || exit"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(env.items())
              if _is_carried(name) and redact(hide(value, secrets), name) == value]
    lines += [f"export PATH={shlex.quote(env.get('PATH', os.defpath))}:$PATH", *setup]
    # sys.prefix itself, not where a link leads to: the environment's own python3 and launch have to come first.
    lines += [f"export PATH={shlex.quote(os.path.join(sys.prefix, 'bin'))}:$PATH"]
    lines += ["# When the time is over, with a little to spare; launch replaces it by the scheduler's own word.",
              f"export {ENDS_AT_VARIABLE}=$(($(date +%s) + {time_s - min(_RESERVE_S, time_s // _RESERVED_PART)}))"]
    return lines


def _is_carried(name: str) -> bool:
    wanted = name in (*FORWARDED, *_OF_THE_ENVIRONMENT) or name.startswith(FORWARDED_PREFIXES)
    return wanted and name not in _LEFT_OUT


def outside_a_job(env: Mapping[str, str]) -> dict[str, str]:
    """`env` for sbatch and qsub without what describes the job that submit itself runs in: Slurm would hand it on,
    and the new job would take it for its own."""
    if not env.get("SLURM_JOB_ID") and not env.get("PBS_JOBID"):
        return dict(env)
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "PBS_EXEC", "PBS_SERVER", "PBS_CONF_FILE", "PBS_DEFAULT")
    return {name: value for name, value in env.items()
            if name not in _OF_A_LAUNCH and (name in kept or not name.startswith(_OF_A_JOB))}
