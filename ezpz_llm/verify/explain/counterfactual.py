"""Rerun of some steps of a run with and without collectives, to measure exposed communication (no torch)."""

from __future__ import annotations

import re
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, as_type, is_own, print_lines
from ezpz_llm.core.rundir import RunDir, read_json, schemas
from ezpz_llm.core.rundir.records import Environment, Launch, RunRecord, read_own_record
from ezpz_llm.launcher.basics.child import launch_words, run_launch
from ezpz_llm.training.layout.batch import option_of
from ezpz_llm.training.layout.precision_recipes import SCALED
from ezpz_llm.training.layout.value_source import Origin, read_sources
from ezpz_llm.verify.explain.split import Split

_NOT_PASSED_ON = ("run_dir",)
_REDERIVED = (Origin.DEFAULT, Origin.RECIPE, Origin.FINE_TUNING, Origin.DERIVED, Origin.TENTH, Origin.WEIGHTS)
"""Origins of values that are not passed on, because the new run derives the same values."""


@dataclass(frozen=True)
class StepsWithoutCollectives:
    """Median seconds of a step on one rank: with collectives, without them, and exposed according to the traces.

    Tracing slows down computation, so `exposed_share` divides the traced exposed time by the untraced step time.
    """

    rank: int
    real_s: float
    stubbed_s: float
    exposed_s: float | None

    @property
    def exposed_share(self) -> float | None:
        """Exposed communication according to the traces, as a share of the step."""
        return None if self.exposed_s is None or not self.real_s else self.exposed_s / self.real_s

    @property
    def removed_share(self) -> float:
        """Share of the step time that is saved without collectives; 0 if the step took no time."""
        return 1 - self.stubbed_s / self.real_s if self.real_s else 0.0


def run_counterfactual(run_dir: Path, yes: bool) -> Path:
    """Train for some steps with the run's configuration; return the new run directory, which is inside the run's.

    Needs an allocation and working directory like those of the run. Only runs that belong to the user are rerun.
    The command is printed, and starts only after the user confirms it.

    Args:
        yes: start without confirmation.

    Raises:
        UserError: the run was not started by launch, has one rank, uses fp16 or belongs to another user; the
            user did not confirm; or the new run failed.
    """
    # Resolve links once, so that the record is read from the directory whose owner was checked.
    run_dir = run_dir.resolve()
    record = read_own_record(RunDir(run_dir)) if is_own(run_dir) else None
    if record is None:
        raise UserError("--counterfactual only reruns your own runs: another user owns this run or can write it",
                        where=str(RunDir(run_dir).record),
                        instead="launch the training yourself, and explain that run")
    if record.launch is None:
        raise UserError("the run has no record of how it was launched", where=str(run_dir),
                        instead="a run that launch started")
    if (record.environment or Environment()).world_size in (None, 1):
        raise UserError("the run has a single rank, and so no communication", where=str(run_dir))
    if record.precision in SCALED:
        raise UserError("without collectives, the loss scales of ranks would diverge",
                        where=f"precision {record.precision} of {run_dir}",
                        instead="a run in bf16, which takes the same time")
    folder = run_dir / f"counterfactual-{time.strftime('%Y%m%d-%H%M%S')}"
    arguments = command(record, folder)
    print_lines(f"--counterfactual starts:\n  {shlex.join(arguments)}", file=sys.stderr)
    if not yes and not _is_confirmed():
        raise UserError("not confirmed, so nothing was started", where="--counterfactual",
                        instead="--counterfactual --yes, to start without asking")
    code = run_launch(arguments, output=sys.stderr)
    if not list(RunDir(folder).profile.glob("counterfactual-rank*.json")):
        raise UserError(f"the counterfactual run ended with exit code {code}", where=str(folder),
                        instead=f"ezpz-llm why {folder}", exit_code=code or 1)
    return folder


def _is_confirmed() -> bool:
    if not sys.stdin.isatty():
        return False
    print_lines("Start it? [y/N] ", end="", file=sys.stderr)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def command(record: RunRecord, folder: Path) -> list[str]:
    """Return the launch command that trains with a record's configuration in the new run directory `folder`.

    The record supplies only values of trainer options and numbers of ranks. It cannot choose the program or other
    options of launch.

    Raises:
        UserError: the record has no trainer configuration or no world size.
    """
    sources, counts = read_sources(record.sources), (record.launch or Launch()).ranks_per_host or []
    if record.world_size is None or record.config is None or record.sources is None:
        raise UserError("run.json has no trainer configuration", where=str(folder.parent))
    chosen = {name: value for name, value in record.config.items()
              if re.fullmatch("[a-z][a-z0-9_]*", name) and name not in _NOT_PASSED_ON
              and name in sources and sources[name].origin not in _REDERIVED}
    ppn = ["--ppn", str(counts[0])] if len(set(counts)) == 1 else []
    return launch_words(["-n", str(record.world_size), *ppn, "--run-dir", str(folder)], [
        sys.executable, "-m", "ezpz_llm.verify.explain.without_collectives",
        *(f"{option_of(name)}={_format_value(value)}" for name, value in chosen.items())])


def _format_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def read_steps_without_collectives(run_dir: Path, split: Split | None) -> list[StepsWithoutCollectives]:
    """Read the step times with and without collectives, by rank. Empty if the run did not measure them."""
    ranks = () if split is None else split.ranks
    exposed = {rank.rank: rank.median_s("exposed_communication") for rank in ranks}
    times = []
    for path in sorted(RunDir(run_dir).profile.glob("counterfactual-rank*.json")):
        seconds = as_type(schemas.StepTimes, read_json(path), str(path))
        if seconds["real"] and seconds["stubbed"]:
            times.append(StepsWithoutCollectives(seconds["rank"], statistics.median(seconds["real"]),
                                                 statistics.median(seconds["stubbed"]),
                                                 exposed.get(seconds["rank"])))
    return times

