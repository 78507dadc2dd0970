"""Validation loss, independent of the number of ranks."""

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
from ezpz_llm.training.dist.agreement import run_long_on_main
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.mesh import Mesh


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
    run_long_on_main(dist, lambda: prepare(corpus, tokenizer, text_key=text_key))
    return TokenData.open(prepare(corpus, tokenizer, progress=False, text_key=text_key))
