"""Tests of queue limits of sites, and of job scripts of Flux and LSF."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env, scheduler as make_program
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.jobs.schedulers.lsf import LsfScheduler
from ezpz_llm.launcher.planning.sites import Job as SiteJob, Limit, Site, find_site
from ezpz_llm.launcher.submit.queues import choose_queue

_HOUR = 3600


def _site(*limits: Limit, queue: str | None = "short") -> Site:
    return Site(name="mine", job=SiteJob(queue=queue, limits=limits))


_THREE = _site(Limit("short", (1, 10), 1, 1), Limit("big", (10, 24), 3), Limit("big", (25, 99), 6),
               Limit("long", None, 72))


@pytest.mark.parametrize(("nodes", "hours", "jobs", "queue"), [
    (1, 1, 1, "short"), (10, 1, 1, "short"), (11, 1, 1, "big"), (24, 3, 1, "big"), (25, 6, 1, "big"),
    (24, 4, 1, "long"), (1, 1, 2, "long"), (500, 72, 9, "long")])
def test_first_queue_that_accepts_the_job(nodes: int, hours: int, jobs: int, queue: str) -> None:
    assert choose_queue(_THREE, None, nodes, hours * _HOUR, jobs) == queue


@pytest.mark.parametrize(("queue", "nodes", "hours", "jobs", "message", "instead"), [
    (None, 1, 73, 1, r"no queue of mine accepts 1 node for 3-01:00:00: short accepts at most 1:00:00 of wall time;",
     "--nodes"),
    ("short", 64, 1, 1, "it accepts 1 to 10 nodes$", "--queue big or long, or"),
    ("short", 1, 2, 2, r"2 jobs of 1 node for 2:00:00 each: it accepts at most 1:00:00 of wall time and "
     "accepts at most 1 job per", "--queue long"),
    ("big", 30, 7, 1, "it accepts at most 6:00:00 of wall time$", "--queue long"),
    ("big", 5, 1, 1, "accepts 10 to 24 nodes, or accepts 25 to 99 nodes$", "--queue short"),
])
def test_message_names_the_broken_limit(queue: str | None, nodes: int, hours: int, jobs: int, message: str,
                                  instead: str) -> None:
    with pytest.raises(UserError) as raised:
        choose_queue(_THREE, queue, nodes, hours * _HOUR, jobs)
    assert re.search(message, raised.value.found)
    assert instead in (raised.value.instead or "")


def test_queues_without_limits() -> None:
    assert choose_queue(_THREE, "theirs", 9999, 9999 * _HOUR, 99) == "theirs"
    assert choose_queue(Site(), None, 9, _HOUR, 1) is None
    assert choose_queue(_site(), None, 9999, 9999 * _HOUR, 9) == "short"


@pytest.mark.parametrize(("site", "nodes", "hours", "queue"), [
    ("polaris", 4, 1, "debug-scaling"), ("polaris", 64, 6, "prod"), ("polaris", 4, 6, "capacity"),
    ("aurora", 1, 1, "debug"), ("aurora", 2, 1, "debug-scaling"), ("aurora", 512, 12, "prod"),
    ("frontier", 91, 2, "batch"), ("lumi", 512, 48, "standard-g"), ("lumi", 4, 72, "small-g"),
    ("derecho", 8, 12, "main"), ("derecho", 8, 24, "preempt"), ("leonardo", 8, 24, "boost_usr_prod")])
def test_queues_of_built_in_sites(site: str, nodes: int, hours: int, queue: str) -> None:
    assert choose_queue(find_site(site, {}), None, nodes, hours * _HOUR, 1) == queue


def _submit(cwd: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ezpz_llm.submit", *words], cwd=cwd, env=clean_env(**env),
                          text=True, capture_output=True, timeout=scaled(60), check=False)


_JOB = ("--nodes", "2", "--time", "90m", "--account", "proj", "--name", "x")
_COMMAND = ("--", "launch", "hostname")


def test_flux_job_script(tmp_path: Path) -> None:
    folder = make_program(tmp_path / "bin", "flux", "echo ƒ21")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = _submit(tmp_path, *_JOB, "--scheduler", "flux", "--queue", "pbatch", "--chain", "2", "--run-dir", "r",
                   "--directive=--setattr=thp=always", "--directive=-t 2h", *_COMMAND, PATH=path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in (tmp_path / "r/job.sh").read_text().splitlines() if line.startswith("#flux:")]
    assert lines == ["#flux: --job-name=x", "#flux: --nodes=2", "#flux: --exclusive",
                     f"#flux: --output='{tmp_path}/r/logs/job-{{{{id.dec}}}}.log'", "#flux: --bank=proj",
                     "#flux: --queue=pbatch", "#flux: --setattr=thp=always", "#flux: -t 2h"]
    assert (folder / "calls").read_text().splitlines() == [
        f"batch {tmp_path}/r/job.sh", f"batch --dependency=afterany:ƒ21 {tmp_path}/r/job.sh"]
    assert f"output     {tmp_path}/r/logs/job-58.log" in done.stdout
    assert "queue      pbatch (--queue)" in done.stdout
    assert subprocess.run(["bash", "-n", str(tmp_path / "r/job.sh")], check=False).returncode == 0


def test_lsf_job_script(tmp_path: Path) -> None:
    """bsub reads the script from standard input."""
    folder = make_program(tmp_path / "bin", "bsub",
                          f"cat > {tmp_path}/given; echo 'Job <12> is submitted to queue <gpu>.'")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = _submit(tmp_path, *_JOB, "--scheduler", "lsf", "--requeue", "--run-dir", "r", *_COMMAND, PATH=path)
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "r/job.sh").read_text()
    assert (tmp_path / "given").read_text() == script
    assert [line for line in script.splitlines() if line.startswith("#BSUB")] == [
        "#BSUB -J x", "#BSUB -n 2", '#BSUB -R "span[ptile=1]"', "#BSUB -x", "#BSUB -W 1:30",
        f"#BSUB -o {tmp_path}/r/logs/job-%J.log", "#BSUB -r", "#BSUB -P proj"]
    assert f"output     {tmp_path}/r/logs/job-12.log" in done.stdout


def test_scheduler_option(tmp_path: Path) -> None:
    done = _submit(tmp_path, *_JOB, "--scheduler", "slurm", "--site", "polaris", "--dry-run", *_COMMAND)
    assert "--scheduler is slurm, but site polaris has pbs" in done.stderr
    done = _submit(tmp_path, *_JOB, "--scheduler", "oar", "--dry-run", *_COMMAND)
    assert "one of slurm, pbs, flux, lsf" in done.stderr
    done = _submit(tmp_path, *_JOB, "--scheduler", "pbs", "--dry-run", "--directive=-m abe", *_COMMAND)
    assert "#PBS -m abe" in done.stdout.splitlines()
    assert "# queue      the scheduler's default" in done.stdout
    done = _submit(tmp_path, *_JOB, "--site", "polaris", "--queue", "debug", "--dry-run", *_COMMAND)
    assert "queue debug of polaris does not accept 2 nodes for 1:30:00: it accepts at most 1:00:00" in done.stderr


def test_lsf_resource_requirements_are_combined() -> None:
    """bsub accepts several -R, but only one span."""
    ours, memory = '#BSUB -R "span[ptile=1]"', '#BSUB -R "rusage[mem=4G]"'
    assert not LsfScheduler().subjects(ours) & LsfScheduler().subjects(memory)
    assert not LsfScheduler().subjects('#BSUB -R "select[ngpus>0]"') & LsfScheduler().subjects(memory)
    assert LsfScheduler().subjects(ours) == LsfScheduler().subjects('#BSUB -R "rusage[mem=4G] span[ptile=2]"')
    assert LsfScheduler().subjects(ours) <= LsfScheduler().subjects("#BSUB -nnodes 2")
    assert not LsfScheduler().subjects(memory) & LsfScheduler().subjects("#BSUB -nnodes 2")


def test_lsf_directive_option_keeps_our_directives(tmp_path: Path) -> None:
    done = _submit(tmp_path, *_JOB, "--scheduler", "lsf", '--directive=-R "rusage[mem=4G]"', "--dry-run", *_COMMAND)
    lines = [line for line in done.stdout.splitlines() if line.startswith("#BSUB -R")]
    assert lines == ['#BSUB -R "span[ptile=1]"', '#BSUB -R "rusage[mem=4G]"'], done.stdout + done.stderr
