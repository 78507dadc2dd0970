"""Layouts on links of known bandwidth: what they issue, what that takes, and a slow link that is named.

What is committed, written anew: python3 benchmarks/record.py layout-links
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

from ezpz_llm.explain.diagnosis import diagnose
from ezpz_llm.observe.traffic import measured

PROGRAM = HELPERS / "traffic_layout_ranks.py"
PAGE = ROOT / "benchmarks/results/traffic.md"
RESULT = ROOT / "benchmarks/results/layout_links.json"
RATES = ("1gbit", "200mbit")
# Little to compute for what is sent, and buffers far above the bursts that a shaped link lets pass.
FLAT = "n-layer=2+n-embd=384+block-size=32+micro-batch=1+accumulation=1+precision=fp32"
WIDE = "n-layer=2+n-embd=64+block-size=64+accumulation=1+precision=fp32+micro-batch="
JOBS = {name: f"{name}+{FLAT}" for name in ("ddp", "zero1", "zero2", "zero3")} | {
    "tp2": f"tp2+{WIDE}128", "pp2": f"pp2+{WIDE}1024"}

WEIGHTS = 4 * 3_684_864
ACTIVATIONS = 4 * 128 * 64 * 64
TABLE = 4 * 320 * 64
"""Bytes of all parameters of the flat model; of the wide one's activations for 128 sequences, and of its embedding,
which both ends of the pipeline have."""
FLAT_ONES = {
    # Two buckets; DDP's first one is small.
    "ddp": {"all_reduce (dp)": (2, WEIGHTS)},
    # Two groups of parameters, with decay and without, are gathered; the norm and the overflow flag are numbers.
    "zero1": {"all_gather (dp)": (2, WEIGHTS), "all_reduce (dp)": (1, WEIGHTS), "scalars": (2, 8)},
    "zero2": {"all_gather (dp)": (2, WEIGHTS), "all_reduce (dp)": (1, WEIGHTS), "scalars": (2, 8)},
    # Parameters are gathered one block ahead at most, so that not all that follow each other go together.
    "zero3": {"all_gather (dp)": (21, WEIGHTS), "reduce_scatter (dp)": (1, WEIGHTS), "scalars": (2, 16)},
}
# Four all-reduces of activations a layer, one after the embedding, one before the head; two numbers a token for the
# loss under a divided vocabulary.
TP2 = {"all_gather (tp)": (1, 131_072), "all_reduce (tp)": (10, 10 * ACTIVATIONS), "scalars": (1, 4)}
PP2 = {"all_reduce (pp)": (1, TABLE)}


PIPED = {f"{way} (pp)": (1, 8 * ACTIVATIONS) for way in ("recv", "send")}
"""What goes to the next stage and back."""


ISSUED = {(name, nodes): {tuple(range(nodes)): kinds} for nodes in (2, 4) for name, kinds in FLAT_ONES.items()} | {
    ("tp2", 2): {(0, 1): TP2},
    # Half of the weights.
    ("tp2", 4): {(0, 1, 2, 3): {**TP2, "all_reduce (dp)": (1, 259_328)}},
    ("pp2", 2): {(0, 1): {**PP2, **PIPED, "scalars": (2, 8)}},
    # A stage's parameters, divided under ZeRO-1.
    ("pp2", 4): {ranks: {**PP2, **PIPED, "scalars": (4, 16), "all_gather (dp)": (2, size),
                         "all_reduce (dp)": (buckets, size)}
                 for ranks, buckets, size in (((0, 1), 4, 298_240), ((2, 3), 5, 282_368))},
}


def on_nodes(cluster: Cluster, folder: Path, jobs: list[str], nodes: int, port: int, timeout: float) -> None:
    """These runs one after the other, one rank on each of the first nodes."""
    ranks = [cluster.start(sys.executable, PROGRAM, folder, *jobs, cwd=folder.parent, node=cluster.nodes[rank],
                           RANK=str(rank), WORLD_SIZE=str(nodes), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
                           GROUP_RANK=str(rank), OMP_NUM_THREADS="1", MASTER_ADDR="10.77.0.1",
                           MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="eth0") for rank in range(nodes)]
    for done in [cluster.finish(rank, timeout) for rank in ranks]:
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.full
def test_a_slow_link_is_named_first(links, tmp_path):
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
def test_what_layouts_issue_takes_what_the_traffic_table_says(links, tmp_path, recording):
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
        for rate, one in by_rate.items():
            assert one.issued == ISSUED[name, nodes], (name, nodes, rate)
            assert one.measured_s == pytest.approx(one.expected_s, rel=0.15), (name, nodes, rate, one)


def write(rows: dict[tuple[str, int], dict[str, Moved]]) -> None:
    """The result, and the page's table from it."""
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


def test_the_page_shows_what_was_measured():
    assert "\n".join(page_table(RESULT)) in PAGE.read_text()
    for row in json.loads(RESULT.read_text())["rows"]:
        issued = {tuple(kinds.pop("ranks")): {label: tuple(pair) for label, pair in kinds.items()}
                  for kinds in row["issued"]}
        assert issued == ISSUED[row["layout"], row["nodes"]]
        for rate in RATES:
            assert row["measured_s"][rate] == pytest.approx(row["expected_s"][rate], rel=0.15), row
            # Bytes alone tell it, too, where calls take no longer than their bytes: see the page.
            by_bytes = row["wire_bytes"] / measured("gloo")["goodput"][rate]
            if row["expected_s"][rate] < 1.1 * by_bytes:
                assert row["measured_s"][rate] == pytest.approx(by_bytes, rel=0.15), row
            else:
                assert (row["layout"], row["nodes"]) in {("zero1", 2), ("zero2", 2), ("zero3", 2), ("zero3", 4)}
