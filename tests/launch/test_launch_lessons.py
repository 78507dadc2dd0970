"""Known problems of launchers that no other test covers (docs/evidence/failure_tests.md)."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_runs import captured_env, clean_env, launch, left_over, record, start
from places import ROOT, TESTS
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics.devices import Devices
from ezpz_llm.launcher.basics.ranks import FAMILIES
from ezpz_llm.launcher.basics.variables import STACKS_SIGNAL
from ezpz_llm.launcher.jobs.option_parsing import parse
from ezpz_llm.launcher.jobs.schedulers import find_allocation
from ezpz_llm.launcher.planning.placement import place_ranks
from ezpz_llm.launcher.planning.plan import build_plan

PAGE = ROOT / "docs" / "evidence" / "failure_tests.md"


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / "ezpz_llm").rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def _defined(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("head", ["situation", "mistake"])
def test_every_test_that_is_named_exists(head: str) -> None:
    """Each row of the page's tables of cases names tests: `test_file.py::test_name`, or a whole file."""
    rows: list[str] = []
    is_inside = False
    for line in PAGE.read_text().splitlines():
        is_inside = line == f"| {head} | tests |" or (is_inside and line.startswith("|"))
        if is_inside and line.startswith("| ") and line != f"| {head} | tests |":
            rows.append(line)
    assert len(rows) > 50
    for row in rows:
        tests = re.findall(r"`([^`]+)`", row.strip("| ").rsplit(" | ", 1)[-1])
        assert tests, row
        for test in tests:
            match = re.fullmatch(r"(test_\w+\.py)(?:::(test_\w+))?", test)
            assert match is not None, row
            path = next(TESTS.rglob(match[1]), None)
            assert path is not None, row
            assert not match[2] or match[2] in _defined(path), f"{match[1]} has no {match[2]}"


