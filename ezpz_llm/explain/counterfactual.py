"""The run's steps again, some of them without collectives, and what both measures say (imports no torch)."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.errors import UserError
from ezpz_llm.explain.split import Split
from ezpz_llm.launch.options import parse
from ezpz_llm.rundir import RunDir, read_json

TRACED, TAKEN = 24, 64
_STEPS = {"steps": TRACED + TAKEN + 16, "trace-steps": TRACED, "counterfactual-steps": TAKEN}
_QUIET = {"save-every": -1, "eval-every": 0, "eval-tokens": 1024, "sample-tokens": 0, "profile": "false",
          "hellaswag": "null", "track": "null", "resume": "null", "warmup-steps": 1, "decay-steps": _STEPS["steps"],
          "log-every": 10 ** 6, "spike-norm": 0, "spike-loss": 0, "bad-steps": 10 ** 6}
"""Nothing between steps, and no judgement of what is trained, which is worthless."""


@dataclass(frozen=True)
class Taken:
    """One rank: medians of steps with collectives and without, and of what was exposed in the traced steps. Tracing
    makes computing longer, so that it is set against the step's time without."""

    rank: int
    real_s: float
    stubbed_s: float
    exposed_s: float | None

    @property
    def exposed_share(self) -> float | None:
        """What of the step was exposed communication by the traces."""
        return None if self.exposed_s is None else self.exposed_s / self.real_s

    @property
    def removed_share(self) -> float:
        """What of the step went with its collectives."""
        return 1 - self.stubbed_s / self.real_s


def rerun(run_dir: Path, record: Mapping[str, Any]) -> Path:
    """Start the run's command again for a few steps; the new run's directory, inside the run's own.

    It needs the same reservation, and the directory in which the command was typed.

    Raises:
        UserError: launch did not start the run, it has one rank or fp16, or the new run failed.
    """
    typed = (record.get("launch") or {}).get("typed")
    if not typed:
        raise UserError("there is no record of how the run was launched", where=str(run_dir),
                        instead="a run that launch started")
    if (record.get("environment") or {}).get("world_size", 1) == 1:
        raise UserError("a single rank has nobody to communicate with", where=str(run_dir))
    if record.get("precision") == "fp16":
        raise UserError("without collectives ranks would scale their losses apart from each other",
                        where=f"precision fp16 of {run_dir}", instead="a run in bf16, which takes as long")
    folder = run_dir / f"counterfactual-{time.strftime('%Y%m%d-%H%M%S')}"
    done = subprocess.run(command(typed, folder), stdout=sys.stderr, check=False)
    if not list(RunDir(folder).profile.glob("counterfactual-rank*.json")):
        raise UserError(f"the run without collectives ended with code {done.returncode}", where=str(folder),
                        instead=f"ezpz-llm why {folder}", exit_code=done.returncode or 1)
    return folder


def command(typed: list[str], folder: Path) -> list[str]:
    """What was typed, with other steps and another run directory."""
    options = parse(typed[1:])
    own = typed[1:len(typed) - len(options.command)]
    if own and own[-1] == "--":
        own = own[:-1]
    changed = [word for name, value in {**_STEPS, **_QUIET}.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "ezpz_llm.launch", *own, "--run-dir", str(folder),
            *_without_run_dir(options.command), *changed]


def _without_run_dir(words: tuple[str, ...]) -> list[str]:
    found, drop = [], False
    for word in words:
        if not drop and word != "--run-dir" and not word.startswith("--run-dir="):
            found.append(word)
        drop = word == "--run-dir"
    return found


def taken(run_dir: Path, split: Split | None) -> list[Taken]:
    """What the steps of a run without collectives tell, by rank; empty where it has none."""
    ranks = () if split is None else split.ranks
    exposed = {rank.rank: rank.usual("exposed_communication") for rank in ranks}
    found = []
    for path in sorted(RunDir(run_dir).profile.glob("counterfactual-rank*.json")):
        seconds = read_json(path)
        if seconds["real"] and seconds["stubbed"]:
            found.append(Taken(seconds["rank"], statistics.median(seconds["real"]),
                               statistics.median(seconds["stubbed"]), exposed.get(seconds["rank"])))
    return found
