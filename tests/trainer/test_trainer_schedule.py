"""Learning-rate schedules against published tables, and DeepSpeed's schedules against its classes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.trainer.check_report import setting_warnings
from ezpz_llm.training.trainer.config import TrainConfig
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import plan_run
from ezpz_llm.training.trainer.schedule import learning_rate

FULL = {0: 8.3916e-07, 1: 1.6783e-06, 200: 1.6867e-04, 201: 1.6951e-04, 714: 6.0000e-04, 715: 6.0000e-04,
        1000: 5.9968e-04, 5000: 5.3060e-04, 10364: 3.0831e-04, 19073: 6.0000e-05, 30000: 6.0000e-05}
DEBUG = {0: 6.0000e-05, 1: 1.2000e-04, 9: 6.0000e-04, 10: 6.0000e-04, 11: 5.9917e-04, 30: 3.3000e-04,
         49: 6.0832e-05, 50: 6.0000e-05, 60: 6.0000e-05}


@pytest.mark.parametrize(("table", "warmup", "steps"), [(FULL, 715, 19073), (DEBUG, 10, 50)])
def test_published_learning_rates(table, warmup, steps):
    for step, expected in table.items():
        rate = learning_rate(step, TrainConfig(lr=6e-4, min_lr=6e-5, warmup_steps=warmup, decay_steps=steps))
        assert rate == pytest.approx(expected, rel=1e-4), step


def rates(steps: int, *argv: str) -> list[float]:
    """Return the learning rates of a planned run's steps."""
    config = plan_run(parse(["--steps", str(steps), "--lr", "1e-3", *argv]), 1).config
    return [learning_rate(step, config) for step in range(steps)]


