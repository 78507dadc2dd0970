"""Steps do not synchronize with the device in our code; only DeepSpeed's own code does."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import HELPERS
from rank_jobs import results_of


def check(tmp_path: Path, without_reads: tuple[str, ...], deepspeed: tuple[str, ...]) -> None:
    results = results_of(HELPERS / "host_read_ranks.py", tmp_path, [*without_reads, *deepspeed, "ddp+unfused"], 2)
    for run in without_reads:
        assert results[run] == {"ours": [], "others": []}, run
    for run in deepspeed:
        assert results[run]["ours"] == [], run
        assert results[run]["others"], run
    # Check that the test can detect our reads: for an unfused optimizer, the CPU reads the decision to skip.
    assert any(place.startswith("step_skip.py") for place in results["ddp+unfused"]["ours"])


@pytest.mark.full
def test_step_reads_nothing_from_its_device(tmp_path: Path) -> None:
    check(tmp_path, ("ddp", "fsdp2"), ("zero1",))


@pytest.mark.full
def test_steps_of_other_layouts_read_nothing_in_our_code(tmp_path: Path) -> None:
    # DeepSpeed's stage 0 has no bf16. With tied embeddings, a pipeline's optimizer is unfused on CPUs, so that the
    # CPU reads the decision to skip.
    check(tmp_path, ("zero0+autocast", "tp2+autocast", "fsdp2"),
          ("zero2", "zero3", "pp2+untied", "tp2_zero1", "sp2"))
