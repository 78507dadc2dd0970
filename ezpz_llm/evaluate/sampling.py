"""Text from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ezpz_llm.model.compile import eager


@torch.no_grad()
def sample(next_logits: Callable[[Tensor], Tensor], prompt_ids: Tensor, *, new_tokens: int,
           generator: torch.Generator, block_size: int, vocab_size: int, top_k: int | None = 50,
           temperature: float = 1.0) -> Tensor:
    """Extend prompts (B, T), at least one token each, to (B, T + new_tokens).

    The draws are made on the host with the caller's own `generator` (a CPU one), so that the same seed and logits
    give the same text on any device, and the global random state stays as it was. Every rank runs the same number
    of forward passes, so all ranks of a sharded model can sample together. There is no cache of keys and values:
    each token costs a forward pass over its context.

    Args:
        next_logits: tokens (B, T) to logits (B, V) of the token that follows, in evaluation mode (dropout off).
        block_size: the longest context that the model takes; earlier tokens fall out of sight.
        vocab_size: the tokenizer's; ids from here to V are padding and are never drawn.
        top_k: draw among the k likeliest tokens; None for all.
        temperature: above 0; divides the logits.
    """
    ids = prompt_ids
    with eager():
        for _ in range(new_tokens):
            logits = next_logits(ids[:, -block_size:])[:, :vocab_size].float().cpu() / temperature
            if top_k is None:
                candidates = torch.arange(vocab_size).expand(len(logits), -1)
            else:
                logits, candidates = logits.topk(min(top_k, vocab_size))
            drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            ids = torch.cat((ids, candidates.gather(1, drawn).to(ids.device)), dim=1)
    return ids
