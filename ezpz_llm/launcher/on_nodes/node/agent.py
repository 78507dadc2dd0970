"""Agent of one node: reports its ranks' signs of life in one file, executes orders, and cleans up after the ranks.

The agent is forked from the shim of local rank 0 and runs until all ranks of the node have ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial

from ezpz_llm.core.base import PrivateFolder, open_private, remove_private
from ezpz_llm.core.rundir import RunDir, write_atomic
from ezpz_llm.launcher.basics import node_folder as files
from ezpz_llm.launcher.basics.cleanup import detach, end_marked, kill
from ezpz_llm.launcher.basics.messages import (
    ENDED,
    KEEPALIVE_S,
    RANKS_ENDED,
    RUNNING,
    STOPPING,
    NodeReport,
    RankReport,
    SignalOrder,
    StacksOrder,
    StopOrder,
    control_interval_s,
    interval_s,
    read_orders,
    read_stop_order,
    write_report,
)
from ezpz_llm.launcher.basics.node_folder import remove_stale
from ezpz_llm.launcher.basics.processes import (
    Process,
    ProcessIdentity,
    find_descendants,
    has_signal_handler,
    list_processes,
    marked_processes,
)
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.launcher.jobs.mpi_world import MpiWatch
from ezpz_llm.launcher.jobs.schedulers import scheduler_here
from ezpz_llm.launcher.on_nodes.node.builds import BuildWatch
from ezpz_llm.launcher.on_nodes.node.groups import end_group
from ezpz_llm.launcher.on_nodes.node.rank_reports import Gatherer, format_stacks

_TICK_S = 1.0
"""Interval of the checks that the shims are alive; they access only the node's memory."""
_MISSING_RANKS_S = 3600.0
"""Time limit of waiting for the node's missing ranks while none runs. Normally launch ends the run long before."""
_NICE = 10
"""Niceness: ranks have priority. The agent needs about a hundredth of a core."""
_LINGER_S = 2.0
"""Time for launcher processes on the node to exit after their ranks, in a run that is being ended."""


