"""Jobs of ranks that try layouts: how a test starts one, and the sequences that all of them train on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def results_of(script: Path, folder: Path, runs: list[str], ranks: int) -> dict[str, Any]:
    """What `script` writes to results.json after these runs."""
    command = [shutil.which("mpiexec") or "mpiexec", "-n", str(ranks), sys.executable, str(script), str(folder),
               *runs]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())


def sequences(seed: int, count: int, length: int) -> torch.Tensor:
    """(count, length) tokens of a language with two successors a symbol, so that losses fall."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 64, (count,), generator=generator)]
    for choice in torch.randint(0, 2, (length - 1, count), generator=generator):
        rows.append((5 * rows[-1] + 7 * choice + 1) % 64)
    return torch.stack(rows, dim=1)
