"""Jobs of ranks that try layouts: how a test starts one, what each rank does, and the sequences to train on."""

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

from ezpz_llm.dist import Dist
from ezpz_llm.dist.setup import setup


class Results(dict[str, Any]):
    """By run what it has left; a test that asks for one that this torch refuses is skipped."""

    def __missing__(self, run: str) -> Any:
        if run in possible([run]):
            raise KeyError(run)
        import pytest  # here, because ranks import this file, too

        pytest.skip(f"{run}: fsdp2 needs a newer torch on CPUs")


def possible(runs: list[str]) -> list[str]:
    """Those that this torch does not refuse: older ones have no fsdp2 on CPUs (docs/evidence/versions.md)."""
    return [run for run in runs if "fsdp2" not in run or _has_fsdp2()]


@functools.cache
def _has_fsdp2() -> bool:
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def results_of(script: Path, folder: Path, runs: list[str], ranks: int) -> Results:
    """What `script` writes to results.json after these runs, but those that this torch refuses."""
    command = [shutil.which("mpiexec") or "mpiexec", "-n", str(ranks), sys.executable, str(script), str(folder),
               *possible(runs)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Results(json.loads((folder / "results.json").read_text()))


def take_runs(action: Callable[[Dist, str], Any]) -> None:
    """A rank's part of such a job: act on each run of the command line, and write what rank 0 got of each."""
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    with setup(device="cpu", run_dir=folder / "run") as dist:
        results = {}
        for run in runs:
            results[run] = action(dist, run)
            gc.collect()
        if dist.is_main:
            (folder / "results.json").write_text(json.dumps(results))


def sequences(seed: int, count: int, length: int) -> torch.Tensor:
    """(count, length) tokens of a language with two successors a symbol, so that losses fall."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 64, (count,), generator=generator)]
    for choice in torch.randint(0, 2, (length - 1, count), generator=generator):
        rows.append((5 * rows[-1] + 7 * choice + 1) % 64)
    return torch.stack(rows, dim=1)
