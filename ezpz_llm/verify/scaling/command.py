"""The command `ezpz-llm scale`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from ezpz_llm.core.base import UserError, count_noun, print_lines, user_path
from ezpz_llm.core.base.shell_commands import to_typable
from ezpz_llm.core.rundir import default_run_dir
from ezpz_llm.verify.scaling.estimate import estimate
from ezpz_llm.verify.scaling.options import Options, help_text, parse
from ezpz_llm.verify.scaling.planning import plan_study
from ezpz_llm.verify.scaling.study import Study, read_own_study, read_repeats, study_file
from ezpz_llm.verify.scaling.study_report import report
from ezpz_llm.verify.scaling.study_runs import StudyInterrupted, remaining_runs, run_all, submit_points


def main(argv: Sequence[str]) -> int:
    """Plan or continue a study, run its points or submit a job for each, and print the report.

    Raises:
        UserError: a point cannot run as requested; no run is started.
    """
    options = parse(argv)
    if options.help:
        print_lines(help_text())
        return 0
    study, folder = _plan_or_read_study(options, argv)
    runs = remaining_runs(study, folder, options.only, options.retry_failed)
    if options.check:
        return 0
    print_lines(_description(study, folder, len(runs)))
    if options.dry_run:
        print_lines(f"estimate   {estimate(study, folder, runs, Path('runs'), in_jobs=options.submit is not None)}")
        return 0
    if not study_file(folder).exists():
        folder.mkdir(parents=True, exist_ok=True)
        study.write(folder)
    if options.submit is not None:
        names = {point.name for point, _ in runs}
        submit_points(study, folder, [point for point in study.points if point.name in names], options.submit)
        return 0
    if runs:
        resume_command = to_typable(f"ezpz-llm scale --study {folder}")
        try:
            run_all(study, folder, runs)
        except StudyInterrupted as interruption:
            print_lines(f"not finished: {interruption}\n  continue with: {resume_command}")
        except (KeyboardInterrupt, SystemExit):
            print_lines(f"interrupted; continue with: {resume_command}", file=sys.stderr)
            raise
    return _report_results(study, folder, options)


def _plan_or_read_study(options: Options, typed: Sequence[str]) -> tuple[Study, Path]:
    """Return the study and its absolute folder.

    Raises:
        UserError: the folder contains a different study, or another user's.
    """
    folder = user_path(options.folder).absolute() if options.folder else default_run_dir("scale").path
    if not options.command:
        return read_own_study(folder), folder
    planned = plan_study(options, os.environ, Path.cwd(), ["ezpz-llm", "scale", *typed])
    if not study_file(folder).exists():
        return planned, folder
    stored = read_own_study(folder)
    if replace(planned, typed=stored.typed, notes=stored.notes) != stored:
        raise UserError("the folder contains a different study", where=str(folder),
                        instead=f"another --study, or ezpz-llm scale --study {folder} to continue the stored one")
    return stored, folder


def _description(study: Study, folder: Path, runs: int) -> str:
    rows = [f"study      {folder}",
            f"runs       {len(study.points)} points x {study.repeats}, {runs} left to run"]
    rows += [f"  {point.name:<24} {count_noun(point.nodes, 'node')}, {count_noun(point.ranks, 'rank')}, "
             f"global batch {point.global_batch} "
             f"(micro-batch {point.micro_batch} x {point.accumulation} micro-steps)" for point in study.points]
    return "\n".join([*rows, *(f"note       {note}" for note in study.notes)])


def _report_results(study: Study, folder: Path, options: Options) -> int:
    """Print the report and the failed runs, and return the exit code."""
    remaining = remaining_runs(study, folder, options.only, retry_failed=False)
    repeats = read_repeats(folder)
    failures = [repeat for repeat in repeats if repeat.error is not None]
    # The job of one point prints no report, except the last job to finish.
    is_all = len(repeats) == len(study.points) * study.repeats
    if len(failures) < len(repeats) and (is_all or not options.only):
        report(folder)
    for repeat in failures:
        print_lines(f"failed: {repeat.point} run {repeat.repeat}: {repeat.error}\n"
                    f"  {to_typable(f'ezpz-llm why {folder / repeat.run_dir}')}")
    return 1 if failures or remaining else 0
