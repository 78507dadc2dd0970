"""Tests of `ezpz-llm submit` and the job templates on four simulated nodes, with real Slurm and a PBS stand-in."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pbs_standin
import pytest
from simcluster.cluster import Cluster

from ezpz_llm.core.base.package_data import data_dir

SUBMIT = ("ezpz-llm", "submit", "--nodes", "2")
TRAIN = ("python3", "-m", "ezpz_llm.train", "--n-layer", "1", "--block-size", "32", "--eval-tokens", "512",
         "--sample-tokens", "0", "--log-every", "10")

# Records its start, and fails the first time.
TWICE = """
import os, sys
run_dir = os.environ["EZPZ_LLM_RUN_DIR"]
if os.environ.get("RANK_IS", os.environ.get("SLURM_PROCID", os.environ.get("PMI_RANK"))) == "0":
    with open(f"{run_dir}/starts", "a") as file:
        print(sys.argv[1:], os.getcwd(), os.environ["EZPZ_LLM_ENDS_AT"], sys.executable, sep="|", file=file)
    sys.exit(3 if len(open(f"{run_dir}/starts").readlines()) == 1 else 0)
"""


def until(what: Callable[[], object], timeout: float = 90) -> object:
    """Poll `what` until its result is true, and return the result."""
    deadline = time.monotonic() + timeout
    while not (result := what()):
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.1)
    return result


def record(run_dir: Path) -> dict:
    try:
        return json.loads((run_dir / "run.json").read_text())
    except FileNotFoundError:
        return {}


def slurm_jobs(cluster: Cluster) -> list[str]:
    return cluster.run("squeue", "--noheader", "--format", "%i %T").stdout.split()


@pytest.mark.full
def test_requeued_training_resumes(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"
    train = (*TRAIN, "--steps", "300", "--save-every", "10", "--prompt", 'a "b" $(c)')
    done = cluster.run(*SUBMIT, "--time", "10m", "--requeue", "--name", "it's; $(odd)", "--run-dir", run_dir, "--",
                       "launch", "--ppn", "1", *train, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (job,) = record(run_dir)["submit"]["jobs"]
    assert f"watch      squeue -j {job}\n" in done.stdout
    shown = cluster.run("squeue", "--noheader", "-j", job, "--format", "%j|%l|%D").stdout.strip()
    assert shown == "it's; $(odd)|10:00|2"
    until((run_dir / "checkpoints/latest").exists)
    assert cluster.run("scontrol", "requeue", job).returncode == 0
    assert record(run_dir).get("steps", 0) < 300
    until(lambda: record(run_dir).get("steps") == 300 and not slurm_jobs(cluster))
    output = (run_dir / f"logs/job-{job}.log").read_text()
    assert len(re.findall(r"^launch +2 ranks on 2 nodes .* in slurm job", output, re.MULTILINE)) == 2, output
    resumed = int(re.search(r"resuming after step (\d+)", output)[1])
    assert 10 <= resumed < 300
    final = record(run_dir)
    assert final["exit"]["code"] == 0
    assert final["config"]["prompt"] == 'a "b" $(c)'
    assert final["submit"]["jobs"] == [job]
    assert float(final["launch"]["env"]["EZPZ_LLM_ENDS_AT"]) <= time.time() + 600


def test_a_chain_on_slurm_runs_until_it_is_complete(cluster: Cluster, tmp_path: Path) -> None:
    program = tmp_path / "twice.py"
    program.write_text(TWICE)
    words = ["a b", "$(touch made)", 'q"', "it's", ";", ""]
    done = cluster.run(*SUBMIT, "--time", "10m", "--chain", "3", "--run-dir", "r", "--", "launch", "--ppn", "1",
                       "python3", str(program), *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, third = jobs = record(tmp_path / "r")["submit"]["jobs"]
    until(lambda: not slurm_jobs(cluster))
    logs = {job: (tmp_path / f"r/logs/job-{job}.log").read_text() for job in jobs}
    assert "exit code 3" in logs[first], logs[first]
    assert f"job {third}: {tmp_path}/r is complete" in logs[third]
    starts = [line.split("|") for line in (tmp_path / "r/starts").read_text().splitlines()]
    assert len(starts) == 2, logs[second]
    for given, folder, ends_at, python in starts:
        assert given == repr(words)
        assert folder == str(tmp_path)
        assert 0 < float(ends_at) - time.time() <= 600
        assert python.startswith(sys.prefix)
    assert not (tmp_path / "made").exists()


def test_slurms_error_is_shown(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run(*SUBMIT, "--time", "10m", "--queue", "nix", "--run-dir", "r", "--", "launch", "hostname",
                       cwd=tmp_path)
    assert done.returncode == 1
    assert "sbatch: error: invalid partition specified: nix\n" in done.stderr
    assert "another --queue" in done.stderr
    assert not (tmp_path / "r").exists()


def by_hand(name: str, folder: Path) -> Path:
    """Return a copy of a template with its three lines filled in, as a user would."""
    text = (data_dir("jobs") / name).read_text()
    for old, new in (
        ("ACCOUNT", "project"),
        ('source "$HOME/ezpz_llm/launchers/activate"', f"export PATH={shlex.quote(sys.prefix)}/bin:$PATH"),
        ("python3 -m ezpz_llm.train --ds-config zero1", "--ppn 1 hostname"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return folder / name


def test_slurm_template_submitted_by_hand(cluster: Cluster, tmp_path: Path) -> None:
    script = by_hand("slurm.sh", tmp_path)
    assert cluster.batch(script, cwd=tmp_path) == ["COMPLETED"]
    [job] = [path.name for path in (tmp_path / "runs").iterdir()]
    assert "started by srun" in (tmp_path / f"ezpz_llm-{job}.log").read_text()
    assert record(tmp_path / "runs" / job)["exit"]["code"] == 0
    assert sorted(path.name for path in (tmp_path / "runs" / job / "logs").glob("rank*")) == ["rank0000.log",
                                                                                            "rank0001.log"]


@pytest.mark.full
def test_a_task_of_an_array_requeues_only_itself(cluster: Cluster, tmp_path: Path) -> None:
    """The last task, whose job id is the id of the array, requeues itself as jobs/slurm.sh does."""
    [again] = re.findall(r"^again=.*$", (data_dir("jobs") / "slurm.sh").read_text(), re.MULTILINE)
    (tmp_path / "array.sh").write_text(f"""#!/bin/bash
