"""Count the collectives that a rank issues, by kind and bytes, at the level of torch's process groups."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from ezpz_llm.training.dist.torch_internals import TorchDispatchMode, operator_schema, script_type, tree_leaves

_KINDS = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather", "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "allgather_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all", "alltoall_": "all_to_all",
    "broadcast_": "broadcast", "reduce_": "reduce", "gather_": "gather", "scatter_": "scatter",
    "send": "send", "recv_": "recv", "recv_any_source_": "recv",
}
"""Kinds of torch's c10d operators, to which all collective functions of torch dispatch."""

MOVE_NOTHING = frozenset({"barrier", "monitored_barrier_"})
"""Operators that transfer no data."""

_INPUT_SECOND = frozenset({"_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_",
                           "alltoall_base_", "alltoall_"})
"""Operators whose first argument is the output, and whose second is the buffer to measure."""


class CollectiveMode(TorchDispatchMode):
    """Dispatch mode that passes each c10d operator's name and arguments to `observe` before executing it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == "c10d":
            self.observe(operator_schema(func).name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def observe(self, name: str, args: tuple[Any, ...]) -> None:
        """Handle a call before it is executed."""
        raise NotImplementedError


class CollectiveCounter(CollectiveMode):
    """Counter of this rank's collectives, by kind and group size, while the mode is active.

    Bytes are the size of the whole buffer that is reduced, gathered, scattered or sent. Single numbers (norms,
    overflow flags) have the kind "scalars".
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))

    def observe(self, name: str, args: tuple[Any, ...]) -> None:
        """Count a call and the bytes of its buffer."""
        if name in MOVE_NOTHING:
            return
        kind, elements, size = issued(name, args)
        entry = self.found["scalars" if elements == 1 else kind][len(group_ranks(args))]
        entry[0] += 1
        entry[1] += size

    def totals(self) -> dict[str, dict[str, Any]]:
        """Return count and bytes by kind, in alphabetical order, and in `groups` by the size of the group."""
        return {kind: {"count": sum(count for count, _ in groups.values()),
                       "bytes": sum(size for _, size in groups.values()),
                       "groups": {str(ranks): {"count": count, "bytes": size}
                                  for ranks, (count, size) in sorted(groups.items())}}
                for kind, groups in sorted(self.found.items())}


def group_ranks(args: tuple[Any, ...]) -> list[int]:
    """Return the ranks of the process group in an operator's arguments; empty if there is no group."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in script_type(leaf):
            return torch.distributed.get_process_group_ranks(torch.distributed.ProcessGroup.unbox(leaf))
    return []


def issued(name: str, args: tuple[Any, ...]) -> tuple[str, int, int]:
    """Return the kind of a c10d operator call, and the elements and bytes of its whole buffer."""
    # Unknown operators are counted under torch's name.
    kind = _KINDS.get(name, name)
    buffer = args[1] if name in _INPUT_SECOND else args[0]
    tensors = [leaf for leaf in tree_leaves(buffer) if isinstance(leaf, torch.Tensor)]
    return (kind, sum(tensor.numel() for tensor in tensors),
            sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def by_ranks(all_ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group ranks with equal collectives: a list of {"ranks": […], "kinds": {…}}."""
    return [{"ranks": [peer for peer, peer_kinds in enumerate(all_ranks) if peer_kinds == kinds], "kinds": kinds}
            for rank, kinds in enumerate(all_ranks) if kinds not in all_ranks[:rank]]