def start_agent(info: RankInfo, run_dir: RunDir, run_id: str, folder: PrivateFolder) -> int:
    """Fork the node's agent from the shim of local rank 0, after `files.register_shim`, and return its process id.

    If the node already has an agent, as under launchers that do not set local ranks, return its id (0 if it has
    exited).
    """
    try:
        handle = folder.open(files.AGENT, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return next(iter(files.agent_pids(run_id)), 0)
    pid = os.fork()
    if pid:
        os.write(handle, files.identity(pid).encode())
        os.close(handle)
        return pid
    try:
        detach(keep=())
        os.chdir("/")
        _lower_priority()
        with open_private(folder.path) as reopened:
            _Agent(info, run_dir, run_id, reopened).run()
    finally:
        os._exit(0)


def _lower_priority() -> None:
    """Raise the agent's niceness and unbind it from local rank 0's cores, so that it does not slow ranks down."""
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


class _Agent:
    """Agent's state and main loop."""

    def __init__(self, info: RankInfo, run_dir: RunDir, run_id: str, folder: PrivateFolder) -> None:
        self.info = info
        self.run_dir = run_dir
        self.run_id = run_id
        self.folder = folder
        self.host = socket.gethostname()
        nodes = -(-info.world_size // info.local_size)
        self.interval_s, self.control_interval_s = interval_s(nodes), control_interval_s(nodes)
        self.gatherer = Gatherer(folder, run_dir)
        self.mpi = MpiWatch(info.world_size)
        self.builds = BuildWatch()
        self.strays = Strays(folder)
        self.stop: StopOrder | None = None
        self.kill_at = float("inf")
        self.executed_tokens: set[str] = set()
        self.signaled: set[tuple[str, int]] = set()
        self.ranks: dict[int, RankReport] = {}
        self.error: str | None = None
        self.written_at = float("-inf")
        self.idle_since: float | None = None

    def run(self) -> None:
        """Run until the node's ranks have ended."""
        try:
            self._run_guarded(lambda: remove_stale(self.run_id))
            self._poll()
            self._finish()
        except Exception:
            self.error = traceback.format_exc()
            self._write(RUNNING)

    def _run_guarded(self, action: Callable[[], None]) -> None:
        """Run one action of the agent; on an error, report it and continue.

        User programs can write to the files that the agent reads, and damaged files must not prevent the cleanup.
        """
        try:
            action()
        except Exception:
            self.error = traceback.format_exc()
            self._write(STOPPING if self.stop else RUNNING, self.ranks)

    def _poll(self) -> None:
        wake = files.open_wake(self.folder)
        gather_at = orders_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= gather_at:
                gather_at = now + self.interval_s
                self._run_guarded(partial(self._gather, now))
            if now >= orders_at:
                orders_at = now + self.control_interval_s
                self._run_guarded(partial(self._execute_orders, now))
            if self._is_finished(now):
                return
            limit = max(0.0, min(_TICK_S, gather_at - now, orders_at - now, self.kill_at - now))
            if select.select([wake], [], [], limit)[0]:
                os.read(wake, 4096)
                orders_at = now
                if len(files.registered_ranks(self.folder)) > len(self.ranks):
                    # launch must learn promptly which ranks have an agent, so that it can end the run.
                    gather_at = now

    def _gather(self, now: float) -> None:
        processes = list(marked_processes(self.run_id))
        self.strays.update(processes)
        ranks, has_news = self.gatherer.update(processes)
        pids = (process.pid for process in processes if process.rank == self.info.rank)
        has_news = self.mpi.check(pids, now) or has_news
        has_news = self.builds.update(processes) or has_news
        self.ranks = ranks
        if has_news or now - self.written_at >= KEEPALIVE_S * self.interval_s:
            self._write(STOPPING if self.stop else RUNNING, ranks)
            self.folder.touch(files.AGENT)

    def _execute_orders(self, now: float) -> None:
        stop = read_stop_order(self.run_dir, self.run_id)
        if stop is not None and stop != self.stop:
            self.stop, self.kill_at = stop, min(self.kill_at, now + stop.grace_s)
            # Shims forward SIGTERM to their ranks; processes that left a rank's group receive only SIGKILL.
            self._signal_ranks(signal.SIGTERM)
        pending: list[SignalOrder | StacksOrder] = [*read_orders(SignalOrder, self.run_dir, self.run_id),
                                                    *read_orders(StacksOrder, self.run_dir, self.run_id)]
        for order in pending:
            if isinstance(order, SignalOrder):
                self._signal_ranks(order.number, order.token)
            elif order.token not in self.executed_tokens:
                self.executed_tokens.add(order.token)
                with contextlib.suppress(OSError):  # the stacks are more important
                    self.folder.write(files.COLLECTIVES, order.token.encode())
                self._write_stacks(order.token, order.ranks)

    def _signal_ranks(self, number: int, token: str = "") -> None:
        for pid in files.running_shims(self.folder).values():
            # A shim that is still starting has no handler yet, and the signal would kill it. It gets the signal
            # later.
            if number == signal.SIGTERM or (has_signal_handler(pid, number)
                                            and (token, pid) not in self.signaled):
                self.signaled.add((token, pid))
                kill(pid, number)

    def _write_stacks(self, token: str, ranks: tuple[int, ...]) -> None:
        local_ranks = sorted(files.registered_ranks(self.folder).keys() & set(ranks))
        if not local_ranks:
            return
        processes = list(marked_processes(self.run_id))
        for rank in local_ranks:
            heading = f"rank {rank} on {self.host}, {time.strftime('%Y-%m-%d %H:%M:%S')} (order {token})"
            of_rank = [process for process in processes if process.rank == rank]
            text = format_stacks(heading, of_rank, self.folder.path / files.file_of(rank, files.STACKS))
            with contextlib.suppress(OSError):
                # Written atomically: `take_stacks` waits for the first line.
                write_atomic(self.run_dir.rank_stacks(rank), text.encode(errors="backslashreplace"))

    def _is_finished(self, now: float) -> bool:
        if now >= self.kill_at:
            return True
        if files.running_shims(self.folder):
            self.idle_since = None
            return False
        if self.stop is not None or len(files.registered_ranks(self.folder)) >= self.info.local_size:
            return True
        if self.idle_since is None:
            self.idle_since = now
        return now - self.idle_since > _MISSING_RANKS_S

    def _finish(self) -> None:
        """Kill processes that ranks left behind, and remove the folder.

        If launch ends the run from another node, kill the launcher's helpers on this node too, but after the
        shims, which wait for the folder to be removed.
        """
        self._run_guarded(self._end_groups)
        survivors = end_marked(self.run_id, chosen=lambda process: process.is_of_rank, roots=self.strays.roots)
        self._run_guarded(self.builds.remove_locks)
        self._run_guarded(self._gather_last)
        ranks = self.ranks
        clears_node = self.stop is not None and self.stop.launch_host != self.host
        self._write(RANKS_ENDED if clears_node else ENDED, ranks, survivors)
        remove_private(self.folder.path)
        if clears_node:
            deadline = time.monotonic() + _LINGER_S
            while any(marked_processes(self.run_id)) and time.monotonic() < deadline:
                time.sleep(0.05)
            self._write(ENDED, ranks, end_marked(self.run_id))

    def _end_groups(self) -> None:
        for group in files.rank_cgroups(self.folder):
            end_group(group)

    def _gather_last(self) -> None:
        self.ranks, _ = self.gatherer.update([])

    def _write(self, state: str, ranks: dict[int, RankReport] | None = None,
               survivors: list[int] | None = None) -> None:
        self.written_at = time.monotonic()
        scheduler = scheduler_here(os.environ)
        report = NodeReport(self.run_id, self.host, self.info.rank, state, self.interval_s, ranks or {},
                            tuple(survivors or ()), scheduler.own_step(os.environ) if scheduler else None,
                            self.error, self.mpi.message, self.builds.names)
        # A full or missing file system must not end the agent before it has cleaned up the node.
        with contextlib.suppress(OSError):
            write_report(self.run_dir, report)


class Strays:
    """Processes below a node's shims that do not carry the run's marker.

    They are recorded while they can be recognized by descent, which is lost once their shim is killed.
    """

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self.recorded: set[ProcessIdentity] = set()

    def update(self, processes: Iterable[Process]) -> None:
        """Record the strays. `processes` are all processes with the marker."""
        by_pid = list_processes(is_own_only=True)
        of_ranks = {process.pid for process in processes if process.is_of_rank}
        # Except for shims and their forks, everything below a shim belongs to its rank.
        spared = {os.getpid(), *(process.pid for process in processes if process.is_shim)}
        roots = {*self.roots(), *(ProcessIdentity(pid, by_pid[pid].start) for pid in of_ranks if pid in by_pid)}
        strays = {process for process in find_descendants(by_pid, roots, spared) if process.pid not in of_ranks}
        if strays != self.recorded:
            self.recorded = strays
            self._write()

    def roots(self) -> set[ProcessIdentity]:
        """Return the processes from which strays and their children descend."""
        return self.recorded | set(files.registered_shims(self._folder))

    def _write(self) -> None:
        # For the janitors, in case the agent is killed too.
        with contextlib.suppress(OSError):
            self._folder.write(files.STRAYS, "".join(f"{process}\n" for process in self.recorded).encode())
