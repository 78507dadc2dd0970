"""Process of one rank, from start to end."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from ezpz_llm.core.base import PrivateFolder, print_lines
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.cleanup import adopt_orphans, descendants, die_with_parent, kill, start_janitor
from ezpz_llm.launcher.basics.devices import has_no_accelerator
from ezpz_llm.launcher.basics.hostlist import expand_numbers
from ezpz_llm.launcher.basics.node_folder import (
    GROUP,
    HEARTBEAT,
    STACKS,
    await_agent,
    file_of,
    have_all_ended,
    mark_end,
)
from ezpz_llm.launcher.basics.processes import ProcessIdentity, awaits_signal, end_all, has_signal_handler
from ezpz_llm.launcher.basics.ranks import OUTER_LAUNCHERS, RankInfo, rank_variables
from ezpz_llm.launcher.basics.start_errors import start_problem
from ezpz_llm.launcher.basics.variables import (
    BIND_VARIABLE,
    HEARTBEAT_VARIABLE,
    NODE_DIR_VARIABLE,
    RUN_ID_VARIABLE,
    STACKS_VARIABLE,
    TORCHELASTIC_VARIABLE,
)
from ezpz_llm.launcher.on_nodes.node.groups import end_group, enter_group, make_group
from ezpz_llm.launcher.on_nodes.shim.memory import count_kills
from ezpz_llm.launcher.on_nodes.shim.output import MANY_RANKS, Output

_EXIT_NOT_EXECUTABLE, _EXIT_NOT_FOUND = 126, 127

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_FORWARDED = (*_ENDING_SIGNALS, *_USER_SIGNALS)
_ORPHAN_GRACE_S = 5.0
_DRAIN_S = 1.0
_KILL_WITHIN_S = 5.0
_CHECK_S = 1.0
"""Interval of checks for background processes of a rank that has ended."""
_SAME_SIGNAL_S = 0.2
"""Longest delay between signals that a scheduler sends to a rank and to its shim."""


class Rank:
    """Process of one rank, with its descendants and output.

    Args:
        folder: the node's folder; None if it could not be created.
        agent: the process id of the node's agent, if it is a child of this process.
    """

    def __init__(self, info: RankInfo, run_dir: RunDir, folder: PrivateFolder | None, command: list[str], log: Path,
                 output: Output, agent: int | None = None) -> None:
        self.info = info
        self.run_dir = run_dir
        self.run_id = os.environ[RUN_ID_VARIABLE]
        self.folder = folder
        self.command = command
        self.log = log
        self.output = output
        self.parent = os.getppid()
        self.agent = agent
        self.started, self.started_monotonic = time.time(), time.monotonic()
        self.lived_s = 0.0
        self.error = ""
        """The rank's error, if its record could not be written."""
        self.kills_before = count_kills()
        self.kill_at: float | None = None
        self.end_signal: signal.Signals | None = None
        self.kept_signals: list[signal.Signals] = []
        self.has_requested_stacks = False
        self.selector = selectors.DefaultSelector()
        self.group = make_group(f"ezpz_llm-{self.run_id}-rank{info.rank}")

    def run(self) -> int:
        """Start the rank, wait until it ends, write its record, and return its exit code."""
        # A single pipe keeps the order of stdout and stderr; there are two only if both go to the console.
        pipes = {stream: os.pipe() for stream in ((1, 2) if self.output.is_split else (1,))}
        if self.group is not None and self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.write(file_of(self.info.rank, GROUP), os.fsencode(self.group))
        read_ends = [read_end for read_end, _ in pipes.values()]
        self.janitor = start_janitor(self.run_id, 0.5, *self.output.make_drain(read_ends), last=self._end_group)
        adopt_orphans()
        wake = _wake_on_signals()
        self.selector.register(wake, selectors.EVENT_READ, None)
        for stream, (read_end, _) in pipes.items():
            self.selector.register(read_end, selectors.EVENT_READ, stream)
        try:
            child = self._start({stream: write_end for stream, (_, write_end) in pipes.items()})
        except OSError as error:
            code = _EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else _EXIT_NOT_EXECUTABLE
            self.output.write_message(f"cannot run {self.command[0]!r}: {start_problem(self.command[0], error)}")
            self._finish(os.getpid(), code, None)
        else:
            status = self._wait_for(child, wake)
            code = status if status >= 0 else 128 - status
            if status < 0:
                self._read_last_signals(wake)
            self._finish(child.pid, code, signal.Signals(-status).name if status < 0 else None)
        if self.folder is not None:
            mark_end(self.folder, self.info.rank, code, self.lived_s, self.error)
            if code == 0:
                self._await_node_ranks(wake, self.folder)
        self._end_group()
        self._end_descendants()
        if self.folder is not None:
            await_agent(self.folder, self.info.local_size)
        self.janitor.dismiss()
        return code

    def _start(self, streams: dict[int, int]) -> subprocess.Popen[bytes]:
        def in_child() -> None:
            """Put the rank into its own process group, which ends with the shim."""
            os.setpgid(0, 0)
            die_with_parent(signal.SIGKILL)
            if self.group is not None:
                enter_group(self.group)

        # MPICH never closes stdin of ranks other than 0, so that a rank that reads it would block forever.
        try:
            return subprocess.Popen(self.command, env=self._environment(),
                                    stdin=None if self.info.rank == 0 else subprocess.DEVNULL, stdout=streams[1],
                                    stderr=streams.get(2, subprocess.STDOUT), close_fds=False, preexec_fn=in_child)
        finally:
            # With the write end open here, the read end would never report the end of the output.
            for stream in streams.values():
                os.close(stream)

    def _environment(self) -> dict[str, str]:
        outer = OUTER_LAUNCHERS if TORCHELASTIC_VARIABLE in os.environ else ()
        env = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
        if self.info.world_size > 1 and has_no_accelerator(env):
            # Without it, accelerate and Hugging Face's Trainer treat each CPU rank as a world of one.
            env.setdefault("ACCELERATE_USE_CPU", "true")
        env |= {**rank_variables(self.info), HEARTBEAT_VARIABLE: str(self.heartbeat())}
        if self.folder is not None:
            env[NODE_DIR_VARIABLE] = str(self.folder.path)
            env[STACKS_VARIABLE] = str(self.folder.path / file_of(self.info.rank, STACKS))
        return env

    def heartbeat(self) -> Path:
        """Return the path of the rank's heartbeat file."""
        if self.folder is None:
            return self.run_dir.rank_heartbeat(self.info.rank)
        return self.folder.path / file_of(self.info.rank, HEARTBEAT)

    def _wait_for(self, child: subprocess.Popen[bytes], wake: int) -> int:
        drain_until: float | None = None
        while drain_until is None or (len(self.selector.get_map()) > 1 and time.monotonic() < drain_until):
            must_poll = self.kill_at is not None or drain_until is not None or self.kept_signals
            for key, _ in self.selector.select(timeout=0.2 if must_poll else None):
                if key.data is None:
                    self._forward_signals(os.read(wake, 512), child)
                else:
                    self._forward_output(key)
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                _signal_group(child, signal.SIGKILL)
            self._deliver_kept_signals(child)
            self._reap(child)
            if drain_until is None and child.returncode is not None:
                self.lived_s = time.monotonic() - self.started_monotonic
                _signal_group(child, signal.SIGKILL)
                drain_until = time.monotonic() + _DRAIN_S
        return child.returncode

    def _reap(self, child: subprocess.Popen[bytes] | None = None) -> None:
        """Reap all children that have ended: the rank and its orphans."""
        with contextlib.suppress(ChildProcessError):
            while (child_info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if child is not None and child_info.si_pid == child.pid:
                    child.wait()
                else:
                    os.waitpid(child_info.si_pid, 0)

    def _await_node_ranks(self, wake: int, folder: PrivateFolder) -> None:
        """Keep background processes of a successful rank running until the node's other ranks have ended.

        Processes in a session of their own may serve the other ranks. Their output is logged, and a signal to this
        rank ends the wait.
        """
        while (self.end_signal is None and os.getppid() == self.parent and folder.path.is_dir()
               and not have_all_ended(folder, self.info.local_size) and any(self._descendants())):
            for key, _ in self.selector.select(_CHECK_S):
                if key.data is not None:
                    self._forward_output(key)
                    continue
                for number in os.read(wake, 512):
                    self._record_signal(number)

    def _end_descendants(self) -> None:
        if survivors := end_all(self._descendants, _KILL_WITHIN_S):
            self.output.write_message(f"could not kill processes {survivors} of rank {self.info.rank} on"
                            f" {os.uname().nodename}")

    def _end_group(self) -> None:
        if self.group is not None:
            end_group(self.group)

    def _descendants(self) -> Iterable[ProcessIdentity]:
        self._reap()
        return self._living()

    def _living(self) -> Iterable[ProcessIdentity]:
        return descendants({self.janitor.pid, *([self.agent] if self.agent else [])})

    def _forward_signals(self, numbers: bytes, child: subprocess.Popen[bytes]) -> None:
        for number in numbers:
            if number == signal.SIGCHLD or child.poll() is not None:
                continue
            self._record_signal(number)
            if number in _USER_SIGNALS:
                self.kept_signals.append(signal.Signals(number))
            elif number != signal.SIGTERM or not self._request_stacks(child):
                _signal_group(child, signal.Signals(number))
            if os.getppid() != self.parent and self.kill_at is None:
                self.kill_at = time.monotonic() + _ORPHAN_GRACE_S

    def _deliver_kept_signals(self, child: subprocess.Popen[bytes]) -> None:
        """Send SIGUSR1 and SIGUSR2 to those processes of the rank's group that handle them, once there is one.

        They would kill a program that is still importing its modules, or the shell that started it.
        """
        if not self.kept_signals or child.poll() is not None:
            return
        group = [process.pid for process in self._living() if _group_of(process.pid) == child.pid]
        for number in self.kept_signals[:]:
            receivers = [pid for pid in group if awaits_signal(pid, number)]
            for pid in receivers:
                kill(pid, number)
            if receivers:
                self.kept_signals.remove(number)

    def _request_stacks(self, child: subprocess.Popen[bytes]) -> bool:
        """Send SIGABRT instead of SIGTERM to a rank that is ended because of a hang; return True if sent.

        Without a handler for SIGTERM, a program would end silently. For SIGABRT Python has a handler that prints
        the stacks (PYTHONFAULTHANDLER).
        """
        # Imported late, because successful ranks do not need it.
        from ezpz_llm.launcher.basics.messages import read_stop_order

        if self.has_requested_stacks:
            return True
        stop = read_stop_order(self.run_dir, self.run_id)
        if (stop is not None and stop.is_hang and not has_signal_handler(child.pid, signal.SIGTERM)
                and has_signal_handler(child.pid, signal.SIGABRT)):
            with contextlib.suppress(OSError):
                # Suppress the core file.
                resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, 0))
                os.kill(child.pid, signal.SIGABRT)
                self.has_requested_stacks = True
        return self.has_requested_stacks

    def _record_signal(self, number: int) -> None:
        if self.end_signal is None and number in _ENDING_SIGNALS:
            self.end_signal = signal.Signals(number)

    def _read_last_signals(self, wake: int) -> None:
        """Record signals that the shim received just after the rank was killed by the same signal."""
        deadline = time.monotonic() + _SAME_SIGNAL_S
        self.selector.close()
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            while self.end_signal is None and (remaining_s := deadline - time.monotonic()) > 0:
                if selector.select(remaining_s):
                    for number in os.read(wake, 512):
                        self._record_signal(number)

    def _forward_output(self, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, 65536)
        if data:
            self.output.write(key.data, data)
        else:
            self.selector.unregister(key.fileobj)

    def _finish(self, pid: int, code: int, signal_name: str | None) -> None:
        """Write the record, and copy the log from the node. Errors here do not change the rank's exit code."""
        self.output.close()
        is_on_node = self.log != self.run_dir.rank_log(self.info.rank)
        # If many ranks are ended together, one record per node is enough; the node's report covers the other ranks.
        is_one_of_many = self.end_signal and self.info.world_size > MANY_RANKS and self.info.local_rank
        has_record = code and not is_one_of_many
        if not has_record and not is_on_node:
            return
        try:
            # Imported late, because successful ranks do not need it.
            from ezpz_llm.launcher.on_nodes.shim.exit_record import (
                EndedRank,
                error_line,
                keep_log,
                make_record,
                write_record,
            )

            if has_record:
                record = make_record(self.run_dir, EndedRank(
                    self.info.rank, self.run_id, self.command, pid, code, signal_name,
                    shim_signal=self.end_signal.name if self.end_signal else None,
                    # The end by the node's clock, the duration by a monotonic clock.
                    ended=self.started + self.lived_s, duration_s=self.lived_s, since=self.started_monotonic,
                    output=self.output.tail(), heartbeat=self.heartbeat(), kills_before=self.kills_before))
                self.error = error_line(record)
                write_record(self.run_dir, record)
                self.error = ""
            if is_on_node:
                keep_log(self.log, self.run_dir, self.info.rank, bool(code) and self.end_signal is None)
        except (OSError, ImportError) as error:
            print_lines(f"launch: rank {self.info.rank} ended with code {code}, but its record or log could not be"
                        f" written: {error}", file=sys.stderr)


def _wake_on_signals() -> int:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (*_FORWARDED, signal.SIGCHLD):
        # Signals that the parent ignores (nohup) are also ignored here and in the rank.
        if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return read_end


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def bind_to_cores(info: RankInfo, env: MutableMapping[str, str]) -> None:
    """Bind this process, and thus its rank, to the cores in EZPZ_LLM_BIND, for launchers that cannot bind.

    The variable is removed, because a launch inside the rank would pass it on. If the node does not have these
    cores, print a message and run unbound.
    """
    binding = env.pop(BIND_VARIABLE, "")
    if not binding:
        return
    cores = binding.split(":")[info.local_rank]
    try:
        os.sched_setaffinity(0, expand_numbers(cores))
    except OSError as error:
        print_lines(f"launch: rank {info.rank} on {os.uname().nodename} is not bound to cores {cores}:"
                    f" {error.strerror}", file=sys.stderr)
