"""Plan of a job to submit: site, scheduler, queue, ranks and run directory, and the text of its script."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.core.base import UserError, user_path
from ezpz_llm.core.rundir import RunDir, default_run_dir, has_secret, redact_words
from ezpz_llm.launcher.basics.devices import Devices
from ezpz_llm.launcher.basics.variables import SITE_VARIABLE
from ezpz_llm.launcher.jobs.node_selection import select_nodes
from ezpz_llm.launcher.jobs.option_parsing import Target, read_command, remove_options, run_dir_of
from ezpz_llm.launcher.jobs.schedulers import batch_schedulers, local, schedulers
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation, BatchScheduler, Node, Request
from ezpz_llm.launcher.planning.placement import Placement, place_ranks
from ezpz_llm.launcher.planning.sites import Site, find_site
from ezpz_llm.launcher.submit.options import Options
from ezpz_llm.launcher.submit.queues import choose_queue
from ezpz_llm.launcher.submit.script import array_lines, environment_lines, fill_template, request_lines

_RESUMES = ("ezpz_llm.train",)
"""Commands of this package that can resume from a checkpoint with --resume."""


@dataclass(frozen=True)
class Job:
    """Job to submit, planned before anything is written.

    Attributes:
        is_default: the run directory's name was chosen by submit, not by the user.
        placement: ranks as launch will place them, as far as submit can predict it.
    """

    options: Options
    site: Site
    scheduler: BatchScheduler
    target: Target
    run_dir: RunDir
    is_default: bool
    placement: Placement
    queue: str | None = None

    @property
    def request(self) -> Request:
        """Request for the scheduler's directives."""
        options = self.options
        return Request(name=options.name or self.target.name, nodes=options.nodes, time_s=options.time_s,
                       output=self.run_dir.path / "logs", account=options.account, queue=self.queue,
                       reservation=options.reservation, requeue=options.requeue,
                       gpus_per_node=None if self.site.devices_per_host else options.gpus_per_node)

    @property
    def notes(self) -> tuple[str, ...]:
        """Note if the job would get no accelerators because nothing says how many a node has."""
        if self.site.name != Site().name or self.options.gpus_per_node or any(
                re.search("gpu|gres", directive) for directive in self.options.directives):
            return ()
        return ("no site file describes the nodes, so the script requests no GPUs: if they have some, pass "
                "--gpus-per-node N or --site S",)


def plan_job(options: Options, env: Mapping[str, str]) -> Job:
    """Plan the job without writing anything.

    Raises:
        UserError: the options contradict each other, no scheduler is installed, or the ranks do not fit.
    """
    if has_secret((*options.launch_words, *options.launch_arguments), env):
        raise UserError("the command has a secret in it, which the job script would store",
                        where="the command to submit", instead="set it in the environment, or read it from a file")
    site = _site(options, env)
    if options.gpus_per_node and site.devices_per_host not in (None, options.gpus_per_node):
        raise UserError(f"the nodes of site {site.name} have {site.devices_per_host} devices, and a job gets all",
                        where=f"--gpus-per-node {options.gpus_per_node}",
                        instead="launch --ppn N for fewer ranks, or --site generic")
    scheduler = _scheduler(site, options.scheduler, env)
    queue = options.queue
    if not options.reservation:
        queue = choose_queue(site, options.queue, options.nodes, options.time_s, options.chain)
    target = read_command(options.launch.command)
    chosen = _chosen_run_dir(options, target)
    return Job(options, site, scheduler, target, RunDir(chosen) if chosen else default_run_dir(target.name),
               chosen is None, _placement(options, site), queue)


def _site(options: Options, env: Mapping[str, str]) -> Site:
    submit_site, launch_site = options.site, options.launch.site
    if submit_site and launch_site and submit_site != launch_site:
        raise UserError(f"submit and launch name two sites: {submit_site} and {launch_site}",
                        where="submit --site, launch --site", instead="pass --site only once")
    of_jobs: dict[str, str] = {}
    for scheduler in batch_schedulers().values():
        of_jobs |= scheduler.variables_of_jobs(socket.gethostname())
    return find_site(submit_site or launch_site, {**of_jobs, **env})


