"""FLOPs by formula and by torch's counter, the measured matmul peak, and both in a run's metrics."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from launch_runs import cpu_seconds
from slowness import scaled
from torch import nn

from ezpz_llm.core.rundir import RunDir, append_line
from ezpz_llm.training.model.config import MODELS, get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.parameters import FlopCount
from ezpz_llm.training.observe import Peak, StepWork, final_text, measure_ceiling, peaks, summarize
from ezpz_llm.training.observe.peaks import Ceiling, best_sample, fastest_product
from ezpz_llm.training.trainer import run_description
from ezpz_llm.training.trainer.run_description import count_flops, counted_flops, flop_and_peak_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", MODELS)
def test_formula_agrees_with_torchs_counter_for_every_named_model(name):
    config = MODELS[name]
    flops = count_flops(config)
    assert flops.is_proven, flops
    assert flops.counted == flops.products
    assert flops.causal == flops.model - 6 * config.n_layer * config.q_width * config.block_size
    # 6N includes positions, biases and gains, which are not matmuls.
    assert 0 <= flops.model - flops.products < 0.04 * flops.model


@pytest.mark.parametrize(("name", "overrides"), [
    ("tiny-gpt2", {"bias": False, "tied": False}), ("tiny-llama", {"n_kv_head": 1, "mlp": "gelu", "bias": True}),
    ("tiny-gpt2", {"n_layer": 1, "block_size": 7, "vocab_size": 99})])
def test_formula_agrees_with_torchs_counter_for_other_shapes(name, overrides):
    assert count_flops(get_model_config(name, **overrides)).is_proven


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "gpt3-125m"])
def test_two_blocks_are_enough_to_count_a_model(name):
    config = MODELS[name]
    assert counted_flops(config) == count_flops(config).counted * config.block_size


def test_model_with_more_matmuls_than_the_formula_has_no_mfu(monkeypatch):
    class Wider(GPT):
        def __init__(self, config):
            super().__init__(config)
            for block in self.transformer["h"]:
                block.mlp.c_proj = nn.Sequential(block.mlp.c_proj, nn.Linear(config.n_embd, config.n_embd))

    monkeypatch.setattr(run_description, "GPT", Wider)
    flops = count_flops(MODELS["tiny-gpt2"])
    assert not flops.is_proven
    assert flops.counted - flops.products == 6 * 4 * 128 * 128
    assert not replace(flops, counted=None).is_proven
    (name, text), = flop_and_peak_rows(StepWork(1, 1, 1, 1, 256), flops)
    assert name == "FLOPs"
    assert text.startswith("warning: ")
    assert f"torch's FLOP counter reports {flops.counted:.6g}: MFU is not shown" in text


def test_measured_peak_is_reachable_and_measured_in_time():
    state = torch.get_rng_state()
    began = cpu_seconds()
    flops, size = fastest_product(CPU, torch.float32)
    assert cpu_seconds() - began < scaled(5), "0.4 s on a quiet machine of two cores"
    first, second = torch.randn(2, size, size).unbind()
    deadline = time.monotonic() + scaled(60)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        first @ second
        seconds.append(time.perf_counter() - began)
    while not 0.2 < flops / (2 * size ** 3 / min(seconds)) < 5:  # other processes may use the core for a while
        assert time.monotonic() < deadline, (flops, size, seconds)
        flops = fastest_product(CPU, torch.float32)[0]
    torch.set_rng_state(state)
    fastest_product(CPU, torch.bfloat16, budget_s=0.01)
    assert torch.equal(torch.get_rng_state(), state), "the measurement changed the random state"


def test_best_rate_is_used_for_any_size(monkeypatch):
    rate = {256: 1e9, 512: 3e9, 1024: 2e9}

    def time_matmuls(operands, count):
        return count * 2 * len(operands[0]) ** 3 / rate[len(operands[0])]

    monkeypatch.setattr(peaks, "_time_matmuls", time_matmuls)
    assert fastest_product(CPU, torch.float32, budget_s=10) == (pytest.approx(3e9), 512)


def test_first_matmul_is_not_part_of_the_time_budget(monkeypatch):
    calls = []

    def time_matmuls(operands, count):
        calls.append(len(operands[0]))
        if len(calls) == 1:
            time.sleep(0.3)
        return count * 1e-5

    monkeypatch.setattr(peaks, "_time_matmuls", time_matmuls)
    monkeypatch.setattr(peaks, "_LARGEST", 512)
    assert fastest_product(CPU, torch.float32, budget_s=0.2)[1] == 512


@pytest.mark.parametrize(("samples", "best", "count"), [
    ([5.0, 5.2, 9.0], 5.2, 2), ([0.1, 5.0, 5.1, 9.0], 5.1, 3), ([0.1, 5.0, 0.2, 3.0, 1.0, 9.0], 5.0, 5)])
def test_peak_is_the_best_of_several_samples(monkeypatch, samples, best, count):
    remaining = iter(samples)
    monkeypatch.setattr(peaks, "fastest_product", lambda device, dtype: (next(remaining), 512))
    assert best_sample(CPU, torch.float32) == (best, 512)
    assert len(samples) - len(list(remaining)) == count


def test_single_process_is_the_slowest():
    alone = SimpleNamespace(rank=0, world_size=1, device=CPU, barrier=lambda: None)
    ceiling = measure_ceiling(alone, "fp32")
    assert (ceiling.slowest_rank, ceiling.slowest_flops, ceiling.precision) == (0, ceiling.flops, "fp32")


WORK = StepWork(4, 2, 8, 8, 1024, flops_per_token=8e8, causal_flops_per_token=7e8,
                peak=Peak("a device", "bf16", 2e12, "vendor"), ceiling=Ceiling(1.6e12, "bf16", 4096, 3, 1.5e12))


def test_rates_by_both_conventions_and_beside_the_ceiling():
    rates = WORK.rates(65536 / 8000)  # 1000 tokens/s per device
    assert rates.flops_per_second_per_device == pytest.approx(8e11)
    assert (rates.mfu, rates.mfu_causal, rates.ceiling_share) == pytest.approx((0.4, 0.35, 0.5))
    unknown = replace(WORK, peak=None).rates(65536 / 8000)
    assert (unknown.mfu, unknown.mfu_causal) == (None, None), "no MFU without the device's peak"
    assert unknown.ceiling_share == pytest.approx(0.5)
    uncounted = replace(WORK, flops_per_token=None, causal_flops_per_token=None).rates(1.0)
    assert (uncounted.mfu, uncounted.mfu_causal, uncounted.ceiling_share) == (None, None, None)
    lines = dict(flop_and_peak_rows(WORK, FlopCount(8e8, 7e8, 7.9e8, 7.9e8)))
    assert lines == {"FLOPs": "800M per token, forward and backward (6N + 12 L C T); 700M without the half of "
                             "attention that the causal mask hides; torch's FLOP counter agrees",
                     "peak": "1.6T FLOP/s measured (bf16 matmul; slowest: rank 3, 1.5T)"}


def test_final_text_has_both_mfus_and_explains_shares_above_one(tmp_path):
    run_dir = RunDir(tmp_path / "run").create()
    for step in range(1, 31):
        phases = {"data_s": 1.0, "forward_s": 3.0, "backward_s": 3.0, "optimizer_s": 1.0, "other_s": 0.192}
        append_line(run_dir.metrics, {"step": step, "loss": 5 - step / 50, "lr": 1e-3, "grad_norm": 1.0,
                                      "step_time_s": 8.192, **phases})
    summary = summarize(run_dir, WORK, {"training": 245.0})
    text = final_text(summary, run_dir)
    assert "MFU             40.0% of the vendor's peak; 35.0% with causal attention counted\n" in text
    assert "FLOP/s          800G per device, 50.0% of the matmul peak measured here\n" in text
    assert "warning" not in text
    assert {"mfu_causal", "ceiling_share", "flops_per_second_per_device"} <= asdict(summary).keys()

    low = replace(WORK, ceiling=replace(WORK.ceiling, flops=4e11))
    text = final_text(summarize(run_dir, low, {"training": 245.0}), run_dir)
    assert "warning: measured matmul peak is unreliable (machine was busy)" in text
    assert "FLOP/s          800G per device\n" in text, "no share above 100 % is printed"
    wrong = replace(WORK, peak=Peak("a device", "bf16", 4e11, "vendor"))
    text = final_text(summarize(run_dir, wrong, {"training": 245.0}), run_dir)
    assert "an MFU of 2.00 is impossible" in text
    assert "vendor's peak" not in text
