"""Scheduler, dialect and site of another package: a class, a function, and a TOML file in its folder."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env
from slowness import scaled

from ezpz_llm.core.base.package_data import data_dir

_MINE = '''
"""A scheduler of another package."""

from ezpz_llm.launcher.planning.dialects.work import Built, Dialect
from ezpz_llm.launcher.basics.log_kinds import CANCELLED
from ezpz_llm.launcher.basics.ranks import Family
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation, BatchScheduler, Node, StepLauncher


def build(program, work):
    return Built((program, "run", "-N", str(len(work.hosts)), "-n", str(work.placement.world_size),
                  *work.site_options, *work.command))


DIALECT = Dialect("Mine step", None, build)


class Mine(BatchScheduler):
    NAME, TITLE, JOB_VARIABLE = "mine", "Mine", "MINE_JOB"
    JOB_PREFIXES, SITE_VARIABLES = ("MINE_",), ("MINE_CLUSTER",)
    PROGRAM, TEMPLATE, DIRECTIVE = "mine", "TEMPLATE_PATH", "#MINE:"
    PATTERNS = ((CANCELLED, r"^mine: job \\S+ was withdrawn"),)

    def detect(self, env):
        if not env.get(self.JOB_VARIABLE):
            return None
        hosts = tuple(Node(name, slots=2) for name in env["MINE_HOSTS"].split(","))
        return Allocation(self.NAME, env[self.JOB_VARIABLE], hosts, None, "MINE_HOSTS")

    def supplement(self, allocation, env, limit_s, tries):
        return allocation.with_notes("Mine was asked")

    def step_launcher(self):
        ranks = Family("Mine", "MINE_RANK", ("MINE_SIZE",), "MINE_LOCAL", requires=("MINE_STEP",))
        return StepLauncher("mine", "Mine step", ranks=ranks)

    def directives(self, request):
        return [f"#MINE: --nodes={request.nodes}", f"#MINE: --time-limit={self.time_limit(request.time_s)}"]

    def subjects(self, line):
        return {line.split()[1].partition("=")[0]}

    def submission(self, script, after):
        return ["mine", "batch", script]

    def job_id(self, line):
        return line or None

    def watch(self, ids):
        return "mine jobs"

    def cancel(self, ids):
        return "mine cancel"

    def output_file(self, request, job):
        return str(request.output / job)


SCHEDULER = Mine()
'''


_PROGRAM = """#!/bin/sh
# mine run -N NODES -n RANKS [-o OPTION] COMMAND...: all on this machine
ranks=$5
shift 5
[ "$1" = -o ] && shift 2
rank=0
while [ $rank -lt $ranks ]; do
    MINE_STEP=1 MINE_RANK=$rank MINE_LOCAL=$rank MINE_SIZE=$ranks "$@" &
    ids="$ids $!"
    rank=$((rank + 1))
done
code=0
for id in $ids; do wait $id || code=$?; done
exit $code
"""

_SITE = """
scheduler = "mine"
launcher = "mine"
[options]
mine = ["-o", "x"]
[env]
MINE_FABRIC = "fast"
[job]
directives = ["#MINE: --queue={queue}"]
[recognise]
MINE_CLUSTER = ["mine*"]
"""

_OURS = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
"""Folder of this package, for PYTHONPATH in case it is not installed."""


@pytest.fixture(name="env")
def _env(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which a package with the plug-in is installed, with a program `mine` on PATH."""
    folder = tmp_path / "installed"
    template = data_dir("jobs") / "slurm.sh"
    (folder / "mine_stand_in-1.0.dist-info").mkdir(parents=True)
    (folder / "mine_stand_in.py").write_text(_MINE.replace("TEMPLATE_PATH", str(template)))
    (folder / "mine_stand_in-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: mine-stand-in\n"
                                                                 "Version: 1.0\n")
    (folder / "mine_stand_in-1.0.dist-info/entry_points.txt").write_text(
        "[ezpz_llm.schedulers]\nmine = mine_stand_in:SCHEDULER\n"
        "[ezpz_llm.dialects]\nmine = mine_stand_in:DIALECT\n")
    (folder / "mine.toml").write_text(_SITE)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mine").write_text(_PROGRAM)
    (tmp_path / "bin/mine").chmod(0o755)
    return clean_env(PYTHONPATH=os.pathsep.join((str(folder), *_OURS)), PATH=f"{tmp_path}/bin:/usr/bin:/bin")


