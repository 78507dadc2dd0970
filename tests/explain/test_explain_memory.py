"""Estimated communication buffers, memory used by a storage, and cross-checks with other tools."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.engine.live_memory import resident_bytes
from ezpz_llm.training.layout.layout import Layout, ZeroOptions
from ezpz_llm.training.layout.memory import bucket_bytes, held_parameters
from ezpz_llm.training.layout.precision_recipes import GradientDtype, GradientDtypes, deepspeed_entries
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.verify.explain.diagnosis import check_sentences, crosschecks

MODEL = get_model_config("gpt2-124m")
ZERO2 = Layout("zero2", "deepspeed", ZeroOptions(2))
PIPELINE = Layout("pp4", "deepspeed", ZeroOptions(1), pp=4)


@pytest.mark.parametrize(("layout", "zero", "device", "expected"), [
    (ZERO2, {"stage": 2, "reduce_bucket_size": 50_000_000}, "cuda", 200_000_000),
    (ZERO2, {"stage": 2, "reduce_bucket_size": 50_000_000, "overlap_comm": True}, "cuda", 400_000_000),
    (ZERO2, {"stage": 3, "reduce_bucket_size": 50_000_000, "overlap_comm": True}, "cuda", 200_000_000),
    (ZERO2, {"stage": 2, "reduce_bucket_size": 50_000_000, "contiguous_gradients": False}, "cuda", 0),
    (ZERO2, {"stage": 3, "reduce_bucket_size": 50_000_000, "contiguous_gradients": False}, "cuda", 200_000_000),
    (ZERO2, {"stage": 3, "contiguous_gradients": False}, "cuda", 4 * held_parameters(ZERO2, MODEL, 0)),
    (ZERO2, {"stage": 1}, "cuda", 2_000_000_000),
    (ZERO2, {"stage": 1}, "cpu", 4 * held_parameters(ZERO2, MODEL, 0)),
    (ZERO2, {"stage": 0}, "cuda", 0),
    (ZERO2, {}, "cuda", 0),
    # Pipeline stages between the tied tables allocate the full bucket, twice.
    (PIPELINE, {"stage": 1, "reduce_bucket_size": 50_000_000}, "cuda", 400_000_000),
    (PIPELINE, {"stage": 1, "reduce_bucket_size": 50_000_000, "overlap_comm": True}, "cuda", 400_000_000),
    (PIPELINE, {"stage": 1, "reduce_bucket_size": 10}, "cuda", 8 * MODEL.padded_vocab_size * MODEL.n_embd),
])
def test_bucket_sizes_match_what_deepspeed_allocates(layout, zero, device, expected):
    assert bucket_bytes(layout, MODEL, {"zero_optimization": zero}, device) == expected


@pytest.mark.parametrize(("stage", "reduced", "itemsize"), [
    (1, "fp32", 2), (2, "fp32", 2), (2, "bf16", 2), (3, "fp32", 4), (3, "bf16", 2)])
def test_buckets_of_a_bf16_model_have_its_dtype_or_that_of_reduced_gradients(
        stage: int, reduced: GradientDtype, itemsize: int) -> None:
    zero = {"stage": stage, "reduce_bucket_size": 50_000_000}
    for recipe, expected in (("bf16", itemsize), ("bf16_autocast", 4)):
        config = {"zero_optimization": zero, **deepspeed_entries(recipe, GradientDtypes("fp32", reduced))}
        assert bucket_bytes(ZERO2, MODEL, config, "cuda") == expected * 50_000_000


def test_memory_that_was_never_written_to_does_not_count():
    # Memory from mmap is fresh; torch's allocator may return memory that was used before.
    storage = torch.frombuffer(mmap.mmap(-1, 200_000_000), dtype=torch.uint8).untyped_storage()
    assert resident_bytes(storage) < 1_000_000
    torch.empty(0).set_(storage, 0, (1_000_000,)).fill_(1)
    assert resident_bytes(storage) == pytest.approx(4_000_000, abs=3_000_000)
    assert resident_bytes(torch.ones(1000).untyped_storage()) == 4000
    assert resident_bytes(torch.empty(0).untyped_storage()) == 0


def test_each_cross_check_has_a_sentence():
    text = " ".join(check_sentences({
        "collectives": {"logged": 4, "issued": 5.0}, "flops": {"deepspeed": 2.2e9, "ours": 2e9, "ratio": 1.1},
        "host": {"torch": 3.0, "deepspeed": 0.25, "ezpz_llm": 0.5, "other": 0.25}}))
    for phrase in ("counted 4 of the 5 collectives", "1.1000 times ezpz_llm's estimate of 2e+09. It includes",
                   "75.0% of its time in torch", "12.5% ezpz_llm, 6.2% deepspeed, 6.2% other"):
        assert phrase in text
    assert "It includes" not in check_sentences({"flops": {"deepspeed": 2e9, "ours": 2e9, "ratio": 1.0}})[0]
    assert check_sentences({}) == []


@pytest.mark.parametrize(("name", "text", "says"), [
    ("host.json", '{"torch": "long"}', "torch is 'long', but must be a number"),
    ("host.json", '[1]', "this is a list, but must be an object"),
    ("host.json", '{"torch": -1}', "torch is -1, but must be 0 to"),
])
def test_wrong_types_are_reported_with_file_and_key(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / name).write_text(text)
    with pytest.raises(UserError, match=says) as error:
        crosschecks(tmp_path, None)
    assert error.value.where == str(tmp_path / "profile" / name)
