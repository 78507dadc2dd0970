"""Tensor parallelism computes the same results as one process: many tests of jobs with two and four ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from places import HELPERS
from rank_jobs import results_of

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.tensor_parallel import apply

SCRIPT = HELPERS / "tensor_parallel_ranks.py"
LAYOUTS = ("ddp", "tp2", "tp2_zero1", "tp2_zero3")
TWO = [f"fp32:{shape}:{layout}" for shape in ("gpt2", "llama") for layout in LAYOUTS]
TWO += ["bf16_autocast:gpt2:ddp", "bf16_autocast:gpt2:tp2_zero1", "bf16_autocast:gpt2:tp2_zero3"]
FOUR = ["fp32:gpt2:ddp", "fp32:gpt2:tp2_zero1", "fp32:llama:tp2_zero3", "bf16_autocast:gpt2:tp2_zero3"]
ONE = "fp32:llama:tp2_zero1"
UNMARKED = ["fp32:gpt2:tp2_zero1:unmarked", "fp32:gpt2:tp2_zero3:unmarked"]
# Run between layouts with tensor parallelism in the same process, because DeepSpeed keeps state in globals.
UNDIVIDED = ["fp32:gpt2:zero0:undivided", "fp32:gpt2:zero1:undivided", "fp32:gpt2:zero3:undivided"]
LATER = "fp32:gpt2:zero2"
ADDED = [f"fp32:{shape}:{layout}:qk_norm" for shape, layout in (("gpt2", "tp2"), ("llama", "tp2_zero1"),
                                                                  ("gpt2", "tp2_zero3"))]
UNSUMMED = "fp32:gpt2:tp2_zero1:qk_norm:unsummed"
FAMILIES = ["fp32:qwen3:tp2_zero1", "fp32:olmo2:tp2", "fp32:olmo2:tp2_zero3", "fp32:qwen3:tp2_zero3",
            "fp32:gpt2_normed:tp2"]
MANY = [*TWO, *UNDIVIDED, *FAMILIES, LATER]
LOSS_BOUND = {"fp32": 1e-5, "bf16_autocast": 2e-3}
NORM_BOUND = {"fp32": 1e-4, "bf16_autocast": 3e-2}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs = ["parts", ONE, *ADDED, UNSUMMED, *UNMARKED]
    return results_of(SCRIPT, tmp_path_factory.mktemp("two"), runs, 2)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(SCRIPT, tmp_path_factory.mktemp("many"), MANY, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(SCRIPT, tmp_path_factory.mktemp("four"), FOUR, 4)


def check(run: str, result: dict[str, Any]) -> None:
    precision = run.partition(":")[0]
    assert largest(result["losses"]) <= LOSS_BOUND[precision]
    assert largest(result["norms"], relative=True) <= NORM_BOUND[precision]
    assert min(result["norms"][1]) > 0.5  # clipping is at work
    assert result["losses"][1][-1] < result["losses"][1][0]
    assert all(value for name, value in result.items() if name.endswith("agree") or name.endswith("agrees"))
    assert result["loss_sum"][0] == pytest.approx(result["loss_sum"][1], rel=LOSS_BOUND[precision])
    assert result["logits"] < 10 * LOSS_BOUND[precision]
    assert result["logits shape"] == [8, 64]


def largest(pair: list[list[float]], *, relative: bool = False) -> float:
    assert len(pair[0]) == len(pair[1]) > 0
    return max(abs(a - b) / (abs(b) if relative else 1) for a, b in zip(*pair, strict=True))


def test_every_step_of_one_layout_equals_one_process(two: dict[str, Any]) -> None:
    check(ONE, two[ONE])


@pytest.mark.full
@pytest.mark.parametrize("run", MANY)
def test_every_step_is_that_of_one_process(many: dict[str, Any], run: str) -> None:
    check(run, many[run])


@pytest.mark.slow
@pytest.mark.parametrize("run", FOUR)
def test_with_data_parallelism_too(four: dict[str, Any], run: str) -> None:
    check(run, four[run])


@pytest.mark.parametrize("run", UNMARKED)
def test_unmarked_parameter_changes_the_norm(two: dict[str, Any], run: str) -> None:
    assert largest(two[run]["norms"], relative=True) > 0.1
    assert largest(two[run]["losses"]) < 1e-3  # losses hardly show the error


@pytest.mark.parametrize("run", ADDED)
def test_gradients_of_a_parameter_used_on_part_of_the_heads_are_summed(two: dict[str, Any], run: str) -> None:
    check(run, two[run])


def test_without_the_sum_copies_drift_apart(two: dict[str, Any]) -> None:
    assert not two[UNSUMMED]["replicated agree"]


def test_initial_weights_and_logits_equal_one_process(two: dict[str, Any]) -> None:
    for checks in two["parts"]["initial weights"]:
        assert checks == dict.fromkeys(checks, True)
        assert len(checks) == 4 * 6  # four checks of six shapes


def test_sharded_loss_equals_the_plain_loss(two: dict[str, Any]) -> None:
    for errors in two["parts"]["loss"]:
        assert errors.pop("nothing") == [0.0, 1.0]  # all targets ignored: a sum of 0, and a mean of NaN
        assert len(errors) == 24  # two dtypes, two reductions, three ways of chunking, without and with z-loss
        for name, (value, gradient) in errors.items():
            bounds = (2e-6, 2e-6) if "float32" in name else (2e-3, 2e-2)
            assert value < bounds[0], name
            assert gradient < bounds[1], name


def test_dropout_is_alike_where_ranks_hold_the_same_and_differs_where_not(two: dict[str, Any]) -> None:
    for checks in two["parts"]["dropout"]:
        assert checks == dict.fromkeys(checks, True)
        assert sum(name.endswith(".drop alike") for name in checks) == 5


def test_checkpoints_move_between_tensor_parallel_ranks_and_one_process(two: dict[str, Any]) -> None:
    pairs = two["parts"]["checkpoints"]
    assert len(pairs) == 4
    for pair in pairs.values():
        assert largest(pair) <= LOSS_BOUND["fp32"]


@pytest.mark.parametrize(("message", "changes", "size"), [
    ("2 key/value heads", {"n_kv_head": 2}, 4), ("hidden units", {"intermediate_size": 127}, 2),
    ("65 vocabulary rows", {"vocab_size": 65, "vocab_multiple": 1}, 2)])
def test_indivisible_models_are_rejected(message: str, changes: dict[str, int], size: int) -> None:
    with torch.device("meta"):
        model = GPT(get_model_config("tiny-llama", **changes))
    with pytest.raises(UserError, match=message):
        apply(model, None, 0, size)