def _run(cwd: Path, env: dict[str, str], module: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", f"ezpz_llm.{module}", *words], cwd=cwd, env=env, text=True,
                          capture_output=True, timeout=scaled(60), check=False)


def test_launch_in_its_job(tmp_path: Path, env: dict[str, str]) -> None:
    job = env | {"MINE_JOB": "m7", "MINE_HOSTS": "n1,n2"}
    done = _run(tmp_path, job, "launch", "--dry-run", "--json", "hostname")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["scheduler"], plan["job_id"], plan["hosts"]) == ("mine", "m7", ["n1", "n2"])
    assert (plan["launcher"], plan["dialect"]) == ("mine", "Mine step")
    assert plan["sources"]["launcher"] == "a Mine job"
    assert plan["argv"][1:6] == ["run", "-N", "2", "-n", "4"]
    assert "Mine was asked" in plan["notes"]
    # Selected by name on the command line, and next to another scheduler's job.
    assert _run(tmp_path, job, "launch", "--dry-run", "--scheduler", "mine", "--launcher", "mine", "hostname"
                ).returncode == 0
    two = job | {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n3"}
    both = _run(tmp_path, two, "launch", "--dry-run", "hostname")
    assert both.returncode == 2
    assert "SLURM_JOB_ID=1 and MINE_JOB=m7 are both set, with different nodes" in both.stderr
    assert "--scheduler slurm or --scheduler mine" in both.stderr
    # Without the plug-in, its name is unknown.
    bare = job | {"PYTHONPATH": os.pathsep.join(_OURS)}
    assert "auto, slurm, pbs, flux" in _run(tmp_path, bare, "launch", "--scheduler", "mine", "hostname").stderr


_PLACE = """
import os
from ezpz_llm.launcher.basics.ranks import find_rank
info = find_rank(os.environ)
print(info.rank, info.world_size, info.local_rank, info.local_size, os.environ.get("RANK"), info.source)
"""


def test_its_ranks(tmp_path: Path, env: dict[str, str]) -> None:
    """Run two real ranks numbered only by `mine`; the shim and the program know their ranks."""
    (tmp_path / "place.py").write_text(_PLACE)
    # Mine's batch scripts also have a rank variable.
    job = env | {"MINE_JOB": "m7", "MINE_HOSTS": socket.gethostname(), "MINE_RANK": "0", "MINE_SIZE": "1"}
    done = _run(tmp_path, job, "launch", "--run-dir", "r", "--tee", "all", sys.executable, "place.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 2 0 2 0 Mine (MINE_RANK)", "[1] 1 2 1 2 1 Mine (MINE_RANK)"]


def test_its_words_for_failures(tmp_path: Path, env: dict[str, str]) -> None:
    job = env | {"MINE_JOB": "m7", "MINE_HOSTS": socket.gethostname()}
    said = "echo 'mine: job m7 was withdrawn' >&2; exit 3"
    (tmp_path / "bin/mine").write_text(_PROGRAM.replace("exit $code", said))
    done = _run(tmp_path, job, "launch", "--run-dir", "r", "true")
    assert "launch: the job was canceled: mine: job m7 was withdrawn" in done.stderr


def test_launch_as_one_of_its_ranks(tmp_path: Path, env: dict[str, str]) -> None:
    """Inside a rank, the command runs as that rank, and no new ranks are started."""
    (tmp_path / "place.py").write_text(_PLACE)
    rank = env | {"MINE_JOB": "m7", "MINE_HOSTS": "n1,n2", "MINE_STEP": "1", "MINE_RANK": "2", "MINE_SIZE": "4",
                  "MINE_LOCAL": "0"}
    done = _run(tmp_path, rank, "launch", sys.executable, "place.py")
    assert done.stdout == "2 4 0 4 None Mine (MINE_RANK)\n", done.stderr


def test_its_site(tmp_path: Path, env: dict[str, str]) -> None:
    site = str(tmp_path / "installed/mine.toml")
    done = _run(tmp_path, env, "submit", "--site", site, "--queue", "q", "--nodes", "2", "--time",
                "1:00:00", "--dry-run", "--", "launch", "hostname")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("#MINE:")] == [
        "#MINE: --nodes=2", "#MINE: --time-limit=1:00:00", "#MINE: --queue=q"]
    assert any(re.search("queued by  mine batch .*job", line) for line in lines)
    # In the job: the site's launcher, with the site's options.
    job = env | {"MINE_JOB": "m7", "MINE_HOSTS": "n1,n2"}
    done = _run(tmp_path, job, "launch", "--dry-run", "--json", "--site", site, "hostname")
    plan = json.loads(done.stdout)
    assert (plan["site"], plan["launcher"], plan["sources"]["launcher"]) == ("mine", "mine", "site mine")
    assert plan["argv"][1:8] == ["run", "-N", "2", "-n", "4", "-o", "x"]
    # Two real ranks, with the site's options and variables.
    job["MINE_HOSTS"] = socket.gethostname()
    done = _run(tmp_path, job, "launch", "--run-dir", "r", "--site", site, "--tee", "all", "sh", "-c",
                "echo $RANK of $WORLD_SIZE, $MINE_FABRIC")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 of 2, fast", "[1] 1 of 2, fast"]


