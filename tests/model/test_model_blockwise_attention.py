"""Blockwise attention compared with torch's kernel in fp32."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ezpz_llm.training.model import attention_kernels as module
from ezpz_llm.training.model.attention_kernels import blockwise_attention
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
