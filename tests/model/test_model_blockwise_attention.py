"""Blockwise attention compared with torch's kernel in fp32."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ezpz_llm.training.model import blockwise_attention as module
from ezpz_llm.training.model.blockwise_attention import blockwise_attention
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT


def inputs(heads: int, kv_heads: int, length: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Return queries, keys and values as parts of one tensor, as in the model, and a gradient, rounded to bf16."""
    torch.manual_seed(0)
    qkv = torch.randn(2, length, heads + 2 * kv_heads, dim).bfloat16().transpose(1, 2)
    return (*qkv.split((heads, kv_heads, kv_heads), dim=1),
            torch.randn(2, length, heads, dim).bfloat16().transpose(1, 2))


def both(function, q, k, v, grad) -> list[torch.Tensor]:
    leaves = [part.detach().clone().requires_grad_() for part in (q, k, v)]
    out = function(*leaves)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(("heads", "kv_heads", "length", "dim"), [
    (2, 2, 64, 16),  # one block
    (4, 2, 300, 32),  # several blocks, the last one shorter, with grouped queries
    (3, 1, 129, 24),  # a block of one row
])
def test_outputs_and_gradients_are_those_of_the_definition(monkeypatch, heads, kv_heads, length, dim) -> None:
    q, k, v, grad = inputs(heads, kv_heads, length, dim)
    exact = both(lambda *parts: functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True),
                 q.float(), k.float(), v.float(), grad.float())

    def distance(tensors: list[torch.Tensor]) -> list[float]:
        return [((tensor.float() - expected).norm() / expected.norm()).item()
                for tensor, expected in zip(tensors, exact, strict=True)]

    assert all(error < 0.01 for error in distance(both(blockwise_attention, q, k, v, grad)))
    monkeypatch.setattr(module, "_ELEMENTS", 2 * heads * length * 7)  # blocks as for very long sequences
    assert all(error < 0.01 for error in distance(both(blockwise_attention, q, k, v, grad)))
    # In fp32, only the order of sums differs.
    in_fp32 = both(blockwise_attention, q.float(), k.float(), v.float(), grad.float())
    assert all(error < 2e-6 for error in distance(in_fp32))


def test_gradients_of_keys_and_values_are_summed_over_blocks_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, a sum of equal terms stops growing at 256 of them."""
    monkeypatch.setattr(module, "_ROWS", 1)
    length = 1024
    q, k, v = (torch.zeros(1, 1, length, 8, dtype=torch.bfloat16) for _ in range(3))
    q[:], v[..., 0, :] = 1.0, 1.0
    # Equal scores: row i has the probabilities 1 / (i + 1), so each row adds about 1 to the first value's gradient.
    grad = torch.arange(1, length + 1).bfloat16().view(1, 1, -1, 1).expand_as(q)
    exact = both(lambda *parts: functional.scaled_dot_product_attention(*parts, is_causal=True),
                 q.double(), k.double(), v.double(), grad.double())
    for actual, expected in zip(both(blockwise_attention, q, k, v, grad), exact, strict=True):
        torch.testing.assert_close(actual[0, 0, 0].double(), expected[0, 0, 0], rtol=0.01, atol=1e-6)


def test_model_uses_blockwise_attention_in_bf16_with_close_gradients() -> None:
    config = get_model_config("tiny-llama", n_layer=2, vocab_size=97, block_size=160)
    tokens = torch.randint(97, (2, 161), generator=torch.Generator().manual_seed(0))
    gradients = []
    for explicit in (False, True):
        torch.manual_seed(0)
        model = GPT(config)
        for block in model.transformer["h"]:
            block.attn.product.explicit = explicit
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        assert ("_BlockwiseAttention" in graph(loss)) == (not explicit)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[1].norm()


def graph(loss: torch.Tensor) -> str:
    """Return the names of all functions in the autograd graph of a loss."""
    visited, todo, names = set(), [loss.grad_fn], []
    while todo:
        node = todo.pop()
        if node is not None and node not in visited:
            visited.add(node)
            names.append(node.name())
            todo += [parent for parent, _ in node.next_functions]
    return " ".join(names)
