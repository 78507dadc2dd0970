"""Dialect of mpiexec as a plug-in: one file, declared in the entry points of an installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env
from slowness import scaled

_MINE = '''
"""A dialect of another package."""

from ezpz_llm.launcher.planning.dialects.work import Built, Dialect


def build(program, work):
    return Built((program, "--ranks", str(work.placement.world_size), *work.site_options, *work.command))


DIALECT = Dialect("My MPI", r"my mpi (?P<version>[0-9.]+)", build, site_name="mine")
'''

_MPIEXEC = """#!/bin/sh
# mpiexec --ranks N COMMAND...: all on this machine, numbered as MPICH does
[ "$1" = --version ] && echo "VERSION" && exit
ranks=$2
shift 2
rank=0
while [ $rank -lt $ranks ]; do
    PMI_RANK=$rank PMI_SIZE=$ranks MPI_LOCALRANKID=$rank MPI_LOCALNRANKS=$ranks "$@" &
    rank=$((rank + 1))
done
wait
"""

_OURS = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
"""Folder of this package, for PYTHONPATH in case it is not installed."""


@pytest.fixture(name="env")
def _env(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which a package with the plug-in is installed."""
    folder = tmp_path / "installed"
    (folder / "mine_stand_in-1.0.dist-info").mkdir(parents=True)
    (folder / "mine_stand_in.py").write_text(_MINE)
    (folder / "mine_stand_in-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: mine-stand-in\n"
                                                                 "Version: 1.0\n")
    (folder / "mine_stand_in-1.0.dist-info/entry_points.txt").write_text(
        "[ezpz_llm.dialects]\nmine = mine_stand_in:DIALECT\n")
    return clean_env(PYTHONPATH=os.pathsep.join((str(folder), *_OURS)), PATH=f"{tmp_path}/bin:/usr/bin:/bin")


def _put_mpiexec(folder: Path, version: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/mpiexec").write_text(_MPIEXEC.replace("VERSION", version))
    (folder / "bin/mpiexec").chmod(0o755)


def _launch(cwd: Path, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ezpz_llm.launch", "--launcher", "mpiexec", "-n", "2", *words],
                          cwd=cwd, env=env, text=True, capture_output=True, timeout=scaled(60), check=False)


def test_its_mpiexec_starts_ranks(tmp_path: Path, env: dict[str, str]) -> None:
    _put_mpiexec(tmp_path, "my mpi 3.1")
    done = _launch(tmp_path, env, "--dry-run", "--json", "hostname")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["launcher"], plan["dialect"]) == ("mpiexec", "My MPI 3.1")
    assert plan["argv"][1:3] == ["--ranks", "2"]
    done = _launch(tmp_path, env, "--run-dir", "r", "--tee", "all", "echo", "here")
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["[0]", "[1]", "here", "here"]), done.stderr
    # Without the plug-in, this mpiexec is unknown.
    bare = _launch(tmp_path, env | {"PYTHONPATH": os.pathsep.join(_OURS)}, "--dry-run", "hostname")
    assert bare.returncode == 2
    assert "unknown mpiexec; its version text begins with 'my mpi 3.1'" in bare.stderr


def test_a_site_names_it(tmp_path: Path, env: dict[str, str]) -> None:
    """A site file can select the dialect if the version text does not identify it, as for PALS."""
    _put_mpiexec(tmp_path, "4.0")
    (tmp_path / "mine.toml").write_text('dialect = "mine"\n[options]\nmpiexec = ["-o", "x"]\n')
    done = _launch(tmp_path, env, "--dry-run", "--json", "--site", "./mine.toml", "hostname")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["dialect"], plan["sources"]["launcher"]) == ("My MPI", "--launcher; the site's dialect")
    assert plan["argv"][1:5] == ["--ranks", "2", "-o", "x"]
    (tmp_path / "mine.toml").write_text('dialect = "theirs"\n')
    done = _launch(tmp_path, env, "--dry-run", "--site", "./mine.toml", "hostname")
    assert done.returncode == 2
    assert "a plug-in dialect" in done.stderr
