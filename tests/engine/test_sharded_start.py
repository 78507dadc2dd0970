"""Initial weights equal a single process's in every layout, and no rank ever holds a whole sharded model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from places import HELPERS
from rank_jobs import possible, results_of
from start_ranks import SHAPES

from ezpz_llm.training.engine.sharded_start import first_element
from ezpz_llm.training.layout.ops import is_built
from ezpz_llm.training.model.config import BLOCK
from ezpz_llm.training.model.parameters import count

SCRIPT = HELPERS / "start_ranks.py"
SHARDED = ("zero3", "fsdp2", "tiled")
OPS = ("cpu_adam", "async_io", "pin_memory")
OFFLOADED = ("zero3_offload_all", "zero3_nvme") if all(map(is_built, OPS)) else ()
RUNS = {1: ["gpt2:zero3", "gpt2:fsdp2"],
        2: [*(f"gpt2:{layout}" for layout in ("ddp", "zero1", "tp2", "pp2", "sp2", "zero3", *OFFLOADED)),
            *(f"llama:{layout}" for layout in ("tp2", *SHARDED)), "big:fsdp2", "big:zero3"],
        4: [*(f"gpt2:{layout}" for layout in ("tp2_zero3", "pp2_tp2", "fsdp2", "zero3+hpz2")),
            *(f"llama:{layout}" for layout in ("tp2_zero3", "zero3+hpz2", "zero3+hpz4", *SHARDED)),
            "big:fsdp2", "big:zero3"]}
# fp32 states that a rank has after initialization, in multiples of its share of the parameters: DeepSpeed allocates
# gradient buffers and a copy for the optimizer immediately, in the same dtype.
COPIES = {"fsdp2": 1, "zero3": 3}
SLACK = 1 << 20


@pytest.fixture(scope="module", params=[1, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (2, 4))])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    ranks = request.param
    return ranks, results_of(SCRIPT, tmp_path_factory.mktemp(f"start{ranks}"), RUNS[ranks], ranks)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [4, 7, 61])
def test_rows_begin_where_torch_deals_them(rows: int, size: int) -> None:
    """Also where they do not divide: then the last rank has fewer."""
    table = torch.arange(rows * 3).view(rows, 3)
    for rank, part in enumerate(table.chunk(size)):
        assert first_element((rows, 3), rank, size) == part[0, 0]


def test_values_are_those_of_one_process(started: tuple[int, dict[str, Any]]) -> None:
    ranks, results = started
    assert list(results) == possible(RUNS[ranks])
    for run, result in results.items():
        assert result["wrong"] == [], run
        elements = sum((Counter(rank) for rank in result["held"]), Counter())
        second = elements.pop("second copy", 0)
        assert elements == Counter(result["parameters"]), run
        if "+hpz" in run:
            groups = ranks // int(run.partition("+hpz")[2])
            total = sum(result["parameters"].values())
            assert groups * total <= second < 1.01 * groups * total


def test_rank_holds_its_share_and_one_block(started: tuple[int, dict[str, Any]]) -> None:
    ranks, results = started
    if ranks == 1:
        pytest.skip("one rank's share is everything")
    block = 4 * count(SHAPES["big"], BLOCK)
    for layout, copies in COPIES.items():
        result = results[f"big:{layout}"]
        share = 4 * sum(result["parameters"].values()) / ranks
        assert share > 2 * block  # otherwise the test could not detect a whole model
        for resting, peak, resident in zip(result["after"], result["peak"], result["resident"], strict=True):
            assert abs(resting - copies * share) < 0.01 * share + SLACK
            assert peak - resting <= block
            # Resident pages include memory of libraries and memory kept by the allocator. A whole model would add
            # the other ranks' shares.
            assert resident < copies * share + block + (ranks - 1) * share
