"""Run launch in PBS jobs on four simulated nodes: a stand-in for PBS (pbs_standin/), real ssh, and MPICH's mpiexec.

All jobs are queued at once; each test checks the results of one of them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pbs_standin
import pytest
from launch_runs import SAVES, record
from places import HELPERS
from simcluster.cluster import Cluster
from slowness import scaled

MEET = f"python3 {HELPERS / 'connecting_ranks.py'}"

# The first line is the request (qsub's arguments), the rest is the script after its set-up.
_JOBS = {
    "dist": """-l select=2:ncpus=2:mpiprocs=2 -l walltime=00:10:00
        launch --run-dir $RUNS/dist python3 -m ezpz_llm.test_dist --steps 10
        echo rc=$?""",
    "halves": f"""-l select=4:ncpus=1 -l place=scatter
        launch --hosts n1,n2 --run-dir $RUNS/half1 {MEET} 2 & launch --hosts n[3-4] --run-dir $RUNS/half2 {MEET} 2 &
        wait %1; echo rc=$?; wait %2; echo rc=$?""",
    "plain": f"""-l select=2 -l walltime=1:00:00
        launch --run-dir $RUNS/plain {MEET}
        echo rc=$?""",
    # PATH as at sites without PBS commands on compute nodes.
    "mixed": f"""-l select=1:ncpus=2:mpiprocs=1+2:ncpus=2:mpiprocs=2 -l walltime=1:00:00
        PATH=$(echo "$PATH" | sed "s#[^:]*/home/bin:##")
        launch --run-dir $RUNS/mixed {MEET}
        echo rc=$?""",
    "array": f"""-J 0-1 -l select=1:ncpus=1
        launch -n 2 --run-dir "$RUNS/array$PBS_ARRAY_INDEX" {MEET}
        echo rc=$?""",
    "walltime": f"""-l select=2:ncpus=1 -l place=scatter -l walltime=4
        trap : TERM
        launch --run-dir $RUNS/walltime {MEET} 60
        echo rc=$?""",
    "deleted": """-l select=2:ncpus=1 -l place=scatter
        launch --run-dir $RUNS/deleted python3 saves.py 2>&1 | tee deleted.log""",
    "addresses": f"""-l select=2:ncpus=1 -l place=scatter
        show() {{ launch --dry-run --json "$@" hostname; }}
        show --interface eth0 > interface.json
        show --interface hsn0 2> missing.txt; echo rc=$?
        MASTER_ADDR=localhost show 2> localhost.txt; echo rc=$?
        ssh $(tail -n 1 $PBS_NODEFILE) PATH=$PATH launch --dry-run --json hostname > elsewhere.json
        # As Debian's installer leaves a host.
        sed "s/^\\S*\\( $(hostname) .*\\)/127.0.1.1\\1/" /etc/hosts > debian
        unshare --mount bash -c "mount --bind debian /etc/hosts && launch --run-dir $RUNS/debian {MEET}"
        echo rc=$?""",
}


class _Pbs:
    """Results of the jobs, available once they have ended."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.runs = cluster, folder, folder / "runs"
        self.bin = pbs_standin.make(folder / "home", {f"n{number}": 2 for number in range(1, 5)})
        self.ids: dict[str, str] = {}

    def command(self, *words: str) -> str:
        done = self.cluster.run(*words, cwd=self.folder, timeout=60, PATH=f"{self.bin}:{os.environ['PATH']}")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, name: str) -> None:
        request, script = _JOBS[name].split("\n", 1)
        path = self.folder / f"{name}.sh"
        path.write_text(f"#!/bin/bash\n#PBS -N {name}\n#PBS -j oe\n#PBS {request}\ncd $PBS_O_WORKDIR\n"
                        f"export PATH={Path(sys.executable).parent}:$PATH\n"
                        f"export RUNS={self.runs} OMP_WAIT_POLICY=PASSIVE\n{script}\n")
        self.ids[name] = self.command("qsub", str(path))

    def job(self, name: str, timeout: float = 120) -> dict:
        """Wait for a job to end, and return its qstat record."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            said = json.loads(self.command("qstat", "-x", "-f", "-F", "json", self.ids[name]))
            fields = said["Jobs"][self.ids[name]]
            if fields["job_state"] == "F":
                return fields
            time.sleep(0.2)
        raise AssertionError(f"{name} has not ended: {fields}\n{self.output(name)}")

    def output(self, name: str, suffix: str = "") -> str:
        number = self.ids[name].split("[")[0].split(".")[0]
        return (self.folder / f"{name}.o{number}{suffix}").read_text()

    def met(self, run: str) -> list[dict]:
        return json.loads((self.runs / run / "met.json").read_text())


@pytest.fixture(scope="module")
def pbs(host_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Pbs]:
    found = _Pbs(host_cluster, tmp_path_factory.mktemp("pbs"))
    (found.folder / "saves.py").write_text(SAVES)
    for name in _JOBS:
        found.submit(name)
    yield found
    for job in found.ids.values():
        if "[]" not in job:
            found.command("qdel", job)


def test_two_nodes_with_two_ranks_each(pbs: _Pbs) -> None:
    """Run test_dist: four ranks with torch and gloo, two per node; the ranks know the end of the job."""
    job = pbs.job("dist")
    output = pbs.output("dist")
    assert "rc=0" in output, output
    assert "test_dist: fit" in output
    assert "4 ranks on 2 nodes" in output
    assert " in pbs job " in output
    record = json.loads((pbs.runs / "dist/run.json").read_text())["launch"]
    hosts = list(dict.fromkeys(part.split("/")[0] for part in job["exec_host"].split("+")))
    assert (record["hosts"], record["world_size"], record["dialect"].split()[0]) == (hosts, 4, "MPICH/Hydra")
    assert len(hosts) == 2
    begun = time.mktime(time.strptime(job["stime"]))
    assert float(record["env"]["EZPZ_LLM_ENDS_AT"]) == begun + 600


def test_a_deleted_job(pbs: _Pbs) -> None:
    """qdel signals all processes of the job's session, including tee."""
    run = pbs.runs / "deleted"
    deadline = time.monotonic() + scaled(120)
    while not all((run / f"up{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline, pbs.output("deleted")
        time.sleep(0.2)
    pbs.command("qdel", pbs.ids["deleted"])
    pbs.job("deleted")
    assert sorted(path.name for path in run.glob("saved*")) == ["saved0", "saved1"]
    assert record(run)["exit"]["code"] == 143
    assert "launch received SIGTERM" in (run / "postmortem.txt").read_text()


def test_two_runs_side_by_side(pbs: _Pbs) -> None:
    pbs.job("halves")
    assert pbs.output("halves").count("rc=0") == 2, pbs.output("halves")
    one, two = pbs.met("half1"), pbs.met("half2")
    assert ([rank["host"] for rank in one], [rank["host"] for rank in two]) == (["n1", "n2"], ["n3", "n4"])
    assert one[0]["MASTER_PORT"] != two[0]["MASTER_PORT"]
    assert (one[0]["MASTER_ADDR"], two[0]["MASTER_ADDR"]) == ("n1", "n3")
    records = [json.loads((pbs.runs / run / "run.json").read_text()) for run in ("half1", "half2")]
    begun, ended = ([record[part][when] for record in records]
                    for part, when in (("launch", "started"), ("exit", "ended")))
    assert max(begun) < min(ended)


def test_two_chunks_on_one_host(pbs: _Pbs) -> None:
    job = pbs.job("plain")
    host = job["exec_host"].split("/")[0]
    assert [(rank["host"], rank["local_rank"]) for rank in pbs.met("plain")] == [(host, 0), (host, 1)]
    assert "note       PBS placed all 2 chunks or ranks on one node" in pbs.output("plain")
    assert pbs.met("plain")[1]["EZPZ_LLM_ENDS_AT"] == f"{time.mktime(time.strptime(job['stime'])) + 3600:.0f}"


def test_chunks_of_different_sizes_and_no_qstat(pbs: _Pbs) -> None:
    job = pbs.job("mixed")
    one, two, three = dict.fromkeys(part.split("/")[0] for part in job["exec_host"].split("+"))
    ranks = pbs.met("mixed")
    assert [(rank["host"], rank["local_rank"]) for rank in ranks] == [(one, 0), (two, 0), (two, 1), (three, 0),
                                                                      (three, 1)]
    assert {rank["EZPZ_LLM_ENDS_AT"] for rank in ranks} == {None}
    assert "note       the job's end time is unknown: qstat is not on PATH" in pbs.output("mixed")


def test_array_jobs(pbs: _Pbs) -> None:
    pbs.job("array")
    for index in ("0", "1"):
        assert "rc=0" in pbs.output("array", f".{index}")
        number = pbs.ids["array"].split("[")[0]
        assert {(rank["PBS_JOBID"], rank["PBS_ARRAY_INDEX"]) for rank in pbs.met(f"array{index}")} == {
            (f"{number}[{index}].login", index)}
    assert pbs.met("array0")[0]["MASTER_PORT"] != pbs.met("array1")[0]["MASTER_PORT"]


def test_the_end_of_the_time(pbs: _Pbs) -> None:
    """PBS's SIGTERM reaches launch, which ends the ranks on both nodes."""
    job = pbs.job("walltime")
    assert job["Exit_status"] == -29
    output = pbs.output("walltime")
    assert re.search(r"^=>> PBS: job killed: walltime \d+ exceeded limit 4$", output, re.MULTILINE)
    assert "rc=143" in output
    marker = json.loads((pbs.runs / "walltime/run.json").read_text())["launch"]["env"]["EZPZ_LLM_RUN_ID"]
    assert pbs.cluster.processes(marker) == {}


def test_addresses(pbs: _Pbs) -> None:
    job = pbs.job("addresses")
    output = pbs.output("addresses")
    first, second = (part.split("/")[0] for part in job["exec_host"].split("+"))
    address = pbs.command("getent", "hosts", first).split()[0]
    plan = json.loads((pbs.folder / "interface.json").read_text())
    assert plan["env"]["MASTER_ADDR"] == address
    assert plan["sources"]["MASTER_ADDR"] == f"interface eth0 of {first} (--interface)"
    missing = (pbs.folder / "missing.txt").read_text()
    assert f"no interface 'hsn0' on {first}, which has lo (127.0.0.1), eth0 ({address})" in missing
    refused = (pbs.folder / "localhost.txt").read_text()
    assert f"ranks on {second} would look for rank 0 on their own node" in refused
    # A shell that ssh started on another node of the job has no PBS variables.
    assert json.loads((pbs.folder / "elsewhere.json").read_text())["scheduler"] == "none"
    assert output.count("rc=2") == 2
    # The rendezvous also works if the node's name resolves to 127.0.1.1.
    assert "rc=0" in output, output
    ranks = [(rank["host"], rank["MASTER_ADDR"]) for rank in pbs.met("debian")]
    assert ranks == [(first, address), (second, address)]
    record = json.loads((pbs.runs / "debian/run.json").read_text())
    assert record["exit"]["code"] == 0
