"""The loss over a fixed set of tokens, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ezpz_llm.errors import UserError
from ezpz_llm.model.loss import IGNORED

Window = tuple[np.ndarray, np.ndarray]
"""Tokens and targets of one sequence, each (T,); targets of -100 do not count."""


def validation_loss(forward_sum: Callable[[Tensor, Tensor], Tensor], windows: Iterable[Window], *,
                    micro_batch: int, device: torch.device, dp_rank: int = 0, dp_size: int = 1,
                    group: torch.distributed.ProcessGroup | None = None) -> tuple[float, int]:
    """Mean negative log-likelihood (nats per token) over all `windows`, and the number of tokens that counted.

    Collective: every rank of the data-parallel `group` (None: the whole world) calls it with the same windows,
    takes its share of them and gets the same answer. Ranks whose share is smaller run fully masked sequences, so
    that all make the same number of forward passes, which may be collective too. Sums stay on the device until
    the end.

    Args:
        forward_sum: tokens and targets, both (micro_batch, T) int64, to the summed loss, 0-d; in evaluation mode.

    Raises:
        UserError: when no token counts.
    """
    # float64 makes the order of summation, and with it the number of ranks, invisible; Apple's GPUs have none.
    total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    count = 0
    remaining = iter(windows)
    with torch.no_grad():
        while round_of_all := list(islice(remaining, micro_batch * dp_size)):
            mine = round_of_all[dp_rank * micro_batch:(dp_rank + 1) * micro_batch]
            tokens, targets = _stack(mine, micro_batch, len(round_of_all[0][0]))
            count += int((targets != IGNORED).sum())
            total += forward_sum(torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device))
    if dp_size > 1:
        both = torch.stack((total, total.new_tensor(count)))
        torch.distributed.all_reduce(both, group=group)
        total, count = both[0], int(both[1])
    if count == 0:
        raise UserError("there are no tokens to validate on", instead="a corpus with a longer validation split")
    return total.item() / count, count


def _stack(windows: list[Window], rows: int, length: int) -> Window:
    tokens = np.zeros((rows, length), dtype=np.int64)
    targets = np.full((rows, length), IGNORED, dtype=np.int64)
    for row, (inputs, wanted) in enumerate(windows):
        tokens[row], targets[row] = inputs, wanted
    return tokens, targets
