"""Measure a layout's collectives without computation, and its step with stubbed collectives."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ezpz_llm.training.engine.collectives import MOVE_NOTHING, issued
from ezpz_llm.training.trainer.loop import train_step
from ezpz_llm.training.trainer.session import Session
from peers.stubbed_collectives import stubbed_collectives

_REPEATS = 5
_STUBBED_STEPS = 6


class _Log(TorchDispatchMode):
    """Counts of a step's collective calls, by kind and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name not in MOVE_NOTHING:
            kind, _, size = issued(name, args)
            self.calls[kind, size] += 1
        return func(*args, **(kwargs or {}))


def apart(session: Session) -> dict[str, Any]:
    """Take more steps of a finished run: one to count its collectives, and some without collectives.

    Call it on all ranks.

    Returns:
        `calls` (each [kind, bytes of the full buffer, count, seconds per call]), `seconds` of all calls in
        sequence, and `stubbed_s`, the seconds of steps with stubbed collectives (which do not train correctly).
    """
    _step(session)  # the preceding validation leaves ZeRO-3's parameters gathered
    with _Log() as log:
        _step(session)
    rows = []
    for (kind, size), count in sorted(log.calls.items()):
        rows.append([kind, size, count, _seconds(kind, size, session.dist.barrier)])
    stubbed = []
    for _ in range(_STUBBED_STEPS):
        session.dist.barrier()
        with stubbed_collectives():
            began = time.perf_counter()
            _step(session)
            stubbed.append(time.perf_counter() - began)
    return {"calls": rows, "seconds": sum(count * seconds for _, _, count, seconds in rows),
            "stubbed_s": stubbed[1:]}


def _step(session: Session) -> None:
    train_step(session, session.step)
    session.step += 1


def _seconds(kind: str, size: int, barrier: Callable[[], None]) -> float:
    """Return the median time of such a call among all ranks, with fp32 buffers.

    Raises:
        SystemExit: this benchmark does not support the kind.
    """
    call = _call(kind, max(1, size // 4))
    if call is None:
        raise SystemExit(f"this benchmark does not support {kind}")
    call_s = []
    for _ in range(_REPEATS + 1):
        barrier()
        began = time.perf_counter()
        call()
        call_s.append(time.perf_counter() - began)
    return statistics.median(call_s[1:])


def _call(kind: str, elements: int) -> Callable[[], Any] | None:
    comm, ranks = torch.distributed, torch.distributed.get_world_size()
    elements += -elements % ranks
    whole, part = torch.zeros(elements), torch.zeros(elements // ranks)
    return {"all_reduce": lambda: comm.all_reduce(whole),
            "all_gather": lambda: comm.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda: comm.reduce_scatter_tensor(part, whole),
            "broadcast": lambda: comm.broadcast(whole, 0),
            "reduce": lambda: comm.reduce(whole, 0)}.get(kind)
