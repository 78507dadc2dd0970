"""Model with bf16 parameters: sums over tokens are computed in fp32 for all kinds of parameters."""

from __future__ import annotations

import copy

import pytest
import torch

from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.embedding import TiedEmbedding, lookup
from ezpz_llm.training.model.gpt import GPT, make_norm
from ezpz_llm.training.model.init import init_weights
from ezpz_llm.training.model.loss import Head, configure_head

ROUNDING = 2.0 ** -8


def apart(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return ((actual.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("shape", ["tiny-gpt2", "tiny-llama"])
def test_the_gradients_of_a_norm_are_summed_over_4096_tokens_in_fp32(shape: str) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = make_norm(get_model_config(shape)).bfloat16()
    exact = copy.deepcopy(norm).double()
    x = torch.randn(4096, norm.weight.shape[0], generator=generator).bfloat16()
    grad = torch.randn(x.shape, generator=generator).add_(0.5).bfloat16()
    norm(x).backward(grad)
    exact(x.double()).backward(grad.double())
    assert norm(x).dtype == norm.weight.grad.dtype == torch.bfloat16
    for actual, expected in zip(norm.parameters(), exact.parameters(), strict=True):
        assert apart(actual.grad, expected.grad) <= ROUNDING


@pytest.mark.parametrize("tied", [False, True])
def test_a_frequent_token_gets_the_sum_of_its_gradients(tied: bool) -> None:
    tokens = torch.zeros(8, 512, dtype=torch.long)
    tokens[0, :3] = torch.tensor([5, 7, 5])
    grad = torch.rand(8, 512, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    table = TiedEmbedding(9, 4).bfloat16()
    table.tied = tied
    table(tokens).backward(grad)
    gradient = table.weight.grad.to_dense() if tied else table.weight.grad
    exact = torch.zeros(9, 4, dtype=torch.float64).index_add_(0, tokens.flatten(), grad.flatten(0, 1).double())
    assert apart(gradient, exact) <= ROUNDING
    assert torch.equal(lookup(tokens, table.weight), table.weight[tokens])


def test_the_heads_gradient_is_summed_over_chunks_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    head = Head(16, 64).bfloat16()
    exact = copy.deepcopy(head).double()
    head.loss_chunk, exact.loss_chunk = 16, 0
    x = torch.randn(4, 1024, 16, generator=generator).bfloat16()
    targets = torch.zeros(4, 1024, dtype=torch.long)
    head(x, targets).backward()
    exact(x.double(), targets).backward()
    assert head.weight.grad.dtype == torch.bfloat16
    assert apart(head.weight.grad, exact.weight.grad) <= 2 * ROUNDING


@pytest.mark.parametrize("shape", ["tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize("chunk", [0, 48])
def test_bf16_gradients_of_a_model_are_close_to_fp32(shape: str, chunk: int) -> None:
    config: ModelConfig = get_model_config(shape, n_layer=2, block_size=64, vocab_size=96, dropout=0.0)
    models = [GPT(config), GPT(config).bfloat16()]
    tokens = torch.randint(0, 40, (4, 64), generator=torch.Generator().manual_seed(0))
    losses = []
    for model in models:
        init_weights(model, config, 1)
        configure_head(model, chunk)
        loss = model(tokens, tokens.roll(1))
        loss.backward()
        losses.append(loss.item())
        assert loss.dtype == torch.float32
    assert losses[1] == pytest.approx(losses[0], abs=5e-3)
    for (name, exact), actual in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert actual.grad.dtype == torch.bfloat16
        rows = slice(config.n_embd, 2 * config.n_embd) if name.endswith("c_attn.bias") else slice(0)
        gradient, expected = actual.grad.float().clone(), exact.grad.clone()
        gradient[rows], expected[rows] = 0, 0  # the gradient of the keys' biases is only rounding errors
        assert apart(gradient, expected) <= 0.05, name
