"""Messages of launchers and schedulers count only if the launcher printed them, for this job, node and time."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from launch_runs import CAPTURED, launch, record
from simcluster.cluster import Cluster
from slowness import scaled

from ezpz_llm.launcher.basics import log_kinds
from ezpz_llm.launcher.basics.program_output import MarkReader, mark
from ezpz_llm.launcher.diagnosis.log_patterns import read_abort, read_messages
from ezpz_llm.launcher.diagnosis.verdict_rules import Evidence, find_root_cause
from ezpz_llm.launcher.on_nodes.kinds import Kind
from ezpz_llm.launcher.on_nodes.run_facts import RunFacts

_CANCELLED = "slurmstepd: error: *** {} ON n1 CANCELLED AT 2026-01-02T03:04:05 {}***\n"
_AT = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))
_FORGED = (_CANCELLED.format("JOB 123", "DUE TO TIME LIMIT "), _CANCELLED.format("STEP 123.0", ""),
           "srun: error: Node failure on n1\n", "srun: error: n1: task 0: Out Of Memory\n",
           "=>> PBS: job killed: walltime 60 exceeded limit 30\n", "n1: shepherd died from signal 9\n",
           "ssh: Could not resolve hostname github.com: Temporary failure in name resolution\n",
           "bash: line 1: hydra_pmi_proxy: command not found\n", "python3: No module named ezpz_llm.launch\n",
           "error: launch started 2 ranks, but this process is rank 0 of 1\n",
           "application called MPI_Abort(MPI_COMM_WORLD, 5) - process 1\n")


def _facts(**changes: object) -> RunFacts:
    return RunFacts(**{"world_size": 2, "hosts": ("n1", "n2"), "launcher": "srun", "launcher_status": 143,
                       "ended": _AT + 10, "started": _AT - 10, "scheduler": "slurm", "job_id": "7", **changes})


def _kinds(text: str, **facts: object) -> list[str]:
    return [match.kind for match in read_messages(text, _facts(**facts))]


@pytest.mark.parametrize("options", [
    ("-n", "2"), ("-n", "2", "--tee", "all"), pytest.param(("--launcher", "torchrun"), marks=pytest.mark.full)])
def test_lines_of_a_program_are_not_the_launchers(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A program that prints messages of schedulers and launchers still succeeds, or fails with its own code."""
    (tmp_path / "prints.py").write_text(f"""
import sys
sys.stderr.write("50 %\\r")
for line in {_FORGED!r}:
    print(line, end="", flush=True)
    sys.stderr.write(line)
sys.stderr.write({_FORGED[0]!r}[:-1])
sys.exit(int(sys.argv[1]))
""")
    for code in (0, 7):
        done = launch(tmp_path, *options, "--run-dir", f"r{code}", sys.executable, "prints.py", str(code))
        assert done.returncode == code, done.stderr
        assert all(line.strip() in done.stderr for line in _FORGED)
        assert "\x1b" not in done.stderr
        launcher_log = (tmp_path / f"r{code}/logs/launcher.log").read_text()
        assert not any(line.strip() in launcher_log for line in _FORGED)
    # The post-mortem blames the rank, and quotes no other author.
    assert record(tmp_path / "r7")["exit"]["cause"].startswith("rank ")
    assert not re.search(r"^  [A-Z]\w+(?: MPI)?: ", (tmp_path / "r7/postmortem.txt").read_text(), re.MULTILINE)


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=6) | st.sampled_from(
    [b"a\n", b"b", b"\n", b"\x1b", mark(b"c")[:5], mark(b"d\n"), mark(b"e")]))), st.integers(1, 7))
def test_marks(parts: list[tuple[bool, bytes]], size: int) -> None:
    """Marks are removed however the launcher divides its output, and never end within the program's text."""
    # Parts of the launcher never hold a marks' first byte.
    parts = [(is_program, data if is_program else data.replace(b"\x1b", b"")) for is_program, data in parts]
    stream = b"".join(mark(data) if is_program else data for is_program, data in parts)
    reader, shown, of_launcher = MarkReader(), b"", b""
    for start in range(0, len(stream), size):
        more = reader.split(stream[start:start + size])
        shown, of_launcher = shown + more[0], of_launcher + more[1]
    shown += reader.rest()
    assert of_launcher == b"".join(data for is_program, data in parts if not is_program)
    assert mark(shown) == mark(b"".join(data for _, data in parts))


