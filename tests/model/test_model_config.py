"""Named models: counts, overrides and rejected values, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.model.config import MODELS, ModelConfig, get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.parameters import flops_per_token, parameter_count


def test_config_and_flops_import_no_torch():
    code = ("import sys, ezpz_llm.training.model.parameters as f, ezpz_llm.training.model.config as c; "
            "f.flops_per_token(c.get_model_config('llama3-8b')); "
            "sys.exit(bool({'torch', 'numpy', 'deepspeed'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], timeout=scaled(120)).returncode == 0


@pytest.mark.parametrize("name", MODELS)
def test_parameter_count_equals_the_tensors(name):
    with torch.device("meta"):
        model = GPT(MODELS[name])
    assert parameter_count(MODELS[name]) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("overrides", [
    {"bias": True}, {"bias": False}, {"tied": False}, {"n_kv_head": 1}, {"mlp": "gelu"}, {"n_embd": 96}])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_parameter_count_follows_overrides(name, overrides):
    config = get_model_config(name, **overrides)
    with torch.device("meta"):
        model = GPT(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())


# name, vocab_multiple, context, N, 6N + 12LCT, 6N + 6LCT: published or calculated by hand
GOLDEN = [
    ("gpt2-124m", 1, 1024, 124_439_808, 859_885_056, 803_261_952),
    ("gpt2-355m", 1, 1024, 354_823_168, 2_430_928_896, 2_279_933_952),
    ("gpt2-774m", 1, 1024, 774_030_080, 5_210_411_520, 4_927_296_000),
    ("gpt2-1558m", 1, 1024, 1_557_611_200, 10_289_385_600, 9_817_526_400),
    ("llama3-1b", 128, 2048, 1_241_581_568, 8_254_795_776, 7_852_142_592),
]


@pytest.mark.parametrize(("name", "multiple", "length", "count", "flops", "causal"), GOLDEN)
def test_counts_and_flops_are_the_published_ones(name, multiple, length, count, flops, causal):
    config = get_model_config(name, vocab_multiple=multiple)
    assert config.block_size == length
    assert parameter_count(config) == count
    assert flops_per_token(config) == flops
    assert flops_per_token(config, length, causal=True) == causal


def test_padded_and_untied_counts():
    padded = get_model_config("gpt2-124m")
    assert padded.padded_vocab_size == 50304
    assert parameter_count(padded) == 124_475_904
    assert parameter_count(get_model_config("gpt2-124m", vocab_multiple=1, tied=False)) == 163_037_184
    assert get_model_config("shakespeare-char").padded_vocab_size == 65
    llama = MODELS["llama3-8b"]
    assert parameter_count(llama) == 8_030_261_248
    # The input embedding of an untied model is only looked up, without a matmul.
    looked_up = 6 * 128256 * 4096
    assert flops_per_token(llama, 8192) == 6 * 8_030_261_248 - looked_up + 12 * 32 * 4096 * 8192


def test_tiny_models_have_the_same_size():
    assert MODELS["tiny-llama"].intermediate_size == 384
    gpt2, llama = (get_model_config(name, bias=False) for name in ("tiny-gpt2", "tiny-llama"))
    assert parameter_count(gpt2) - gpt2.block_size * gpt2.n_embd == parameter_count(llama)


def test_derived_fields_follow_overrides():
    yardstick = get_model_config("shakespeare-char", n_layer=4, n_head=4, n_embd=128, block_size=64, dropout=0.0)
    assert (yardstick.n_kv_head, yardstick.intermediate_size, yardstick.bias) == (4, 512, False)
    assert get_model_config("llama3-8b", n_embd=512).intermediate_size == 1792
    assert get_model_config("tiny-gpt2", n_head=None) == MODELS["tiny-gpt2"]
    assert get_model_config("tiny-gpt2", vocab_size=300).padded_vocab_size == 320


@pytest.mark.parametrize(("name", "overrides", "parts"), [
    ("gpt2-125m", {}, ["unknown model 'gpt2-125m'", "gpt2-124m"]),
    ("tiny-gpt2", {"n_heads": 4}, ["'n_heads'", "n_head"]),
    ("tiny-gpt2", {"n_head": 5}, ["128", "5 heads", "n_embd 130", "1, 2, 4, 8"]),
    ("tiny-llama", {"n_kv_head": 3}, ["4 heads", "3 key/value heads", "1, 2, 4"]),
    ("tiny-llama", {"n_embd": 132, "n_head": 4}, ["33 dimensions", "even"]),
    ("tiny-gpt2", {"dropout": 1.0}, ["dropout is 1.0"]),
    ("tiny-gpt2", {"n_layer": 0}, ["n_layer is 0"]),
    ("tiny-gpt2", {"n_embd": 10**12 + 1}, ["n_embd is 1000000000001", "at most 1,048,576"]),
    ("tiny-gpt2", {"block_size": 2.5}, ["block_size is 2.5"]),
    ("tiny-gpt2", {"norm": "layer-norm"}, ["norm of a model", "layernorm"]),
])
def test_inconsistent_shape_is_rejected_with_advice(name, overrides, parts):
    with pytest.raises(UserError) as caught:
        get_model_config(name, **overrides)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_config_validates_itself():
    with pytest.raises(UserError, match="n_layer is -1"):
        ModelConfig(n_layer=-1, n_head=2, n_embd=8, block_size=4, vocab_size=7)
