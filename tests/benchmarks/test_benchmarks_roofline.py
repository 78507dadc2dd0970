"""The counts of a step's kernels: a new cast or copy in the step changes one of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ezpz_llm.base.outside import read_json
from ezpz_llm.base.package_data import data_dir
from ezpz_llm.model.parameters import parameter_count

pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."),
                                reason="operators, and what inductor fuses, are another version's")

BENCHMARKS = Path(data_dir("benchmarks"))
SMALL = ("--n-layer", "2", "--n-head", "4", "--n-kv-head", "4", "--n-embd", "64", "--block-size", "64",
         "--micro-batch-size", "4", "--global-batch-size", "8", "--ds-config", "ddp",
         "--precision", "bf16_autocast")
"""Two micro-steps of two layers."""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder's programs can be imported."""
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
    assert len(step.kernels) == 378
    # Casts: of each matrix and bias forward, of each product's input, and of gradients on their way back.
    assert {name: found[name] for name in ("_to_copy", "copy_", "clone", "mul_", "add_")} == \
        {"_to_copy": 103, "copy_": 12, "clone": 4, "mul_": 6, "add_": 30}
    # Forward one, backward two, and of the head's three: 4 products a layer and the head, of each micro-step.
    assert found["mm"] + found["addmm"] == 2 * (3 * (2 * 4 + 1))
    assert found["_scaled_dot_product_flash_attention"] == 2 * 2
    # Weight, gradient and two moments, read and written: the gradient too, which it divides to clip.
    adamw = sum(kernel.read + kernel.written for kernel in step.kernels if kernel.name == "_fused_adamw_")
    assert 32 * parameter_count(plan.model) <= adamw < 32.1 * parameter_count(plan.model)


@pytest.mark.full
def test_the_kernels_of_a_compiled_step(benchmarks: None) -> None:
    from roofline_compiled import count_compiled
    from roofline_counts import plan_of

    step = count_compiled(plan_of([*SMALL, "--compile", "true"]))
    found = Counter(kernel.name for kernel in step.kernels)
    assert step.host_reads == []
    assert len(step.kernels) == 340
    assert found["_to_copy"] == 7
    assert found["mm"] + found["addmm"] == 2 * (3 * (2 * 4 + 1))


@pytest.mark.parametrize(("work", "how"), [
    ("gpt2-124m B 4", "eager"),
    *(pytest.param(f"{model} B {micro_batch}", how, marks=pytest.mark.full)
      for model, micro_batch in (("gpt2-124m", 16), ("gpt2-124m", 4), ("llama3-1b", 4), ("llama3-1b", 8))
      for how in ("eager", "compiled") if (model, micro_batch, how) != ("gpt2-124m", 4, "eager"))])
def test_the_committed_counts_are_those_of_the_program(benchmarks: None, work: str, how: str) -> None:
    """Run benchmarks/roofline.py again where a change is meant to move them."""
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
                # No faster than its bytes, and no faster than its products.
                assert bound["step_s"] >= step["bytes"] / (device["bandwidth"] * rates["memory"])
                assert bound["step_s"] >= step["product_flops"] / (device["peak_flops"] * rates["products"])
