"""Choice of the run that a command reads if the user names none: the newest of the right kind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ezpz_llm.core.base import UserError, print_lines
from ezpz_llm.core.rundir.files import RunDir

if TYPE_CHECKING:
    from ezpz_llm.core.rundir.records import RunRecord


class RunKind(NamedTuple):
    """Kind of run that a command can read.

    Attributes:
        name: completes "no …" in messages.
        fits: returns True for a run directory and record of this kind.
    """

    name: str
    fits: Callable[[RunDir, RunRecord], bool]


def _has_steps(run_dir: RunDir, record: RunRecord) -> bool:
    return run_dir.metrics.is_file() and run_dir.metrics.stat().st_size > 0


ANY = RunKind("run", lambda run_dir, record: True)
LAUNCHED = RunKind("run that launch started", lambda run_dir, record: bool(record.launch or record.exit))
WITH_STEPS = RunKind("run with a step", _has_steps)
TRAINING = RunKind("training run with a step",
                   lambda run_dir, record: record.config is not None and _has_steps(run_dir, record))


def newest_run(folder: Path, kind: RunKind, instead: str) -> RunDir:
    """Return the run of this kind in `folder` whose record or metrics were written last.

    Prints a note to stderr if a run of another kind is newer.

    Raises:
        UserError: there is no such run. `instead` is what to type.
    """
    runs = sorted({path.parent for name in ("run.json", "metrics.jsonl") for path in folder.glob(f"*/{name}")},
                  key=_last_written, reverse=True)
    for run in runs:
        run_dir = RunDir(run.absolute())
        if _fits(run_dir, kind):
            if run != runs[0]:
                print_lines(f"note: reading {run}; {runs[0]} is newer, but not a {kind.name}", file=sys.stderr)
            return run_dir
    raise UserError(f"no {kind.name if runs else 'run'} in {folder}/", where=os.getcwd(), instead=instead)


def _last_written(run: Path) -> float:
    return max(path.stat().st_mtime for name in ("run.json", "metrics.jsonl") if (path := run / name).exists())


def _fits(run_dir: RunDir, kind: RunKind) -> bool:
    from ezpz_llm.core.rundir.records import read_record  # not needed by the shims, which import this package

    try:
        return kind.fits(run_dir, read_record(run_dir))
    except UserError:  # the command that reads the run will report the error
        return True