def _scheduler(site: Site, option: str | None, env: Mapping[str, str]) -> BatchScheduler:
    if option and site.scheduler and option != site.scheduler:
        raise UserError(f"--scheduler is {option}, but site {site.name} has {site.scheduler}",
                        where="--scheduler, --site", instead="omit one of them")
    if name := option or site.scheduler:
        if name not in batch_schedulers():
            raise UserError(f"submit does not write job scripts for {schedulers()[name].TITLE}",
                            instead="write a job script that calls ezpz-llm launch, and submit it yourself")
        return batch_schedulers()[name]
    writers = batch_schedulers().values()
    for scheduler in writers:
        if shutil.which(scheduler.PROGRAM, path=env.get("PATH", os.defpath)):
            return scheduler
    programs = ", ".join(dict.fromkeys(scheduler.PROGRAM for scheduler in writers))
    raise UserError(f"no scheduler found ({programs})", where="PATH",
                    instead="submit on a login node, or load the scheduler's module")


def _chosen_run_dir(options: Options, target: Target) -> Path | None:
    submit_dir, launch_dir = options.run_dir, run_dir_of(target, options.launch.run_dir)
    paths = [user_path(path).absolute() for path in (submit_dir, launch_dir) if path]
    if len(set(paths)) > 1:
        raise UserError(f"submit and launch name two run directories: {submit_dir} and {launch_dir}",
                        where="submit --run-dir, launch --run-dir", instead="pass --run-dir only once")
    return paths[0] if paths else None


def _placement(options: Options, site: Site) -> Placement:
    launch = options.launch
    hosts = tuple(Node(f"node{number}") for number in range(1, options.nodes + 1))
    count, source = ((options.gpus_per_node, "--gpus-per-node") if options.gpus_per_node else
                     (site.devices_per_host or 0, f"site {site.name}"))
    devices = Devices(tuple(map(str, range(count))), source)
    job = Allocation(local.NAME, None, hosts, None, source=f"submit --nodes {options.nodes}")
    selected = select_nodes(job, launch.nodes, launch.hosts, launch.hostfile)
    return place_ranks(selected, devices, launch.ranks, launch.per_host)


def write_script(job: Job, typed: list[str]) -> str:
    """Return the job's script: the scheduler's template, filled in."""
    request, run_dir = job.request, str(job.run_dir.path)
    arguments = job.options.launch_arguments
    if not job.options.is_study:
        # The user's --run-dir is this one. The script appends the index of an array's element.
        command = job.options.launch.command
        options = remove_options(arguments[:len(arguments) - len(command)], "--run-dir")
        command = remove_options(command, "--run-dir") if job.target.module else command
        arguments = (*job.options.launch_words, "--run-dir", run_dir, *options, *command)
    resume_options = ["--resume", run_dir] if job.target.module in _RESUMES else []
    requeue_command = dict(job.scheduler.AGAIN) if request.requeue else {}
    replaced = {run_dir: '"$run_dir"'}
    introduction = (f"# Written by: {shlex.join(redact_words(typed))}".replace("\n", "\n# ")
                    + "\n# You can edit this script and submit it yourself.")
    return fill_template(job.scheduler.TEMPLATE, introduction, {
        "request": request_lines(job.scheduler.directives(request), _more_directives(job), _values(job),
                                 job.scheduler.subjects, job.site.name),
        "environment": environment_lines(os.environ, Path.cwd(), _setup(job), request.time_s,
                                         has_modules=bool(job.site.job.setup)),
        "command": [f"run_dir={shlex.quote(run_dir)}{job.scheduler.ARRAY_SUFFIX}",
                    *array_lines("command", arguments, replaced),
                    *array_lines("go_on", resume_options, replaced),
                    *array_lines("again", list(requeue_command), requeue_command)],
    })


def _more_directives(job: Job) -> tuple[str, ...]:
    """Return the directives of the site and then the user's, which replace those with the same subject."""
    of_user = tuple(f"{job.scheduler.DIRECTIVE} {option}" for option in job.options.directives)
    replaced = set().union(*map(job.scheduler.subjects, of_user))
    return (*(line for line in job.site.job.directives if not job.scheduler.subjects(line) & replaced), *of_user)


def _values(job: Job) -> dict[str, str | None]:
    request = job.request
    return {"nodes": str(request.nodes), "time": job.scheduler.time_limit(request.time_s),
            "account": request.account, "queue": request.queue,
            "reservation": request.reservation,
            "devices": None if job.site.devices_per_host is None else str(job.site.devices_per_host)}


def _setup(job: Job) -> tuple[str, ...]:
    user_site = job.options.site or job.options.launch.site or os.environ.get(SITE_VARIABLE)
    if user_site is None and job.site.name == Site().name:
        return job.site.job.setup
    # The job gets the site that was found here, with an absolute path if it is a file.
    path = user_path(user_site) if user_site else None
    site = str(path.absolute()) if path and path.is_file() else job.site.name
    return (*job.site.job.setup, f"export {SITE_VARIABLE}={shlex.quote(site)}")
