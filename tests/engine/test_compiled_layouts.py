"""Compiled blocks: one graph in layouts that compile by default, several graphs in the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import HELPERS
from rank_jobs import results_of

from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.trainer.compile_choice import graph_break_reason

SOME = ("fsdp2+recompute", "zero1", "tp2")
MORE = ("ddp", "ddp+dropout", "ddp+recompute", "fsdp2", "zero0", "zero2", "zero2+recompute", "tp2+recompute",
        "tp2+dropout", "tp2_zero1", "pp2", "pp2+recompute", "sp2", "zero3")


def check(tmp_path: Path, runs: tuple[str, ...]) -> None:
    results = results_of(HELPERS / "compile_ranks.py", tmp_path, list(runs), 2)
    for run in runs:
        layout, *options = run.split("+")
        is_whole = graph_break_reason(resolve(Request(layout, world_size=2)).layout,
                                      0.1 * ("dropout" in options)) is None
        assert (results[run] == {"graphs": 1, "breaks": 0}) == is_whole, (run, results[run])
        assert is_whole or results[run]["breaks"] > 1


@pytest.mark.full
def test_all_blocks_share_one_graph(tmp_path: Path) -> None:
    check(tmp_path, SOME)


@pytest.mark.full
def test_layouts_that_compile_to_one_graph(tmp_path: Path) -> None:
    check(tmp_path, MORE)
