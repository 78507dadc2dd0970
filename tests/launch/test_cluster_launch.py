"""Run launch on four simulated nodes with real Slurm: every launcher, kinds of jobs, and placement of ranks.

The full matrix of programs, nodes and launchers, with recorded results:
python3 benchmarks/record.py cluster-matrix
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest
from launch_runs import STALE, record
from places import HELPERS
from slowness import scaled

from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist.device import device_index

MEET = f"{sys.executable} {HELPERS / 'connecting_ranks.py'}"
LAUNCHERS = ("srun", "mpiexec", "torchrun")
PROGRAMS = {
    "test_dist": ["--steps", "10", "--device", "cpu"],
    "train": ["--steps", "5", "--n-layer", "2", "--n-embd", "64", "--block-size", "64", "--eval-tokens", "2048",
              "--sample-tokens", "10", "--log-every", "5", "--precision", "fp32", "--device", "cpu"],
}
FULL = (("train", 4, "srun"), ("test_dist", 2, "mpiexec"), ("train", 2, "torchrun"))
"""Cells of the matrix that are marked full; the others are slow."""
MATRIX = data_dir("benchmarks") / "results/cluster_matrix.json"


def _cases() -> list:
    return [pytest.param(program, nodes, launcher, id=f"{program}-{nodes}-{launcher}",
                         marks=pytest.mark.full if (program, nodes, launcher) in FULL else pytest.mark.slow)
            for program in PROGRAMS for nodes in (1, 2, 4) for launcher in LAUNCHERS]


def _hosts_of(run_dir: Path) -> dict[int, str]:
    """Return each rank's node, as reported by the nodes' agents."""
    hosts = {}
    for path in (run_dir / "heartbeat").glob("node*.json"):
        report = json.loads(path.read_text())
        hosts |= {int(rank): report["host"] for rank in report["ranks"]}
    return hosts


def _met(run_dir: Path) -> list[dict]:
    """Return the reports of the ranks of connecting_ranks.py."""
    return json.loads((run_dir / "met.json").read_text())


def _places(run_dir: Path) -> list[tuple[str, int]]:
    return [(rank["host"], rank["local_rank"]) for rank in _met(run_dir)]


def _two_on(*hosts: str) -> list[tuple[str, int]]:
    return [(host, local_rank) for host in hosts for local_rank in (0, 1)]


@pytest.mark.parametrize(("program", "nodes", "launcher"), _cases())
def test_programs_on_nodes(cluster, tmp_path: Path, request: pytest.FixtureRequest, recording: bool, program: str,
                           nodes: int, launcher: str) -> None:
    """Launch from an salloc shell on the login node: every rank runs on its node, and the program succeeds."""
    began = time.monotonic()
    done = cluster.run("salloc", f"-N{nodes}", "--ntasks-per-node=2", "-t5", "launch", "--launcher", launcher,
                       "--run-dir", "run", "python3", "-m", f"ezpz_llm.{program}", *PROGRAMS[program],
                       cwd=tmp_path, timeout=200, OMP_NUM_THREADS="1", EZPZ_LLM_CACHE=str(_cache(request)), **STALE)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "run"
    expected = {rank: f"n{rank // 2 + 1}" for rank in range(2 * nodes)}
    assert _hosts_of(run_dir) == expected
    launched = record(run_dir)["launch"]
    assert (launched["launcher"], launched["world_size"]) == (launcher, 2 * nodes)
    assert launched["hosts"] == [f"n{number}" for number in range(1, nodes + 1)]
    if program == "test_dist":
        for rank, host in expected.items():
            log = (run_dir / f"logs/rank{rank:04d}.log").read_text()
            assert f"[cpu][rank={rank}/{2 * nodes - 1}][{rank % 2}][{host}]" in log
        assert re.search(rf"^ranks +{2 * nodes} on ", done.stdout, re.MULTILINE), done.stdout
        assert "test_dist: fit" in done.stdout
    else:
        assert re.search(rf"^layout .*, on {2 * nodes} cpu ranks$", done.stdout, re.MULTILINE), done.stdout
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
        assert lines[-1]["loss"] < lines[0]["loss"]
    assert cluster.processes(launched["env"]["EZPZ_LLM_RUN_ID"]) == {}
    if recording:
        _write(program, nodes, launcher, time.monotonic() - began, sorted(set(expected.values())))


_STRANGER = """
import os, socket, sys, time
from datetime import timedelta
import torch.distributed as dist
port = int(sys.argv[1])
held, tries, set_keys = [], 0, 0
print("ready", flush=True)
while True:
    try:
        peer = socket.create_connection(("n1", port), timeout=2)
        tries += 1
        if tries % 3 == 0:
            store = dist.TCPStore("n1", port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
            for key in ("setup/error", "ezpz_llm/setup/error", "ezpz_llm/0/setup/error", "default_pg/0//cpu//0/0"):
                store.set(key, "\\x1b]0;PWNED\\x07 evil")
                set_keys += 1
        elif tries % 3 == 1:
            peer.sendall(os.urandom(4096))
        held = [*held[-50:], peer]
        if tries < 100 or tries % 100 == 0:  # a pipe holds some thousand lines
            print(tries, set_keys, flush=True)
    except (OSError, RuntimeError):
        pass
    time.sleep(0.02)
"""
"""Attack from another node: garbage, idle connections, and foreign keys in the ranks' store."""


@pytest.mark.parametrize("runs", [1, pytest.param(100, marks=(pytest.mark.slow, pytest.mark.timeout(7200)))])
def test_a_stranger_at_the_store_of_two_nodes(cluster, tmp_path: Path, runs: int) -> None:
    """torch's store has no authentication, but foreign keys, garbage and idle connections must not end the run."""
    stranger = cluster.start(sys.executable, "-u", "-c", _STRANGER, "24690", node="n4")
    try:
        assert stranger.stdout.readline() == "ready\n"
        for number in range(runs):
            done = cluster.run("salloc", "-N2", "--ntasks-per-node=1", "-t5", "launch", "--launcher", "srun",
                               "--run-dir", f"run{number}", "python3", "-m", "ezpz_llm.test_dist",
                               *PROGRAMS["test_dist"], cwd=tmp_path, timeout=200, OMP_NUM_THREADS="1",
                               MASTER_PORT="24690")
            assert done.returncode == 0, done.stdout + done.stderr
            assert "test_dist: fit" in done.stdout
            assert "PWNED" not in done.stdout + done.stderr
            assert "\x1b" not in done.stdout + done.stderr
    finally:
        cluster.kill(stranger)
        out, err = stranger.communicate(timeout=scaled(30))
    tries, set_keys = map(int, out.splitlines()[-1].split())
    assert tries > 10, err
    assert set_keys > 10, err


def _cache(request: pytest.FixtureRequest) -> Path:
    """Return a cache folder shared by all tests, so that the data are prepared once."""
    return request.getfixturevalue("tmp_path_factory").getbasetemp() / "cluster-cache"


def _write(program: str, nodes: int, launcher: str, seconds: float, hosts: list[str]) -> None:
    results = json.loads(MATRIX.read_text()) if MATRIX.exists() else {
        "command": "python3 benchmarks/record.py cluster-matrix",
        "what": "4 simulated nodes with real Slurm; seconds of the whole job, all ranks on one machine's cores",
        "cores": os.cpu_count(), "runs": {}}
    results["runs"][f"{program}, {nodes} x 2, {launcher}"] = {
        "exit_code": 0, "hosts": hosts, "seconds": round(seconds, 1),
        "date": datetime.now(timezone.utc).date().isoformat()}
    MATRIX.write_text(json.dumps(results, indent=2) + "\n")


def _batch(cluster, folder: Path, options: str, script: str, timeout: float = 120) -> str:
    """Run an sbatch script and return its output."""
    (folder / "job.sh").write_text(f"#!/bin/bash\n#SBATCH --output=out-%a.txt -t 5\n#SBATCH {options}\n{script}")
    states = cluster.batch("job.sh", cwd=folder, timeout=timeout)
    output = "".join(path.read_text() for path in sorted(folder.glob("out-*.txt")))
    assert set(states) == {"COMPLETED"}, output
    return output


@pytest.fixture(scope="module")
def job(cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run a batch job on four nodes that launches in many ways. Return its folder and its output."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "hosts").write_text("n1\nn3\nn4\n")
    return folder, _batch(cluster, folder, "-N4 --ntasks-per-node=2", timeout=280, script=f"""
run() {{ timeout 120 launch --run-dir "$@" {MEET}; echo "$1 rc=$?"; }}
squeue --noheader --jobs $SLURM_JOB_ID --format %e > end
run all
run first --nodes 2
for launcher in srun mpiexec torchrun; do run without-n2-$launcher --launcher $launcher --hostfile hosts; done
HYDRA_LAUNCHER=ssh run ssh --launcher mpiexec --hosts n[2-3]
launch --hosts n1,n2 --run-dir one {MEET} 1 & launch --hosts n[3-4] --run-dir two --launcher mpiexec {MEET} 1 &
wait %1; echo "one rc=$?"; wait %2; echo "two rc=$?"
srun -N1 -n1 --nodelist n3 launch --run-dir nested -n 2 {MEET}; echo "nested rc=$?"
srun -N2 -n4 launch {MEET.split()[0]} -c '
import os, socket
from ezpz_llm.launcher.basics.ranks import find_rank
info = find_rank(os.environ)
print(f"rank {{info.rank}} of {{info.world_size}} on {{socket.gethostname()}}")'
launch --hosts n1,n5 hostname
echo "outside rc=$?"
""")


@pytest.mark.parametrize(("run", "hosts"), [
    ("all", ("n1", "n2", "n3", "n4")),
    ("first", ("n1", "n2")),
    ("without-n2-srun", ("n1", "n3", "n4")),
    ("without-n2-mpiexec", ("n1", "n3", "n4")),
    ("without-n2-torchrun", ("n1", "n3", "n4")),
    ("ssh", ("n2", "n3")),
    ("one", ("n1", "n2")),
    ("two", ("n3", "n4")),
    ("nested", ("n3",)),
])
def test_ranks_are_on_these_hosts(job, run: str, hosts: tuple[str, ...]) -> None:
    """Check the ranks' own reports: for the job, --nodes, --hosts, a hostfile that omits a node, and a step."""
    folder, output = job
    assert f"{run} rc=0" in output, output
    assert _places(folder / run) == _two_on(*hosts)


def test_ranks_know_the_end_of_the_job(job) -> None:
    folder, _ = job
    ends_at = time.mktime(time.strptime((folder / "end").read_text().strip(), "%Y-%m-%dT%H:%M:%S"))
    for run in ("all", "without-n2-mpiexec", "without-n2-torchrun", "ssh"):
        assert {rank["EZPZ_LLM_ENDS_AT"] for rank in _met(folder / run)} == {f"{ends_at:.0f}"}


def test_two_launches_of_a_job_side_by_side(job) -> None:
    """Check that they ran at the same time, with different rendezvous addresses."""
    folder, _ = job
    begun, ended = ([record(folder / run)[part][when] for run in ("one", "two")]
                    for part, when in (("launch", "started"), ("exit", "ended")))
    assert max(begun) < min(ended)
    one, two = (_met(folder / run)[0] for run in ("one", "two"))
    assert (one["MASTER_ADDR"], two["MASTER_ADDR"]) == ("n1", "n3")
    assert one["MASTER_PORT"] != two["MASTER_PORT"]


def test_launch_inside_a_step(job) -> None:
    """The only task of a step starts new ranks; each of several tasks is already a rank."""
    folder, output = job
    assert "using its 1 node of the job's 4" in output
    assert record(folder / "nested")["launch"]["hosts"] == ["n3"]
    assert sorted(re.findall(r"^rank \d of 4 on n\d$", output, re.MULTILINE)) == [
        "rank 0 of 4 on n1", "rank 1 of 4 on n1", "rank 2 of 4 on n2", "rank 3 of 4 on n2"]


def test_a_host_outside_the_job_is_refused(job) -> None:
    _, output = job
    assert "outside rc=2" in output
    assert "n5" in next(line for line in output.splitlines() if line.startswith("error:"))


def test_array_jobs(cluster, tmp_path: Path) -> None:
    """Both tasks of an array run at once, each on its own nodes; the last task's job id is the array's."""
    output = _batch(cluster, tmp_path, "--array=0-1 -N2 --ntasks-per-node=2", f"""
launch --run-dir run$SLURM_ARRAY_TASK_ID {MEET} 1
echo rc=$?
""")
    assert output.count("rc=0") == 2, output
    met = [_met(tmp_path / f"run{task}") for task in (0, 1)]
    hosts = [list(dict.fromkeys(rank["host"] for rank in ranks)) for ranks in met]
    assert [len(ranks) for ranks in met] == [4, 4]
    assert sorted(hosts[0] + hosts[1]) == ["n1", "n2", "n3", "n4"]
    for task, ranks in enumerate(met):
        assert {rank["SLURM_ARRAY_TASK_ID"] for rank in ranks} == {str(task)}
        assert len({rank["SLURM_JOB_ID"] for rank in ranks}) == 1
    assert met[0][0]["SLURM_JOB_ID"] != met[1][0]["SLURM_JOB_ID"]
    assert met[0][0]["MASTER_PORT"] != met[1][0]["MASTER_PORT"]


_DEVICES = """
import json, os, socket
from ezpz_llm.launcher.basics.devices import visible_devices
from ezpz_llm.launcher.basics.ranks import find_rank
info = find_rank(os.environ)
print(json.dumps({"host": socket.gethostname(), "local_rank": info.local_rank, "local_size": info.local_size,
                  "visible": visible_devices(os.environ).ids}))
"""


def _devices_used(run_dir: Path) -> list[tuple[str, str, int]]:
    """Return each rank's node, its visible devices, and the index of the device that it uses."""
    devices = []
    for rank in range(4):
        report = json.loads((run_dir / f"logs/rank{rank:04d}.log").read_text())
        info = RankInfo(rank, 4, report["local_rank"], report["local_size"], rank // 2, "the test")
        devices.append((report["host"], ",".join(report["visible"]),
                        device_index("cuda", len(report["visible"]), info)))
    return devices


def test_devices(gpu_cluster, tmp_path: Path) -> None:
    """A rank uses its only visible device, or the one of its local rank if all of the node's are visible.

    The job does not request tasks, so the number of devices sets the ranks per node.
    """
    (tmp_path / "devices.py").write_text(_DEVICES)
    site = tmp_path / "one_each.toml"
    site.write_text('description = "each rank sees its own device"\n[options]\nsrun = ["--gpus-per-task=1"]\n')
    output = _batch(gpu_cluster, tmp_path, "-N2 --gpus-per-node=2", f"""
launch --run-dir node python3 devices.py; echo rc=$?
launch --run-dir task --site {site} python3 devices.py; echo rc=$?
launch --run-dir mpiexec --launcher mpiexec python3 devices.py; echo rc=$?
""")
    assert output.count("rc=0") == 3, output
    assert _devices_used(tmp_path / "task") == [("n1", "0", 0), ("n1", "1", 0), ("n2", "0", 0), ("n2", "1", 0)]
    for run in ("node", "mpiexec"):
        assert _devices_used(tmp_path / run) == [("n1", "0,1", 0), ("n1", "0,1", 1), ("n2", "0,1", 0),
                                                  ("n2", "0,1", 1)]


def test_a_job_that_requests_tasks_per_gpu(gpu_cluster, tmp_path: Path) -> None:
    """srun rejects such a job's variables together with launch's options."""
    (tmp_path / "devices.py").write_text(_DEVICES)
    output = _batch(gpu_cluster, tmp_path, "-N2 --gpus-per-node=2 --ntasks-per-gpu=1", """
launch --run-dir r python3 devices.py; echo rc=$?
""")
    assert output.count("rc=0") == 1, output
    assert [host for host, _, _ in _devices_used(tmp_path / "r")] == ["n1", "n1", "n2", "n2"]
