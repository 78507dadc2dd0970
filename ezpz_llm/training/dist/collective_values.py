"""Check of the values that each kind of collective returns in a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup

_PERIOD = 251
"""Elements of a pattern before it repeats: a prime, so that a value at a wrong offset is found."""
_ELEMENTS = 1000
"""Elements that a rank sends to each other rank: not a power of two."""


class _Values:
    """Values that the ranks of a group send: small integers, whose sums are exact in fp32."""

    def __init__(self, group: ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        self.group, self.device, self.dtype = group, device, dtype
        self.rank, self.size = torch_dist.get_rank(group), torch_dist.get_world_size(group)

    def make_part(self, rank: int, part: int = 0) -> Tensor:
        """Return the values (_ELEMENTS,) of part `part` of the tensor that a rank sends."""
        return ((torch.arange(_ELEMENTS, device=self.device) + 7 * part + 3 * rank) % _PERIOD).to(self.dtype)

    def make_parts(self, rank: int) -> Tensor:
        """Return the values of all parts, (size x _ELEMENTS,)."""
        return torch.cat([self.make_part(rank, part) for part in range(self.size)])

    def make_empty(self, parts: int = 1) -> Tensor:
        """Return a tensor for `parts` parts, with values that no rank sends."""
        return torch.full((parts * _ELEMENTS,), -1, device=self.device, dtype=self.dtype)

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank of the group."""
        return torch_dist.get_global_rank(self.group, rank)


def _all_reduce(values: _Values) -> tuple[Tensor, Tensor]:
    result = values.make_part(values.rank)
    torch_dist.all_reduce(result, group=values.group)
    return result, torch.stack([values.make_part(rank) for rank in range(values.size)]).sum(dim=0)


def _all_gather(values: _Values) -> tuple[Tensor, Tensor]:
    result = values.make_empty(values.size)
    _single("all_gather")(result, values.make_part(values.rank), group=values.group)
    return result, torch.cat([values.make_part(rank) for rank in range(values.size)])


def _reduce_scatter(values: _Values) -> tuple[Tensor, Tensor]:
    result = values.make_empty()
    _single("reduce_scatter")(result, values.make_parts(values.rank), group=values.group)
    return result, torch.stack([values.make_part(rank, values.rank) for rank in range(values.size)]).sum(dim=0)


def _all_to_all(values: _Values) -> tuple[Tensor, Tensor]:
    result = values.make_empty(values.size)
    torch_dist.all_to_all_single(result, values.make_parts(values.rank), group=values.group)
    return result, torch.cat([values.make_part(rank, values.rank) for rank in range(values.size)])


def _broadcast(values: _Values) -> tuple[Tensor, Tensor]:
    last = values.size - 1
    result = values.make_part(last) if values.rank == last else values.make_empty()
    torch_dist.broadcast(result, src=values.global_rank(last), group=values.group)
    return result, values.make_part(last)


def _send_and_receive(values: _Values) -> tuple[Tensor, Tensor]:
    """Pass values around a ring. Even ranks send first, so that no rank waits for itself in blocking calls."""
    following, preceding = ((values.rank + shift) % values.size for shift in (1, -1))
    sent, result = values.make_part(values.rank), values.make_empty()

    def send() -> None:
        torch_dist.send(sent, values.global_rank(following), group=values.group)

    def receive() -> None:
        torch_dist.recv(result, values.global_rank(preceding), group=values.group)

    for action in (send, receive) if values.rank % 2 == 0 else (receive, send):
        action()
    return result, values.make_part(preceding)


def _single(name: str) -> Callable[..., Any]:
    """Return the collective that takes one tensor for all ranks; torch 2.13 renamed it."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
    return getattr(torch_dist, f"{name}_single", None) or getattr(torch_dist, old)


KINDS: dict[str, Callable[[_Values], tuple[Tensor, Tensor]]] = {
    "all-reduce": _all_reduce, "all-gather": _all_gather, "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all, "broadcast": _broadcast, "send and receive": _send_and_receive,
}
"""Each kind with a function that returns this rank's result and the expected values."""
_MOVES = ("all-gather", "all-to-all", "broadcast", "send and receive")


def wrong_kinds(group: ProcessGroup, device: torch.device, kinds: tuple[str, ...] = tuple(KINDS)) -> list[str]:
    """Return the kinds of collectives that returned wrong values on this rank, such as "all-reduce in fp32".

    Collective in the group. Sums are checked in fp32, kinds that only move values also in bf16. Each rank returns
    only its own errors.
    """
    if not torch_dist.is_initialized() or torch_dist.get_world_size(group) == 1:
        return []
    wrong = []
    for kind in kinds:
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16} if kind in _MOVES else {"fp32": torch.float32}
        for name, dtype in dtypes.items():
            result, expected = KINDS[kind](_Values(group, device, dtype))
            if not torch.equal(result, expected):
                wrong.append(f"{kind} in {name}")
    return wrong
