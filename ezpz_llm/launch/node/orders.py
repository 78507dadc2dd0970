"""Orders to the agents of a run's nodes: files in control/, since the run directory is what all nodes share."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.launch.node.folder import node_dir, wake
from ezpz_llm.rundir.files import write_json
from ezpz_llm.rundir.layout import RunDir

_STOP = "stop"
_STACKS = "stacks-"
_SIGNAL = "signal-"


@dataclass(frozen=True)
class StopOrder:
    """End all processes of the run: SIGTERM, and SIGKILL after `grace_s`. `launch_host` is where launch itself
    ends its launcher, which agents leave alone there."""

    run_id: str
    grace_s: float
    launch_host: str


@dataclass(frozen=True)
class StacksOrder:
    """Write down what the named ranks are doing. `token` tells one order's answers from another's."""

    run_id: str
    token: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SignalOrder:
    """Send every rank the signal `number`."""

    run_id: str
    token: str
    number: int


def order_stop(run_dir: RunDir, stop: StopOrder) -> None:
    """Have every node end what it runs. A second order counts instead of the first."""
    write_json(run_dir.control / _STOP, asdict(stop))
    wake(node_dir(stop.run_id))


def order_signal(run_dir: RunDir, run_id: str, number: int) -> None:
    """Have every rank sent a signal, whatever the launcher would make of it."""
    order = SignalOrder(run_id, os.urandom(4).hex(), number)
    write_json(run_dir.control / f"{_SIGNAL}{order.token}", asdict(order))
    wake(node_dir(run_id))


def take_stacks(run_dir: RunDir, run_id: str, ranks: Collection[int], within_s: float) -> dict[int, Path]:
    """Have the nodes of `ranks` write their stacks, and wait for that; the files of those that did in time.

    Raises:
        OSError: the run directory is not writable.
    """
    order = StacksOrder(run_id, os.urandom(4).hex(), tuple(ranks))
    path = run_dir.control / f"{_STACKS}{order.token}"
    write_json(path, asdict(order))
    wake(node_dir(run_id))
    deadline = time.monotonic() + within_s
    missing, found = set(ranks), {}
    try:
        while missing and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank in sorted(missing):
                if _is_answer(run_dir.rank_stacks(rank), order.token):
                    found[rank] = run_dir.rank_stacks(rank)
            missing -= found.keys()
    finally:
        path.unlink(missing_ok=True)
    return found


def _is_answer(path: Path, token: str) -> bool:
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        return token in file.readline()
    return False


def stop_ordered(run_dir: RunDir, run_id: str) -> StopOrder | None:
    """The order to stop, if there is one for this run."""
    found = _read(run_dir.control / _STOP)
    return StopOrder(**found) if found and found["run_id"] == run_id else None


def stacks_ordered(run_dir: RunDir, run_id: str) -> list[StacksOrder]:
    """The orders for stacks that still wait for answers."""
    found = [_read(path) for path in run_dir.control.glob(f"{_STACKS}*")]
    return [StacksOrder(**{**one, "ranks": tuple(one["ranks"])})
            for one in found if one and one["run_id"] == run_id]


def signals_ordered(run_dir: RunDir, run_id: str) -> list[SignalOrder]:
    """The orders for signals that there have been."""
    found = [_read(path) for path in sorted(run_dir.control.glob(f"{_SIGNAL}*"))]
    return [SignalOrder(**one) for one in found if one and one["run_id"] == run_id]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
