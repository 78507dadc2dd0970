"""No step waits for a number of its device's where we compute it; under DeepSpeed only DeepSpeed does."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import HELPERS
from rank_jobs import results_of


def check(tmp_path: Path, nobody: tuple[str, ...], deepspeed: tuple[str, ...]) -> None:
    results = results_of(HELPERS / "host_read_ranks.py", tmp_path, [*nobody, *deepspeed, "ddp+unfused"], 2)
    for run in nobody:
        assert results[run] == {"ours": [], "others": []}, run
    for run in deepspeed:
        assert results[run]["ours"] == [], run
        assert results[run]["others"], run
    # That a read of ours is seen at all: an optimizer that cannot be told on the device is asked on the CPU.
    assert any(place.startswith("gradients.py") for place in results["ddp+unfused"]["ours"])


@pytest.mark.full
def test_a_step_reads_nothing_from_its_device(tmp_path: Path) -> None:
    check(tmp_path, ("ddp", "fsdp2"), ("zero1",))


@pytest.mark.full
def test_a_step_of_other_layouts_reads_nothing_of_ours(tmp_path: Path) -> None:
    # DeepSpeed's stage 0 has no bf16. Tied, a pipeline's optimizer is unfused on CPUs, and so is asked there.
    check(tmp_path, ("zero0+autocast", "tp2+autocast", "fsdp2"),
          ("zero2", "zero3", "pp2+untied", "tp2_zero1", "sp2"))
