"""The command `ezpz-llm scale`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ezpz_llm.base import UserError, counted, user_path
from ezpz_llm.base.shell_commands import typable
from ezpz_llm.rundir import default_run_dir
from ezpz_llm.scaling.estimate import estimate
from ezpz_llm.scaling.options import Options, help_text, parse
from ezpz_llm.scaling.precheck import plan_study
from ezpz_llm.scaling.reporting import report
from ezpz_llm.scaling.running import Cut, left, run_all, submit_points
from ezpz_llm.scaling.study import Study, read_repeats, read_study, study_file


def main(argv: Sequence[str]) -> int:
    """Plan a study or take up one that is there, make its runs or queue them, and report.

    Raises:
        UserError: anything that could not run as it was asked for; nothing is started then.
    """
    options = parse(argv)
    if options.help:
        print(help_text())
        return 0
    study, folder = _study(options, argv)
    runs = left(study, folder, options.only, options.retry_failed)
    if options.check:
        return 0
    print(_described(study, folder, len(runs)), flush=True)
    if options.dry_run:
        print(f"estimate   {estimate(study, folder, runs, Path('runs'), in_jobs=options.submit is not None)}")
        return 0
    if not study_file(folder).exists():
        folder.mkdir(parents=True, exist_ok=True)
        study.write(folder)
    if options.submit is not None:
        names = {point.name for point, _ in runs}
        submit_points(study, folder, [point for point in study.points if point.name in names], options.submit)
        return 0
    if runs:
        again = typable(f"ezpz-llm scale --study {folder}")
        try:
            run_all(study, folder, runs)
        except Cut as cut:
            print(f"not finished: {cut}\n  continue with: {again}", flush=True)
        except (KeyboardInterrupt, SystemExit):
            print(f"ended; continue with: {again}", file=sys.stderr, flush=True)
            raise
    return _conclude(study, folder, options)


def _study(options: Options, typed: Sequence[str]) -> tuple[Study, Path]:
    """The study with its folder, absolute.

    Raises:
        UserError: the folder holds another study than the one asked for.
    """
    folder = user_path(options.folder).absolute() if options.folder else default_run_dir("scale").path
    if not options.command:
        return read_study(folder), folder
    planned = plan_study(options, os.environ, Path.cwd(), ["ezpz-llm", "scale", *typed])
    if not study_file(folder).exists():
        return planned, folder
    stored = read_study(folder)
    if replace(planned, typed=stored.typed, notes=stored.notes) != stored:
        raise UserError("the folder holds another study", where=str(folder),
                        instead=f"another --study, or ezpz-llm scale --study {folder} to continue that one")
    return stored, folder


def _described(study: Study, folder: Path, runs: int) -> str:
    rows = [f"study      {folder}",
            f"runs       {len(study.points)} points x {study.repeats}, of which {runs} are to be made"]
    rows += [f"  {point.name:<24} {counted(point.nodes, 'node')}, {counted(point.ranks, 'rank')}, "
             f"{point.global_batch} sequences a step "
             f"({point.micro_batch} a rank x {point.accumulation} micro-steps)" for point in study.points]
    return "\n".join([*rows, *(f"note       {note}" for note in study.notes)])


def _conclude(study: Study, folder: Path, options: Options) -> int:
    """Say what came of it; the exit code."""
    to_make = left(study, folder, options.only, retry_failed=False)
    repeats = read_repeats(folder)
    failures = [repeat for repeat in repeats if repeat.error is not None]
    # A job of one point says nothing of the others, unless it is the last to end.
    is_all = len(repeats) == len(study.points) * study.repeats
    if len(failures) < len(repeats) and (is_all or not options.only):
        report(folder, options.target)
    for repeat in failures:
        print(f"failed: {repeat.point} run {repeat.repeat}: {repeat.error}\n"
              f"  {typable(f'ezpz-llm why {folder / repeat.run_dir}')}", flush=True)
    return 1 if failures or to_make else 0
