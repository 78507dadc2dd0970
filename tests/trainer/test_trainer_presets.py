"""Presets against the published recipes, and the printed settings."""

from __future__ import annotations

import pytest

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.model.init import decay_counts
from ezpz_llm.training.model.parameters import parameter_count
from ezpz_llm.training.trainer.callbacks.selfcheck import expected_first_loss
from ezpz_llm.training.trainer.check_report import effective_settings, setting_warnings, settings_by_source
from ezpz_llm.training.trainer.config import FIELDS, PRESETS
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import RunPlan, plan_run
from ezpz_llm.training.trainer.schedule import learning_rate

# Preset: peak rate, tokens per step, steps, warm-up, end of the cosine, context, parameters with padded embedding.
RUNS = {
    "gpt2-124m-fineweb": (6e-4, 2**19, 19073, 715, 19073, 1024, 124_475_904),
    "gpt2-355m-fineweb": (3e-4, 2**19, 19073, 715, 19073, 1024, 354_871_296),
    "gpt2-774m-fineweb": (2.5e-4, 2**19, 19073, 715, 19073, 1024, 774_090_240),
    "gpt2-1558m-fineweb": (2e-4, 2**20, 9537, 358, 9537, 1024, 1_557_686_400),
    "gpt3-125m": (6e-4, 2**19, 572_205, 715, 495_911, 2048, 124_475_904 + 1024 * 768),
    "llama3-1b": (3e-4, 2**20, 19073, 2000, 19073, 2048, 1_241_581_568),
}
FULL = {0: 8.3916e-07, 1: 1.6783e-06, 200: 1.6867e-04, 201: 1.6951e-04, 714: 6.0000e-04, 715: 6.0000e-04,
        1000: 5.9968e-04, 5000: 5.3060e-04, 10364: 3.0831e-04, 19073: 6.0000e-05, 30000: 6.0000e-05}


def planned(*argv: str, ranks: int = 8) -> RunPlan:
    return plan_run(parse(list(argv)), ranks)


def rate(plan: RunPlan, step: int) -> float:
    return learning_rate(step, plan.config)


@pytest.mark.parametrize("preset", RUNS)
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_every_number_of_a_preset_for_any_number_of_ranks(preset, ranks):
    plan = planned("--preset", preset, ranks=ranks)
    lr, tokens, steps, warmup, decay, context, parameters = RUNS[preset]
    config, batch = plan.config, plan.resolved.batch
    assert (config.lr, plan.tokens_per_step, config.steps) == (lr, tokens, steps)
    assert (config.warmup_steps, config.decay_steps, plan.model.block_size) == (warmup, decay, context)
    assert config.min_lr == pytest.approx(lr / 10)
    assert (config.beta1, config.beta2, config.eps, config.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
    assert (plan.resolved.clip, plan.resolved.precision, config.seed) == (1.0, "bf16_autocast", 1337)
    assert (config.corpus, config.tokenizer, plan.model.dropout) == ("fineweb-edu", "gpt2", 0.0)
    assert config.eval_tokens == 10_485_760
    assert parameter_count(plan.model) == parameters
    assert batch.micro_batch * batch.accumulation * batch.dp_size == batch.global_batch
    assert setting_warnings(plan) == []


def test_golden_learning_rates_of_a_preset():
    plan = planned("--preset", "gpt2-124m-fineweb")
    for step, expected in FULL.items():
        assert rate(plan, step) == pytest.approx(expected, rel=1e-4), step
    gpt3 = planned("--preset", "gpt3-125m")
    assert rate(gpt3, 0) > 0
    assert rate(gpt3, 495_910) == pytest.approx(6e-5, rel=1e-6)
    assert rate(gpt3, 495_911) == rate(gpt3, 572_204) == pytest.approx(6e-5)


def test_the_character_run_of_85_million():
    plan = planned("--preset", "wordplay-shakespeare-char", ranks=4)
    assert plan.tokens_per_step == 262_144
    assert plan.resolved.batch.micro_batch == 64
    config = plan.config
    assert (config.lr, config.warmup_steps, config.steps, config.beta2) == (6e-4, 100, 1000, 0.95)
    assert rate(plan, 999) == pytest.approx(6e-5, rel=1e-3)
    assert parameter_count(plan.model) - plan.model.block_size * plan.model.n_embd == 85_003_776
    assert decay_counts(plan.model) == [(50, 85_771_008), (25, 19_200)]


def test_decay_groups_and_first_losses_of_the_published_sizes():
    plans = {preset: planned("--preset", preset) for preset in RUNS}
    assert decay_counts(plans["gpt2-124m-fineweb"].model) == [(50, 124_354_560), (98, 121_344)]
    for preset, loss in (("gpt2-124m-fineweb", 10.979), ("gpt2-355m-fineweb", 11.030),
                         ("gpt2-774m-fineweb", 11.081), ("gpt2-1558m-fineweb", 11.145), ("llama3-1b", 12.19)):
        # Published without padding: ln(50304 / 50257) is 0.0009.
        assert expected_first_loss(plans[preset].model) == pytest.approx(loss, abs=4e-3)


def test_every_number_can_be_overridden_and_shorter_runs_keep_their_shape():
    plan = planned("--preset", "gpt3-125m", "--steps", "1000", "--lr", "1e-3", "--global-batch-size", "64")
    assert (plan.config.warmup_steps, plan.config.decay_steps) == (1, 866)
    assert (plan.config.min_lr, plan.resolved.batch.global_batch) == (1e-4, 64)
    for preset in PRESETS:
        assert planned("--preset", preset, "--steps", "1", ranks=1).config.decay_steps == 1


def test_a_micro_batch_that_is_typed_is_taken_as_it_is():
    assert planned("--preset", "gpt2-124m-fineweb", "--micro-batch-size", "16").resolved.batch.accumulation == 4
    with pytest.raises(UserError, match="not a multiple of micro-batch 48"):
        planned("--preset", "gpt2-124m-fineweb", "--micro-batch-size", "48")


def test_a_horizon_beyond_the_run_is_told():
    """Plan a cosine of 600,000 steps in a run of 1,000: its last learning rate is the peak."""
    plan = planned("--steps", "1000", "--decay-steps", "600000", "--lr", "6e-4", ranks=1)
    assert "ends at 0.0006 instead of 6e-05" in setting_warnings(plan)[0]


def test_all_settings_are_printed_by_source():
    plan = planned("--preset", "gpt2-124m-fineweb", "--steps", "1000")
    text = settings_by_source(plan)
    assert effective_settings(plan).keys() >= FIELDS.keys()
    flat = " ".join(text.split())
    for name in FIELDS:
        assert f" {name} " in flat, name
    groups = dict(line.strip().split(": ", 1) for line in text.replace("\n    ", " ").splitlines()[1:])
    assert groups["command line"] == "steps 1000"
    assert "lr 0.0006" in groups["preset gpt2-124m-fineweb"]
    assert groups["preset gpt2-124m-fineweb, in proportion to 1000 steps"] == "warmup_steps 37"
    assert groups["a tenth of lr"] == "min_lr 6e-05"
    assert "n_layer 12" in groups["model gpt2-124m"]
    assert max(map(len, text.splitlines())) <= 120
