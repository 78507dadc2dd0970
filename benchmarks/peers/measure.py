"""Run a program once, in processes of its own, and gather what its ranks found."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peers.machine import own_precision
from peers.programs import NATIVE, PROGRAMS, Work
from peers.task import Task

TIMEOUT_S = 1800
_BENCHMARKS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Bench:
    """What all programs of a comparison share."""

    work: Work
    folder: Path
    peers: dict[str, Path]
    steps: int
    changes: dict[str, Any]

    def task(self, program: str, scratch: Path) -> Task:
        entry = PROGRAMS[program]
        native = {"precision": own_precision()} if entry.module in NATIVE else {}
        return Task(program, str(self.folder / "data"), str(scratch), steps=self.steps,
                    peer=str(self.peers[entry.peer]) if entry.peer else None,
                    **{**native, **self.work.changes, **self.changes, **entry.changes})

    def lacks(self, program: str) -> str | None:
        """What a program needs that is not here; None where it can run."""
        entry = PROGRAMS[program]
        if entry.peer and entry.peer not in self.peers:
            return f"--peer {entry.peer}=FOLDER names no checkout"
        if entry.package and find_spec(entry.package) is None:
            return f"{entry.package} is not installed"
        return None


def run_program(bench: Bench, program: str) -> dict[str, Any]:
    """Medians of one run, and everything that it found.

    Raises:
        SystemExit: it failed; with the end of its output.
    """
    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        task = bench.task(program, Path(scratch))
        file = Path(scratch) / "task.json"
        task.write(file)
        load = os.getloadavg()[0]
        with (Path(scratch) / "output").open("w+") as output:
            done = subprocess.run(command(task, file), env=environment(bench, task), cwd=scratch, timeout=TIMEOUT_S,
                                  stdout=output, stderr=subprocess.STDOUT, check=False)
            output.seek(0)
            said = output.read()
        ranks = [Path(scratch) / f"rank{rank}.json" for rank in range(task.ranks)]
        if done.returncode or not all(path.exists() for path in ranks):
            raise SystemExit(f"{program} ended with exit code {done.returncode}\n{said[-6000:]}")
        return {**together([json.loads(path.read_text()) for path in ranks], task), "load_before": load}


def command(task: Task, file: Path) -> list[str]:
    """Ours is started by launch where there are several ranks, a plain loop by torchrun."""
    module = ["-m", "peers.worker", str(file)]
    if task.ranks == 1:
        return [sys.executable, *module]
    if PROGRAMS[task.program].module == "ours":
        launch = shutil.which("launch", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        return [launch or "launch", "-n", str(task.ranks), "--run-dir", str(Path(task.scratch) / "run"),
                sys.executable, *module]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={task.ranks}",
            *module]


def environment(bench: Bench, task: Task) -> dict[str, str]:
    """The same for all: no GPU, no hub, so many threads, and threads that wait without spinning."""
    return {**os.environ, "PYTHONPATH": str(_BENCHMARKS), "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(task.threads), "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_CACHE_DIR": str(bench.folder / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def together(ranks: list[dict[str, Any]], task: Task) -> dict[str, Any]:
    """Rank 0's findings, with processor time and memory added up over ranks."""
    first = dict(ranks[0])
    if not first["wall_s"]:
        return first
    first["cpu_s"] = [sum(times) for times in zip(*(one["cpu_s"] for one in ranks), strict=True)]
    for name in ("peak_bytes", "start_bytes"):
        first[name] = sum(one[name] for one in ranks)
    tokens, losses = task.tokens_per_step, first["losses"]
    first.update(step_s=statistics.median(first["wall_s"]), best_s=min(first["wall_s"]),
                 tokens_per_second=tokens / statistics.median(first["wall_s"]),
                 tokens_per_cpu_second=tokens / statistics.median(first["cpu_s"]),
                 loss_first=losses[0], loss_reached=statistics.mean(losses[-3:]))
    return first
