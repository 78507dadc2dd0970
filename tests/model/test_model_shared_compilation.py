"""Compilation of each graph on one rank; other ranks and later runs load the result."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import HELPERS
from rank_jobs import results_of


def test_one_rank_compiles_and_the_others_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    runs = ["first", "restart", "damaged", "mended", "other shape", "other torch"]
    results = results_of(HELPERS / "shared_compile_ranks.py", tmp_path, runs, 4)
    counts = {run: (result["compiled"], result["loaded"]) for run, result in results.items()}
    assert counts == {"first": (1, 3), "restart": (0, 4), "damaged": (1, 3), "mended": (0, 4),
                      "other shape": (1, 3), "other torch": (1, 3)}
    assert len({result["value"] for run, result in results.items() if run != "other shape"}) == 1


@pytest.mark.full
@pytest.mark.parametrize(("layout", "compiling"), [("ddp", 1), ("zero1", 1), ("fsdp2", 1), ("pp2", 1), ("tp2", 2)])
def test_layouts_share_the_code_of_their_blocks(layout: str, compiling: int, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the blocks once, or once per tensor-parallel group, whose name is part of its code; the loss once."""
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    runs = [f"first+{layout}", f"restart+{layout}"]
    first, restart = results_of(HELPERS / "shared_compile_ranks.py", tmp_path, runs, 4).values()
    assert first["compiled"] == compiling + 1
    assert (restart["compiled"], restart["loaded"]) == (0, first["compiled"] + first["loaded"])
    assert restart["value"] == first["value"]
