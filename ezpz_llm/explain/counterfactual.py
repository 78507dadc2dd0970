"""The run's steps again, some of them without collectives, and what both measures say (imports no torch)."""

from __future__ import annotations

import re
import shlex
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, as_type, is_own
from ezpz_llm.explain.split import Split
from ezpz_llm.launch.child import launch_words, run_launch
from ezpz_llm.layout.batch import option_of
from ezpz_llm.layout.precision_recipes import SCALED
from ezpz_llm.layout.value_source import DEFAULT, Origin, ValueSource
from ezpz_llm.rundir import RunDir, own_record, read_json, schemas

_OF_ONE_RUN = ("run_dir", "counterfactual_steps")  # the second was an option of the trainer once
_NOT_CHOSEN = (Origin.DEFAULT, Origin.RECIPE, Origin.FINE_TUNING, Origin.DERIVED, Origin.TENTH, Origin.WEIGHTS)
"""Sources of values that come about again by themselves."""


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
        """Share of the step that was exposed communication by the traces."""
        return None if self.exposed_s is None or not self.real_s else self.exposed_s / self.real_s

    @property
    def removed_share(self) -> float:
        """Share of the step saved by leaving out its collectives; 0 of a step that took no time."""
        return 1 - self.stubbed_s / self.real_s if self.real_s else 0.0


def rerun(run_dir: Path, yes: bool) -> Path:
    """Start our trainer with the run's configuration for a few steps; the new run's directory, in the run's own.

    It needs the same reservation, and the directory in which the run was launched. Only a run of the user's own is
    made again, and the command is shown and asked about before it starts.

    Args:
        yes: start without asking.

    Raises:
        UserError: launch did not start the run, it has one rank or fp16, it is another user's, nobody said yes, or
            the new run failed.
    """
    # Links on the way are followed once, and the record is read as what is checked to be the user's own.
    run_dir = run_dir.resolve()
    record = own_record(RunDir(run_dir)) if is_own(run_dir) else None
    if record is None:
        raise UserError("only a run of your own is made again: another user owns this, or all can write it",
                        where=str(RunDir(run_dir).record),
                        instead="launch the training yourself, and explain that run")
    if not isinstance(record.get("launch"), dict):
        raise UserError("there is no record of how the run was launched", where=str(run_dir),
                        instead="a run that launch started")
    if (record.get("environment") or {}).get("world_size", 1) == 1:
        raise UserError("a single rank has nobody to communicate with", where=str(run_dir))
    if record.get("precision") in SCALED:
        raise UserError("without collectives ranks would scale their losses apart from each other",
                        where=f"precision {record['precision']} of {run_dir}",
                        instead="a run in bf16, which takes as long")
    folder = run_dir / f"counterfactual-{time.strftime('%Y%m%d-%H%M%S')}"
    words = command(record, folder)
    print(f"This starts:\n  {shlex.join(words)}", file=sys.stderr, flush=True)
    if not yes and not _says_yes():
        raise UserError("nothing was started", where="--counterfactual", instead="--yes to start it without asking")
    code = run_launch(words, output=sys.stderr)
    if not list(RunDir(folder).profile.glob("counterfactual-rank*.json")):
        raise UserError(f"the run without collectives ended with code {code}", where=str(folder),
                        instead=f"ezpz-llm why {folder}", exit_code=code or 1)
    return folder


def _says_yes() -> bool:
    if not sys.stdin.isatty():
        return False
    print("Start it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def command(record: Mapping[str, Any], folder: Path) -> list[str]:
    """Our trainer under launch with the configuration that a record has, other steps and another run directory.

    The record's words are values of options and nothing else: none is a program, or an option of launch.

    Raises:
        UserError: the record has no configuration of a training, or no number of ranks.
    """
    ranks, hosts = record["environment"].get("world_size"), record["launch"].get("ranks_per_host")
    config, sources = record.get("config"), record.get("sources")
    if not isinstance(ranks, int) or not isinstance(config, dict) or not isinstance(sources, dict):
        raise UserError("run.json has no configuration of a training", where=str(folder.parent))
    chosen = {name: value for name, value in config.items()
              if re.fullmatch("[a-z][a-z0-9_]*", name) and name not in _OF_ONE_RUN
              and ValueSource.read(str(sources.get(name, DEFAULT))).origin not in _NOT_CHOSEN}
    is_even = isinstance(hosts, list) and all(isinstance(count, int) for count in hosts) and len(set(hosts)) == 1
    per_host = ["--ppn", str(hosts[0])] if is_even else []
    return launch_words(["-n", str(ranks), *per_host, "--run-dir", str(folder)], [
        sys.executable, "-m", "ezpz_llm.explain.without_collectives",
        *(f"{option_of(name)}={_word(value)}" for name, value in chosen.items())])


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def taken(run_dir: Path, split: Split | None) -> list[Taken]:
    """Step times of a run without collectives, by rank; empty if it has none."""
    ranks = () if split is None else split.ranks
    exposed = {rank.rank: rank.usual("exposed_communication") for rank in ranks}
    found = []
    for path in sorted(RunDir(run_dir).profile.glob("counterfactual-rank*.json")):
        seconds = as_type(schemas.StepTimes, read_json(path), str(path))
        if seconds["real"] and seconds["stubbed"]:
            found.append(Taken(seconds["rank"], statistics.median(seconds["real"]),
                               statistics.median(seconds["stubbed"]), exposed.get(seconds["rank"])))
    return found
