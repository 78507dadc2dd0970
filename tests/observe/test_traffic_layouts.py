"""Layouts on links of known bandwidth: issued collectives, their time, and detection of a slow link.

To record the committed result again: python3 benchmarks/record.py layout-links
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
from layout_links import Moved, moved, page_table
from places import HELPERS, ROOT
from simcluster.cluster import Cluster

from ezpz_llm.training.observe.traffic import measured
from ezpz_llm.verify.explain.diagnosis import diagnose

PROGRAM = HELPERS / "traffic_layout_ranks.py"
PAGE = ROOT / "benchmarks/results/traffic.md"
RESULT = ROOT / "benchmarks/results/layout_links.json"
RATES = ("1gbit", "200mbit")
# Little computation per byte sent, and buffers far larger than the bursts that a shaped link allows.
FLAT = "n-layer=2+n-embd=384+block-size=32+micro-batch-size=1+gradient-accumulation-steps=1+precision=fp32"
WIDE = "n-layer=2+n-embd=64+block-size=64+gradient-accumulation-steps=1+precision=fp32+micro-batch-size="
JOBS = {name: f"{name}+{FLAT}" for name in ("ddp", "zero1", "zero2", "zero3")} | {
    "tp2": f"tp2+{WIDE}128", "pp2": f"pp2+{WIDE}1024"}

WEIGHTS = 4 * 3_684_864
ACTIVATIONS = 4 * 128 * 64 * 64
TABLE = 4 * 320 * 64
"""Bytes of the wide model's embedding, which the first and last pipeline stages hold. WEIGHTS has all parameters of
the flat model, and ACTIVATIONS the activations of the wide model for 128 sequences."""
FLAT_ONES = {
    # Two buckets; DDP's first one is small.
    "ddp": {"all_reduce (dp)": (2, WEIGHTS)},
    # Two parameter groups (with and without decay) are gathered. The norm and the overflow flag are scalars.
    "zero1": {"all_gather (dp)": (2, WEIGHTS), "all_reduce (dp)": (1, WEIGHTS), "scalars": (2, 8)},
    "zero2": {"all_gather (dp)": (2, WEIGHTS), "all_reduce (dp)": (1, WEIGHTS), "scalars": (2, 8)},
    # Parameters are gathered at most one block ahead, so not all successive gathers are merged.
    "zero3": {"all_gather (dp)": (21, WEIGHTS), "reduce_scatter (dp)": (1, WEIGHTS), "scalars": (2, 16)},
}
# Four all-reduces of activations per layer, one after the embedding, and one before the head. Two numbers per token
# for the loss with a sharded vocabulary.
TP2 = {"all_gather (tp)": (1, 131_072), "all_reduce (tp)": (10, 10 * ACTIVATIONS), "scalars": (1, 4)}
PP2 = {"all_reduce (pp)": (1, TABLE)}


PIPED = {f"{way} (pp)": (1, 8 * ACTIVATIONS) for way in ("recv", "send")}
"""Sends and receives between neighboring stages."""


ISSUED = {(name, nodes): {tuple(range(nodes)): kinds} for nodes in (2, 4) for name, kinds in FLAT_ONES.items()} | {
    ("tp2", 2): {(0, 1): TP2},
    # Half of the weights.
    ("tp2", 4): {(0, 1, 2, 3): {**TP2, "all_reduce (dp)": (1, 259_328)}},
    ("pp2", 2): {(0, 1): {**PP2, **PIPED, "scalars": (2, 8)}},
    # A stage's parameters, sharded by ZeRO-1.
    ("pp2", 4): {ranks: {**PP2, **PIPED, "scalars": (4, 16), "all_gather (dp)": (2, size),
                         "all_reduce (dp)": (buckets, size)}
                 for ranks, buckets, size in (((0, 1), 4, 298_240), ((2, 3), 5, 282_368))},
}


def on_nodes(cluster: Cluster, folder: Path, jobs: list[str], nodes: int, port: int, timeout: float) -> None:
    """Run the jobs one after the other, with one rank on each of the first nodes."""
    ranks = [cluster.start(sys.executable, PROGRAM, folder, *jobs, cwd=folder.parent, node=cluster.nodes[rank],
                           RANK=str(rank), WORLD_SIZE=str(nodes), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
                           GROUP_RANK=str(rank), OMP_NUM_THREADS="1", MASTER_ADDR="10.77.0.1",
                           MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="eth0") for rank in range(nodes)]
    for done in [cluster.finish(rank, timeout) for rank in ranks]:
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.full
def test_slow_link_is_the_first_cause(links, tmp_path):
    links.shape("1gbit")
    links.shape("100mbit", "n2")
    try:
        on_nodes(links, tmp_path / "slow", ["ddp"], nodes=3, port=29400, timeout=150)
    finally:
        links.shape(None)
    first = diagnose(tmp_path / "slow" / "ddp").causes[0]
    assert first.kind == "slow_link", first
    assert first.what.startswith("n2 "), first


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_communication_of_layouts_takes_the_time_of_the_traffic_table(links, tmp_path, recording):
    rows: dict[tuple[str, int], dict[str, Moved]] = {}
    for nodes in (2, 4):
        for number, rate in enumerate(RATES):
            links.shape(rate)
            folder = tmp_path / f"{nodes}-{rate}"
            on_nodes(links, folder, [*JOBS.values()], nodes, 29500 + 100 * nodes + 20 * number, timeout=500)
            bandwidth = measured("gloo")["goodput"][rate]
            for name, job in JOBS.items():
                rows.setdefault((name, nodes), {})[rate] = moved(folder / job, bandwidth)
    if recording:
        write(rows)
    for (name, nodes), by_rate in rows.items():
        for rate, result in by_rate.items():
            assert result.issued == ISSUED[name, nodes], (name, nodes, rate)
            assert result.measured_s == pytest.approx(result.expected_s, rel=0.15), (name, nodes, rate, result)


def write(rows: dict[tuple[str, int], dict[str, Moved]]) -> None:
    """Write the result file, and the page's table from it."""
    RESULT.write_text(json.dumps({
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": "python3 benchmarks/record.py layout-links",
        "versions": {"torch": torch.__version__}, "runs": JOBS,
        "what": "two and four simulated nodes with one rank each; measured_s: exposed communication of the median "
                "step, mean over ranks, without waiting for ranks that compute; expected_s: what the traffic table "
                "says of the calls; bytes are those of a rank's busier direction",
        "rows": [by_rate[RATES[0]].as_row(name, nodes, {rate: (one.expected_s, one.measured_s)
                                                        for rate, one in by_rate.items()})
                 for (name, nodes), by_rate in rows.items()]}, indent=1) + "\n")
    text = PAGE.read_text()
    begin = text.index("| layout ")
    PAGE.write_text(text[:begin] + "\n".join(page_table(RESULT)) + text[text.index("\n\n", begin):])


def test_page_has_the_measured_values():
    assert "\n".join(page_table(RESULT)) in PAGE.read_text()
    for row in json.loads(RESULT.read_text())["rows"]:
        issued = {tuple(kinds.pop("ranks")): {label: tuple(pair) for label, pair in kinds.items()}
                  for kinds in row["issued"]}
        assert issued == ISSUED[row["layout"], row["nodes"]]
        for rate in RATES:
            assert row["measured_s"][rate] == pytest.approx(row["expected_s"][rate], rel=0.15), row
            # The bytes alone predict the time if the overhead of calls is small: see the page.
            by_bytes = row["wire_bytes"] / measured("gloo")["goodput"][rate]
            if row["expected_s"][rate] < 1.1 * by_bytes:
                assert row["measured_s"][rate] == pytest.approx(by_bytes, rel=0.15), row
            else:
                assert (row["layout"], row["nodes"]) in {("zero1", 2), ("zero2", 2), ("zero3", 2), ("zero3", 4)}
