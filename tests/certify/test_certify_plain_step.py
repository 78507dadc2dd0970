"""Step definition against torch's modules and numerical derivatives."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import init_weights
from ezpz_llm.training.model.loss import configure_head
from ezpz_llm.training.trainer import schedule
from ezpz_llm.training.trainer.config import RunConfig
from ezpz_llm.verify.certify import plain_step
from ezpz_llm.verify.certify.plain_step import ARITHMETIC, EXACT, IGNORED, Settings, Tensors

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 29, "vocab_multiple": 8,
         "dropout": 0.0}
SHAPES = {
    "gpt2": {**SMALL}, "gpt2-without-biases": {**SMALL, "bias": False}, "gpt2-untied": {**SMALL, "tied": False},
    "llama": {**SMALL, "n_kv_head": 2}, "llama-untied": {**SMALL, "n_kv_head": 1, "tied": False},
}


def shape(name: str) -> ModelConfig:
    return get_model_config(f"tiny-{name.partition('-')[0]}", **SHAPES[name])


def settings_of(config: ModelConfig, clip: float, z_loss: float = 0.0) -> Settings:
    return Settings(config.n_head, config.n_kv_head, config.norm, config.norm_eps, config.rope_theta, clip,
                    (0.9, 0.95), 1e-8, 0.1, z_loss)


def in_fp64(config: ModelConfig) -> tuple[GPT, Tensors]:
    """Return a model whose gains and biases are not ones and zeros, and its weights by name."""
    model = GPT(config)
    init_weights(model, config, seed=3)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.double()
    return model, {name: value.detach().clone() for name, value in model.named_parameters()}


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return micro-batches of three sequences with different numbers of ignored targets."""
    generator = torch.Generator().manual_seed(11)
    micro_batches = []
    for number in range(count):
        rows = torch.randint(SMALL["vocab_size"], (3, SMALL["block_size"] + 1), generator=generator)
        targets = rows[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.1 * (number + 1)] = IGNORED
        micro_batches.append((rows[:, :-1].contiguous(), targets))
    return micro_batches


def test_it_imports_nothing_that_it_checks() -> None:
    tree = ast.parse(Path(plain_step.__file__).read_text())
    names = {name for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))
             for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])}
    assert names <= {"__future__", "math", "collections.abc", "dataclasses", "typing", "torch"}
    assert len(Path(plain_step.__file__).read_text().splitlines()) <= 400


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("name", SHAPES)
def test_loss_and_gradients_match_the_model_in_every_shape(name: str, z_loss: float) -> None:
    """The model computes rotary angles and sums of losses in fp32, which gives an error of 2^-24 per term."""
    config = shape(name)
    model, weights = in_fp64(config)
    configure_head(model, 0, z_loss)
    micro_batches = batches(2)
    losses = []
    for tokens, targets in micro_batches:
        losses.append(model(tokens, targets))
        (losses[-1] / 2).backward()
    loss, gradients = plain_step.gradients(weights, micro_batches, settings_of(config, 1.0, z_loss))
    assert loss == pytest.approx(sum(each.item() for each in losses) / 2, rel=1e-6)
    assert gradients.keys() == weights.keys()
    for parameter_name, parameter in model.named_parameters():
        apart = (parameter.grad - gradients[parameter_name]).norm() / parameter.grad.norm()
        assert apart < 1e-5, parameter_name


