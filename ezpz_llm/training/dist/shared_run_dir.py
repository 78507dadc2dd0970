"""Run directory of all ranks, which rank 0 chooses, creates, and owns."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from ezpz_llm.core.base import UserError
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir, default_run_dir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.launcher.basics.variables import RUN_ID_VARIABLE
from ezpz_llm.launcher.jobs.owner import Ownership, become_owner
from ezpz_llm.training.dist.process_group import destroy_group


def agree_on_run_dir(info: RankInfo, asked: Path | None, name: str,
                     control: ProcessGroup | None) -> tuple[RunDir, Ownership | None]:
    """Return the run directory, and its ownership on rank 0 if launch does not hold it. Collective.

    Args:
        asked: run directory of the command line.
        name: prefix of the name of a new run directory.
        control: see `Dist.control`.

    Raises:
        UserError: two directories are given, the run directory cannot be created, or another run writes to it. In
            the last two cases, the process group is destroyed.
    """
    given = os.environ.get(RUN_DIR_VARIABLE)
    if given and asked is not None and Path(given).resolve() != asked.resolve():
        raise UserError(f"two run directories: {given} from launch, and {asked} from the command",
                        where=f"{RUN_DIR_VARIABLE} and --run-dir",
                        instead="pass --run-dir to launch only, or the same directory to both")
    ownership: Ownership | None = None
    error: UserError | None = None
    outcome: list[str | None] = [None, None]
    if info.rank == 0:
        run_dir = RunDir((Path(given) if given else asked or default_run_dir(name).path).absolute())
        try:
            run_dir.create()
            if RUN_ID_VARIABLE not in os.environ:
                ownership = become_owner(run_dir, "", os.environ)
            outcome = [str(run_dir.path), None]
        except UserError as own_error:
            error, outcome = own_error, [None, str(own_error)]
    if info.world_size > 1:
        torch.distributed.broadcast_object_list(outcome, src=0, group=control)
    path, failure = outcome
    if path is None:
        if info.world_size > 1:
            # All ranks raise the error. A program that catches it continues or exits without a process group.
            destroy_group()
        raise error or UserError(failure or "rank 0 could not create the run directory")
    return RunDir(Path(path)), ownership
