"""Run a program once in separate processes, and combine the results of its ranks."""

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
    """Settings shared by all programs of a comparison."""

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
        """Return the program's missing requirement, or None if it can run."""
        entry = PROGRAMS[program]
        if entry.peer and entry.peer not in self.peers:
            return f"--peer {entry.peer}=FOLDER names no checkout"
        if entry.package and find_spec(entry.package) is None:
            return f"{entry.package} is not installed"
        return None


def run_program(bench: Bench, program: str) -> dict[str, Any]:
    """Run a program. Return the medians and all results.

    Raises:
        SystemExit: the program failed; the message has the end of its output.
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
            text = output.read()
        ranks = [Path(scratch) / f"rank{rank}.json" for rank in range(task.ranks)]
        if done.returncode or not all(path.exists() for path in ranks):
            raise SystemExit(f"{program} ended with exit code {done.returncode}\n{text[-6000:]}")
        return {**together([json.loads(path.read_text()) for path in ranks], task), "load_before": load}


def command(task: Task, file: Path) -> list[str]:
    """Return the command of a program. With several ranks, ours is started by launch, a plain loop by torchrun."""
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
    """Return the common environment: no GPU, no hub, the task's number of threads, and threads that do not spin."""
    return {**os.environ, "PYTHONPATH": str(_BENCHMARKS), "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(task.threads), "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_CACHE_DIR": str(bench.folder / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def together(ranks: list[dict[str, Any]], task: Task) -> dict[str, Any]:
    """Return rank 0's results, with processor time and memory summed over ranks."""
    first = dict(ranks[0])
    if not first["wall_s"]:
        return first
    first["cpu_s"] = [sum(times) for times in zip(*(rank["cpu_s"] for rank in ranks), strict=True)]
    for name in ("peak_bytes", "start_bytes"):
        first[name] = sum(rank[name] for rank in ranks)
    tokens, losses = task.tokens_per_step, first["losses"]
    first.update(step_s=statistics.median(first["wall_s"]), best_s=min(first["wall_s"]),
                 tokens_per_second=tokens / statistics.median(first["wall_s"]),
                 tokens_per_cpu_second=tokens / statistics.median(first["cpu_s"]),
                 loss_first=losses[0], loss_reached=statistics.mean(losses[-3:]))
    return first
