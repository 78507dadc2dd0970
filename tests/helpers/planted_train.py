"""`ezpz_llm.train` with something slow planted: seconds of sleep.

    PLANT=rank:R:S|loader:S|checkpoint:S python3 tests/helpers/planted_train.py [options]

`rank` sleeps in every block's forward pass on rank R, `loader` whenever a step's samples are read, in
whichever thread, on every rank, `checkpoint` whenever one is begun.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ezpz_llm.checkpoint.saver import Saver
from ezpz_llm.data.samples import Batches
from ezpz_llm.model.gpt import Block
from ezpz_llm.train import main


def slowed(inner: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The function, after a sleep."""
    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return inner(self, *args, **kwargs)

    return slow


def plant(where: str, *numbers: str) -> None:
    """Slow one part of the trainer down."""
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
