"""Tests of the dtypes of gradient accumulation and reduction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.layout import ops
from ezpz_llm.training.layout.precision_recipes import GradientDtypes
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.parameters import parameter_count
from ezpz_llm.verify.certify.case import published_traffic

TINY = get_model_config("tiny-gpt2")


@pytest.mark.parametrize(("layout", "precision", "key", "reason"), [
    ("ddp", "bf16", "grad_accum_dtype", "fp32 master weights"),
    ("fsdp2", "bf16", "grad_accum_dtype", "fp32 shards"),
    ("zero3_offload_optimizer", "bf16", "grad_accum_dtype", "in CPU memory"),
    ("zero1", "fp32", "reduce_dtype", "the precision is fp32"), ("ddp", "fp16", "reduce_dtype", "fp16"),
    ("zero1", "bf16_autocast", "grad_accum_dtype", "bf16_autocast"), ("zero2", None, "reduce_dtype", "the device")])
def test_unsupported_bf16_gradients_are_rejected_with_the_reason(
        monkeypatch: pytest.MonkeyPatch, layout: str, precision: str | None, key: str, reason: str) -> None:
    dtype: dict[str, Any] = {key: "bf16"}
    monkeypatch.setattr(ops, "is_built", lambda name: True)
    with pytest.raises(UserError) as raised:
        resolve(Request(layout, world_size=2, precision=precision, **dtype))
    assert reason in raised.value.found
    assert key in raised.value.where
    assert "fp32" in raised.value.instead


def test_gradient_dtypes_are_printed_with_their_source() -> None:
    resolved = resolve(Request("zero2", world_size=2, precision="bf16", reduce_dtype="bf16"))
    assert resolved.gradients == GradientDtypes("fp32", "bf16")
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in resolved.explain().splitlines()}
    assert lines["grad_accum_dtype"].split() == ["fp32", "default"]
    assert lines["reduce_dtype"].split() == ["bf16", "command", "line"]
    assert published_traffic(resolved.layout, TINY, resolved.batch, "bf16",
                             resolved.gradients)["reduce_scatter"] == \
        2 * parameter_count(TINY)


@pytest.mark.parametrize(("values", "expected"), [
    ({}, ("bf16", "bf16")), ({"data_types": {"grad_accum_dtype": "fp32"}}, ("fp32", "bf16")),
    ({"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}, ("fp32", "fp32")),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, ("fp32", "bf16")),
    ({"ezpz_llm": {"engine": "fsdp2"}, "zero_optimization": {"stage": 0}}, ("fp32", "fp32"))])
def test_gradient_dtypes_of_a_bf16_block_are_deepspeeds_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                values: dict[str, Any], expected: tuple[str, str]) -> None:
    """DeepSpeed accumulates and reduces in the dtype of the parameters by default."""
    monkeypatch.setattr(ops, "is_built", lambda name: True)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, **values}))
    resolved = resolve(Request(str(path), world_size=2))
    assert (resolved.gradients.accumulated, resolved.gradients.reduced) == expected
    config = resolved.for_deepspeed(RunDir(tmp_path)) if resolved.deepspeed is not None else None
    if config is not None:
        assert config["bf16"] == {"enabled": True}
        assert (config["data_types"]["grad_accum_dtype"], config["communication_data_type"]) == expected
    assert any("DeepSpeed's default, because mine.json" in note for note in resolved.notes) == \
        ("bf16" in expected)
    typed = resolve(Request(str(path), world_size=2, grad_accum_dtype="fp32", reduce_dtype="fp32"))
    assert typed.gradients == GradientDtypes()
