"""What a step's communication takes besides parameters, gradients and moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ezpz_llm.engine.base import Engine
from ezpz_llm.engine.held import buckets, state_storages, taken


class Size(NamedTuple):
    """Bytes allocated, and those of them that take memory."""

    allocated: int
    taken: int


class BufferLog:
    """Looks at memory whenever a collective is called."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = _size(buckets(engine))
        self._buckets = Size(0, 0)
        self._moved: list[dict[int, Size]] = []

    def look(self, tensors: Iterable[torch.Tensor]) -> None:
        """At DeepSpeed's buckets, and at the tensors that the collective is about to move."""
        self._buckets = max(self._buckets, _size(buckets(self._engine)))
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._moved.append({storage.data_ptr(): _size([storage]) for storage in storages})

    def found(self) -> dict[str, int]:
        """`buffer_bytes`, what the buckets took, or else the most that one collective moved besides states; and
        `buffer_transient_bytes`, what of it was allocated in the step."""
        if self._buckets.allocated:
            return {"buffer_bytes": self._buckets.taken,
                    "buffer_transient_bytes": self._buckets.allocated - self._before.allocated}
        own = state_storages(self._engine)
        most = max((_sum(size for place, size in moved.items() if place not in own) for moved in self._moved),
                   default=Size(0, 0))
        return {"buffer_bytes": most.taken, "buffer_transient_bytes": most.allocated}


def _size(storages: Iterable[torch.UntypedStorage]) -> Size:
    return _sum(Size(storage.nbytes(), taken(storage)) for storage in storages)


def _sum(sizes: Iterable[Size]) -> Size:
    sizes = list(sizes)
    return Size(sum(size.allocated for size in sizes), sum(size.taken for size in sizes))
