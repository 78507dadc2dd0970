"""Exact bytes on the wire and in memory on two ranks, for bf16 parameters and for autocast."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from places import HELPERS
from rank_jobs import results_of

from ezpz_llm.training.engine.precision import _BF16_UNITS, native_precision
from ezpz_llm.training.layout.memory import memory_per_rank, total
from ezpz_llm.training.layout.precision_recipes import GradientDtype, GradientDtypes
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.parameters import parameter_count, parameter_shapes

LAYOUTS = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "ddp,tp2", "tp2_zero3", "sp2")
CONFIG = get_model_config("tiny-gpt2", n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=64)
SIZE = parameter_count(CONFIG)
ACCUMULATION = 2
IN_BF16: tuple[tuple[str, GradientDtype, GradientDtype], ...] = (("ddp", "fp32", "bf16"), ("fsdp2", "fp32", "bf16"),
           *((layout, added, reduced) for layout in ("zero1", "zero2", "zero3")
             for added, reduced in (("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16"))))
"""Layout, dtype of gradient accumulation, dtype of gradient reduction."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs = [f"{precision}:{layout}" for layout in LAYOUTS for precision in ("bf16", "bf16_autocast")]
    runs += [f"bf16:{layout}:{added}:{reduced}" for layout, added, reduced in IN_BF16]
    return results_of(HELPERS / "recipe_ranks.py", tmp_path_factory.mktemp("recipes"), runs, 2)


def issued(results: dict[str, Any], run: str) -> dict[str, int]:
    """Return bytes by kind, after checking that all groups have two ranks."""
    kinds = results[run]["collectives"]
    assert all(set(kind["groups"]) == {"2"} for kind in kinds.values())
    return {kind: counts["bytes"] for kind, counts in kinds.items() if kind != "scalars"}


def test_ddp_reduces_gradients_once_a_step_in_fp32(results: dict[str, Any]) -> None:
    assert issued(results, "bf16:ddp") == {"all_reduce": 4 * SIZE}
    assert issued(results, "bf16_autocast:ddp")["all_reduce"] == 4 * SIZE


@pytest.mark.parametrize("layout", ["fsdp2", "zero1", "zero2", "zero3"])
def test_gathers_are_half_of_autocasts(results: dict[str, Any], layout: str) -> None:
    low, wide = (results[f"{precision}:{layout}"]["collectives"]["all_gather"]
                 for precision in ("bf16", "bf16_autocast"))
    assert (2 * low["bytes"], low["count"]) == (wide["bytes"], wide["count"])
    assert low["bytes"] > 0


@pytest.mark.parametrize("layout", ["zero1", "zero2"])
def test_deepspeeds_stage_2_reduces_each_micro_step_in_fp32(results: dict[str, Any], layout: str) -> None:
    low = issued(results, f"bf16:{layout}")
    assert low == {"all_reduce": 4 * SIZE * ACCUMULATION, "all_gather": 2 * SIZE}


def test_zero3_reduces_each_micro_step_in_fp32(results: dict[str, Any]) -> None:
    assert issued(results, "bf16:zero3")["reduce_scatter"] == 4 * SIZE * ACCUMULATION


@pytest.mark.parametrize("layout", ["ddp,tp2", "tp2_zero3"])
def test_tensor_parallel_sums_are_half_of_autocasts(results: dict[str, Any], layout: str) -> None:
    """These two ranks hold different parts of the model, so they reduce no gradients."""
    low, wide = (results[f"{precision}:{layout}"]["collectives"]["all_reduce"]
                 for precision in ("bf16", "bf16_autocast"))
    assert (2 * low["bytes"], low["count"]) == (wide["bytes"], wide["count"])
    tokens = 8 * CONFIG.block_size
    a_sum = 2 * tokens * CONFIG.n_embd
    assert low["bytes"] == (4 * CONFIG.n_layer + 2) * a_sum


def test_sequence_parallel_exchanges_are_in_bf16(results: dict[str, Any]) -> None:
    # Queries, keys, values and the output, in both passes, as under autocast.
    expected = 2 * CONFIG.n_layer * 4 * 2 * 8 * CONFIG.block_size // 2 * CONFIG.n_embd
    for precision in ("bf16", "bf16_autocast"):
        assert issued(results, f"{precision}:sp2")["all_to_all"] == expected


