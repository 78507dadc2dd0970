"""Real runs with every MPI on the package index: rendezvous, unchanged arguments, and the ranks' exit codes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import STALE, clean_env, launch, left_over, record, start
from mpi_wheels import REQUIREMENTS, mpi_environment
from slowness import scaled

from ezpz_llm.launcher.planning.dialects import choose_launcher
from ezpz_llm.launcher.planning.dialects.work import Work
from ezpz_llm.launcher.planning.placement import Placement
from ezpz_llm.launcher.planning.rank_binding import Binding

WORDS = ("a b", "it's", '"q"', "$(date)", "; exit 9", "x\\ny", "two\nlines", "*", "", "-n", "--", "ü")
DIALECTS = {"mpich": "MPICH/Hydra 5", "openmpi4": "Open MPI 4", "openmpi5": "Open MPI 5", "intel": "Intel MPI 2021"}
LIBRARIES = {"mpich": "MPICH", "openmpi4": "Open MPI v4", "openmpi5": "Open MPI v5", "intel": "Intel(R) MPI"}

_MEET = """
import sys
from mpi4py import MPI
world = MPI.COMM_WORLD
print(world.rank, world.size, world.allreduce(world.rank + 1), sys.argv[1:], flush=True)
print(MPI.Get_library_version(), file=sys.stderr)
"""

# Rank 1 fails; rank 0 succeeds a little later, so that launch does not have to end it.
_END = """
import os, signal, sys, time
from ezpz_llm.launcher.basics.ranks import find_rank
if find_rank(os.environ).rank == 1:
    if sys.argv[1] == "exit":
        sys.exit(7)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
time.sleep(0.5)
"""

_CORES = """
import os, sys
from pathlib import Path
from ezpz_llm.launcher.basics.ranks import find_rank
Path(sys.argv[1], f"cores{find_rank(os.environ).rank}").write_text(str(sorted(os.sched_getaffinity(0))))
"""


@pytest.mark.full
@pytest.mark.parametrize("name", REQUIREMENTS)
def test_two_ranks_meet_and_words_arrive(tmp_path: Path, name: str) -> None:
    (tmp_path / "meet.py").write_text(_MEET)
    done = launch(tmp_path, "--launcher", "mpiexec", "-n", "2", "--run-dir", "r", sys.executable, "meet.py", *WORDS,
                  **mpi_environment(name), **STALE)
    assert done.returncode == 0, done.stderr
    assert record(tmp_path / "r")["launch"]["dialect"].startswith(DIALECTS[name])
    for rank in (0, 1):
        lines = (tmp_path / f"r/logs/rank{rank:04d}.log").read_text()
        assert f"{rank} 2 3 {list(WORDS)!r}\n" in lines
        assert LIBRARIES[name] in lines
    assert left_over(tmp_path / "r") == {}


@pytest.mark.parametrize("name", ["openmpi4", pytest.param("openmpi5", marks=pytest.mark.full)])
def test_ranks_run_the_python_that_is_first_on_path(tmp_path: Path, name: str) -> None:
    """A distribution installs Open MPI in /usr/bin, next to a Python without the active environment's packages."""
    env = mpi_environment(name)
    shutil.copytree(Path(env["MPI4PY_LIBMPI"]).parents[1], tmp_path / "usr")
    system_python = tmp_path / "usr/bin/python3"
    system_python.write_text("#!/bin/sh\necho the system Python\n")
    system_python.chmod(0o755)
    path = os.pathsep.join((str(Path(sys.executable).parent), str(tmp_path / "usr/bin"), os.environ["PATH"]))
    done = launch(tmp_path, "--launcher", "mpiexec", "-n", "1", "--run-dir", "r", "python3", "-c",
                  "import os, sys; print(sys.prefix, os.environ['PATH'])", PATH=path)
    assert (done.returncode, done.stdout) == (0, f"{sys.prefix} {path}\n"), done.stderr
    assert record(tmp_path / "r")["launch"]["dialect"].startswith(DIALECTS[name])


