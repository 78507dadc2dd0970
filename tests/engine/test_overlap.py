"""Gradients of ZeRO 1 and 2 that are reduced beside the backward pass are those that are reduced after it.

DeepSpeed has no streams on a CPU: what is run here is its order of hooks and buckets, with two buckets by turns.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from places import HELPERS
from rank_jobs import results_of

from ezpz_llm.engine.deepspeed_engine import keep_until_reduced

BUCKETS = (1, 6000, 1_000_000)
"""Each parameter by itself, larger than its bucket; the tied table and some others in one; all in one."""


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_overlap_changes_no_bit_of_a_tied_model_with_accumulation(tmp_path: Path, ranks: int) -> None:
    # Gloo adds three ranks' numbers in an order that depends on their place in a bucket, and stage 1 fills its
    # buckets in another order where it overlaps.
    cases = [(layout, bucket) for layout in ("zero1", "zero2") for bucket in BUCKETS
             if ranks == 2 or layout == "zero2" or bucket == 1]
    runs = [f"{layout}+{bucket}{how}" for layout, bucket in cases for how in ("", "+overlap")]
    results = results_of(HELPERS / "overlap_ranks.py", tmp_path, runs, ranks)
    for layout, bucket in cases:
        assert results[f"{layout}+{bucket}+overlap"] == results[f"{layout}+{bucket}"], (layout, bucket)
    first = results["zero1+1"]
    assert min(first["norms"]) > 0.5  # clipped
    assert results["zero2+1000000"]["norms"] == pytest.approx(first["norms"], rel=1e-5)
    assert results["zero2+1000000"]["bits"] != first["bits"] or ranks == 2


def test_a_gradient_is_kept_for_the_stream_that_reduces_it() -> None:
    """The allocator is told of the stream before the reduction is issued; only where there is one."""
    calls: list[object] = []
    tensor = SimpleNamespace(record_stream=lambda stream: calls.append(stream))

    def zero(overlap_comm: bool, stream: str | None) -> SimpleNamespace:
        return SimpleNamespace(overlap_comm=overlap_comm, reduction_stream=stream,
                               average_tensor=lambda found, dtype: calls.append((found, dtype)))

    optimizer = zero(True, "its stream")
    keep_until_reduced(optimizer)
    optimizer.average_tensor(tensor, "fp32")
    assert calls == ["its stream", (tensor, "fp32")]
    for without in (zero(False, "its stream"), zero(True, None)):
        calls.clear()
        keep_until_reduced(without)
        without.average_tensor(tensor, "fp32")
        assert calls == [(tensor, "fp32")]
