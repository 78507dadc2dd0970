"""Model compared with an independent, explicit implementation, and properties that other modules rely on."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.model.config import MODELS, get_model_config
from ezpz_llm.training.model.gpt import GPT, rotate, rotation_frequencies, rotation_tables
from ezpz_llm.training.model.parameters import flops_per_token, parameter_count

SMALL = {"n_layer": 2, "vocab_size": 97, "block_size": 24}
SHAPES = {
    "gpt2": get_model_config("tiny-gpt2", **SMALL),
    "gpt2-unbiased": get_model_config("shakespeare-char", **SMALL, n_embd=48, n_head=3, dropout=0.0),
    "llama": get_model_config("tiny-llama", **SMALL),
    "llama-untied": get_model_config("tiny-llama", **SMALL, n_kv_head=1, tied=False),
    "llama-slowed": get_model_config("tiny-llama", **SMALL, rope_factor=8.0, rope_theta=50.0, rope_context=40),
    "gpt2-erf": get_model_config("tiny-gpt2", **SMALL, mlp="gelu_erf"),
    "qwen3": get_model_config("tiny-qwen3", **SMALL),
    "olmo2": get_model_config("tiny-olmo2", **SMALL),
}


def randomised(config, seed=0):
    """Return a model with random values in all parameters, including norms and biases."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if ".ln_" in name and name.endswith("weight") else 0.0, 0.3 if p.dim() < 2 else 0.15)
    return model


