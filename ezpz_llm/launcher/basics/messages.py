"""Orders to the agents of a run's nodes (control/) and their reports (heartbeat/), as files in the run directory.

The folders are private, and orders are accepted only from files that this user owns.
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

from ezpz_llm.core.base import Range, make_private, open_private, read_records
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.node_folder import wake

_LOGS = "logs"
_RECORDS_WITHIN_S = 2.0
"""Seconds in which ranks write records of their collectives (training/dist/collective_records.py)."""
_MAX_BYTES = 1 << 20
"""Size limit of an order, since every agent reads it up to once a second. Its longest part is the list of ranks."""

Order = TypeVar("Order", bound="StopOrder | StacksOrder | SignalOrder")


@dataclass(frozen=True)
class StopOrder:
    """Order to end all processes of the run: SIGTERM, then SIGKILL after `grace_s`.

    Attributes:
        launch_host: the node on which launch runs. There launch itself ends the launcher.
        is_hang: True to send SIGABRT instead of SIGTERM to ranks whose handler for it prints their stacks.
        received: the signal that launch received, or "".
    """

    run_id: str
    grace_s: Annotated[float, Range(0, 86_400)]
    launch_host: str
    is_hang: bool = False
    received: str = ""


@dataclass(frozen=True)
class StacksOrder:
    """Order to write the stacks of `ranks`, and the records of all ranks' collectives.

    `token` identifies the replies to this order.
    """

    run_id: str
    token: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SignalOrder:
    """Order to send every rank the signal `number`."""

    run_id: str
    token: str
    number: Annotated[int, Range(1, 64)]


_FILES = {StopOrder: "stop", StacksOrder: "stacks-", SignalOrder: "signal-"}
"""File name of each kind of order; names that end in "-" are followed by the order's token."""


def clear_orders(run_dir: RunDir) -> None:
    """Remove all orders."""
    with make_private(run_dir.control) as control:
        for name in control.names():
            if name == _LOGS or name.startswith(tuple(_FILES.values())):
                control.remove(name)


def order_stop(run_dir: RunDir, stop: StopOrder) -> None:
    """Order every node to end its processes. A second order replaces the first."""
    # The run directory may have been removed; the ranks must be ended nevertheless.
    run_dir.path.mkdir(parents=True, exist_ok=True)
    _write_order(run_dir, stop)


def order_signal(run_dir: RunDir, run_id: str, number: int) -> None:
    """Order every node to send its ranks a signal; launchers may not forward it unchanged."""
    _write_order(run_dir, SignalOrder(run_id, os.urandom(4).hex(), number))


def order_logs(run_dir: RunDir, ranks: str) -> None:
    """Order the logs of these ranks ("0,4-7") to be copied to the run directory when the ranks end.

    Raises:
        OSError: the run directory is not writable, or belongs to another user.
    """
    with make_private(run_dir.control) as control:
        control.write(_LOGS, ranks.encode())


def take_stacks(run_dir: RunDir, run_id: str, ranks: Collection[int], within_s: float,
                nodes: int) -> dict[int, Path]:
    """Order the nodes of `ranks` to write their stacks, and return the files written within `within_s`.

    Meanwhile, all ranks that have called `ezpz_llm.setup` write records of their collectives.

    Raises:
        OSError: the run directory is not writable.
    """
    order = StacksOrder(run_id, os.urandom(4).hex(), tuple(ranks))
    name = _write_order(run_dir, order)
    began = time.monotonic()
    # Until then, every agent has read the order.
    earliest, deadline = began + control_interval_s(nodes) + _RECORDS_WITHIN_S, began + within_s
    missing, files = set(ranks), {}
    try:
        while (missing and time.monotonic() < deadline) or time.monotonic() < earliest:
            time.sleep(0.1)
            for rank in sorted(missing):
                if _is_reply(run_dir.rank_stacks(rank), order.token):
                    files[rank] = run_dir.rank_stacks(rank)
            missing -= files.keys()
    finally:
        with open_private(run_dir.control) as control:
            control.remove(name)
    return files


def _is_reply(path: Path, token: str) -> bool:
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        return token in file.readline(4096)
    return False


