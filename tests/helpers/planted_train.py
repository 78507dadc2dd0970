"""Run `ezpz_llm.train` with an injected delay of S seconds.

    PLANT=rank:R:S|loader:S|checkpoint:S python3 tests/helpers/planted_train.py [options]

`rank` sleeps in every block's forward pass on rank R. `loader` sleeps on every rank whenever a step's samples are
read, in any thread. `checkpoint` sleeps whenever a checkpoint is started.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ezpz_llm.train import main
from ezpz_llm.training.checkpoint.saver import Saver
from ezpz_llm.training.data.samples import Batches
from ezpz_llm.training.model.gpt import Block


def slowed(inner: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Return `inner` with a sleep before each call."""
    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return inner(self, *args, **kwargs)

    return slow


def plant(where: str, *numbers: str) -> None:
    """Slow down one part of the trainer."""
    if where == "rank":
        if os.environ.get("EZPZ_LLM_RANK", os.environ.get("PMI_RANK")) == numbers[0]:
            Block.forward = slowed(Block.forward, float(numbers[1]))
    elif where == "loader":
        Batches.micro_batches = slowed(Batches.micro_batches, float(numbers[0]))
    elif where == "checkpoint":
        Saver.start = slowed(Saver.start, float(numbers[0]))
    else:
        raise ValueError(where)


if __name__ == "__main__":
    plant(*os.environ["PLANT"].split(":"))
    raise SystemExit(main(sys.argv[1:]))
