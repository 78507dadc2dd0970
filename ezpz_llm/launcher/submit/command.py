"""Check a `launch` command, write a job script for it, and submit the script."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from ezpz_llm.core.base import EXIT_USAGE, count_noun, print_lines
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir, default_run_dir, write_atomic
from ezpz_llm.core.rundir.records import Launch, Submission, read_record, update_record
from ezpz_llm.launcher.jobs.schedulers.scheduler import clock
from ezpz_llm.launcher.running.precheck import check_command
from ezpz_llm.launcher.submit.job import Job, plan_job, write_script
from ezpz_llm.launcher.submit.options import help_text, parse
from ezpz_llm.launcher.submit.script import RejectedError, queue_chain, remove_job_variables
from ezpz_llm.launcher.submit.state import find_state


def main(argv: Sequence[str]) -> int:
    """Check the command, write its job script and submit it, or print the script.

    Raises:
        UserError: invalid options or command, or the scheduler rejects the job.
    """
    options = parse(argv)
    if options.help:
        print_lines(help_text())
        return 0
    if options.state is not None:
        print_lines(find_state(RunDir(options.state)))
        return 0
    typed = ["ezpz-llm", "submit", *argv]
    job = plan_job(options, os.environ)
    script = write_script(job, typed)
    if _check(job):
        print_lines("submit: nothing was queued: the command's check failed", file=sys.stderr)
        return EXIT_USAGE
    if options.dry_run:
        queued_by = shlex.join(job.scheduler.submission(str(job.run_dir.job_script), None))
        print_lines(f"{script}\n# queue      {_queue_line(job)}\n# ranks      {_ranks(job)}\n"
                    f"# queued by  {queued_by}")
        return 0
    existed_before = job.run_dir.path.exists() and not job.is_default
    job = _claim(job)
    write_atomic(job.run_dir.job_script, write_script(job, typed))
    try:
        _queue(job, typed)
    except RejectedError:
        # Without a job, this directory must not become the newest run.
        if not existed_before and not (read_record(job.run_dir).submit or Submission()).jobs:
            shutil.rmtree(job.run_dir.path, ignore_errors=True)
        raise
    return 0


def _check(job: Job) -> int:
    env = {**os.environ, RUN_DIR_VARIABLE: str(job.run_dir.path)}
    checked = check_command(job.target, job.options.launch.command, job.placement.world_size, env)
    for note in (*job.notes, *checked.notes):
        print_lines(f"submit: note: {note}", file=sys.stderr)
    return checked.code


def _claim(job: Job) -> Job:
    """Create the run directory. A default one is not shared with a run that began in the same second."""
    while job.is_default and not job.run_dir.claim():
        job = replace(job, run_dir=default_run_dir(job.target.name))
    job.run_dir.create()
    return job


def _queue(job: Job, typed: list[str]) -> None:
    # --state compares start times to distinguish an earlier launch in this directory from this job's.
    before = (read_record(job.run_dir).launch or Launch()).started
    jobs: list[str] = []
    submission = Submission(
        typed=typed, scheduler=job.scheduler.NAME, site=job.site.name, nodes=job.options.nodes,
        time_s=job.options.time_s, ranks=job.placement.world_size, script=str(job.run_dir.job_script),
        submitted=time.time(), launched_before=before, jobs=jobs)
    update_record(job.run_dir, submit=submission)
    try:
        for job_id in queue_chain(job.scheduler, job.run_dir.job_script, job.options.chain,
                                  remove_job_variables(os.environ)):
            jobs.append(job_id)
            update_record(job.run_dir, submit=submission)
    finally:
        if jobs:
            print_lines(_summary(job, jobs))


def _summary(job: Job, jobs: list[str]) -> str:
    nodes, time_s = job.options.nodes, job.options.time_s
    return "\n".join([
        f"queued     {', then '.join(jobs)}: {count_noun(nodes, 'node')}, at most {clock(time_s)}",
        f"queue      {_queue_line(job)}",
        f"ranks      {_ranks(job)}",
        f"run        {job.run_dir.path}",
        f"script     {job.run_dir.job_script}",
        f"output     {job.scheduler.output_file(job.request, jobs[0])}",
        f"watch      {job.scheduler.watch(jobs)}",
        f"cancel     {job.scheduler.cancel(jobs)}",
    ])


def _queue_line(job: Job) -> str:
    if job.queue is None:
        return "the scheduler's default"
    if job.options.queue:
        return f"{job.queue} (--queue)"
    reason = f"; its queue {job.site.job.queue} does not accept the job" if job.queue != job.site.job.queue else ""
    return f"{job.queue} (site {job.site.name}{reason})"


def _ranks(job: Job) -> str:
    placement = job.placement
    return "set by the study" if job.options.is_study else f"{placement.world_size} ({placement.source})"