_STAYS = """
import time
from mpi4py import MPI
print(MPI.COMM_WORLD.size, flush=True)
time.sleep(4)
"""


@pytest.mark.full
def test_an_mpi_under_the_mpiexec_of_another_is_named(tmp_path: Path) -> None:
    """Each rank is a world of size 1, without an error. (MPICH 5 under Open MPI's mpiexec fails by itself.)"""
    (tmp_path / "stays.py").write_text(_STAYS)
    env = mpi_environment("mpich") | {"MPI4PY_LIBMPI": mpi_environment("openmpi5")["MPI4PY_LIBMPI"]}
    done = launch(tmp_path, "--launcher", "mpiexec", "-n", "2", "--run-dir", "r", sys.executable, "stays.py", **env)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert ("warning: the ranks load Open MPI (libmpi.so.40), but are not connected: each of the 2 ranks is alone"
            " in its own MPI world (rank 0 of 1)") in done.stderr
    assert "the launcher belongs to another MPI" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", REQUIREMENTS)
def test_codes_are_the_ranks_own(tmp_path: Path, name: str) -> None:
    """The launchers' exit codes would be 7, 9, 11 and 255 (MPICH), 255 for all but the first (Intel MPI)."""
    (tmp_path / "end.py").write_text(_END)
    env = mpi_environment(name)
    ends = {"exit": 7, "SIGKILL": 137, "SIGSEGV": 139, "missing": 127}
    runs = {}
    for how in ends:
        command = ("no-such-program",) if how == "missing" else (sys.executable, "end.py", how)
        runs[how] = start(tmp_path, "--launcher", "mpiexec", "-n", "2", "--run-dir", how, *command, **env)
    said = {how: run.communicate(timeout=scaled(60))[1] for how, run in runs.items()}
    assert {how: run.returncode for how, run in runs.items()} == ends, said
    for how, text in said.items():
        assert ("cannot run 'no-such-program'" if how == "missing" else "rank 1 on ") in text
        assert left_over(tmp_path / how) == {}


@pytest.mark.full
@pytest.mark.parametrize("name", [name if name in ("intel", "openmpi5") else
                                  pytest.param(name, marks=pytest.mark.slow) for name in REQUIREMENTS])
def test_test_dist_under_each(tmp_path: Path, name: str) -> None:
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **mpi_environment(name)}
    done = launch(tmp_path, "--launcher", "mpiexec", "-n", "2", "--run-dir", "r", sys.executable, "-m",
                  "ezpz_llm.test_dist", "--steps", "10", timeout=150, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    run = record(tmp_path / "r")
    assert (run["launch"]["world_size"], run["exit"]["code"]) == (2, 0)
    assert "[cpu][rank=1/1][1]" in (tmp_path / "r/logs/rank0001.log").read_text()


@pytest.mark.full
@pytest.mark.parametrize("name", REQUIREMENTS)
def test_ranks_run_on_their_own_cores(tmp_path: Path, name: str) -> None:
    """Bind two ranks to two cores with each launcher's option, in the opposite of the launcher's default order.

    Each rank writes its own file, since lines that two ranks print at once could be mixed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core here, and two ranks to put on cores of their own")
    env = clean_env(**mpi_environment(name))
    launcher = choose_launcher("mpiexec", "none", 2, env)
    work = Work((sys.executable, "-c", _CORES, str(tmp_path)), Placement((("here", 2),), "test"), True,
                tmp_path / "hostfile", 1, (), os.geteuid() == 0,
                binding=Binding("list", (str(cores[1]), str(cores[0]))))
    built = launcher.build(work)
    for path, content in built.files.items():
        path.write_text(content)
    env |= {variable: value for variable, (value, _) in built.env.items()}
    subprocess.run(built.argv, env=env, timeout=scaled(60), check=True)
    assert {path.name: path.read_text() for path in tmp_path.glob("cores*")} == {
        "cores0": f"[{cores[1]}]", "cores1": f"[{cores[0]}]"}