def test_the_trainers_own_schedules() -> None:
    warm = [2.5e-4, 5e-4, 7.5e-4, 1e-3]
    assert rates(8, "--schedule", "constant", "--warmup-steps", "4") == pytest.approx(warm + 4 * [1e-3])
    assert rates(8, "--schedule", "linear", "--warmup-steps", "4", "--min-lr", "0") == pytest.approx(
        [*warm, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    # Stable, then a decay over a fifth of the run; the step after the last would have the minimum.
    wsd = rates(20, "--schedule", "wsd", "--warmup-steps", "4", "--min-lr", "2e-4")
    assert wsd == pytest.approx([*warm, *13 * [1e-3], 8e-4, 6e-4, 4e-4])
    assert rates(20, "--schedule", "wsd", "--wsd-decay-steps", "10", "--warmup-steps", "4")[10:12] == pytest.approx(
        [1e-3, 9.1e-4])
    log = rates(5, "--schedule", "constant", "--warmup-steps", "3", "--warmup-type", "log",
                "--warmup-min-lr", "1e-4")
    assert log == pytest.approx([1e-4 + 9e-4 * math.log(n) / math.log(4) for n in (2, 3, 4)] + 2 * [1e-3])


PEAK, FLOOR, DECAY, WSD_DECAY = 4e-3, 5e-4, 40, 9
CURVES = {
    # (1 + cos(pi x)) / 2 is the squared cosine of half the angle.
    "cosine": lambda step, progress: math.cos(math.pi / 2 * progress) ** 2,
    "linear": lambda step, progress: 1 - progress,
    "constant": lambda step, progress: 1.0,
    "wsd": lambda step, progress: min(1.0, max(0.0, (DECAY - step) / WSD_DECAY)),
}
"""Height above the floor (0 to 1) at a step, from the completed share of the decay."""


@pytest.mark.parametrize("begin", [0.0, 1e-4])
@pytest.mark.parametrize("shape", ["linear", "log"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("name", CURVES)
def test_every_step_of_a_warm_up_a_decay_and_the_steps_after_it(name: str, warmup: int, shape: Any,
                                                               begin: float) -> None:
    config = TrainConfig(schedule=name, lr=PEAK, min_lr=FLOOR, warmup_steps=warmup, decay_steps=DECAY,
                         wsd_decay_steps=WSD_DECAY, warmup_type=shape, warmup_min_lr=begin)
    for step in range(DECAY + 5):
        number = step + 1
        if number <= warmup:
            share = number / warmup if shape == "linear" else math.log(number + 1, warmup + 1)
            expected = begin + (PEAK - begin) * share
        else:
            progress = min(1.0, (step - warmup) / (DECAY - warmup))
            expected = FLOOR + (PEAK - FLOOR) * CURVES[name](step, progress)
        assert learning_rate(step, config) == pytest.approx(expected, rel=1e-12), number


@pytest.mark.parametrize(("argv", "words"), [
    (["--schedule", "cosin"], "did you mean cosine"),
    (["--schedule", "wsd", "--warmup-steps", "9"], "a warm-up of 9 steps and a decay of 2 do not fit"),
    (["--schedule", "linear", "--warmup-steps", "11"], "does not end within 10"),
    (["--decay-steps", "3", "--warmup-steps", "4"], "or more --decay-steps"),
    (["--schedule", "constant", "--min-lr", "1e-5"], "constant ends at 0.001, not at 1e-05"),
    (["--warmup-min-lr", "1"], "would fall from 1"),
    (["--schedule", "WarmupLR", "--warmup-steps", "0"], "DeepSpeed rejects WarmupLR with 0 warm-up steps"),
])
def test_impossible_schedules_are_rejected(argv: list[str], words: str) -> None:
    with pytest.raises(UserError) as raised:
        rates(10, *argv)
    assert words in str(raised.value)


def test_a_schedule_that_outlasts_the_run_is_a_warning() -> None:
    def warnings(*argv: str) -> str:
        return " ".join(setting_warnings(plan_run(parse(["--steps", "10", *argv]), 1)))

    assert "its linear schedule only after step 20" in warnings("--schedule", "linear", "--decay-steps", "20")
    assert "never reaches its peak" in warnings("--schedule", "constant", "--warmup-steps", "20")
    assert warnings("--schedule", "constant", "--decay-steps", "20") == ""


@pytest.mark.parametrize(("argv", "first"), [
    (["--schedule", "WarmupDecayLR", "--decay-steps", "10"], 12),
    (["--schedule", "WarmupDecayLR", "--decay-steps", "10", "--warmup-min-lr", "1e-5"], None),
    (["--schedule", "WarmupCosineLR", "--decay-steps", "10", "--min-lr", "0"], 12),
    (["--min-lr", "0", "--decay-steps", "98"], 99), (["--min-lr", "0", "--decay-steps", "99"], None),
    (["--schedule", "wsd", "--min-lr", "0", "--decay-steps", "50"], 51),
    (["--schedule", "linear", "--min-lr", "0"], None), (["--schedule", "constant"], None)])
def test_a_learning_rate_of_0_before_the_last_step_is_a_warning(argv: list[str], first: int | None) -> None:
    plan = plan_run(parse(["--steps", "100", *argv]), 1)
    around = [learning_rate(step, plan.config) == 0 for step in (first - 2, first - 1)] if first else []
    assert around in ([], [False, True])
    text = " ".join(setting_warnings(plan))
    assert ("Pass --decay-steps 100" in text) == (first is not None)
    assert first is None or f"the learning rate is 0 from step {first} to 100, which train nothing" in text


def test_a_learning_rate_of_almost_0_before_the_last_step_is_a_warning(own_config) -> None:
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
    path = own_config({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "scheduler": scheduler})
    text = " ".join(setting_warnings(plan_run(parse(["--steps", "100", "--ds-config", path]), 1)))
    assert "the learning rate is 1e-07 from step 11 to 100, which train almost nothing" in text


THEIRS = {
    "log": ("WarmupLR", {"warmup_num_steps": 5, "warmup_max_lr": 1e-3}),
    "linear": ("WarmupLR", {"warmup_num_steps": 5, "warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3,
                            "warmup_type": "linear"}),
    "one step": ("WarmupLR", {"warmup_num_steps": 1, "warmup_max_lr": 1e-3}),
    "decay": ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 5, "warmup_type": "linear"}),
    "decay to a floor": ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 5, "warmup_min_lr": 2e-4}),
    "all warm-up": ("WarmupDecayLR", {"total_num_steps": 6, "warmup_num_steps": 9}),
    "cosine": ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 5}),
    "cosine by ratios": ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_min_ratio": 0.1,
                                            "cos_min_ratio": 0.2, "warmup_type": "linear"}),
    "defaults": ("WarmupLR", {}),
}


@pytest.mark.parametrize("title", THEIRS)
def test_deepspeeds_schedulers_step_by_step(title: str, own_config) -> None:
    """Compare the learning rates of a ds_config's scheduler with those of DeepSpeed's class."""
    import torch
    from deepspeed.runtime import lr_schedules

    kind, params = THEIRS[title]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    expected = []
    for _ in range(15):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    path = own_config({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                       "scheduler": {"type": kind, "params": params}})
    config = plan_run(parse(["--steps", "15", "--ds-config", path]), 1).config
    assert [learning_rate(step, config) for step in range(15)] == pytest.approx(expected, rel=1e-14, abs=0)
    assert config.schedule == kind


@pytest.fixture
def own_config(tmp_path):
    """Return a function that writes a ds_config and returns its path."""
    import json

    def write(values: dict[str, Any]) -> str:
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(values))
        return str(path)
    return write