#SBATCH --array=1-2 --nodes=1 --requeue
echo $SLURM_RESTART_COUNT >> {tmp_path}/task$SLURM_ARRAY_TASK_ID
while [ ! -e {tmp_path}/task1 ]; do sleep 0.1; done
if [ $SLURM_ARRAY_TASK_ID = 2 ] && [ -z "$SLURM_RESTART_COUNT" ]; then
    {again}
    "${{again[@]}}"
fi
while [ $(wc -l < {tmp_path}/task2) -lt 2 ]; do sleep 0.1; done
""")
    done = cluster.run("sbatch", "--parsable", tmp_path / "array.sh", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    until(lambda: not slurm_jobs(cluster))
    assert (tmp_path / "task2").read_text().split() == ["1"]
    assert (tmp_path / "task1").read_text().split() == []
    assert len((tmp_path / "task1").read_text().splitlines()) == 1


class Pbs:
    """PBS stand-in in its own folder."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.path = f"{pbs_standin.make(folder / 'pbs', {node: 2 for node in cluster.nodes})}:{os.environ['PATH']}"
        (folder / "here.toml").write_text('scheduler = "pbs"\n')

    def run(self, *words: str) -> str:
        done = self.cluster.run(*words, cwd=self.folder, PATH=f"{sys.prefix}/bin:{self.path}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def settle(self) -> None:
        until(lambda: not self.run("qstat").strip())


def test_chain_and_template_on_pbs(host_cluster: Cluster, tmp_path: Path) -> None:
    pbs = Pbs(host_cluster, tmp_path)
    (tmp_path / "twice.py").write_text(TWICE)
    told = pbs.run(*SUBMIT, "--time", "10m", "--site", "here.toml", "--chain", "3", "--run-dir", "r", "--",
                   "launch", "--ppn", "1", "python3", "twice.py", "a b", "$(touch made)")
    number = pbs.run("qsub", str(by_hand("pbs.sh", tmp_path))).strip()
    jobs = record(tmp_path / "r")["submit"]["jobs"]
    assert f"cancel     qdel {' '.join(jobs)}" in told
    pbs.settle()
    assert "is complete, nothing is left to do" in (tmp_path / f"r/logs/{jobs[2]}.OU").read_text()
    starts = [line.split("|") for line in (tmp_path / "r/starts").read_text().splitlines()]
    assert len(starts) == 2
    for given, folder, ends_at, python in starts:
        assert given == repr(["a b", "$(touch made)"])
        assert folder == str(tmp_path)
        assert 0 < float(ends_at) - time.time() <= 600
        assert python.startswith(sys.prefix)
    assert record(tmp_path / "r")["launch"]["scheduler"] == "pbs"
    assert record(tmp_path / "runs" / number)["exit"]["code"] == 0


@pytest.mark.slow
def test_chain_of_short_jobs_on_pbs_resumes(host_cluster: Cluster, tmp_path: Path) -> None:
    """Each job stops before its time limit and writes a checkpoint, from which the next job resumes."""
    pbs = Pbs(host_cluster, tmp_path)
    pbs.run(*SUBMIT, "--time", "0:00:50", "--site", "here.toml", "--chain", "2", "--requeue", "--run-dir", "r",
            "--", "launch", "--ppn", "1", *TRAIN, "--steps", "100000", "--save-every", "100000")
    jobs = record(tmp_path / "r")["submit"]["jobs"]
    pbs.settle()
    first, second = ((tmp_path / f"r/logs/{job}.OU").read_text() for job in jobs)
    stopped = int(re.search(r"stopped after step (\d+) of 100000: the allocation ends at", first)[1])
    assert f"resuming after step {stopped} " in second
    assert record(tmp_path / "r")["steps"] > stopped


@pytest.mark.slow
def test_job_without_a_checkpoint_restarts(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(*SUBMIT, "--time", "10m", "--chain", "2", "--run-dir", "r", "--", "launch", "--ppn", "1", *TRAIN,
                "--steps", "2000", "--save-every", "-1", cwd=tmp_path)
    first, second = record(tmp_path / "r")["submit"]["jobs"]
    until((tmp_path / "r/metrics.jsonl").exists)
    cluster.run("scancel", "--signal=KILL", "--full", first)
    until(lambda: list((tmp_path / "r").glob("metrics-before-*.jsonl")))
    until((tmp_path / "r/metrics.jsonl").exists)
    assert "slurm job" in (tmp_path / f"r/logs/job-{second}.log").read_text()
