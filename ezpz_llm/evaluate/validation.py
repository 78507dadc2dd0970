"""The loss over a fixed set of tokens, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from ezpz_llm.base.errors import UserError
from ezpz_llm.data.formats import TEXT
from ezpz_llm.data.prepare import prepare
from ezpz_llm.data.samples import IGNORED
from ezpz_llm.data.shards import TokenData
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import raise_together
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.dist.mesh import Mesh


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
        batches: tokens and targets on the host; targets of -100 do not count.

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
    error = None
    try:
        if dist.is_main:
            prepare(corpus, tokenizer, text_key=text_key)
    except UserError as found:
        error = found
    raise_together(dist, error)
    return TokenData.open(prepare(corpus, tokenizer, progress=False, text_key=text_key))
