"""What one step issues, in order: the key with which the collectives of a trace are told apart."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ezpz_llm.certify.collectives import MOVE_NOTHING, issued
from ezpz_llm.dist.degrees import AXES
from ezpz_llm.dist.mesh import Mesh


class Census:
    """Lists the collectives of one step, which the steps after it issue again.

    A trace has their names and times alone. Counting makes every operator of the step a Python call, so that it is
    not done in the steps that are traced.

    Attributes:
        collectives: once the step has passed, in order, each with its kind, the axes of its group ("dp", "dp sp",
            "world"), the ranks in it, the bytes of its whole buffer and, for sends and receives, the other rank.
    """

    def __init__(self, step: int, mesh: Mesh, *, counts: bool = True) -> None:
        self._step = step
        self._mesh = mesh
        self._counts = counts
        self._log: _CollectiveLog | None = None
        self.collectives: list[dict[str, Any]] = []

    def before_step(self, step: int) -> None:
        """Start counting before the one step (not where blocks are compiled, which it would keep from it)."""
        if step == self._step and self._counts:
            self._log = _CollectiveLog(self._mesh)
            self._log.__enter__()

    def after_step(self, step: int) -> None:
        """Stop counting."""
        self.close()

    def close(self) -> None:
        """The same for a run that ends within the step."""
        if self._log is not None:
            self._log.__exit__(None, None, None)
            self.collectives, self._log = self._log.calls, None


class _CollectiveLog(TorchDispatchMode):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh
        self.calls: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == "c10d":
            self._note(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        group = _group(args)
        ranks = torch.distributed.get_process_group_ranks(group) if group is not None else []
        kind, size = (name, 0) if name in MOVE_NOTHING else issued(name, args)[::2]
        call = {"kind": kind, "axes": self._axes(ranks), "ranks": ranks, "bytes": size}
        if name in ("send", "recv_"):
            call["peer"] = ranks[args[2]]
        self.calls.append(call)

    def _axes(self, ranks: list[int]) -> str:
        mesh = self._mesh
        for count in range(1, len(AXES) + 1):
            for axes in combinations(AXES, count):
                if mesh.size(*axes) > 1 and mesh.degrees.peers(mesh.rank, *axes) == ranks:
                    return " ".join(axes)
        return "alone" if len(ranks) == 1 else ""


def _group(args: tuple[Any, ...]) -> torch.distributed.ProcessGroup | None:
    """The group among an operator's arguments."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return torch.distributed.ProcessGroup.unbox(leaf)
    return None
