"""Run `ezpz_llm.train` with injected NaN losses.

    POISON=FIRST:LAST[:RANK] python3 tests/helpers/poisoned_train.py [options]

The forward passes FIRST to LAST, counted from 1, return NaN, on RANK only if given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ezpz_llm.train import main
from ezpz_llm.training.model.gpt import GPT


def poisoned(inner: Callable[..., Any], first: int, last: int, rank: int | None = None,
             add: float = 0.0) -> Callable[..., Any]:
    """Return `GPT.forward` with the injected fault in training mode.

    With `add`, that is added to the loss instead, which leaves the gradients unchanged.
    """
    calls = [0]

    def forward(self, *inputs, **named):
        loss = inner(self, *inputs, **named)
        is_counted = self.training and not loss.is_meta  # FLOPs are counted on the meta device
        calls[0] += is_counted
        is_on_rank = rank is None or rank == torch.distributed.get_rank()
        if not is_counted or not first <= calls[0] <= last or not is_on_rank:
            return loss
        return loss + add if add else loss * float("nan")

    return forward


if __name__ == "__main__":
    where = [int(number) for number in os.environ["POISON"].split(":")]
    GPT.forward = poisoned(GPT.forward, *where)
    raise SystemExit(main(sys.argv[1:]))
