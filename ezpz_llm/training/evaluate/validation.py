"""Validation loss, independent of the number of ranks, and sampling of text from a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from ezpz_llm.core.base import UserError
from ezpz_llm.training.data.formats import TEXT
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.samples import IGNORED
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import run_together
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.model.compile import eager


def validation_loss(forward_sum: Callable[[Tensor, Tensor], Tensor],
                    batches: Iterable[tuple[np.ndarray, np.ndarray]], *, device: torch.device,
                    mesh: Mesh) -> tuple[float, int]:
    """Return the mean negative log-likelihood (nats per token) over all ranks' batches, and the number of tokens.

    Collective, with one reduction at the end; every rank gets the same result. Each data-parallel rank must have
    the same number of batches, since a forward pass may be collective; `ValidationWindows` pads with masked
    sequences.

    Args:
        forward_sum: maps tokens and targets, both (B, T) int64 on `device`, to the summed loss, 0-d, in evaluation
            mode; under pipeline or sequence parallelism, to this rank's contribution to that sum.
        batches: tokens and targets on CPU; targets of -100 are ignored.

    Raises:
        UserError: all targets are ignored.
    """
    # float64 makes the result independent of the order of summation, and so of the number of ranks; some devices
    # lack it.
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
        # Ranks of a pipeline or sequence group count the same tokens.
        total, count = both[0], int(both[1]) // mesh.size("pp", "sp")
    if count == 0:
        raise UserError("there are no tokens to validate on", instead="a corpus with a longer validation split")
    return total.item() / count, count


def open_corpus(corpus: str, tokenizer: str | None, dist: Dist, text_key: str = TEXT) -> TokenData:
    """Open a corpus as token shards; rank 0 prepares it while the other ranks wait. Collective.

    Raises:
        UserError: see `prepare`; the same on every rank.
    """
    run_together(dist, lambda: prepare(corpus, tokenizer, text_key=text_key), on_main=True)
    return TokenData.open(prepare(corpus, tokenizer, progress=False, text_key=text_key))


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
