"""First screen of a training run, as golden files for three terminal widths."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from golden import check_golden

from ezpz_llm.core.base.label_rows import align_rows
from ezpz_llm.training.data.manifest import Manifest, Source, Split, Splits
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenizers import gpt2_entry
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.trainer.first_screen import expected_end, first_screen
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import plan_run

RUNS = {
    "a laptop": ("--precision fp32", 1, "cpu"),
    "eight GPUs": ("--model gpt2-124m --ds-config zero1 --precision bf16 --reduce-dtype bf16 --micro-batch-size 4 "
                   "--gradient-accumulation-steps 2 --steps 20000 --save-every 1000 --keep-every 5000", 8, "cuda"),
    "three dimensions": ("--model gpt2-124m --ds-config 3d --precision bf16_autocast "
                         "--gradient-accumulation-steps 4", 16, "cuda")}


def screen(words: str, world_size: int, device: str, width: int) -> str:
    """Return the first screen of a run with these options, its notes, and its expected end."""
    plan = plan_run(parse(words.split()), world_size, device=device)
    manifest = Manifest(
        request="", command="", source=Source("", 1, 1), tokenizer=gpt2_entry(), vocab_size=50257,
        end_of_text=50256, dtype="uint16", documents=1, tokens=9_040_455_680, unigram_entropy=7.0,
        splits=Splits(Split(9_036_044_288, []), Split(4_411_392, [])))
    dist = SimpleNamespace(world_size=world_size, device=SimpleNamespace(type=device))
    return (first_screen(plan, TokenData(Path("data"), manifest), cast("Dist", dist), width)
            + align_rows([("note", note) for note in plan.resolved.notes], width)
            + expected_end(plan.config.steps - 10, 2.3196, 1_764_000_000, width))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_first_screen_of_a_run_is_the_golden_one(width, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        text = "\n".join(f"{name}\n\n{screen(*run, width)}" for name, run in RUNS.items())
    finally:
        monkeypatch.undo()
        time.tzset()
    check_golden(f"first_screen_{width}.txt", text)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()