def read_stop_order(run_dir: RunDir, run_id: str) -> StopOrder | None:
    """Return the order to stop this run, if there is one."""
    return next(iter(read_orders(StopOrder, run_dir, run_id)), None)


def read_orders(kind: type[Order], run_dir: RunDir, run_id: str) -> list[Order]:
    """Return the orders of a kind for the run. `take_stacks` removes its order when it returns.

    Invalid files are skipped, so that they do not stop the agent.
    """
    return [order for order in read_records(kind, run_dir.control, _FILES[kind], _MAX_BYTES)
            if order.run_id == run_id]


def read_log_order(run_dir: RunDir) -> str:
    """Return the ranks whose logs are to be copied, "" for none."""
    with contextlib.suppress(OSError), open_private(run_dir.control) as control:
        return control.read(_LOGS, _MAX_BYTES).decode(errors="replace")
    return ""


def _write_order(run_dir: RunDir, order: StopOrder | StacksOrder | SignalOrder) -> str:
    name = _FILES[type(order)] + getattr(order, "token", "")
    with make_private(run_dir.control) as control:
        control.write(name, json.dumps(asdict(order)).encode())
    wake(order.run_id)
    return name


_REPORTS_PER_SECOND = 200
"""Reports per second of all agents together; shared file systems often have a single metadata server."""
_READS_PER_SECOND = 2000
"""Reads of orders per second of all agents together; a read costs less than a report."""
KEEPALIVE_S = 10.0
"""Period after which an unchanged report is written again, if the agent's interval is 1 s.

At longer intervals it is ten intervals.
"""

RUNNING, STOPPING, RANKS_ENDED, ENDED = "running", "stopping", "ranks ended", "ended"
"""States of an agent: RANKS_ENDED when no rank process is left, ENDED when no process of the run is left."""


@dataclass(frozen=True)
class RankReport:
    """Report about one rank.

    Attributes:
        silent_s: seconds from the last heartbeat to the report, by the node's clock; None if there was none.
        idle_s: seconds since the rank last used the CPU or wrote to its log.
        state: the kernel's letter for the main process ("D": waiting for a device or a file system).
        ended: the exit code, None while the rank runs.
        lived_s: the lifetime of an ended rank.
        error: the error of an ended rank whose record could not be written, for example because the disk was full.
    """

    pid: int | None = None
    phase: str | None = None
    step: int | None = None
    silent_s: float | None = None
    idle_s: float = 0.0
    state: str | None = None
    ended: int | None = None
    lived_s: float | None = None
    error: str = ""


@dataclass(frozen=True)
class NodeReport:
    """Report about all ranks of one node.

    Attributes:
        left: rank processes that could not be killed.
        slurm_step: "JOB.STEP", if the ranks are tasks of a Slurm step.
        error: the agent's own last error.
        mpi: a note that MPI in the ranks runs as a world of one.
        builds: extensions that ranks were seen compiling.
    """

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
    """Return the interval at which an agent reads orders: 1 s, longer above 2000 nodes."""
    return max(1.0, nodes / _READS_PER_SECOND)


def interval_s(nodes: int) -> float:
    """Return the interval at which an agent gathers reports: 1 s, longer above 200 nodes.

    The limit protects the file system.
    """
    return max(1.0, nodes / _REPORTS_PER_SECOND)


def write_report(run_dir: RunDir, report: NodeReport) -> None:
    """Write a node's report in place, which takes half the operations of an atomic replacement.

    `read_reports` skips a report that is being written.

    Raises:
        OSError: the report cannot be written.
    """
    # The run directory may have been removed, and created again by a checkpoint.
    with make_private(run_dir.heartbeat) as folder:
        folder.overwrite(run_dir.node_report(report.first_rank).name, json.dumps(asdict(report)).encode() + b"\n")


def read_reports(run_dir: RunDir, run_id: str) -> list[NodeReport]:
    """Return the latest report of each node of this run, ordered by rank.

    Incomplete reports and other users' reports are skipped.
    """
    reports = read_records(NodeReport, run_dir.heartbeat, "node")
    return sorted((report for report in reports if report.run_id == run_id), key=lambda report: report.first_rank)
