"""Comparison of the calls of ranks whose layout communicates in them, before a collective waits forever.

If ranks call different modules, such as an evaluation on one rank or a dropped layer, their collectives do not
match: they wait for each other, abort, or add different tensors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist import Mesh
from ezpz_llm.training.dist.torch_internals import default_store

_PATIENCE_S = 300.0
"""Seconds to wait for the other rank, which may evaluate. Then the collective waits as it would anyway."""
_COMPARED = 16
"""Number of backward passes from the first in which calls of single modules are compared, too."""
_KEPT = 256
"""Number of calls that are kept in the store."""
_numbers = count()


class CallOrder:
    """Calls of a model on the first two data-parallel ranks, compared through the store of the process group.

    Under tensor parallelism, these are two groups of ranks. A rank compares with the rank of the same share.

    Both ranks record calls that every rank must make, without waiting. A rank compares a call without gradients, a
    backward pass that uses other modules than the one before, and each call up to the first _COMPARED backward
    passes, with that of the other rank. Other ranks do nothing.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, gathers: bool, *, reduces: bool) -> None:
        """Record calls from now on.

        Args:
            gathers: True if the layout gathers parameters when modules are called.
            reduces: True if backward passes reduce the gradients of used parameters only.
        """
        self._rank, ranks = mesh.place("dp", "sp")
        # A model of one rank, such as a reference, is not counted, since other ranks may not have it.
        self._key = f"ezpz_llm/calls/{next(_numbers) if ranks > 1 else None}/{mesh.tp_rank}"
        self._gathers = gathers
        self._reduces = reduces
        self._is_active = ranks > 1 and self._rank < 2
        self._calls = self._passes = 0
        self._modules = [name for name, part in module.named_modules()
                         if any(parameter.requires_grad for parameter in part.parameters(recurse=False))]
        self._used: set[str] = set()
        self._previous = set(self._modules)
        if self._is_active and reduces:
            for name, part in module.named_modules():
                if name in self._previous or part is module or isinstance(part, FSDPModule):
                    part.register_forward_pre_hook(partial(self._add_module, name), prepend=True)

    def _add_module(self, name: str, *_: Any) -> None:
        """Record a call of a module, before its collectives."""
        if torch.compiler.is_compiling():
            return
        has_gradients = torch.is_grad_enabled()
        if has_gradients:
            self._used.add(name)
        is_early = self._passes < _COMPARED
        if self._gathers and (is_early or not name):
            self._exchange(f"calls {name or 'the model'} with{'' if has_gradients else 'out'} gradients",
                           compares=is_early or not has_gradients)

    def add_backward(self, rates: Sequence[float]) -> None:
        """Record a backward pass, before its collectives.

        Args:
            rates: learning rates of the optimizer's groups.

        Raises:
            UserError: the other rank makes another call, has used other modules, or has other learning rates.
        """
        if not self._is_active:
            return
        self._passes += 1
        used = self._used & set(self._modules)
        unused = [name for name in self._modules if name not in used] if self._reduces else []
        self._exchange(f"computes the gradient of a loss {_without(unused)} at the learning rates {[*rates]}",
                       compares=self._passes <= _COMPARED or used != self._previous)
        self._previous, self._used = used, set()

    def _exchange(self, call: str, *, compares: bool) -> None:
        if not self._is_active:
            return
        self._calls += 1
        store = default_store()
        slot = f"{self._key}/{self._calls % _KEPT}/"
        store.set(f"{slot}{self._rank}", f"{self._calls} {call}")
        if not compares:
            return
        other = 1 - self._rank
        number, text = self._wait_for(f"{slot}{other}")
        if number == self._calls and text != call:
            raise UserError(f"this rank {call}, but rank {other} {text}",
                            where=f"a wrapped model on rank {self._rank}", instead=_INSTEAD)

    def _wait_for(self, key: str) -> tuple[int, str]:
        """Return number and text of the other rank's current call or a later one.

        If it makes none, return (0, "") and stop comparing calls.
        """
        store, end, pause = default_store(), time.monotonic() + _PATIENCE_S, 0.0005
        while time.monotonic() < end:
            if store.check([key]):
                number, _, text = store.get(key).decode().partition(" ")
                if int(number) >= self._calls:
                    return int(number), text
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        self._is_active = False
        return 0, ""


_INSTEAD = ("the same calls and learning rates on every rank, also in an evaluation; ddp, or 0 * output.sum() of "
            "the other modules in the loss, if ranks use different modules")


def _without(unused: Sequence[str]) -> str:
    if not unused:
        return "of all modules"
    return f"without {unused[0]}" + (f" and {len(unused) - 1} more" if len(unused) > 1 else "")
