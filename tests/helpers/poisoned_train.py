"""Run `ezpz_llm.train` with injected NaN losses.

    POISON=FIRST:LAST[:RANK] python3 tests/helpers/poisoned_train.py [options]

The forward passes FIRST to LAST, counted from 1, return NaN, on RANK only if given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from ezpz_llm.engine import deepspeed_engine, torch_engine
from ezpz_llm.train import main


def poisoned(inner: Callable[..., Any], first: int, last: int, rank: int | None = None,
             add: float = 0.0) -> Callable[..., Any]:
    """Return an engine's `forward` with the injected fault.

    With `add`, that is added to the loss instead, which leaves the gradients unchanged.
    """
    calls = [0]

    def forward(self, *inputs, last_micro_step):
        loss = inner(self, *inputs, last_micro_step=last_micro_step)
        calls[0] += 1
        if not first <= calls[0] <= last or rank not in (None, self._mesh.rank):
            return loss
        return loss + add if add else loss * float("nan")

    return forward


if __name__ == "__main__":
    where = [int(number) for number in os.environ["POISON"].split(":")]
    for engine in (torch_engine.TorchEngine, deepspeed_engine.DeepSpeedEngine):
        engine.forward = poisoned(engine.forward, *where)
    raise SystemExit(main(sys.argv[1:]))
