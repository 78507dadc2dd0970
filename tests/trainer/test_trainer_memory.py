"""Warning about runs that need more memory than their node has."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from ezpz_llm.training.trainer import run_description
from ezpz_llm.training.trainer.memory_estimate import memory_warning
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import plan_run


def warning_for(words: str, node_gb: float, ranks: int = 2) -> str | None:
    plan = plan_run(parse(f"--precision fp32 --device cpu {words}".split()), ranks, device="cpu")
    return memory_warning(plan, ranks, ranks, int(node_gb * 1e9))


def test_default_run_fits_in_the_memory_that_it_was_measured_to_use() -> None:
    """README: 1.22 GB, of which 0.4 GB are Python and its libraries."""
    assert warning_for("", node_gb=1.22) is None


@pytest.mark.parametrize(("words", "gigabytes", "options"), [
    # Values, gradients, and half of the moments take 2 x 1.5 GB with 124M parameters, 2 x 15 GB with 1.2B.
    ("--model gpt2-124m --micro-batch-size 8", 6, "--micro-batch-size 1"),
    ("--model llama3.2-1b --micro-batch-size 2", 48, r"--micro-batch-size 1 --block-size \d+"),
    # fsdp2 keeps 0.5 GB of unsharded gradients on each rank, if a smaller micro-batch needs more micro-steps.
    ("--model gpt2-124m --ds-config fsdp2 --global-batch-size 16 --micro-batch-size 8", 5,
     r"--micro-batch-size 1 --block-size \d+"),
    ("--model gpt2-124m --ds-config fsdp2 --global-batch-size 16 --gradient-accumulation-steps 1", 6,
     "--micro-batch-size 1 --gradient-accumulation-steps 8"),
    ("--model gpt2-124m --ds-config fsdp2 --micro-batch-size 8 --gradient-accumulation-steps 1", 5,
     "--micro-batch-size 1"),
    ("--model gpt2-124m --ds-config fsdp2 --micro-batch-size 8", 5, "--micro-batch-size 1"),
])
def test_suggested_options_fit(words: str, gigabytes: float, options: str) -> None:
    text = warning_for(words, gigabytes)
    assert text is not None
    match = re.fullmatch(r"2 ranks with \d x \d+ tokens per micro-step will need about ([\d,]+) GB on this node, "
                         rf"which has {gigabytes} GB: pass ({options})", text)
    assert match, text
    assert int(match[1].replace(",", "")) > gigabytes
    # Options given later win.
    assert warning_for(f"{words} {match[2]}", gigabytes) is None
    longer = re.sub(r"--block-size (\d+)", lambda size: f"--block-size {2 * int(size[1])}", match[2])
    assert longer == match[2] or warning_for(f"{words} {longer}", gigabytes) is not None


def test_the_memory_of_a_node_is_that_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_run(parse(["--model", "gpt2-124m", "--precision", "fp32", "--device", "cpu"]), 2, device="cpu")
    dist = SimpleNamespace(device=torch.device("cpu"), world_size=2, info=SimpleNamespace(local_size=2))
    monkeypatch.setattr(run_description, "usable_memory", lambda: (2 * 10**9, 10**9))
    assert "which has 2 GB" in run_description._memory_warnings(plan, dist)[0]
    monkeypatch.setattr(run_description, "usable_memory", lambda: (0, 0))
    assert run_description._memory_warnings(plan, dist) == []


def test_a_model_that_never_fits_needs_another_layout() -> None:
    text = warning_for("--model gpt2-124m", node_gb=1)
    assert text is not None
    assert text.endswith("use a layout that shards more, or more nodes")
