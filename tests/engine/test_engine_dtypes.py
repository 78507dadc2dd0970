"""Dtypes of a step in each precision recipe: parameters, matmuls, master weights, moments, losses, and sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_layer import LENGTH, VOCABULARY, micro_batches, one_layer_engine, single_rank
from torch import nn

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.tp_collectives import reduce_from_tp_region
from ezpz_llm.verify.certify.reference import make_engine

DTYPES = {"fp32": (torch.float32, torch.float32), "bf16_autocast": (torch.float32, torch.bfloat16),
          "bf16": (torch.bfloat16, torch.bfloat16)}
"""Dtypes of parameters and of matmul outputs, by recipe. Master weights, moments and the loss are always fp32."""


@pytest.fixture
def dist(tmp_path: Path) -> Dist:
    return single_rank(tmp_path)


@pytest.mark.parametrize("recipe", DTYPES)
def test_parameters_matmuls_moments_and_losses(dist: Dist, recipe: str) -> None:
    of_parameters, of_products = DTYPES[recipe]
    engine = one_layer_engine(dist, clip=0.1, precision=recipe)
    output_dtypes: list[torch.dtype] = []
    for module in engine.module.modules():
        if type(module) is nn.Linear:
            module.register_forward_hook(lambda _, inputs, output: output_dtypes.append(output.dtype))
    for training in (True, False):
        engine.module.train(training)
        assert engine.module(*micro_batches(0)[0]).dtype == torch.float32
    assert set(output_dtypes) == {of_products}
    assert {parameter.dtype for parameter in engine.module.parameters()} == {of_parameters}
    assert (engine.masters is not None) == (of_parameters != torch.float32)
    assert {tensor.dtype for piece in engine.training_state().slices() for tensor in piece.tensors.values()} == {
        torch.float32}


@pytest.mark.parametrize("recipe", DTYPES)
def test_initial_weights_are_rounded_to_the_dtype_of_parameters(dist: Dist, recipe: str) -> None:
    engine = one_layer_engine(dist, clip=0.1, precision=recipe)
    for piece in engine.training_state().slices():
        weight = piece.tensors["weight"]
        assert torch.equal(weight, weight.to(DTYPES[recipe][0]).float()), piece.name


def test_rotary_angles_stay_in_fp32_in_sharded_blocks(dist: Dist) -> None:
    resolved = resolve(Request("fsdp2", world_size=1, global_batch=4, precision="bf16", device="cpu"))
    config = get_model_config("tiny-llama", n_layer=1, block_size=LENGTH, vocab_size=VOCABULARY)
    engine = make_engine(config, resolved, dist)
    assert isinstance(engine, MicroStepEngine)
    dtypes: list[torch.dtype] = []
    engine.module.transformer["h"][0].attn.register_forward_pre_hook(
        lambda _, inputs: dtypes.extend(part.dtype for part in inputs[1]))
    engine.module(*micro_batches(0)[0])
    dist.close()
    assert dtypes == [torch.float32, torch.float32]


@pytest.mark.parametrize(("casts", "expected"), [(True, torch.float32), (False, torch.bfloat16)])
def test_sums_over_tensor_parallel_ranks_have_the_dtype_of_the_residual_stream(
        dist: Dist, casts: bool, expected: torch.dtype) -> None:
    dist.ensure_group()
    x = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
        assert reduce_from_tp_region(x, None).dtype == expected
    dist.close()
