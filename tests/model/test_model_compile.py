"""Compiled blocks, and the reported attention kernel."""

from __future__ import annotations

import runpy
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ezpz_llm.training.model import attention_kernels
from ezpz_llm.training.model.attention_kernels import AttentionKernel, attention_kernel, is_blockwise
from ezpz_llm.training.model.compile import compile_blocks, eager
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT, gelu
from ezpz_llm.training.model.init import init_weights
from ezpz_llm.training.model.loss import Head


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_compiled_blocks_equal_eager_ones_and_share_one_graph(name):
    from torch._dynamo.utils import counters

    config = get_model_config(name, block_size=32)
    model, compiled = GPT(config), GPT(config)
    for candidate in (model, compiled):
        init_weights(candidate, candidate.config, 0)
    compile_blocks(compiled)
    compiled.lm_head.compiler = None  # it would add two graphs
    assert list(compiled.state_dict()) == list(model.state_dict())
    counters.clear()
    tokens = torch.randint(257, (2, 33))
    losses = [m(tokens[:, :-1], tokens[:, 1:]) for m in (model, compiled)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for (name, p), q in zip(model.named_parameters(), compiled.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 1e-4 * p.grad.norm() + 1e-7, name
    assert counters["stats"]["unique_graphs"] == 1
    with eager(), torch.no_grad():
        compiled.eval()(tokens[:, :5])
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_compiled_loss_equals_eager_loss():
    torch.manual_seed(0)
    x, targets = torch.randn(3, 7, 24), torch.randint(70, (3, 7))
    targets[0, 2:5] = -100
    for z_loss in (0.0, 0.1):
        results = []
        for compiler in (None, "inductor"):
            torch.manual_seed(1)
            head, inputs = Head(24, 70), x.clone().requires_grad_()
            head.loss_chunk, head.z_loss, head.compiler = 8, z_loss, compiler
            loss = head(inputs, targets)
            loss.backward()
            results.append((loss.detach(), inputs.grad, head.weight.grad))
        for eager_result, compiled_result in zip(*results, strict=True):
            torch.testing.assert_close(compiled_result, eager_result, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_compiled_gelu_equals_eager_gelu():
    x = torch.linspace(-12, 12, 4001, requires_grad=True)
    eager_result, compiled_result = gelu(x), torch.compile(gelu)(x)
    torch.testing.assert_close(compiled_result, eager_result, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(result.sum(), x)[0] for result in (eager_result, compiled_result)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=2e-6)


def test_the_reported_kernel_is_the_one_that_runs():
    config = get_model_config("tiny-gpt2", block_size=64)
    cpu = torch.device("cpu")
    kernel = attention_kernel(config, 2, cpu, torch.float32)
    assert (kernel.name, kernel.score_bytes) == ("flash_attention", 0)
    # With dropout in attention, CPUs have only the explicit form, which keeps B H T^2 scores.
    dropout = attention_kernel(get_model_config("tiny-gpt2", block_size=64, dropout=0.1), 2, cpu, torch.float32)
    assert (dropout.name, dropout.score_bytes) == ("math", 2 * 4 * 64 * 64 * 4)
    with sdpa_kernel(SDPBackend.MATH):
        forced = attention_kernel(get_model_config("tiny-llama", block_size=64), 1, cpu, torch.float32)
    assert (forced.name, forced.score_bytes) == ("math", 4 * 64 * 64 * 4)
    assert attention_kernel(config, 2, cpu, torch.bfloat16).name == "blockwise_attention"


def test_the_kernel_on_intel_gpus_does_not_store_scores_where_torch_would(monkeypatch):
    """Before 2.11, torch has no fused kernel with gradients there, and later none with masks."""
    config, xpu = get_model_config("tiny-gpt2", block_size=64), torch.device("xpu")
    assert attention_kernel(config, 2, xpu, torch.bfloat16, masked=True).name == "blockwise_attention"
    exact = attention_kernel(config, 2, xpu, torch.float32, masked=True)
    assert exact == AttentionKernel("math", 2 * 4 * 64 * 64 * 4)
    assert not is_blockwise(xpu, torch.bfloat16, 0.0)
    monkeypatch.setattr(torch, "__version__", "2.9.1+xpu")
    before = runpy.run_path(attention_kernels.__file__)
    assert before["attention_kernel"](config, 2, xpu, torch.bfloat16).name == "blockwise_attention"
    dropout = before["attention_kernel"](replace(config, dropout=0.1), 2, xpu, torch.bfloat16)
    assert (dropout.name, dropout.score_bytes) == ("math", 2 * 4 * 64 * 64 * 2)
