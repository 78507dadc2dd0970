"""Jobs of several ranks that try layouts: starting a job, the ranks' main function, and training sequences."""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from slowness import scaled

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.setup import setup


class Results(dict[str, Any]):
    """Results by run. Accessing a run that this torch does not support skips the test."""

    def __missing__(self, run: str) -> Any:
        if run in possible([run]):
            raise KeyError(run)
        import pytest  # here, because ranks import this file without needing pytest

        pytest.skip(f"{run}: fsdp2 needs a newer torch on CPUs")


def possible(runs: list[str]) -> list[str]:
    """Return the runs that this torch supports: older versions lack fsdp2 on CPUs (docs/evidence/versions.md)."""
    return [run for run in runs if "fsdp2" not in run or _has_fsdp2()]


@functools.cache
def _has_fsdp2() -> bool:
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def results_of(script: Path, folder: Path, runs: list[str], ranks: int) -> Results:
    """Run `script` on several ranks, and return its results.json for the runs that this torch supports."""
    command = [shutil.which("mpiexec") or "mpiexec", "-n", str(ranks), sys.executable, str(script), str(folder),
               *possible(runs)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(500), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Results(json.loads((folder / "results.json").read_text()))


def take_runs(action: Callable[[Dist, str], Any]) -> None:
    """Call `action` for each run of the command line on every rank, and write rank 0's results."""
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    with setup(device="cpu", run_dir=folder / "run") as dist:
        results = {}
        for run in runs:
            results[run] = action(dist, run)
            gc.collect()
        if dist.is_main:
            (folder / "results.json").write_text(json.dumps(results))


def sequences(seed: int, count: int, length: int) -> torch.Tensor:
    """Return (count, length) tokens in which each symbol has two possible successors, so that the loss falls."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 64, (count,), generator=generator)]
    for choice in torch.randint(0, 2, (length - 1, count), generator=generator):
        rows.append((5 * rows[-1] + 7 * choice + 1) % 64)
    return torch.stack(rows, dim=1)