def test_an_evaluation_counts_every_target_once() -> None:
    """The mean of the batches' means would differ, because their numbers of ignored targets do."""
    config = shape("gpt2")
    model, weights = in_fp64(config)
    summed = sum(model(tokens, targets, reduction="sum").item() for tokens, targets in batches(3))
    counted = sum((targets != IGNORED).sum().item() for _, targets in batches(3))
    loss = plain_step.evaluation_loss(weights, batches(3), settings_of(config, 1.0, z_loss=1e-2))
    assert loss == pytest.approx(summed / counted, rel=1e-6)
    means, _ = plain_step.gradients(weights, batches(3), settings_of(config, 1.0))
    assert abs(means - loss) > 1e-4 * loss


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_gradient_matches_the_numerical_derivative_of_the_loss(name: str) -> None:
    config = shape(name)
    _, weights = in_fp64(config)
    micro_batches, settings = batches(2), settings_of(config, 1.0)
    _, gradients = plain_step.gradients(weights, micro_batches, settings)
    direction = {key: torch.randn(value.shape, dtype=torch.float64) for key, value in weights.items()}
    step = 1e-6
    up, down = (plain_step.gradients({key: value + side * step * direction[key] for key, value in weights.items()},
                                     micro_batches, settings)[0] for side in (1, -1))
    slope = sum((gradients[key] * direction[key]).sum().item() for key in weights)
    assert (up - down) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_the_update_matches_clipping_and_adamw_of_torch() -> None:
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator).double()
               for name, shape in {"a": (6, 4), "b": (4,)}.items()}
    leaves = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    numbers = settings_of(shape("gpt2"), 0.5)
    optimizer = torch.optim.AdamW([{"params": [leaves["a"]], "weight_decay": numbers.weight_decay},
                                   {"params": [leaves["b"]], "weight_decay": 0.0}],
                                  lr=1.0, betas=numbers.betas, eps=numbers.eps)
    state = plain_step.initial_state(weights)
    for step, size in enumerate((1.0, 0.01, 1e-9), 1):  # clipped, not clipped, near Adam's epsilon
        gradients = {name: size * torch.randn(value.shape, generator=generator).double()
                     for name, value in weights.items()}
        rate = plain_step.cosine_rate(step, 1e-2, 1e-3, 2, 10)
        for name, leaf in leaves.items():
            leaf.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(list(leaves.values()), numbers.clip)
        assert plain_step.global_norm(gradients) == pytest.approx(norm.item(), rel=1e-12)
        factor = plain_step.clip_factor(norm.item(), numbers.clip)
        assert (factor < 1) == (size == 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        clipped = {name: value * factor for name, value in gradients.items()}
        state = plain_step.apply_adamw(state, clipped, rate, numbers)
        assert state.step == step
        for name, leaf in leaves.items():
            torch.testing.assert_close(state.weights[name], leaf.detach(), rtol=1e-12, atol=1e-15)
            torch.testing.assert_close(state.second[name], optimizer.state[leaf]["exp_avg_sq"], rtol=1e-12, atol=0)


def test_a_clip_of_0_disables_clipping() -> None:
    assert plain_step.clip_factor(1e9, 0.0) == 1.0
    assert plain_step.clip_factor(0.3, 0.5) == 1.0
    assert plain_step.clip_factor(5.0, 0.5) == pytest.approx(0.1, rel=1e-6)


def test_a_step_is_composed_of_its_parts() -> None:
    config = shape("llama")
    _, weights = in_fp64(config)
    numbers, micro_batches = settings_of(config, 0.1), batches(2)
    loss, norm, state = plain_step.train_step(plain_step.initial_state(weights), micro_batches, 1e-2, numbers)
    expected_loss, gradients = plain_step.gradients(weights, micro_batches, numbers)
    assert (loss, norm) == (expected_loss, plain_step.global_norm(gradients))
    clipped = {name: value * (0.1 / (norm + 1e-6)) for name, value in gradients.items()}
    due = plain_step.apply_adamw(plain_step.initial_state(weights), clipped, 1e-2, numbers)
    assert all(torch.equal(state.weights[name], due.weights[name]) for name in weights)
    loss_after, _ = plain_step.gradients(state.weights, micro_batches, numbers)
    assert loss_after < loss


def test_the_learning_rate_matches_the_cosine_of_the_trainer() -> None:
    config = RunConfig(lr=6e-4, min_lr=6e-5, warmup_steps=7, decay_steps=40, schedule="cosine")
    for step in range(50):
        assert plain_step.cosine_rate(step, 6e-4, 6e-5, 7, 40) == pytest.approx(
            schedule.learning_rate(step, config), rel=1e-12)


@pytest.mark.parametrize("dtype", ARITHMETIC)
def test_rounding_and_reordering_have_the_stated_size(dtype: str) -> None:
    """The error against fp64 must match a mantissa of 8 bits for bf16 matmuls and of 24 bits for fp32."""
    config = shape("gpt2")
    _, weights = in_fp64(config)
    micro_batches, numbers, arithmetic = batches(1), settings_of(config, 1.0), ARITHMETIC[dtype]
    unit = torch.finfo(arithmetic.products).eps / 2

    def apart(actual: dict, expected: dict) -> float:
        squares = sum((actual[key] - expected[key]).square().sum().item() for key in actual)
        return math.sqrt(squares) / plain_step.global_norm(expected)

    _, exact = plain_step.gradients(weights, micro_batches, numbers, EXACT)
    _, plain = plain_step.gradients(weights, micro_batches, numbers, arithmetic)
    _, again = plain_step.gradients(weights, micro_batches, numbers, arithmetic)
    _, reordered = plain_step.gradients(weights, micro_batches, numbers, arithmetic.reordered(1))
    assert apart(again, plain) == 0
    assert unit / 10 < apart(plain, exact) < 10 * unit
    assert arithmetic.errors / 10 < apart(reordered, plain) < 20 * arithmetic.errors
