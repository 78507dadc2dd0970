"""Tied embedding: its gradient is computed without V rows of zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.embedding import TiedEmbedding
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import init_weights
from ezpz_llm.training.model.loss import configure_head
from ezpz_llm.training.model.pipeline import PipelineStage

CONFIG = get_model_config("tiny-gpt2", vocab_size=300, block_size=32)


class DenseGradients(TorchDispatchMode):
    """Dispatch mode that counts dense gradients of lookups."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() == "aten::embedding_dense_backward"
        return func(*args, **(kwargs or {}))


def table_gradient(tied: bool, loss_chunk: int | None, precision: torch.dtype) -> tuple[torch.Tensor, int]:
    """Return the embedding's gradient after two backward passes with repeated tokens, and the number of dense
    gradients of lookups (of tokens and positions)."""
    model = GPT(CONFIG)
    init_weights(model, CONFIG, 1)
    configure_head(model, loss_chunk)
    model.transformer["wte"].tied = tied
    tokens = torch.randint(0, 40, (4, 32), generator=torch.Generator().manual_seed(0))
    with DenseGradients() as dense:
        for _ in range(2):
            with torch.autocast("cpu", precision, enabled=precision != torch.float32):
                loss = model(tokens, tokens.roll(1))
            (loss / 2).backward()
    return model.lm_head.weight.grad, dense.count


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss_chunk", [None, 0, 48])
def test_lookup_gradient_is_added_to_the_heads_gradient(loss_chunk, precision):
    plain, dense = table_gradient(False, loss_chunk, precision)
    assert dense == 4
    tied, dense = table_gradient(True, loss_chunk, precision)
    assert dense == 2, "only the untied position embedding should have dense gradients"
    assert not tied.is_sparse
    assert (tied - plain).norm() <= 1e-6 * plain.norm()


def test_only_embeddings_tied_to_a_local_head_have_sparse_gradients():
    model = GPT(CONFIG)
    table = model.transformer["wte"]
    assert isinstance(table, TiedEmbedding)
    assert table.tied
    assert not GPT(get_model_config("tiny-llama", tied=False)).transformer["wte"].tied
    table(torch.tensor([[1, 1, 7]])).sum().backward()
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense()[:, 0].nonzero().flatten().tolist() == [1, 7]
    stage = PipelineStage(GPT(CONFIG), (0, 1, 2), 0)
    stage.transformer["wte"](torch.tensor([[1, 1, 7]])).sum().backward()
    assert not stage.transformer["wte"].weight.grad.is_sparse
