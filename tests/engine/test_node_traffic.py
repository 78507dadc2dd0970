"""Bytes of each group's collectives in every layout, on four simulated nodes with two ranks each."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import pytest
from places import HELPERS
from rank_jobs import Results, possible
from simcluster.cluster import Cluster

PROGRAM = HELPERS / "node_traffic_ranks.py"
NODES, PER_NODE = 4, 2
LAYOUTS = ("ddp", "fsdp2", "fsdp2_within2", "zero1", "zero2", "zero3", "zero3_hpz2", "zero3_offload_optimizer",
           "zero3_offload_all", "tiled", "tp2_zero1", "tp2_zero3", "sp2", "pp2", "pp2_tp2", "3d")
"""All layouts in bf16 but zero3_nvme, which needs a compiled op and has the collectives of zero3_offload_all."""
WITHIN_NODES = ("fsdp2_within2", "zero3_hpz2")


@pytest.fixture(scope="module")
def results(links: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("traffic")
    runs = possible([f"{precision}:{layout}" for layout in LAYOUTS for precision in ("bf16", "bf16_autocast")])
    shared = {"WORLD_SIZE": str(NODES * PER_NODE), "LOCAL_WORLD_SIZE": str(PER_NODE), "MASTER_ADDR": "10.77.0.1",
              "MASTER_PORT": "29800", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(NODES * PER_NODE):
        node, local_rank = divmod(rank, PER_NODE)
        ranks.append(links.start(sys.executable, PROGRAM, folder, *runs, cwd=folder, node=links.nodes[node],
                                 RANK=str(rank), LOCAL_RANK=str(local_rank), GROUP_RANK=str(node), **shared))
    for done in [links.finish(rank, timeout=1500) for rank in ranks]:
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return Results(json.loads((folder / "results.json").read_text()))


def by_group(rows: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Return the bytes of a rank by kind and axis of the group."""
    total: Counter[tuple[str, str]] = Counter()
    for row in rows:
        total[row["kind"], row["axis"]] += row["bytes"]
    return total


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathers_sums_and_sends_in_bf16_are_half_of_autocasts(results: dict[str, Any], layout: str) -> None:
    """Gathered parameters, sums of tensor-parallel ranks, and sends between stages, on each rank."""
    for low_rows, wide_rows in zip(results[f"bf16:{layout}"], results[f"bf16_autocast:{layout}"], strict=True):
        low, wide = by_group(low_rows), by_group(wide_rows)
        gathers = {key for key in wide if key[0] == "all_gather" and key[1] != "tp"}
        assert bool(gathers) == (layout != "ddp")
        halves = gathers | {key for key in wide if key == ("all_reduce", "tp")}
        assert {key: 2 * low[key] for key in halves} == {key: wide[key] for key in halves}
        sent = {key for key in wide if key[0] in ("send", "recv")}
        assert bool(sent) == (layout in ("pp2", "pp2_tp2", "3d"))
        # With tensor parallelism, DeepSpeed also sends the shapes of the parts as integers.
        assert all(0.5 * wide[key] <= low[key] <= 0.51 * wide[key] for key in sent)
        # ddp reduces gradients once per step in fp32, and autocast also exchanges heads in bf16.
        equal = [("all_reduce", "dp")] if layout == "ddp" else [("all_to_all", "sp")]
        assert [low[key] for key in equal] == [wide[key] for key in equal]
        assert bool(low[equal[0]]) == (layout in ("ddp", "sp2"))


@pytest.mark.full
@pytest.mark.parametrize("layout", WITHIN_NODES)
def test_no_backward_gather_leaves_a_node(results: dict[str, Any], layout: str) -> None:
    for precision in ("bf16", "bf16_autocast"):
        for rows in results[f"{precision}:{layout}"]:
            gathers = [row for row in rows if row["kind"] == "all_gather" and row["phase"] == "backward"]
            assert gathers
            assert not [row for row in gathers if row["spans_nodes"]]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp2", "zero3"])
def test_without_sharding_inside_nodes_backward_gathers_leave_them(results: dict[str, Any], layout: str) -> None:
    for rows in results[f"bf16:{layout}"]:
        assert [row for row in rows if row["kind"] == "all_gather" and row["phase"] == "backward"
                and row["spans_nodes"]]
