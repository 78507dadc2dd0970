"""Studies on simulated nodes under real Slurm: parts of a reservation, one job per point, links of known bandwidth.

To update the committed results: python3 benchmarks/record.py scaling-links
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
from launch_runs import record
from places import ROOT
from scale_runs import TRAIN
from simcluster.cluster import Cluster, missing
from slowness import scaled

from ezpz_llm.training.observe.traffic import measured, traffic_per_step
from ezpz_llm.verify.scaling.study import Repeat, read_repeats

# One rank per node: the simulated nodes share two cores.
STUDY = ("--", "launch", "--ppn", "1", "python3", *TRAIN[1:], "--steps", "30", "--trace-steps", "3")

# With this batch, communication takes about as long as the rest of a step.
RESULT = ROOT / "benchmarks/results/scaling_links.json"
SHAPED = ("--", "launch", "--ppn", "1", "python3", "-m", "ezpz_llm.train", "--model", "tiny-gpt2", "--n-layer", "2",
          "--n-embd", "256", "--block-size", "128", "--micro-batch-size", "2", "--precision", "fp32")
WEIGHTS = 4 * 1_670_144
CORES = 0.5
STEPS = {"1gbit": "30", "200mbit": "20"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.getbasetemp() / "cluster-cache")


def _hosts(study: Path, repeat: Repeat) -> list[str]:
    return record(study / repeat.run_dir)["launch"]["hosts"]


@pytest.mark.full
def test_point_runs_on_part_of_reservation(cluster, tmp_path: Path, cache: str) -> None:
    study = ("ezpz-llm", "scale", "--nodes", "1,2", "--repeats", "2", "--study", "s", "--ds-config", "ddp")
    run = cluster.run("salloc", "-N2", "-t5", *study, "--point", "weak-ddp-n1", *STUDY, cwd=tmp_path, timeout=200,
                      OMP_NUM_THREADS="1", EZPZ_LLM_CACHE=cache)
    # The other point's runs are left to run, but --point excludes them.
    assert run.returncode == 0, run.stdout + run.stderr
    repeats = read_repeats(tmp_path / "s")
    assert [(each.nodes, each.ranks, _hosts(tmp_path / "s", each), each.slowest_host) for each in repeats] == [
        (1, 1, ["n1"], "n1"), (1, 1, ["n2"], "n2")]
    assert "run 1  on n2 " in run.stdout
    run = cluster.run("salloc", "-N1", "-t5", "ezpz-llm", "scale", "--study", "s", cwd=tmp_path, timeout=60)
    assert (run.returncode, "point weak-ddp-n2 requires 2 nodes, but there are 1" in run.stderr) == (2, True)


@pytest.mark.slow
def test_submit_one_job_per_point_then_report(cluster, tmp_path: Path, cache: str) -> None:
    study = ("ezpz-llm", "scale", "--nodes", "1,2", "--repeats", "1", "--study", "s", "--ds-config", "ddp")
    run = cluster.run(*study, "--submit", "--time 0:05:00", *STUDY, cwd=tmp_path, timeout=60, OMP_NUM_THREADS="1",
                      EZPZ_LLM_CACHE=cache)
    assert run.returncode == 0, run.stdout + run.stderr
    deadline = time.monotonic() + scaled(200)
    while cluster.run("squeue", "--noheader").stdout.strip():
        assert time.monotonic() < deadline
        time.sleep(1)
    logs = "".join(path.read_text() for path in tmp_path.glob("s/points/*/job/logs/*"))
    repeats = {repeat.point: repeat for repeat in read_repeats(tmp_path / "s")}
    assert {name: (repeat.ranks, repeat.error) for name, repeat in repeats.items()} == {
        "weak-ddp-n1": (1, None), "weak-ddp-n2": (2, None)}, logs
    assert len(_hosts(tmp_path / "s", repeats["weak-ddp-n2"])) == 2
    assert repeats["weak-ddp-n2"].split["exposed_communication"] > 0
    run = cluster.run("ezpz-llm", "scale", "report", "s", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "weak-ddp-n2" in run.stdout
    assert (tmp_path / "s/report.html").exists()


def moving_s(nodes: int, rate: str) -> float:
    """Return the seconds per step in which ZeRO-1 moves its gradients and weights."""
    issued = {"all_reduce": {"count": 1, "bytes": WEIGHTS}, "all_gather": {"count": 2, "bytes": WEIGHTS}}
    bandwidth = measured("gloo")["goodput"][rate]
    return sum(traffic.seconds(bandwidth) for traffic in traffic_per_step("gloo", issued, nodes).values())


@pytest.mark.full
def test_slow_network_lowers_throughput(cluster: Cluster, tmp_path: Path, cache: str) -> None:
    cluster.shape("200mbit")
    try:
        run = cluster.run("salloc", "-N2", "-t5", "ezpz-llm", "scale", "--nodes", "1,2", "--repeats", "1",
                          "--study", "s", "--ds-config", "zero1", *SHAPED, "--steps", "16", "--trace-steps", "3",
                          cwd=tmp_path, timeout=200, OMP_NUM_THREADS="1", EZPZ_LLM_CACHE=cache)
    finally:
        cluster.shape(None)
    assert run.returncode == 0, run.stdout + run.stderr
    single, double = (next(repeat for repeat in read_repeats(tmp_path / "s") if repeat.nodes == nodes)
                      for nodes in (1, 2))
    assert double.split["exposed_communication"] > 0.85 * moving_s(2, "200mbit")
    assert min(double.step_times_s) > 0.85 * moving_s(2, "200mbit")
    assert 2 * single.tokens_per_second > double.tokens_per_second
    assert "Weak scaling, zero1: 2 sequences of 128 tokens per step and device at every size" in run.stdout


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes with half a core each, so that a machine with two cores can run them concurrently."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("nodes") / "sim") as started, ExitStack() as undo:
        for node in started.nodes:
            undo.callback(started.limit_cores(node, CORES))
        yield started


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rate", STEPS)
def test_added_step_time_matches_link_bandwidth(nodes: Cluster, tmp_path: Path, recording: bool, rate: str) -> None:
    nodes.shape(rate)
    command = ("ezpz-llm", "scale", "--nodes", "1,2,4", "--mode", "both", "--ds-config", "zero1", "--study", rate)
    process = nodes.run("salloc", "-N4", "-t30", *command, *SHAPED, "--steps", STEPS[rate], "--log-every", "6",
                        cwd=tmp_path, timeout=1700, COLUMNS="100")
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads((tmp_path / rate / "report.json").read_text())
    points = {point["point"]: point for point in report["points"]}
    assert {name: (point["nodes"], point["runs"], point["runs_failed"]) for name, point in points.items()} == {
        f"{mode}-zero1-n{nodes}": (nodes, 3, 0) for mode in ("weak", "strong") for nodes in (1, 2, 4)}
    if recording:
        write(rate, report, process.stdout)
    for point in points.values():
        expected = moving_s(point["nodes"], rate) if point["nodes"] > 1 else 0
        assert point["exposed_communication_s"] > 0.85 * expected
        if point["mode"] == "weak":
            added = point["step_time_s"] - points["weak-zero1-n1"]["step_time_s"]
            assert added == pytest.approx(expected, rel=0.2), point["point"]


def write(rate: str, report: dict, output: str) -> None:
    """Add a study to the recorded ones of other rates."""
    record = json.loads(RESULT.read_text()) if RESULT.exists() else {"studies": {}}
    record |= {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": "python3 benchmarks/record.py scaling-links",
        "machine": f"{os.cpu_count()} cores; four simulated nodes with {CORES} of a core each, one rank a node, "
                   "real Slurm; a node's link is held by tbf to the rate in both directions",
        "versions": {"torch": torch.__version__}}
    numbers = {**report, "points": [{name: value for name, value in point.items() if name != "origin"}
                                    for point in report["points"]]}
    lines = [line for line in output.splitlines() if not line.startswith(("study ", "page: ", "numbers: "))]
    record["studies"][rate] = {"report": numbers, "said": lines}
    RESULT.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