def test_one_reader_for_each_scheduler() -> None:
    """All commands get nodes from the same two modules: there is no second parser that could disagree."""
    readers = {name for name, tree in _sources() for node in ast.walk(tree) if isinstance(node, ast.Constant)
               and node.value in ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST", "PBS_NODEFILE")}
    assert readers == {"ezpz_llm/launcher/jobs/schedulers/slurm.py", "ezpz_llm/launcher/jobs/schedulers/pbs.py"}


def test_ranks_are_read_from_one_table() -> None:
    """Only one module has the names of launchers' rank variables."""
    names = {name for family in FAMILIES for name in (family.rank, family.local_rank) if name}
    assert "SLURM_LOCALID" in names
    assert "SLURM_LOCAL_ID" not in names
    allowed = {"ezpz_llm/launcher/basics/ranks.py", "ezpz_llm/launcher/basics/variables.py",
               "ezpz_llm/training/dist/setup.py", "ezpz_llm/launcher/planning/dialects/on_node.py"}
    reads = {(file, node.value) for file, tree in _sources() for node in ast.walk(tree)
             if isinstance(node, ast.Constant) and node.value in names - {"SLURM_PROCID", "SLURM_LOCALID"}}
    # setup exports them for DeepSpeed, and on_node removes the outer launcher's.
    assert {file for file, _ in reads} <= allowed, reads


def test_nothing_goes_through_a_shell_or_comes_from_the_net() -> None:
    """Arguments stay a list from plan to exec, and all code that runs on compute nodes is in the wheel."""
    for name, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                assert not any(word.arg == "shell" for word in node.keywords), name
                called = ast.unparse(node.func)
                assert called not in ("os.system", "os.popen", "subprocess.getoutput"), name
    for folder in ("launchers", "jobs"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file():
                assert not re.search(r"\b(curl|wget)\b", path.read_text(encoding="utf-8")), path


def test_a_job_asks_for_no_signal() -> None:
    """NCCL and schedulers use SIGUSR1 and SIGUSR2; launch uses a real-time signal."""
    scripts = [*(ROOT / "tests/golden").rglob("*"), *(ROOT / "jobs").rglob("*")]
    assert any("#SBATCH" in path.read_text() for path in scripts if path.is_file())
    for path in scripts:
        assert not path.is_file() or "--signal" not in path.read_text(), path
    assert signal.SIGRTMIN <= STACKS_SIGNAL <= signal.SIGRTMAX


def test_what_is_installed_comes_from_an_index() -> None:
    required = importlib.metadata.requires("ezpz_llm") or []
    assert any(name.startswith("torch") for name in required)
    assert not [name for name in required if "://" in name or " @ " in name]


def test_a_scheduler_that_is_only_installed_is_no_job(tmp_path: Path) -> None:
    for name in ("sbatch", "srun", "qsub", "qstat", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    plan = build_plan(parse(["hostname"]), {"PATH": str(tmp_path)})
    assert plan.allocation.scheduler == "none"
    assert plan.launcher.kind != "srun"
    assert plan.hosts == (socket.gethostname(),)


def test_the_users_own_values_win_and_the_plan_says_so(tmp_path: Path) -> None:
    site = tmp_path / "here.toml"
    site.write_text('interface = "lo"\n[env]\nFI_PROVIDER = "cxi"\nNCCL_NET = "x"\n')
    (tmp_path / "hosts").write_text(f"{socket.gethostname()}\nn2\n")
    mine = {"NCCL_SOCKET_IFNAME": "ib0", "FI_PROVIDER": "tcp", "PYTHONPATH": "/mine", "PYTHONUNBUFFERED": "0",
            "MASTER_ADDR": "192.0.2.7"}
    plan = build_plan(parse(["--site", str(site), "--hostfile", str(tmp_path / "hosts"), "hostname"]),
                      clean_env(**mine))
    assert not mine.keys() & plan.env.keys()
    assert (plan.env["NCCL_NET"].value, plan.env["NCCL_NET"].source) == ("x", "site here")
    assert plan.env["GLOO_SOCKET_IFNAME"].source == "site here"
    assert all(setting.source for setting in plan.env.values())
    # Also on other nodes.
    assert "using MASTER_ADDR=192.0.2.7, which is set in your environment" in plan.notes


def test_more_ranks_than_a_host_can_run_are_refused() -> None:
    job = find_allocation(captured_env("slurm/env_sbatch_script.txt"))
    with pytest.raises(UserError, match="50000000 ranks on one node"):
        place_ranks(job, Devices((), "none"), 100_000_000, None)


_SAYS = ["CUDA error: an illegal memory access", "AttributeError: 'NoneType'", "Traceback (most recent call last):",
         "RuntimeError: NCCL", "WARNING: cuda", "", "libfabric:1234", "srun: error: none", "launch: rank 3 failed"]


def test_nothing_is_hidden_and_nothing_written_elsewhere(tmp_path: Path) -> None:
    """Output lines that look like errors are passed through; ./hostfile is left unchanged."""
    (tmp_path / "hostfile").write_text("n7 slots=3\n")
    program = f"import sys\nfor line in {_SAYS!r}:\n    print(line)\n    print(line, file=sys.stderr)\n"
    done = launch(tmp_path, "-n", "2", "--run-dir", "r", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == _SAYS
    assert "\n".join(_SAYS) in done.stderr
    for rank in (0, 1):
        lines = (tmp_path / f"r/logs/rank{rank:04d}.log").read_text().splitlines()
        assert sorted(lines) == sorted(_SAYS * 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hostfile", "r"]
    assert (tmp_path / "hostfile").read_text() == "n7 slots=3\n"


@pytest.mark.parametrize(("spoil", "code"), [
    # Repeat until it is removed, since the node's agent may be writing there.
    ('until rm -rf "$EZPZ_LLM_RUN_DIR"; do :; done', 0),
    ('until rm -rf "$EZPZ_LLM_RUN_DIR"; do :; done', 5),
    ('echo "[" > "$EZPZ_LLM_RUN_DIR/run.json"', 5),
])
def test_an_end_that_cannot_be_recorded_is_the_same_end(tmp_path: Path, spoil: str, code: int) -> None:
    done = launch(tmp_path, "-n", "1", "--run-dir", "r", "sh", "-c", f"{spoil}; exit {code}")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    # A failing rank's record creates the directory again, with the end in it; else a message says there is none.
    remade = "rm -rf" in spoil and code != 0
    assert ("cannot record the end of the run in" in done.stderr) is not remade
    if remade:
        assert record(tmp_path / "r")["exit"]["code"] == code


def test_only_the_runs_own_processes_are_ended(tmp_path: Path) -> None:
    """A process with the same command line, one that listens on a port, and another run of the program survive."""
    words = ("sh", "-c", "sleep 0.5; exit $CODE")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        listener = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE,
                                    pass_fds=(held.fileno(),))
    alike = subprocess.Popen(["sleep", "309"])
    other = start(tmp_path, "-n", "2", "--run-dir", "other", "sh", "-c", "until [ -e end ]; do sleep 0.2; done")
    try:
        program = "sleep 309 & [ $PMI_RANK = 1 ] && sleep 1 && exit 7; wait"
        failed = launch(tmp_path, "-n", "2", "--run-dir", "failed", "sh", "-c", program)
        assert failed.returncode == 7, failed.stderr
        assert left_over(tmp_path / "failed") == {}
        refused = launch(tmp_path, "-n", "1", *words, MASTER_PORT=str(port))
        assert f"MASTER_PORT={port} cannot be used" in refused.stderr
        assert f"pid {listener.pid} (" in refused.stderr
        assert (alike.poll(), listener.poll(), other.poll()) == (None, None, None)
        (tmp_path / "end").touch()
        lines = other.communicate(timeout=scaled(40))[1].splitlines()
        assert [line[:20] for line in lines if line.startswith("launch:")] == ["launch: exit code 0 "]
        assert other.returncode == 0
    finally:
        for process in (alike, listener, other):
            process.kill()
            process.communicate()


@pytest.mark.parametrize(("outer", "inner"), [
    ("mpiexec", "mpiexec"), ("mpiexec", "torchrun"), pytest.param("torchrun", "mpiexec", marks=pytest.mark.full)])
def test_a_launch_inside_a_single_rank_is_a_run_of_its_own(tmp_path: Path, outer: str, inner: str) -> None:
    """It inherits the variables that the outer run's shim and launcher set for that rank."""
    program = "import os; from ezpz_llm.launcher.basics.ranks import find_rank; i = find_rank(os.environ);" \
              " print(i.rank, i.world_size, os.environ['EZPZ_LLM_RANK'])"
    done = launch(tmp_path, "--launcher", outer, "-n", "1", "--run-dir", "outer", "launch", "--launcher", inner,
                  "-n", "2", "--run-dir", "inner", "--tee", "all", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 2 0", "[1] 1 2 1"]
    assert record(tmp_path / "inner")["exit"]["code"] == 0
    assert left_over(tmp_path / "inner") == left_over(tmp_path / "outer") == {}


def test_any_place_and_any_locale(tmp_path: Path) -> None:
    """Run without HOME and USER, with a TMPDIR too long for a socket, and with names that are not valid text."""
    long = tmp_path / ("t" * 200)
    long.mkdir()
    env = {name: value for name, value in clean_env().items() if name not in ("HOME", "USER", "LOGNAME")}
    env |= {"TMPDIR": str(long), "LC_ALL": "C", "PYTHONUTF8": "0"}
    name = os.fsencode(tmp_path) + b"/r\xff \xc3\xbc"
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", name, "sh", "-c",
                           "echo \xfc; exit 3"], cwd=tmp_path, env=env, capture_output=True, timeout=scaled(60),
                          check=False)
    assert done.returncode == 3, done.stderr
    assert b"Traceback" not in done.stderr
    again = subprocess.run([sys.executable, "-m", "ezpz_llm.why", name], env=env, capture_output=True,
                           timeout=scaled(60), check=False)
    assert (again.returncode, b"exit code 3" in again.stdout) == (0, True), again.stderr
