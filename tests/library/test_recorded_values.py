"""Arguments of `record`: numbers of Python, NumPy and torch are written as they are, others are rejected."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

import ezpz_llm


def recorded(run: ezpz_llm.Run, step: Any = None, loss: Any = 0.5, **values: Any) -> dict[str, Any]:
    """Record a step, by default the next, and return its line."""
    ezpz_llm.record(run.step + 1 if step is None else step, loss=loss, **values)
    run.flush()
    return dict(json.loads((run.run_dir / "metrics.jsonl").read_text().splitlines()[-1]))


FORMS = [float, np.float32, np.float64, np.float16, np.array, lambda x: np.array([x]), lambda x: np.array([[x]]),
         torch.tensor, lambda x: torch.tensor([x]), lambda x: torch.tensor(x, dtype=torch.bfloat16),
         lambda x: torch.tensor([[x]], requires_grad=True)]


@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_all_kinds(run: ezpz_llm.Run, form: Any):
    line = recorded(run, loss=form(0.5), tokens=form(4.0), lr=form(0.25), grad_norm=form(2.0), acc=form(0.75))
    assert (line["loss"], line["lr"], line["grad_norm"], line["acc"]) == (0.5, 0.25, 2, 0.75)
    assert line["tokens_per_second"] * line["step_time_s"] == pytest.approx(4)


@pytest.mark.parametrize("form", [int, np.int64, np.uint8, np.array, lambda x: np.array([x]), torch.tensor,
                                  lambda x: torch.tensor([x], dtype=torch.int32)])
def test_whole_numbers_of_all_kinds(run: ezpz_llm.Run, form: Any):
    step = run.step + 1
    line = recorded(run, form(step), form(3), tokens=form(5), lr=form(1), count=form(7))
    assert (line["step"], line["loss"], line["lr"], line["count"]) == (step, 3, 1, 7)
    assert type(line["step"]) is type(line["count"]) is int


@pytest.mark.parametrize("value", [0.1, 2**53 + 1, 2**63 - 1, -1, 1e-300, np.float64(0.1), torch.tensor(2**53 + 1),
                                   torch.tensor(0.1, dtype=torch.float64)])
def test_figures_are_exact(run: ezpz_llm.Run, value: Any):
    assert recorded(run, mine=value)["mine"] == value


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True)])
def test_booleans_are_figures(run: ezpz_llm.Run, value: Any):
    assert repr(recorded(run, is_best=value)["is_best"]) == "1"


@pytest.mark.parametrize("value", [math.nan, -math.inf, np.float32("nan"), torch.tensor(math.inf)])
def test_non_finite_numbers_are_null(run: ezpz_llm.Run, value: Any):
    line = recorded(run, loss=value, lr=value, grad_norm=value, mine=value, none=None)
    assert [line[name] for name in ("loss", "lr", "grad_norm", "mine", "none")] == [None] * 5


NOT_NUMBERS = ["x", "1", b"1", [1.0], (1,), {}, object(), 1j, np.array([1, 2]), np.array([]), np.array(["x"]),
               np.str_("x"), torch.ones(2), torch.ones(0), torch.tensor(1j), torch.ones(1, device="meta"),
               torch.ones(1).to_sparse(), 10**400]


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["step", "loss", "tokens", "lr", "grad_norm", "val_acc"])
def test_other_values_are_rejected(run: ezpz_llm.Run, name: str, value: Any):
    recorded(run)
    with pytest.raises(ezpz_llm.UserError, match=rf"^{name} (is|has) "):
        recorded(run, **{name: value})
    assert recorded(run)["step"] == 2


@pytest.mark.parametrize(("name", "value"), [
    ("step", True), ("step", 1.5), ("step", 5.0), ("step", 0), ("step", -3), ("step", 2**53 + 1), ("step", 2**60),
    ("step", np.float64(7)), ("step", torch.tensor(7.0)), ("step", torch.tensor(True)), ("step", np.bool_(True)),
    ("step", math.nan), ("step", None), ("loss", None), ("loss", True), ("tokens", -1), ("tokens", math.nan),
    ("tokens", True), ("lr", True), ("grad_norm", False)])
def test_values_that_make_no_sense_are_rejected(run: ezpz_llm.Run, name: str, value: Any):
    with pytest.raises(ezpz_llm.UserError, match=f"^{name} is ") as error:
        ezpz_llm.record(**{"step": run.step + 1, "loss": 1.0, name: value})
    assert error.value.instead


def test_the_message_tells_what_to_write(run: ezpz_llm.Run):
    with pytest.raises(ezpz_llm.UserError) as error:
        recorded(run, accuracy=torch.ones(3, 2))
    assert error.value.found == "accuracy has the shape (3, 2), but must be a number"
    assert error.value.instead == "a number, such as accuracy.mean()"


@pytest.mark.parametrize("name", ["step_time_s", "tokens_per_second", "tokens_per_second_per_device", "data_s",
                                  "forward_s", "backward_s", "optimizer_s", "other_s"])
def test_names_of_other_keys_are_rejected(run: ezpz_llm.Run, name: str):
    with pytest.raises(ezpz_llm.UserError, match=f"{name} is a key of every line"):
        recorded(run, **{name: 1.0})


def test_keys_of_a_line_are_reserved(run: ezpz_llm.Run):
    """Check that no figure can replace a value that `record` writes."""
    line = recorded(run, tokens=1)
    taken = set(line) - {"step", "loss", "lr", "grad_norm"}  # arguments of record
    assert taken
    for name in taken:
        with pytest.raises(ezpz_llm.UserError, match=name):
            recorded(run, **{name: 1.0})


