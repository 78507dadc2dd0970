"""Counts of a step's kernels: a new cast or copy in the step changes a count. Also, the code for GPUs on a CPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.core.base.untrusted_input import read_json
from ezpz_llm.training.model.loss import Head
from ezpz_llm.training.model.parameters import parameter_count

pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."),
                                reason="other versions of torch have other operators and fusions")

BENCHMARKS = Path(data_dir("benchmarks"))
SMALL = ("--n-layer", "2", "--n-head", "4", "--n-kv-head", "4", "--n-embd", "64", "--block-size", "64",
         "--micro-batch-size", "4", "--global-batch-size", "8", "--ds-config", "ddp",
         "--precision", "bf16_autocast")
"""Options for two micro-steps of a model with two layers."""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the programs in benchmarks/ importable."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in ("roofline", "roofline_counts", "roofline_compiled"):
        sys.modules.pop(name, None)


def test_the_kernels_of_an_eager_step(benchmarks: None) -> None:
    from roofline_counts import count_eager, plan_of

    plan = plan_of([*SMALL, "--compile", "false"])
    step = count_eager(plan)
    found = Counter(kernel.name for kernel in step.kernels)
    assert step.host_reads == []
    assert len(step.kernels) == 372
    # Casts of each matrix and bias in the forward pass, of each matmul's input, and of gradients.
    assert {name: found[name] for name in ("_to_copy", "copy_", "clone", "mul_", "add_")} == \
        {"_to_copy": 103, "copy_": 10, "clone": 0, "mul_": 6, "add_": 30}
    # For each of 4 matmuls per layer and the head, in each micro-step: one forward and two backward.
    assert found["mm"] + found["addmm"] == 2 * (3 * (2 * 4 + 1))
    assert found["_scaled_dot_product_flash_attention"] == 2 * 2
    # Weight, gradient and two moments are read and written; the gradient is scaled for clipping.
    adamw = sum(kernel.read + kernel.written for kernel in step.kernels if kernel.name == "_fused_adamw_")
    assert 32 * parameter_count(plan.model) <= adamw < 32.1 * parameter_count(plan.model)


@pytest.mark.full
def test_the_kernels_of_a_compiled_step(benchmarks: None) -> None:
    from roofline_compiled import count_compiled
    from roofline_counts import plan_of

    step = count_compiled(plan_of([*SMALL, "--compile", "true"]))
    found = Counter(kernel.name for kernel in step.kernels)
    assert step.host_reads == []
    assert len(step.kernels) == 348
    assert found["_to_copy"] == 13
    assert found["mm"] + found["addmm"] == 2 * (3 * (2 * 4 + 1))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_the_loss_is_the_same_on_the_branches_of_a_gpu(benchmarks: None, z_loss: float) -> None:
    from roofline_counts import device_branches

    results = []
    for branches in (nullcontext(), device_branches()):
        torch.manual_seed(0)
        head = Head(24, 509).bfloat16()
        head.loss_chunk, head.z_loss = 100, z_loss
        x, targets = torch.randn(1, 250, 24).bfloat16().requires_grad_(), torch.randint(509, (1, 250))
        with branches:
            loss = head(x, targets)
            loss.backward()
        results.append((loss.detach(), x.grad, head.weight.grad))
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu)


@pytest.mark.parametrize(("work", "how"), [
    ("gpt2-124m B 4", "eager"),
    *(pytest.param(f"{model} B {micro_batch}", how, marks=pytest.mark.full)
      for model, micro_batch in (("gpt2-124m", 16), ("gpt2-124m", 4), ("llama3-1b", 4), ("llama3-1b", 8))
      for how in ("eager", "compiled") if (model, micro_batch, how) != ("gpt2-124m", 4, "eager"))])
def test_the_committed_counts_are_those_of_the_program(benchmarks: None, work: str, how: str) -> None:
    """Run benchmarks/roofline.py again if a change is intended to affect them."""
    from roofline import total
    from roofline_compiled import count_compiled
    from roofline_counts import count_eager, plan_of

    committed = read_json(BENCHMARKS / "results" / "roofline.json")["works"][work]
    plan = plan_of([*committed["options"], "--compile", str(how == "compiled").lower()])
    found = total(count_compiled(plan) if how == "compiled" else count_eager(plan))
    assert found == {name: committed["steps"][how][name] for name in found}


def test_the_committed_bounds_are_of_the_rates_that_are_written_beside_them() -> None:
    result = read_json(BENCHMARKS / "results" / "roofline.json")
    rates = result["assumptions"]
    for work in result["works"].values():
        for step in work["steps"].values():
            assert step["host_reads"] == 0
            for name, bound in step["bounds"].items():
                device = rates["devices"][name]
                assert bound["mfu"] == pytest.approx(work["model_flops"] / bound["step_s"] / device["peak_flops"])
                # The time is at least that of its bytes, and at least that of its matmuls.
                assert bound["step_s"] >= step["bytes"] / (device["bandwidth"] * rates["memory"])
                assert bound["step_s"] >= step["product_flops"] / (device["peak_flops"] * rates["products"])