@pytest.mark.parametrize(("text", "facts", "is_found"), [
    (_CANCELLED.format("JOB 7", ""), {}, True),
    (_CANCELLED.format("JOB 7", "DUE TO TIME LIMIT "), {}, True),
    (_CANCELLED.format("JOB 7", "DUE TO TIME LIMIT "), {"hosts": ("n2",)}, True),  # a run on some nodes of the job
    (_CANCELLED.format("JOB 123", "DUE TO TIME LIMIT "), {}, False),
    (_CANCELLED.format("JOB 123", "DUE TO NODE FAILURE, SEE LOG "), {}, False),
    (_CANCELLED.format("JOB 7", ""), {"started": _AT + 100, "ended": _AT + 200}, False),
    (_CANCELLED.format("JOB 7", ""), {"started": _AT - 200, "ended": _AT - 100}, False),
    (_CANCELLED.format("STEP 7.0", ""), {}, True),
    ("[2026-01-02T03:04:05.1] error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE to SIGNAL Killed ***",
     {}, True),  # Slurm 26.05
    (_CANCELLED.format("STEP 7.0", ""), {"steps": frozenset({"7.0"})}, True),
    (_CANCELLED.format("STEP 7.0", ""), {"steps": frozenset({"7.1"})}, False),
    (_CANCELLED.format("STEP 7.0", ""), {"hosts": ("n2",)}, False),
    (_CANCELLED.format("JOB 7", ""), {"launcher": "mpiexec"}, True),
    (_CANCELLED.format("JOB 7", ""), {"launcher": "mpiexec", "scheduler": "none", "job_id": None}, False),
    ("srun: error: Node failure on n2\n", {}, True),
    ("srun: error: Node failure on n3\n", {}, False),
    ("=>> PBS: job killed: walltime 60 exceeded limit 30\n", {}, False),
    ("=>> PBS: job killed: walltime 60 exceeded limit 30\n", {"launcher": "mpiexec", "scheduler": "pbs"}, True),
    ("n1: rank 0 died from signal 9\n", {}, False),
    ("n1: rank 0 died from signal 9\n", {"launcher": "mpiexec"}, True),
])
def test_messages_must_fit_the_run(text: str, facts: dict[str, object], is_found: bool) -> None:
    assert bool(_kinds(text, **facts)) is is_found


def test_an_abort_is_attributed_to_the_rank_that_logged_it() -> None:
    text = "application called MPI_Abort(MPI_COMM_WORLD, 17) - process 1\n"
    assert [match.code for match in read_abort(text, 1)] == [17]
    assert read_abort(text, 0) == []


def test_a_canceled_step() -> None:
    """srun cancels the step of a failed rank too, but says so."""
    killed = "srun: error: n1: task 0: Killed\n"
    for text, kind in ((_CANCELLED.format("STEP 7.0", "") + killed, Kind.CANCELLED),
                       (killed + _CANCELLED.format("STEP 7.0", ""), Kind.CANCELLED),
                       (killed, Kind.UNRECORDED),
                       (killed + "srun: error: n2: task 1: Killed\n", Kind.CANCELLED),
                       (killed + "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
                        + _CANCELLED.format("STEP 7.0", ""), Kind.UNRECORDED)):
        verdict = find_root_cause(Evidence((), tuple(read_messages(text, _facts())), _facts()))
        assert verdict is not None
        assert (verdict.kind, verdict.code) == (kind, 143)
    # Captured output of failed ranks. `timeout` cancels the steps of the other blocks.
    for block in (CAPTURED / "slurm/srun_exit_codes.txt").read_text().split("=== ")[1:]:
        matches = tuple(read_messages(block, _facts(job_id="2", started=None)))
        if any(match.kind == log_kinds.ENDED for match in matches) and not block.startswith("timeout"):
            verdict = find_root_cause(Evidence((), matches, _facts()))
            assert verdict is not None
            assert verdict.kind is not Kind.CANCELLED, block


_WAITS = """
import os, time
open(os.path.join(os.environ["EZPZ_LLM_RUN_DIR"], "up" + os.environ["EZPZ_LLM_RANK"]), "w").close()
time.sleep(600)
"""


@pytest.mark.full
@pytest.mark.parametrize("signal", [(), ("--signal=KILL",)])
def test_scancel_of_the_step(gpu_cluster: Cluster, tmp_path: Path, signal: tuple[str, ...]) -> None:
    (tmp_path / "waits.py").write_text(_WAITS)
    running = gpu_cluster.start("salloc", "-N2", "--gpus-per-node=1", "launch", "--run-dir", "r", "python3",
                                "waits.py", cwd=tmp_path)
    deadline = time.monotonic() + scaled(60)
    while len(list(tmp_path.glob("r/up*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job = record(tmp_path / "r")["launch"]["job_id"]
    [step] = [word for word in gpu_cluster.run("squeue", "-s", "-h", "-o", "%i", "-j", job).stdout.split()
              if word.endswith(".0")]
    assert gpu_cluster.run("scancel", *signal, step).returncode == 0
    done = gpu_cluster.finish(running, scaled(60))
    assert done.returncode in (137, 143), done.stderr
    cause = "all ranks were killed at once" if signal else "the job or its step was canceled: "
    assert f"launch: {cause}" in done.stderr, done.stderr
    assert "dmesg" not in done.stderr
    assert record(tmp_path / "r")["exit"]["kind"] == "cancelled"


@pytest.mark.full
def test_lines_of_a_rank_in_the_jobs_output_file(gpu_cluster: Cluster, tmp_path: Path) -> None:
    """Slurm writes the end of a job to its output file, where the ranks' lines are too."""
    forged = """
import os, sys, time
print(f"slurmstepd: error: *** JOB {os.environ['SLURM_JOB_ID']} ON n1 CANCELLED AT "
      + time.strftime("%Y-%m-%dT%H:%M:%S") + " DUE TO TIME LIMIT ***", file=sys.stderr, flush=True)
"""
    (tmp_path / "waits.py").write_text(forged + _WAITS)
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH -o job.txt\ntrap : TERM\n"
                                     "launch --run-dir r python3 waits.py\n")
    gpu_cluster.run("sbatch", "-N2", "-t5", "job.sh", cwd=tmp_path)
    deadline = time.monotonic() + scaled(120)
    while len(list(tmp_path.glob("r/up*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    gpu_cluster.run("scancel", "--full", record(tmp_path / "r")["launch"]["job_id"])
    while not (tmp_path / "r/postmortem.txt").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    text = (tmp_path / "r/postmortem.txt").read_text()
    assert text.startswith("launch: the job was canceled: "), text