def test_a_dialect_that_no_package_has(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "installed/mine_stand_in-1.0.dist-info/entry_points.txt").write_text(
        "[ezpz_llm.schedulers]\nmine = mine_stand_in:SCHEDULER\n")
    job = env | {"MINE_JOB": "m7", "MINE_HOSTS": "n1,n2"}
    done = _run(tmp_path, job, "launch", "--dry-run", "hostname")
    assert done.returncode == 2
    assert "no installed package has the dialect 'Mine step' of mine" in done.stderr
    assert "entry points ezpz_llm.dialects" in done.stderr


@pytest.mark.parametrize(("value", "reason"), [
    ("Mine", "it is a class, not an instance of a class derived from"
             " ezpz_llm.launcher.jobs.schedulers.scheduler.Scheduler"),
    ("object()", "it is of type object, not an instance of a class derived from"),
    ("type('Half', (BatchScheduler,), {'detect': Mine.detect})()",
     "TypeError: Can't instantiate abstract class Half"),
    ("type('Nameless', (Mine,), {'TITLE': 7})()", "its TITLE is not a string"),
    ("type('Short', (Mine,), {'step_launcher': lambda self: StepLauncher('mine')})()",
     "TypeError: StepLauncher.__new__() missing 1 required positional argument: 'dialect'"),
    ("type('Other', (Mine,), {'step_launcher': lambda self: 'mine'})()",
     "its step_launcher() returns a str, not a StepLauncher"),
])
def test_an_object_that_is_no_scheduler(tmp_path: Path, env: dict[str, str], value: str, reason: str) -> None:
    module = tmp_path / "installed/mine_stand_in.py"
    module.write_text(module.read_text().replace("SCHEDULER = Mine()", f"SCHEDULER = {value}"))
    done = _run(tmp_path, env, "launch", "--dry-run", "hostname")
    assert done.returncode == 0, done.stderr
    assert "ignoring the entry point mine = mine_stand_in:SCHEDULER (ezpz_llm.schedulers): " in done.stderr
    assert reason in done.stderr
