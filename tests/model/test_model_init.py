"""Initial weights, decay groups, and the loss of an untrained model."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import TILE, decay_groups, fill, init_weights, initial_std, initial_values
from ezpz_llm.training.model.parameters import Placement, parameter_shapes, whole_box


def initialised(config, seed=1337):
    model = GPT(config)
    init_weights(model, model.config, seed)
    return model


@pytest.fixture(scope="module")
def gpt2():
    """GPT-2 124M, initialized once (0.5 GB, one second)."""
    return initialised(get_model_config("gpt2-124m"))


def expected_loss(config):
    """Return ln V + C 0.02^2 / 2: logits of unit-variance activations with a tied embedding are N(0, C 0.02^2)."""
    return math.log(config.padded_vocab_size) + config.n_embd * 0.02 ** 2 / 2


def test_parameter_missing_in_the_table_is_an_error():
    config = get_model_config("tiny-llama")
    with pytest.raises(UserError, match=r"transformer\.h\.0\.attn\.q_gain is not in the table of parameters"):
        initial_values(config, 0)("transformer.h.0.attn.q_gain", ((0, 8),))


@pytest.mark.full
def test_stds_of_the_124m(gpt2):
    for name, p in gpt2.named_parameters():
        if p.dim() < 2:
            assert bool((p == (1 if name.endswith("weight") else 0)).all()), name
        else:
            expected = 0.02 / math.sqrt(24) if name.endswith("c_proj.weight") else 0.02
            assert abs(p.std().item() / expected - 1) < 0.02, name
            assert abs(p.mean().item()) < 5 * expected / math.sqrt(p.numel()), name


def test_step_0_loss_of_the_124m(gpt2):
    torch.manual_seed(0)
    tokens = torch.randint(50257, (2, 97))
    with torch.no_grad():
        loss = gpt2(tokens[:, :-1], tokens[:, 1:]).item()
        unpadded = gpt2(tokens[:, :-1])[..., :50257].flatten(0, 1)
        without_padding = torch.nn.functional.cross_entropy(unpadded, tokens[:, 1:].flatten()).item()
    assert math.log(50257) < loss < math.log(50257) + 0.3
    assert abs(loss - expected_loss(gpt2.config)) < 0.1
    assert 0 < loss - without_padding < 0.002  # 47 rows of padding: ln(50304 / 50257) = 0.0009


def test_padding_leaves_the_other_values_as_they_are():
    padded, exact = (initialised(get_model_config("tiny-gpt2", vocab_multiple=n)) for n in (64, 1))
    tokens = torch.randint(257, (1, 8))
    assert torch.equal(padded.transformer["wte"].weight[:257], exact.transformer["wte"].weight)
    torch.testing.assert_close(padded(tokens)[..., :257], exact(tokens))


def test_decay_groups_of_the_124m(gpt2):
    decayed, undecayed = decay_groups(gpt2, 0.1)
    sizes = [[p.numel() for p in group["params"]] for group in (decayed, undecayed)]
    assert [len(s) for s in sizes] == [50, 98]
    assert [sum(s) for s in sizes] == [124_354_560, 121_344]
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    assert len({id(p) for group in (decayed, undecayed) for p in group["params"]}) == 148
    names = dict(gpt2.named_parameters())
    assert all(names[name] is p for group in (decayed, undecayed)
               for name, p in zip(group["names"], group["params"], strict=True))
    torch.optim.AdamW([decayed, undecayed], lr=1e-3)


def test_decay_groups_without_biases():
    with torch.device("meta"):
        model = GPT(get_model_config("shakespeare-char", n_layer=12, n_head=12, n_embd=768, block_size=1024))
    decayed, undecayed = ([p.numel() for p in group["params"]] for group in decay_groups(model, 0.1))
    assert (len(decayed), sum(decayed), len(undecayed), sum(undecayed)) == (50, 85_771_008, 25, 19_200)


def test_stds_of_the_llama_scheme():
    big = get_model_config("llama3-1b")
    assert initial_std(big, "transformer.h.3.attn.c_proj.weight", 2048) == 0.00390625
    assert initial_std(big, "transformer.h.3.mlp.c_proj.weight", 8192) == 0.00390625
    assert initial_std(big, "transformer.h.3.mlp.c_gate.weight", 2048) == 2048 ** -0.5
    assert initial_std(big, "transformer.wte.weight", 2048) == 0.02
    assert initial_std(get_model_config("llama3-8b"), "lm_head.weight", 4096) == 1 / 64


def test_step_0_loss_of_a_small_llama():
    config = get_model_config("tiny-llama", n_embd=512, n_head=8, vocab_size=8192)
    torch.manual_seed(0)
    tokens = torch.randint(8192, (4, 129))
    with torch.no_grad():
        loss = initialised(config)(tokens[:, :-1], tokens[:, 1:]).item()
    assert abs(loss - expected_loss(config)) < 0.15


def test_values_do_not_depend_on_random_state_or_on_the_order_of_construction():
    config = get_model_config("tiny-llama", n_layer=2)
    torch.manual_seed(1)
    model = GPT(config)
    state = torch.get_rng_state()
    init_weights(model, model.config, 7)
    assert torch.equal(torch.get_rng_state(), state)

    torch.manual_seed(2)
    second = GPT(config)
    turned = torch.nn.ModuleDict(dict(reversed(list(second.transformer.items()))))
    second.transformer = turned
    init_weights(second, second.config, 7)
    expected = dict(model.named_parameters())
    assert [name for name, _ in second.named_parameters()] != list(expected)
    assert all(torch.equal(p, expected[name]) for name, p in second.named_parameters())


def test_parameters_and_seeds_differ():
    config = get_model_config("tiny-gpt2", n_layer=2)
    models = [initialised(config, seed) for seed in (0, 1, 1337, 2 ** 31, 2 ** 32 - 1)]
    starts = [tuple((p.flatten()[:4] / p.std()).tolist()) for model in models
              for p in model.parameters() if p.dim() >= 2]
    assert len({tuple(round(x, 4) for x in start) for start in starts}) == len(starts) == 5 * 10


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_values_have_the_schemes_mean_and_deviation_and_none_is_drawn_twice(name: str, seed: int) -> None:
    """Within six standard errors: about one false alarm in 5e8 matrices. Matrices have several tiles."""
    config = get_model_config(f"tiny-{name}", n_layer=2, n_head=2, n_kv_head=2, n_embd=64, block_size=70,
                              vocab_size=200, intermediate_size=600, tied=False)
    values, drawn = initial_values(config, seed), []
    for parameter, shape in parameter_shapes(config).items():
        whole = values(parameter, whole_box(shape))
        if whole.dim() == 1:
            assert (whole == float(parameter.endswith(".weight"))).all(), parameter
            continue
        std = 0.02 if name == "gpt2" or "wte" in parameter else shape[1] ** -0.5
        if "c_proj" in parameter:  # a projection into the residual stream
            std = (0.02 if name == "gpt2" else config.n_embd ** -0.5) / math.sqrt(2 * config.n_layer)
        count = whole.numel()
        assert abs(whole.double().mean().item()) <= 6 * std / math.sqrt(count), parameter
        root_mean_square = whole.double().square().mean().sqrt().item()
        assert root_mean_square == pytest.approx(std, rel=6 / math.sqrt(2 * count)), parameter
        drawn.append(whole.flatten().view(torch.int64))  # pairs: some values of 32 bits are equal by chance
    assert len(torch.cat(drawn).unique()) == sum(map(len, drawn))


WIDE = replace(get_model_config("tiny-gpt2", n_layer=1, n_head=4, n_kv_head=4, n_embd=600, intermediate_size=1100))
MATRIX = "transformer.h.0.mlp.c_proj.weight"  # 600 x 1100: 10 x 3 tiles, the last ones smaller


def some_box(chance: random.Random) -> tuple[tuple[int, int], ...]:
    return tuple((start := chance.randrange(length), chance.randint(start + 1, length)) for length in (600, 1100))


def test_any_part_has_the_values_of_the_whole():
    values, chance = initial_values(WIDE, 7), random.Random(1)
    whole = values(MATRIX, ((0, 600), (0, 1100)))
    assert whole.shape == (600, 1100)
    assert whole.unique().numel() > 0.99 * whole.numel()  # tiles have different values
    for _ in range(50):
        box = some_box(chance)
        part = whole[tuple(slice(*side) for side in box)]
        assert torch.equal(values(MATRIX, box), part)
        # Under ZeRO-3 with tensor parallelism, a rank has a range of concatenated boxes.
        second = some_box(chance)
        flat = torch.cat((part.flatten(), whole[tuple(slice(*side) for side in second)].flatten()))
        start = chance.randrange(flat.numel())
        target = torch.zeros(chance.randint(0, flat.numel() - start))
        fill(target, Placement(MATRIX, (600, 1100), (box, second)), start, values)
        assert torch.equal(target, flat[start:start + target.numel()])


@pytest.mark.parametrize("box", [((0, 600), (0, 1100)), ((30, 590), (500, 1090))])
def test_threads_draw_the_same_values(monkeypatch: pytest.MonkeyPatch, box: tuple[tuple[int, int], ...]) -> None:
    values, drawing = initial_values(WIDE, 7), set()
    serial = values(MATRIX, box)
    generator = np.random.Generator

    def recorded(bits: Any) -> np.random.Generator:
        drawing.add(threading.get_ident())
        return generator(bits)

    monkeypatch.setattr(np.random, "Generator", recorded)
    for threads in (2, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert torch.equal(values(MATRIX, box), serial)
    assert threading.get_ident() not in drawing


def test_drawing_a_part_costs_only_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    class Counting:
        def __init__(self, bits: Any) -> None:
            self.inner = generator(bits)

        def standard_normal(self, size: tuple[int, int], dtype: Any) -> np.ndarray:
            drawn.append(math.prod(size))
            return self.inner.standard_normal(size, dtype=dtype)

    generator = np.random.Generator
    monkeypatch.setattr(np.random, "Generator", Counting)
    config = get_model_config("tiny-gpt2", n_layer=1, n_head=4, n_kv_head=4, n_embd=1024)
    at = Placement("transformer.h.0.mlp.c_proj.weight", (1024, 4096), (((0, 1024), (0, 4096)),))
    columns = Placement(at.name, at.shape, (((0, 1024), (512, 1024)),))
    for placement, ranks in ((at, 1), (at, 4), (at, 16), (columns, 1)):
        size = math.prod(stop - start for start, stop in placement.boxes[0]) // ranks
        drawn.clear()
        fill(torch.empty(size), placement, size * (ranks - 1), initial_values(config, 7))
        assert sum(drawn) == size, (placement, ranks)  # these parts end at tile boundaries
    drawn.clear()
    fill(torch.empty(4096 * 100), at, 4096 * 100, initial_values(config, 7))
    assert sum(drawn) <= 4096 * (100 + TILE[0])


def test_initial_values_are_stable_across_versions():
    """A change of these values changes every run, and must be listed in CHANGELOG.md."""
    values = initial_values(get_model_config("tiny-gpt2"), 1337)
    assert values("transformer.wte.weight", ((100, 101), (3, 7))).flatten().tolist() == pytest.approx(
        [0.002298299, -0.020660259, -0.017486135, 0.018152693], abs=1e-9)
