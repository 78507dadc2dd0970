"""Validation loss, the same for any number of ranks, and text sampled from a model one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from ezpz_llm.base import UserError
from ezpz_llm.data.formats import TEXT
from ezpz_llm.data.prepare import prepare
from ezpz_llm.data.samples import IGNORED
from ezpz_llm.data.shards import TokenData
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import together
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.model.compile import eager


def validation_loss(forward_sum: Callable[[Tensor, Tensor], Tensor],
                    batches: Iterable[tuple[np.ndarray, np.ndarray]], *, device: torch.device,
                    mesh: Mesh) -> tuple[float, int]:
    """Mean negative log-likelihood (nats per token) over all ranks' batches, and the number of tokens that counted.

    Collective, with one reduction at the end; every rank gets the same answer. The batches are those of this rank's
    data-parallel place, equally many everywhere (as `ValidationWindows` deals them, padding with masked sequences),
    since a forward pass may be collective too.

    Args:
        forward_sum: tokens and targets, both (B, T) int64 on `device`, to the summed loss, 0-d, in evaluation mode;
            or this rank's part of it, where a pipeline or a sequence is divided.
        batches: tokens and targets on CPU; targets of -100 do not count.

    Raises:
        UserError: when no token counts.
    """
    # float64 makes the order of summation, and with it the number of ranks, invisible; some devices have none.
    dtype = torch.float64 if DEVICES[device.type].float64 else torch.float32
    total = torch.zeros((), dtype=dtype, device=device)
    count = 0
    with torch.no_grad():
        for tokens, targets in batches:
            count += int((targets != IGNORED).sum())
            total += forward_sum(torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device))
    if mesh.size("pp", "dp", "sp") > 1:
        both = torch.stack((total, total.new_tensor(count)))
        torch.distributed.all_reduce(both, group=mesh.group("pp", "dp", "sp"))
        # Who shares a pipeline or a sequence counted the same tokens.
        total, count = both[0], int(both[1]) // mesh.size("pp", "sp")
    if count == 0:
        raise UserError("there are no tokens to validate on", instead="a corpus with a longer validation split")
    return total.item() / count, count


# A corpus for all ranks: prepared once, by rank 0.
def open_corpus(corpus: str, tokenizer: str | None, dist: Dist, text_key: str = TEXT) -> TokenData:
    """The corpus as token shards; rank 0 prepares them while the others wait. Collective.

    Raises:
        UserError: as `prepare`; the same on every rank.
    """
    together(dist, lambda: prepare(corpus, tokenizer, text_key=text_key), on_main=True)
    return TokenData.open(prepare(corpus, tokenizer, progress=False, text_key=text_key))


# Text from a model, one token at a time.
@torch.no_grad()
def sample(next_logits: Callable[[Tensor], Tensor], prompt_ids: Tensor, *, new_tokens: int,
           generator: torch.Generator, block_size: int, vocab_size: int, top_k: int | None = 50,
           temperature: float = 1.0) -> Tensor:
    """Extend prompts (B, T), at least one token each, to (B, T + new_tokens).

    The draws are made on CPU with the caller's own `generator`, so that the same seed and logits
    give the same text on any device, and the global random state stays as it was. Every rank runs the same number
    of forward passes, so all ranks of a sharded model can sample together. There is no cache of keys and values:
    each token costs a forward pass over its context.

    Args:
        next_logits: tokens (B, T) to logits (B, V) of the token that follows, in evaluation mode (dropout off).
        block_size: the longest context that the model takes; earlier tokens fall out of sight.
        vocab_size: the tokenizer's; ids from here to V are padding and are never drawn.
        top_k: draw among the k likeliest tokens; None for all.
        temperature: above 0; divides the logits.

    Raises:
        UserError: a logit is NaN or Inf; after all forward passes, so that no rank leaves the others alone.
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
        raise UserError("the logits are not finite", instead="weights of an earlier checkpoint: the model diverged",
                        exit_code=1)
    return ids
