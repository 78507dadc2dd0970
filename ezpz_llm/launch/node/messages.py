"""Orders to the agents of a run's nodes: files in control/, since the run directory is what all nodes share.

The folder is private, and an order is believed only if it is a file of our own.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

from ezpz_llm.base import Range, make_private, open_private, read_records
from ezpz_llm.launch.node.folder import wake
from ezpz_llm.rundir import RunDir

_LOGS = "logs"
_MOST_BYTES = 1 << 20
"""Of an order, which every agent reads once a second: the ranks that it names are its longest part."""

Order = TypeVar("Order", bound="StopOrder | StacksOrder | SignalOrder")


@dataclass(frozen=True)
class StopOrder:
    """End all processes of the run: SIGTERM, and SIGKILL after `grace_s`. `launch_host` is where launch itself
    ends its launcher, which agents leave alone there. `is_hang`: nobody knows where the ranks stand, and those that
    can say it in place of SIGTERM are to. `received` is the signal that launch itself was sent, "" for none."""

    run_id: str
    grace_s: Annotated[float, Range(0, 86_400)]
    launch_host: str
    is_hang: bool = False
    received: str = ""


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
    number: Annotated[int, Range(1, 64)]


_FILES = {StopOrder: "stop", StacksOrder: "stacks-", SignalOrder: "signal-"}
"""How the names of each kind's files begin; of orders that there can be several of, the token follows."""


def clear_orders(run_dir: RunDir) -> None:
    """Remove all orders that there have been."""
    with make_private(run_dir.control) as control:
        for name in control.names():
            if name == _LOGS or name.startswith(tuple(_FILES.values())):
                control.remove(name)


def order_stop(run_dir: RunDir, stop: StopOrder) -> None:
    """Have every node end what it runs. A second order counts instead of the first."""
    # Somebody may have removed the run directory: its ranks have to be ended all the same.
    run_dir.path.mkdir(parents=True, exist_ok=True)
    _give(run_dir, stop)


def order_signal(run_dir: RunDir, run_id: str, number: int) -> None:
    """Have every rank sent a signal, whatever the launcher would make of it."""
    _give(run_dir, SignalOrder(run_id, os.urandom(4).hex(), number))


def order_logs(run_dir: RunDir, ranks: str) -> None:
    """Have the logs of these ranks ("0,4-7") copied to the run directory when they end.

    Raises:
        OSError: the run directory is not writable, or not ours.
    """
    with make_private(run_dir.control) as control:
        control.write(_LOGS, ranks.encode())


def take_stacks(run_dir: RunDir, run_id: str, ranks: Collection[int], within_s: float) -> dict[int, Path]:
    """Have the nodes of `ranks` write their stacks, and wait for that; the files of those that did in time.

    Raises:
        OSError: the run directory is not writable.
    """
    order = StacksOrder(run_id, os.urandom(4).hex(), tuple(ranks))
    name = _give(run_dir, order)
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
        with open_private(run_dir.control) as control:
            control.remove(name)
    return found


def _is_answer(path: Path, token: str) -> bool:
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        return token in file.readline(4096)
    return False


def stop_ordered(run_dir: RunDir, run_id: str) -> StopOrder | None:
    """The order to stop, if there is one for this run."""
    return next(iter(orders(StopOrder, run_dir, run_id)), None)


def orders(kind: type[Order], run_dir: RunDir, run_id: str) -> list[Order]:
    """The orders of that kind that there have been for the run; of those for stacks, the ones that still wait for
    answers. What is no order must not end the agent that clears the node."""
    return [order for order in read_records(kind, run_dir.control, _FILES[kind], _MOST_BYTES)
            if order.run_id == run_id]


def logs_ordered(run_dir: RunDir) -> str:
    """The ranks whose logs are wanted, "" for none."""
    with contextlib.suppress(OSError), open_private(run_dir.control) as control:
        return control.read(_LOGS, _MOST_BYTES).decode(errors="replace")
    return ""


def _give(run_dir: RunDir, order: StopOrder | StacksOrder | SignalOrder) -> str:
    name = _FILES[type(order)] + getattr(order, "token", "")
    with make_private(run_dir.control) as control:
        control.write(name, json.dumps(asdict(order)).encode())
    wake(order.run_id)
    return name


NODES_A_SECOND = 200
"""How many reports a second all agents together write: a shared file system often has one metadata server."""
LOOKS_A_SECOND = 2000
"""How often a second all agents together look for orders."""
KEEPALIVE_S = 10.0
"""A report without news is written again after this long, where the interval is a second; else ten intervals."""

RUNNING, STOPPING, RANKS_ENDED, ENDED = "running", "stopping", "ranks ended", "ended"
"""An agent's states. In the last two no process of any rank is left; in the last, nothing else of the run."""


@dataclass(frozen=True)
class RankReport:
    """One rank as its node sees it.

    `silent_s` are the seconds since its last heartbeat (None: it never gave one), `idle_s` those since it last
    used the processor or wrote to its log; both by the node's clock, at the time of the report. `ended` is its exit
    code, `lived_s` how long it then had run. `state` is the kernel's letter for its main process ("D": waiting for
    a device or a file system).
    """

    pid: int | None = None
    phase: str | None = None
    step: int | None = None
    silent_s: float | None = None
    idle_s: float = 0.0
    state: str | None = None
    ended: int | None = None
    lived_s: float | None = None


@dataclass(frozen=True)
class NodeReport:
    """All ranks of one node. `left` are processes of ranks that could not be ended; `slurm_step` is "JOB.STEP"
    where the ranks are tasks of one; `error` says what went wrong in the agent itself last; `mpi` that an MPI in
    the ranks is alone; `builds` are the extensions that ranks were seen to compile."""

    run_id: str
    host: str
    first_rank: int
    state: str
    interval_s: float
    ranks: Mapping[int, RankReport] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    slurm_step: str | None = None
    error: str | None = None
    mpi: str | None = None
    builds: tuple[str, ...] = ()


def control_interval_s(nodes: int) -> float:
    """How often an agent looks for orders, which costs less than a report."""
    return max(1.0, nodes / LOOKS_A_SECOND)


def interval_s(nodes: int) -> float:
    """How often an agent gathers: once a second, less often on more nodes than a shared file system bears."""
    return max(1.0, nodes / NODES_A_SECOND)


def write_report(run_dir: RunDir, report: NodeReport) -> None:
    """Write it in place: half the file system's work of writing it beside and renaming. `read_reports` copes.

    Raises:
        OSError: the file system refuses.
    """
    # The run directory may have been removed, and made again by a checkpoint.
    with make_private(run_dir.heartbeat) as folder:
        folder.overwrite(run_dir.node_report(report.first_rank).name, json.dumps(asdict(report)).encode() + b"\n")


def read_reports(run_dir: RunDir, run_id: str) -> list[NodeReport]:
    """The latest report of each node of this run, in the order of their ranks; without one that is just being
    written, or that no agent of ours wrote."""
    found = read_records(NodeReport, run_dir.heartbeat, "node")
    return sorted((report for report in found if report.run_id == run_id), key=lambda report: report.first_rank)
