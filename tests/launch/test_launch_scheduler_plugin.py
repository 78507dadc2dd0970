"""A scheduler from outside the package: one file, named by the entry points of an installed package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env

from ezpz_llm.base.package_data import data_dir
from ezpz_llm.launch import schedulers as room
from ezpz_llm.launch.schedulers.scheduler import Scheduler

_FLUX = '''
"""A stand-in of Flux."""

from ezpz_llm.launch.schedulers.scheduler import Allocation, Host
from ezpz_llm.launch.dialects.work import Built
from ezpz_llm.launch.schedulers.scheduler import Scheduler, StepLauncher, clock


def build(program, work):
    return Built((program, "run", "-N", str(len(work.hosts)), "-n", str(work.placement.world_size), *work.command))


class Flux(Scheduler):
    NAME, TITLE, JOB_VARIABLE = "flux", "Flux", "FLUX_JOB_ID"
    JOB_QUERY = (("flux", "jobs"), ("unknown",))
    PROGRAM, TEMPLATE, DIRECTIVE = "flux", "TEMPLATE_PATH", "#FLUX:"

    def detect(self, env):
        if not env.get(self.JOB_VARIABLE):
            return None
        hosts = tuple(Host(name, slots=2) for name in env["FLUX_HOSTS"].split(","))
        return Allocation(self.NAME, env[self.JOB_VARIABLE], hosts, None, "FLUX_HOSTS")

    def supplement(self, allocation, env, limit_s, tries):
        return allocation.noting("Flux was asked")

    def step_launcher(self):
        return StepLauncher("flux", "Flux", build)

    def time_limit(self, seconds):
        return clock(seconds)

    def directives(self, request):
        return [f"#FLUX: --nodes={request.nodes}", f"#FLUX: --time-limit={self.time_limit(request.time_s)}"]

    def subjects(self, line):
        return {line.split()[1].partition("=")[0]}

    def submission(self, script, after):
        return ["flux", "batch", script]


SCHEDULER = Flux()
'''


@pytest.fixture(name="env")
def _env(tmp_path: Path) -> dict[str, str]:
    """An environment in which a package with that one file is installed, and a program `flux` is on PATH."""
    folder = tmp_path / "installed"
    template = data_dir("jobs") / "slurm.sh"
    (folder / "flux_stand_in-1.0.dist-info").mkdir(parents=True)
    (folder / "flux_stand_in.py").write_text(_FLUX.replace("TEMPLATE_PATH", str(template)))
    (folder / "flux_stand_in-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: flux-stand-in\n"
                                                                 "Version: 1.0\n")
    (folder / "flux_stand_in-1.0.dist-info/entry_points.txt").write_text(
        "[ezpz_llm.schedulers]\nflux = flux_stand_in:SCHEDULER\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/flux").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/flux").chmod(0o755)
    return clean_env(PYTHONPATH=str(folder), PATH=f"{tmp_path}/bin:/usr/bin:/bin")


def _run(cwd: Path, env: dict[str, str], module: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", f"ezpz_llm.{module}", *words], cwd=cwd, env=env, text=True,
                          capture_output=True, timeout=60, check=False)


def test_launch_in_its_job(tmp_path: Path, env: dict[str, str]) -> None:
    job = env | {"FLUX_JOB_ID": "f7", "FLUX_HOSTS": "n1,n2"}
    done = _run(tmp_path, job, "launch", "--dry-run", "--json", "hostname")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["scheduler"], plan["job_id"], plan["hosts"]) == ("flux", "f7", ["n1", "n2"])
    assert (plan["launcher"], plan["dialect"]) == ("flux", "Flux")
    assert plan["sources"]["launcher"] == "a Flux job"
    assert plan["argv"][1:6] == ["run", "-N", "2", "-n", "4"]
    assert "Flux was asked" in plan["notes"]
    # By its names on the line, and beside another scheduler's job.
    assert _run(tmp_path, job, "launch", "--dry-run", "--scheduler", "flux", "--launcher", "flux", "hostname"
                ).returncode == 0
    two = job | {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n3"}
    both = _run(tmp_path, two, "launch", "--dry-run", "hostname")
    assert both.returncode == 2
    assert "two reservations: SLURM_JOB_ID=1 and FLUX_JOB_ID=f7" in both.stderr
    assert "--scheduler slurm or --scheduler flux" in both.stderr
    # Without that package its jobs are refused, with what to type, and its name is unknown.
    bare = {name: value for name, value in job.items() if name != "PYTHONPATH"}
    assert "launch does not speak Flux" in _run(tmp_path, bare, "launch", "--dry-run", "hostname").stderr
    assert "auto, slurm, pbs, none" in _run(tmp_path, bare, "launch", "--scheduler", "flux", "hostname").stderr


def test_a_site_of_its(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "mine.toml").write_text('scheduler = "flux"\nlauncher = "flux"\n[options]\nflux = ["-o", "x"]\n'
                                        '[job]\ndirectives = ["#FLUX: --queue={queue}"]\n')
    done = _run(tmp_path, env, "submit", "--site", "./mine.toml", "--queue", "q", "--nodes", "2", "--time",
                "1:00:00", "--dry-run", "--", "launch", "hostname")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("#FLUX:")] == [
        "#FLUX: --nodes=2", "#FLUX: --time-limit=1:00:00", "#FLUX: --queue=q"]
    assert any(re.search("queued by  flux batch .*job", line) for line in lines)


def test_ours_have_all_that_is_asked() -> None:
    names = {name for name in (*vars(Scheduler), *Scheduler.__annotations__) if not name.startswith("_")}
    for scheduler in room.SCHEDULERS:
        assert not {name for name in names if not hasattr(scheduler, name)}
