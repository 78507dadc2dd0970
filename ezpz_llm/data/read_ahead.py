"""Reading the next step's samples while this step is computed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ezpz_llm.data.samples import Batches


class ReadAhead(Batches):
    """`Batches`, with a thread that reads the step after the one asked for.

    So a step waits only for a disk that is slower than the training. Any step may be asked for, also the same one
    twice: what was not read ahead is read then.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader = ThreadPoolExecutor(1, "read-ahead")
        self._next: tuple[int, Future[list[tuple[np.ndarray, np.ndarray]]]] | None = None

    def micro_batches(self, consumed: int) -> list[tuple[np.ndarray, np.ndarray]]:
        read_next = super().micro_batches
        if self._next and self._next[0] == consumed:
            found = self._next[1].result()
        else:
            found = read_next(consumed)
        following = consumed + self.global_batch
        if not self._next or self._next[0] != following:
            self._next = following, self._reader.submit(read_next, following)
        return found
