"""Selective recomputation: the same gradients and matmuls with less memory, without a second pass of attention."""

from __future__ import annotations

import pytest
import torch
from allocations import allocated
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.torch_internals import TorchDispatchMode
from ezpz_llm.training.model.config import ModelConfig, Recompute, get_model_config
from ezpz_llm.training.model.gpt import GPT, rotation_of
from ezpz_llm.training.model.init import init_weights
from ezpz_llm.training.model.recomputation import recompute_blocks

SHAPES = {
    "gpt2": get_model_config("tiny-gpt2", n_layer=2, n_embd=64, block_size=128),
    "llama": get_model_config("tiny-llama", n_layer=2, n_embd=64, block_size=128),
    "norms after": get_model_config("tiny-olmo2", n_layer=2, n_embd=64, block_size=128),
    "dropout": get_model_config("tiny-gpt2", n_layer=2, n_embd=64, block_size=128, dropout=0.2),
}


class Calls(TorchDispatchMode):  # type: ignore[misc,valid-type]  # it has no public name
    """Counter of the operators that compute attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.attention += "attention" in name and "backward" not in name
        return function(*args, **(kwargs or {}))


def make_model(config: ModelConfig, recompute: Recompute) -> GPT:
    model = GPT(config)
    init_weights(model, config, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    recompute_blocks(model, recompute)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_and_products_are_those_without_recomputation(shape: str, dtype: torch.dtype) -> None:
    config = SHAPES[shape]
    tokens = torch.randint(0, config.vocab_size, (2, 128), generator=torch.Generator().manual_seed(0))
    gradients, products, attention = [], [], []
    kinds: tuple[Recompute, ...] = (0, "selective")
    for recompute in kinds:
        model = make_model(config, recompute)
        torch.manual_seed(5)
        with FlopCounterMode(display=False) as flops, Calls() as calls:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = model(tokens, tokens)
            before = calls.attention
            loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        products.append(flops.get_total_flops())
        attention.append((before, calls.attention - before))
    assert torch.equal(gradients[0], gradients[1])
    if not config.dropout:
        assert products[0] == products[1]
        assert attention == [(config.n_layer, 0), (config.n_layer, 0)]


@pytest.mark.parametrize(("shape", "most"), [("gpt2", 0.65), ("llama", 0.55)])
def test_a_block_keeps_at_least_a_third_less(shape: str, most: float) -> None:
    x = torch.randn(2, 128, 64, requires_grad=True)
    rotation = rotation_of(SHAPES[shape], 128, x.device)

    def kept(recompute: Recompute) -> int:
        block = make_model(SHAPES[shape], recompute).transformer["h"][0]
        return allocated(lambda: block(x, rotation)) - x.nbytes

    assert kept("selective") <= most * kept(0)


def test_blocks_with_selective_recomputation_compile_to_one_graph() -> None:
    config = SHAPES["llama"]
    tokens = torch.randint(0, config.vocab_size, (2, 128))
    gradients = []
    kinds: tuple[Recompute, ...] = (0, "selective")
    for recompute in kinds:
        model = make_model(config, recompute)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for block in model.transformer["h"]:
            block.compile(backend="aot_eager")  # traces like any backend, but faster
        model(tokens, tokens).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-8)


def test_a_replaced_linear_layer_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's adds the bias in place to the output that is kept, so that it would be added twice."""
    monkeypatch.setattr(functional, "linear", lambda x, weight, bias=None: x.matmul(weight.t()).add_(bias))
    with pytest.raises(UserError, match="requires torch's linear layer"):
        make_model(SHAPES["gpt2"], "selective")


def test_all_products_are_kept_if_the_last_one_has_the_shape_of_another() -> None:
    """Otherwise the other one would be computed again."""
    config = get_model_config("tiny-gpt2", n_layer=1, n_embd=64, intermediate_size=64, n_head=1, head_dim=16,
                              block_size=64)
    tokens = torch.randint(0, config.vocab_size, (2, 64))
    counts = []
    kinds: tuple[Recompute, ...] = (0, "selective")
    for recompute in kinds:
        with FlopCounterMode(display=False) as flops:
            make_model(config, recompute)(tokens, tokens).backward()
        counts.append(flops.get_total_flops())
    assert counts[0] == counts[1]
