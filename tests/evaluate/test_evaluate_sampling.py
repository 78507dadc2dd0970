"""Sampling: the tokens that are drawn, and the state that must not change."""

from __future__ import annotations

import copy

import pytest
import torch

from ezpz_llm.core.base import UserError
from ezpz_llm.training.evaluate.sampling import sample
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import init_weights

CONFIG = get_model_config("tiny-gpt2", n_layer=2, block_size=16, dropout=0.2)


@pytest.fixture
def model():
    model = GPT(CONFIG)
    init_weights(model, model.config, 3)
    return model


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def last(model):
    return lambda tokens: model(tokens, last_only=True)[:, -1]


def draw(forward, prompt, **options):
    settings = {"new_tokens": 40, "generator": seeded(), "block_size": 16, "vocab_size": 257, "top_k": 5}
    return sample(forward, prompt, **(settings | options))


def test_each_token_is_among_the_k_likeliest_of_its_cropped_context(model):
    lengths = []

    def forward(tokens):
        lengths.append(tokens.shape[1])
        return model(tokens)[:, -1]

    model.eval()
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    ids = draw(forward, prompt)
    assert ids.shape == (2, 43)
    assert torch.equal(ids[:, :3], prompt)
    assert lengths == [min(16, 3 + i) for i in range(40)]
    for at in range(3, 43):
        top = model(ids[:, max(0, at - 16):at])[:, -1, :257].topk(5).indices
        assert bool((top == ids[:, at:at + 1]).any(dim=1).all()), at
    assert torch.equal(draw(last(model), prompt, top_k=1)[:, 3], model(prompt)[:, -1, :257].argmax(dim=-1))


def test_padded_ids_are_never_drawn():
    logits = torch.zeros(1, 320)
    logits[..., 257:] = 1e4
    drawn = draw(lambda tokens: logits, torch.zeros(1, 1, dtype=torch.long), new_tokens=600, top_k=None)
    assert drawn.max() < 257
    assert len(drawn.unique()) > 200
    capped = draw(lambda tokens: logits, torch.zeros(1, 1, dtype=torch.long), new_tokens=20, top_k=1000)
    assert capped.max() < 257


def test_temperature_sharpens():
    logits = torch.zeros(1, 320)
    logits[..., 7] = 1.0
    prompt = torch.zeros(1, 1, dtype=torch.long)
    cold, warm = (draw(lambda tokens: logits, prompt, new_tokens=200, top_k=None, temperature=temperature)
                  for temperature in (0.05, 1.0))
    assert (cold == 7).sum() == 200
    assert (warm == 7).sum() < 20


def test_same_seed_same_text_and_other_seed_other_text(model):
    model.eval()
    prompt = torch.tensor([[1]])
    first, again, other = (draw(last(model), prompt, generator=seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_training_run_does_not_notice_sampling(model):
    """Sample with dropout on and half-accumulated gradients: weights after five steps are bitwise equal."""
    def train(model, sampling):
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(5):
            for micro in range(2):
                tokens = torch.randint(257, (2, 17), generator=seeded(10 * step + micro))
                model(tokens[:, :-1], tokens[:, 1:]).backward()
                if sampling:
                    model.eval()
                    grads = [p.grad.clone() for p in model.parameters()]
                    state = torch.get_rng_state()
                    draw(last(model), torch.tensor([[1]]), new_tokens=4)
                    assert torch.equal(torch.get_rng_state(), state)
                    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
                    model.train()
            optimizer.step()
            optimizer.zero_grad()
        return model

    with_samples, without = train(copy.deepcopy(model), True), train(copy.deepcopy(model), False)
    assert all(torch.equal(p, q) for p, q in zip(with_samples.parameters(), without.parameters(), strict=True))


@pytest.mark.parametrize("top_k", [5, None])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_after_all_forward_passes(value, top_k):
    """An error before the last forward pass would leave the other ranks of a sharded model waiting."""
    logits, calls = torch.zeros(1, 320), []
    logits[0, 7] = value

    def forward(tokens):
        calls.append(tokens)
        return logits

    with pytest.raises(UserError, match="the logits are not finite"):
        draw(forward, torch.zeros(1, 1, dtype=torch.long), new_tokens=6, top_k=top_k)
    assert len(calls) == 6
