"""Bytes on the wire: the committed table compared with the counters of a link.

To record the whole table again: python3 benchmarks/record.py traffic
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
from places import HELPERS, ROOT
from simcluster.cluster import Cluster, missing

from ezpz_llm.training.observe import traffic as module
from ezpz_llm.training.observe.traffic import call_traffic, measured, reason

PROGRAM = HELPERS / "traffic_ranks.py"
PAGE = ROOT / "benchmarks/results/traffic.md"
TABLE = Path(module.__file__).with_name("traffic_gloo.json")
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_list", "reduce_scatter", "all_to_all", "broadcast", "reduce",
               "gather", "scatter")
SIZES = (4096, 65536, 2**20, 2**23)
RANKS = (2, 3, 4, 8)
RATES = {"1gbit": 125e6, "200mbit": 25e6}
MIB = 2**20


def on_the_link(cluster: Cluster, folder: Path, cases: list, nodes: int, timeout: float) -> list[dict]:
    """Return the result of `traffic_ranks.py` with one rank on each of the first nodes."""
    (folder / "cases.json").write_text(json.dumps(cases))
    ranks = [cluster.start(sys.executable, PROGRAM, folder / "cases.json", folder / "found.json", cwd=folder,
                           node=cluster.nodes[rank], RANK=str(rank), WORLD_SIZE=str(nodes), OMP_NUM_THREADS="1",
                           MASTER_ADDR="10.77.0.1", MASTER_PORT="29511", GLOO_SOCKET_IFNAME="eth0")
             for rank in range(nodes)]
    for done in [cluster.finish(rank, timeout) for rank in ranks]:
        assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


def test_table_matches_the_counters_of_a_link(links, tmp_path):
    cases = [[kind, ranks, MIB, 2] for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
             for ranks in (2, 4)] + [["send", 2, MIB, 2], ["broadcast", 4, 3 * MIB // 2, 2]]
    for row in on_the_link(links, tmp_path, cases, nodes=4, timeout=250):
        expected = call_traffic("gloo", row["kind"], row["bytes"], row["ranks"])
        assert max(row["sent"]) == pytest.approx(expected.sent, rel=0.03), row
        received = call_traffic("gloo", "recv", row["bytes"], 2) if row["kind"] == "send" else expected
        assert max(row["received"]) == pytest.approx(received.received, rel=0.03), row


@pytest.mark.slow
def test_table_predicts_times_at_another_bandwidth(links, tmp_path):
    """All-to-all is excluded, since its ranks take turns in some calls only."""
    cases = [[kind, ranks, 6 * MIB, 5] for ranks in (2, 4)
             for kind in ("all_reduce", "all_gather", "reduce_scatter")]
    links.shape("100mbit")
    try:
        rows = on_the_link(links, tmp_path, [*cases, ["send", 2, 6 * MIB, 5]], nodes=4, timeout=250)
    finally:
        links.shape(None)
    bandwidth = 12.5e6 * measured("gloo")["goodput"]["200mbit"] / RATES["200mbit"]
    for row in rows:
        expected = call_traffic("gloo", row["kind"], row["bytes"], row["ranks"]).seconds(bandwidth)
        assert row["seconds"] == pytest.approx(expected, rel=0.15), row


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_table(tmp_path, recording):
    if (why := missing()) is not None:
        pytest.skip(why)
    cases = [[kind, ranks, size - size % (4 * ranks), 7] for ranks in RANKS for kind in COLLECTIVES
             for size in SIZES]
    cases += [["send", 2, size, 7] for size in SIZES] + [["nothing", 2, 4096, 7]]
    found = {}
    with Cluster(tmp_path / "sim", nodes=max(RANKS), slurm=False, sshd=False) as cluster:
        for rate in RATES:
            cluster.shape(rate)
            found[rate] = on_the_link(cluster, tmp_path, cases, max(RANKS), timeout=1500)
    nothing = [found[rate].pop() for rate in RATES]
    assert all(abs(number) < 500 for row in nothing for number in row["sent"] + row["received"])
    goodput = {rate: row["bytes"] / row["seconds"] for rate in RATES for row in [found[rate][-1]]}
    for rate, reached in goodput.items():
        assert 0.85 < reached / RATES[rate] < 0.98, "fraction of data on a shaped link"
    rows = []
    for fast, slow in zip(*(found[rate] for rate in RATES), strict=True):
        sent = max(slow["sent"])
        assert max(fast["sent"]) == pytest.approx(sent, rel=0.05, abs=6000), "bytes do not depend on speed"
        rows.append({"kind": slow["kind"], "ranks": slow["ranks"], "bytes": slow["bytes"], "sent": sent,
                     "received": max(slow["received"]), "all_ranks_sent": sum(slow["sent"]),
                     "seconds": {rate: round(row["seconds"], 6) for rate, row in zip(RATES, (fast, slow),
                                                                                     strict=True)}})
    lists = {(row["ranks"], row["bytes"]): row for row in rows if row["kind"] == "all_gather_list"}
    for row in rows:
        if row["kind"] == "all_gather":
            same = lists[row["ranks"], row["bytes"]]["sent"]
            assert row["sent"] == pytest.approx(same, rel=0.05, abs=500), "all functions that gather are one kind"
    rows = [row for row in rows if row["kind"] != "all_gather_list"]
    if recording:
        write(rows, goodput)


def write(rows: list[dict], goodput: dict[str, float]) -> None:
    about = {"backend": "gloo", "date": datetime.now(timezone.utc).date().isoformat(),
             "command": "python3 benchmarks/record.py traffic",
             "versions": {"torch": torch.__version__},
             "link": "one a node, to a switch, held by tbf to the rate in both directions; one rank a node; bytes "
                     "are the node's own link's counters, seconds the median of seven calls from when the last "
                     "rank called until all had ended, goodput bytes a second of the largest send",
             "goodput": {rate: round(reached) for rate, reached in goodput.items()}}
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    TABLE.write_text(f"{json.dumps(about, indent=1)[:-2]},\n \"rows\": [\n  {lines}\n ]\n}}\n")
    module._rows.cache_clear()
    text = PAGE.read_text()
    begin = text.index("| collective")
    PAGE.write_text(text[:begin] + "\n".join(page_table()) + text[text.index("\n\n", begin):])


def page_table() -> list[str]:
    """Return the rows of the page's table, in fractions of a large buffer on 2, 4, and 8 ranks."""
    def shares(values) -> str:
        return " / ".join(f"{value:.2f}" for value in values)

    rows = ["| collective over gloo | measured | textbook | the time is that of | why it differs |",
            "|---|---|---|---|---|"]
    for kind in COLLECTIVES:
        if kind == "all_gather_list":
            continue
        calls = [call_traffic("gloo", kind, SIZES[-1], ranks) for ranks in (2, 4, 8)]
        why = "" if all(call.is_textbook for call in calls) else reason("gloo", kind)
        rows.append(f"| {kind} | {shares(call.bytes / SIZES[-1] for call in calls)} | "
                    f"{shares(call.textbook / SIZES[-1] for call in calls)} | "
                    f"{shares(call.line_bytes / SIZES[-1] for call in calls)} | {why} |")
    return rows


def test_page_has_the_table():
    assert "\n".join(page_table()) in PAGE.read_text()
