"""Tokens sampled from a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ezpz_llm.core.base import UserError
from ezpz_llm.training.model.compile import eager


@torch.no_grad()
def sample(next_logits: Callable[[Tensor], Tensor], prompt_ids: Tensor, *, new_tokens: int,
           generator: torch.Generator, block_size: int, vocab_size: int, top_k: int | None = 50,
           temperature: float = 1.0) -> Tensor:
    """Extend prompts (B, T), at least one token each, to (B, T + new_tokens).

    Tokens are drawn on CPU with `generator`, so that the same seed and logits give the same text on any device, and
    the global random state does not change. Every rank runs the same number of forward passes, so the ranks of a
    sharded model can sample together. There is no KV cache: each token costs a forward pass over its context.

    Args:
        next_logits: maps tokens (B, T) to logits (B, V) of the next token, in evaluation mode (no dropout).
        block_size: context length of the model; earlier tokens are dropped.
        vocab_size: size of the tokenizer's vocabulary; ids from `vocab_size` to V - 1 are padding and never drawn.
        top_k: draw from the k most likely tokens; None for all.
        temperature: above 0; divides the logits.

    Raises:
        UserError: a logit is NaN or Inf. Raised after all forward passes, so that no other rank waits in one.
    """
    ids, finite = prompt_ids, True
    with eager():
        for _ in range(new_tokens):
            logits = next_logits(ids[:, -block_size:])[:, :vocab_size].float().cpu() / temperature
            if not logits.isfinite().all():
                finite, logits = False, torch.zeros_like(logits)
            if top_k is None:
                candidates = torch.arange(vocab_size).expand(len(logits), -1)
            else:
                logits, candidates = logits.topk(min(top_k, vocab_size))
            drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            ids = torch.cat((ids, candidates.gather(1, drawn).to(ids.device)), dim=1)
    if not finite:
        raise UserError("the logits are not finite", instead="an earlier checkpoint, since the model diverged",
                        exit_code=1)
    return ids