def naive_logits(config, weights, tokens):
    """Compute the forward pass as in the papers, with loops, explicit masks and complex rotations."""
    heads, group, dim = config.n_head, config.n_head // config.n_kv_head, config.head_dim

    def linear(x, name):
        y = x @ weights[name + ".weight"].T
        return y + weights[name + ".bias"] if name + ".bias" in weights else y

    def norm(x, name):
        if config.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * weights[name + ".weight"]
        return x + weights[name + ".bias"] if name + ".bias" in weights else x

    def angle(i):  # Llama 3.1's rule in terms of wavelengths, as in the published code
        plain = config.rope_theta ** (-2 * i / dim)
        length = 2 * math.pi / plain
        longest, shortest = config.rope_context / config.rope_low, config.rope_context / config.rope_high
        if config.rope_factor == 1 or length < shortest:
            return plain
        if length > longest:
            return plain / config.rope_factor
        mix = (config.rope_context / length - config.rope_low) / (config.rope_high - config.rope_low)
        return (1 - mix) * plain / config.rope_factor + mix * plain

    def turn(x):  # (T, D): the pair (i, i + D/2) as one complex number
        t = torch.arange(len(x), dtype=torch.float64)
        angles = torch.tensor([angle(i) for i in range(dim // 2)], dtype=torch.float64)
        z = torch.complex(x[:, :dim // 2].double(), x[:, dim // 2:].double())
        z = z * torch.exp(1j * t[:, None] * angles)
        return torch.cat((z.real, z.imag), -1).to(x.dtype)

    def attention(x, name):  # (T, C)
        qkv = linear(x, name + ".c_attn")
        if config.qk_norm == "width":
            q, k, v = qkv.split((heads * dim, config.kv_width, config.kv_width), -1)
            qkv = torch.cat((norm(q, name + ".q_width_norm"), norm(k, name + ".k_width_norm"), v), -1)
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        out = []
        for h in range(heads):
            q = qkv[:, h * dim:(h + 1) * dim]
            at = heads * dim + (h // group) * dim
            k = qkv[:, at:at + dim]
            v = qkv[:, at + config.n_kv_head * dim:at + config.n_kv_head * dim + dim]
            if config.qk_norm == "head":
                q, k = norm(q, name + ".q_head_norm"), norm(k, name + ".k_head_norm")
            if config.position == "rope":
                q, k = turn(q), turn(k)
            scores = (q @ k.T / math.sqrt(dim)).masked_fill(mask, -math.inf)
            out.append(torch.softmax(scores, -1) @ v)
        return linear(torch.cat(out, -1), name + ".c_proj")

    def mlp(x, name):
        hidden = linear(x, name + ".c_fc")
        if config.mlp == "swiglu":
            gate = linear(x, name + ".c_gate")
            hidden = gate * torch.sigmoid(gate) * hidden
        elif config.mlp == "gelu_erf":
            hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        else:
            hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden ** 3)))
        return linear(hidden, name + ".c_proj")

    rows = []
    for row in tokens:
        x = weights["transformer.wte.weight"][row]
        if config.position == "learned":
            x = x + weights["transformer.wpe.weight"][:len(row)]
        for layer in range(config.n_layer):
            block = f"transformer.h.{layer}"
            if config.norm_order == "after":
                x = x + norm(attention(x, block + ".attn"), block + ".ln_1")
                x = x + norm(mlp(x, block + ".mlp"), block + ".ln_2")
            else:
                x = x + attention(norm(x, block + ".ln_1"), block + ".attn")
                x = x + mlp(norm(x, block + ".ln_2"), block + ".mlp")
        rows.append(linear(norm(x, "transformer.ln_f"), "lm_head"))
    return torch.stack(rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_equal_the_naive_forward(shape):
    config = SHAPES[shape]
    model = randomised(config)
    tokens = torch.randint(config.vocab_size, (2, 24))
    targets = torch.randint(config.vocab_size, (2, 24))
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    if config.tied:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    expected = naive_logits(config, weights, tokens)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)

    loss = model(tokens, targets)
    nll = -torch.log_softmax(expected, -1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(loss, nll, rtol=1e-5, atol=1e-5)
    loss.backward()
    nll.backward()
    for name, p in model.named_parameters():
        difference = (p.grad - weights[name].grad).norm() / weights[name].grad.norm()
        assert difference < 1e-4, (name, difference)


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_attention_is_causal(shape):
    config = SHAPES[shape]
    model = randomised(config).eval()
    tokens = torch.randint(config.vocab_size, (1, 24))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % config.vocab_size
    original, changed_output = model(tokens), model(changed)
    torch.testing.assert_close(original[0, :10], changed_output[0, :10])
    assert (original[0, 10:] - changed_output[0, 10:]).abs().amin(dim=-1).max() > 1e-4


def test_rotary_scores_depend_on_distance_alone():
    dim, length = 32, 40
    rotation = rotation_tables(length, 500000.0 ** (-torch.arange(0, dim, 2) / dim))
    torch.manual_seed(0)
    q, k = (torch.randn(dim).expand(1, length, 1, dim) for _ in range(2))
    scores = rotate(q, rotation)[0, :, 0] @ rotate(k, rotation)[0, :, 0].T
    for distance in (0, 3, 17):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-4)
    assert (scores[3, 0] - scores[17, 0]).abs() > 1e-2
    torch.testing.assert_close(rotate(q, rotation)[0, 0], q[0, 0])
    assert rotate(q.bfloat16(), rotation).dtype == torch.bfloat16


def test_names_and_shapes_are_those_of_the_published_124m():
    with torch.device("meta"):
        model = GPT(get_model_config("gpt2-124m", vocab_multiple=1))
    expected = {"transformer.wte.weight": (50257, 768), "transformer.wpe.weight": (1024, 768),
                "transformer.ln_f.weight": (768,), "transformer.ln_f.bias": (768,), "lm_head.weight": (50257, 768)}
    for layer in range(12):
        for name, shape in {"ln_1": (768,), "attn.c_attn": (2304, 768), "attn.c_proj": (768, 768), "ln_2": (768,),
                            "mlp.c_fc": (3072, 768), "mlp.c_proj": (768, 3072)}.items():
            expected[f"transformer.h.{layer}.{name}.weight"] = shape
            expected[f"transformer.h.{layer}.{name}.bias"] = shape[:1]
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert len(shapes) == 149
    assert shapes == expected


def test_llama_state_dict_has_only_parameters():
    config = SHAPES["llama"]
    model = GPT(config)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()} | {"lm_head.weight"}
    assert not list(model.buffers())
    assert model.transformer["h"][0].attn.c_attn.weight.shape == (128 + 64 + 64, 128)
    assert model.transformer["h"][0].mlp.c_gate.weight.shape == (384, 128)


def test_tying_survives_moves_and_loading():
    config = SHAPES["gpt2"]
    model, second = randomised(config, 1), randomised(config, 2)
    second.load_state_dict(model.state_dict())
    moves = (lambda m: m, lambda m: m.bfloat16(), lambda m: m.to("meta"), lambda m: m.to_empty(device="cpu"))
    for move in moves:
        second = move(second)
        table = second.transformer["wte"].weight
        assert second.lm_head.weight is table
        assert sum(p is table for p in second.parameters()) == 1
    assert not any(p is model.lm_head.weight for p in GPT(SHAPES["llama-untied"]).parameters())


def test_masked_targets_are_ignored_in_mean_and_sum():
    config = SHAPES["gpt2"]
    model = randomised(config)
    tokens, targets = torch.randint(97, (2, 24)), torch.randint(97, (2, 24))
    targets[1, 5:] = -100
    nll = -torch.log_softmax(model(tokens), -1)
    losses = torch.cat((nll[0].gather(-1, targets[0, :, None]), nll[1, :5].gather(-1, targets[1, :5, None])))
    torch.testing.assert_close(model(tokens, targets), losses.mean())
    torch.testing.assert_close(model(tokens, targets, reduction="sum"), losses.sum())
    assert model(tokens, torch.full_like(targets, -100), reduction="sum") == 0


def test_dtypes_under_autocast():
    config = SHAPES["llama"]
    model, tokens = randomised(config), torch.randint(97, (2, 24))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens).dtype == torch.bfloat16
        loss = model(tokens, tokens)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert abs(loss - model(tokens, tokens)) < 0.05


def test_sequence_longer_than_the_context_is_rejected():
    for shape in ("gpt2", "llama"):
        with pytest.raises(UserError, match=r"25 tokens .* 24"):
            GPT(SHAPES[shape])(torch.zeros(1, 25, dtype=torch.long))


def test_dropout_acts_in_training_only():
    config = get_model_config("tiny-gpt2", n_layer=1, block_size=16, dropout=0.5)
    model, tokens = randomised(config), torch.randint(257, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(("name", "overrides"), [("gpt2-124m", {}), ("llama3-1b", {"n_layer": 4})])
def test_flops_agree_with_torchs_counter(name, overrides):
    config = get_model_config(name, **overrides)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(1, config.block_size, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_total_flops() / config.block_size
    assert abs(counted / flops_per_token(config) - 1) < 0.02


def test_attention_can_be_sharded_by_heads():
    """Tensor parallelism shards each part of c_attn and the columns of c_proj, and sums the results."""
    config = SHAPES["llama"]
    whole = randomised(config).transformer["h"][0].attn
    x = torch.randn(2, 24, 128)
    rotation = rotation_tables(24, rotation_frequencies(config, torch.device("cpu")))
    total = 0
    for half in range(2):
        part = randomised(config).transformer["h"][0].attn
        rows = torch.cat([p.chunk(2)[half] for p in whole.c_attn.weight.split((128, 64, 64))])
        part.c_attn.weight = torch.nn.Parameter(rows)
        part.c_proj.weight = torch.nn.Parameter(whole.c_proj.weight.chunk(2, dim=1)[half])
        total = total + part(x, rotation)
    torch.testing.assert_close(total, whole(x, rotation), rtol=1e-4, atol=1e-4)


def test_context_lengths_of_named_models():
    assert {name: MODELS[name].block_size for name in ("tiny-gpt2", "gpt3-125m", "llama3-1b", "llama3-8b")} == {
        "tiny-gpt2": 256, "gpt3-125m": 2048, "llama3-1b": 2048, "llama3-8b": 8192}
    assert parameter_count(MODELS["tiny-gpt2"]) < 1_000_000