def test_fsdp2_reduces_each_micro_step_in_fp32(results: dict[str, Any]) -> None:
    low = issued(results, "bf16:fsdp2")
    assert low["reduce_scatter"] == 4 * SIZE * ACCUMULATION
    assert set(low) == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize(("layout", "parameters", "gradients", "moments", "master"), [
    ("ddp", 2, 4, 8, 4), ("fsdp2", 4 / 2, 4 / 2, 8 / 2, 0), ("zero1", 2, 4 / 2, 8 / 2, 4 / 2),
    ("zero2", 2, 4 / 2, 8 / 2, 4 / 2), ("zero3", 2 / 2, 4 / 2, 8 / 2, 4 / 2)])
def test_bytes_per_parameter_on_two_ranks(results: dict[str, Any], layout: str, parameters: float, gradients: float,
                                        moments: float, master: float) -> None:
    sizes = results[f"bf16:{layout}"]["held"]
    expected = {"parameters": parameters, "gradients": gradients, "moments": moments, "master": master}
    assert {kind: sizes[kind] for kind in expected} == {kind: each * SIZE for kind, each in expected.items()}
    arithmetic = memory_per_rank(resolve(Request(layout, world_size=2)).layout, CONFIG, 2, precision="bf16")
    assert total(arithmetic, "device") == sum(expected.values()) * SIZE


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_memory_table_agrees_with_the_estimate(results: dict[str, Any], layout: str) -> None:
    """The table measures gradients at the start of the step, the rest after the last evaluation."""
    result = results[f"bf16:{layout}"]
    parts = {part.kind: part.bytes for part in memory_per_rank(
        resolve(Request(layout, world_size=2)).layout, CONFIG, 2, precision="bf16")}
    assert result["held"]["gradients"] == parts["gradients"]
    assert result["parameters at end"] == parts["parameters"]
    assert result["master at end"] == parts.get("copy", 0)


@pytest.mark.parametrize(("layout", "added", "reduced"), IN_BF16)
def test_gradients_are_accumulated_and_reduced_in_the_requested_dtypes(results: dict[str, Any], layout: str,
                                                              added: GradientDtype, reduced: GradientDtype) -> None:
    requested = issued(results, f"bf16:{layout}:{added}:{reduced}")
    itemsize = {"fp32": 4, "bf16": 2}
    kind = "reduce_scatter" if layout in ("fsdp2", "zero3") else "all_reduce"
    plain = issued(results, f"bf16:{layout}")
    assert requested.pop(kind) == itemsize[reduced] * SIZE * (1 if layout == "ddp" else ACCUMULATION)
    assert requested == {name: size for name, size in plain.items() if name != kind}
    result, default = results[f"bf16:{layout}:{added}:{reduced}"], results[f"bf16:{layout}"]
    parts = {part.kind: part.bytes for part in memory_per_rank(
        resolve(Request(layout, world_size=2)).layout, CONFIG, 2, precision="bf16",
        gradients=GradientDtypes(added, reduced))}
    # Stages 1 and 2 keep a whole copy of a parameter that straddles both ranks, unless they accumulate in fp32.
    straddling = max(map(prod, parameter_shapes(CONFIG).values())) if layout in ("zero1", "zero2") else 0
    assert 0 <= result["held"]["gradients"] - parts["gradients"] <= (2 * straddling if added == "bf16" else 0)
    assert parts["gradients"] == itemsize[added] * SIZE // (1 if layout == "ddp" else 2)
    assert result["losses"] == pytest.approx(default["losses"], abs=4e-3)
    assert result["norm"] == pytest.approx(default["norm"], rel=3e-2)
    assert result["norm"] != default["norm"]


@pytest.mark.parametrize(("device", "has_bf16", "ds_config", "precision"), [
    ("cuda", True, "zero1", "bf16"), ("cuda", True, "pp2", "bf16"), ("cuda", True, "zero0", "bf16_autocast"),
    ("cuda", False, "zero1", "fp32"), ("xpu", True, "fsdp2", "bf16"), ("mps", True, "ddp", "fp32"),
    ("cpu", True, "zero1", "bf16"), ("cpu", True, "zero0", "bf16_autocast"), ("cpu", False, "zero1", "fp32")])
def test_auto_precision(monkeypatch: pytest.MonkeyPatch, device: str, has_bf16: bool, ds_config: str,
                         precision: str) -> None:
    monkeypatch.setitem(_BF16_UNITS, device, lambda: has_bf16)
    layout = resolve(Request(ds_config, world_size=2)).layout
    assert native_precision(torch.device(device), layout) == precision
