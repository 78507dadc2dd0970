"""Process groups: the number of calls does not depend on the world size, and each group has the right ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launch_runs import clean_env
from places import HELPERS
from slowness import scaled

from ezpz_llm.training.layout import ds_config

ENV = clean_env(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
EVERY_LAYOUT = [name for name in ds_config.names() if "nvme" not in name and "offload" not in name]
"""Offload needs compiled ops; its groups are those of zero3."""
LAYOUTS = ("zero1", "fsdp2_within2", "zero3_hpz2", "tp2_zero3", "zero3,sp4", "pp2", "pp2,pp4", "3d")


def starts(*arguments: str) -> dict[str, list[dict[str, Any]]]:
    """Return what tests/helpers/fake_world.py prints, by layout."""
    ran = subprocess.run([sys.executable, str(HELPERS / "fake_world.py"), *arguments], env=ENV, capture_output=True,
                         text=True, timeout=scaled(400), check=True)
    printed = defaultdict(list)
    for line in ran.stdout.splitlines():
        if line.startswith("{"):
            of_start = json.loads(line)
            printed[of_start["layout"]].append(of_start)
    return printed


def test_startup_makes_equally_many_calls_with_64_and_4096_ranks() -> None:
    printed = starts("64,512,4096", *LAYOUTS)
    calls = {layout: [(len(rank["groups"]), rank["collectives"]) for rank in ranks]
             for layout, ranks in printed.items()}
    assert set(calls) == set(LAYOUTS)
    for layout, by_size in calls.items():
        assert len(by_size) == 3, layout
        assert by_size[0] == by_size[1] == by_size[2], layout
        assert by_size[0][0] <= 6, layout


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(EVERY_LAYOUT, marks=pytest.mark.full)])
def test_ranks_create_groups_that_partition_the_world(layouts: Sequence[str]) -> None:
    """Compares the calls with the same index: with NCCL, they are one ncclCommSplit, which hangs without a rank."""
    printed = starts("--every-rank", "16", *layouts)
    assert set(printed) == set(layouts)
    for layout, ranks in printed.items():
        assert [rank["rank"] for rank in ranks] == list(range(16))
        assert len({len(rank["groups"]) for rank in ranks}) == 1, layout
        for index, groups in enumerate(zip(*(rank["groups"] for rank in ranks), strict=True)):
            for rank, group in enumerate(groups):
                assert rank in group, (layout, index, rank)
                assert all(groups[peer] == group for peer in group), (layout, index, rank)


def test_groups_of_changing_meshes_with_groups_of_only_some_ranks(tmp_path: Path) -> None:
    """torch derives a group's name from the number of groups of a rank, and never reuses a name."""
    result = tmp_path / "result.json"
    mpiexec = shutil.which("mpiexec") or "mpiexec"
    subprocess.run([mpiexec, "-n", "4", sys.executable, str(HELPERS / "group_ranks.py"), str(result)], env=ENV,
                   cwd=tmp_path, timeout=scaled(120), check=True)
    pairs, halves = [11, 11, 1100, 1100], [101, 1010, 101, 1010]
    expected = [{"tp": pairs, "dp": halves}, {"pp": halves, "dp": pairs, "sends": halves}, {},
                {"tp": pairs, "dp": halves}, {"ends": [1001, 110, 110, 1001]},
                {"pp": halves, "dp": pairs, "sends": halves}]
    for rank, by_mesh in enumerate(json.loads(result.read_text())):
        assert by_mesh == [{name: sums[rank] for name, sums in mesh.items()} for mesh in expected], rank
