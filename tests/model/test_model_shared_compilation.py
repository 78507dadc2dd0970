"""Compilation of each graph on one rank; other ranks and later runs load the result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from places import HELPERS
from rank_jobs import results_of

EXPECTED = {
    "first": (1, 3), "restart": (0, 4), "damaged": (1, 3), "restart after repair": (0, 4), "invalid": (1, 3),
    "other shape": (1, 3), "other torch": (1, 3), "no cache": (4, 0), "two folders": (1, 3),
    "two folders again": (0, 4)}
"""Graphs compiled and loaded by four ranks, by run, in order. In "two folders", two ranks are on
a node with a folder of its own."""

needs_artifacts = pytest.mark.skipif(not hasattr(torch.compiler, "save_cache_artifacts"),
                                     reason="this torch cannot save inductor's cache entries")


@needs_artifacts
def test_one_rank_compiles_and_the_others_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    results = results_of(HELPERS / "shared_compile_ranks.py", tmp_path, list(EXPECTED), 4)
    counts = {run: (result["compiled"], result["loaded"]) for run, result in results.items()}
    assert counts == EXPECTED
    assert len({result["value"] for run, result in results.items() if run != "other shape"}) == 1


@needs_artifacts
@pytest.mark.full
@pytest.mark.parametrize(("layout", "compiling"), [("ddp", 1), ("zero1", 1), ("fsdp2", 1), ("pp2", 1), ("tp2", 2)])
def test_layouts_share_the_code_of_their_blocks(layout: str, compiling: int, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the loss once, and the blocks once, or once per tensor-parallel group: they contain its name."""
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    runs = [f"first+{layout}", f"restart+{layout}"]
    first, restart = results_of(HELPERS / "shared_compile_ranks.py", tmp_path, runs, 4).values()
    assert first["compiled"] == compiling + 1
    assert (restart["compiled"], restart["loaded"]) == (0, first["compiled"] + first["loaded"])
    assert restart["value"] == first["value"]
