"""The rank shim: a small process around one rank of any program. `launch` starts it; nobody types it.

It inherits every descriptor (a closed PMI_FD ends MPI_Init), keeps the rank in its own process group, forwards
signals, writes the rank's log (rank 0's output reaches the console too), records a failure in errors/, and ends
with the rank's own code, or 128 + the signal's number.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ezpz_llm.errors import EXIT_PREFLIGHT, UserError, run_command
from ezpz_llm.launch.leftovers import die_with_parent, start_janitor
from ezpz_llm.launch.ranks import RankInfo, find_rank
from ezpz_llm.launch.variables import RUN_ID_VARIABLE, WORLD_SIZE_VARIABLE
from ezpz_llm.rundir.files import write_json
from ezpz_llm.rundir.layout import RUN_DIR_VARIABLE, RunDir

EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 126, 127

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_TAIL_LINES = 20
_TAIL_BYTES = 16384
_ORPHAN_GRACE_S = 5.0
_DRAIN_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Run `-- COMMAND…` as the rank that the environment says this is; the exit code is the rank's."""
    if not argv or argv[0] != "--" or len(argv) < 2:
        raise UserError("the rank shim is started by launch", instead="launch COMMAND …")
    die_with_parent(signal.SIGTERM)
    info = find_rank(os.environ)
    run_dir = RunDir(Path(os.environ[RUN_DIR_VARIABLE]))
    _check_world(info)
    try:
        log = run_dir.rank_log(info.rank).open("ab", buffering=0)
    except OSError as error:
        raise UserError(f"rank {info.rank} on {socket.gethostname()} cannot write its log: {error.strerror}",
                        where=error.filename, exit_code=EXIT_PREFLIGHT,
                        instead="name a --run-dir on a file system that all hosts share") from error
    with log:
        return _Rank(info, run_dir, list(argv[1:]), log).run()


def _check_world(info: RankInfo) -> None:
    promised = int(os.environ[WORLD_SIZE_VARIABLE])
    if info.world_size != promised:
        raise UserError(f"launch started {promised} ranks, but this process finds itself rank {info.rank} of"
                        f" {info.world_size} ({info.source})",
                        where=socket.gethostname(), exit_code=EXIT_PREFLIGHT,
                        instead="use the mpiexec (or srun --mpi plug-in) that belongs to this MPI")


class _Rank:
    """One rank's process and its output."""

    def __init__(self, info: RankInfo, run_dir: RunDir, command: list[str], log: BinaryIO) -> None:
        self.info = info
        self.run_dir = run_dir
        self.command = command
        self.log = log
        self.log_start = log.tell()
        self.parent = os.getppid()
        self.started = time.time()
        self.kill_at: float | None = None
        self.selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Start the rank, stay with it to its end, write its record; the exit code."""
        janitor = start_janitor(os.environ[RUN_ID_VARIABLE], delay_s=0.5)
        wake = _wake_on_signals()
        self.selector.register(wake, selectors.EVENT_READ, None)
        try:
            child = self._start()
        except OSError as error:
            code = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE
            self._say(f"launch: cannot run {self.command[0]!r}: {error.strerror}\n".encode())
            self._record(os.getpid(), code, None)
        else:
            status = self._stay_with(child, wake)
            code = status if status >= 0 else 128 - status
            if code:
                self._record(child.pid, code, signal.Signals(-status).name if status < 0 else None)
            else:
                # A rank that has ended in order is not a silent one.
                self.run_dir.rank_heartbeat(self.info.rank).unlink(missing_ok=True)
        janitor.dismiss()
        return code

    def _start(self) -> subprocess.Popen[bytes]:
        def in_child() -> None:
            os.setpgid(0, 0)
            die_with_parent(signal.SIGKILL)

        is_first = self.info.rank == 0
        output = subprocess.PIPE if is_first else self.log
        # MPICH never closes the standard input of the other ranks: one that reads it would wait for ever.
        child = subprocess.Popen(self.command, stdin=None if is_first else subprocess.DEVNULL, stdout=output,
                                 stderr=output, close_fds=False, preexec_fn=in_child)
        for pipe, console in ((child.stdout, 1), (child.stderr, 2)):
            if pipe is not None:
                self.selector.register(pipe, selectors.EVENT_READ, console)
        return child

    def _stay_with(self, child: subprocess.Popen[bytes], wake: int) -> int:
        drain_until: float | None = None
        while drain_until is None or (len(self.selector.get_map()) > 1 and time.monotonic() < drain_until):
            has_deadline = self.kill_at is not None or drain_until is not None
            for key, _ in self.selector.select(timeout=0.2 if has_deadline else None):
                if key.data is None:
                    self._forward(os.read(wake, 512), child)
                else:
                    self._pass_on(key)
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                _signal_group(child, signal.SIGKILL)
            if drain_until is None and child.poll() is not None:
                _signal_group(child, signal.SIGKILL)
                drain_until = time.monotonic() + _DRAIN_S
        return child.returncode

    def _forward(self, numbers: bytes, child: subprocess.Popen[bytes]) -> None:
        for number in numbers:
            if number == signal.SIGCHLD or child.poll() is not None:
                continue
            _signal_group(child, signal.Signals(number))
            if os.getppid() != self.parent and self.kill_at is None:
                self.kill_at = time.monotonic() + _ORPHAN_GRACE_S

    def _pass_on(self, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, 65536)
        if not data:
            self.selector.unregister(key.fileobj)
            return
        self.log.write(data)
        _write_console(key.data, data)

    def _say(self, text: bytes) -> None:
        self.log.write(text)
        if self.info.rank == 0:
            _write_console(2, text)

    def _record(self, pid: int, code: int, signal_name: str | None) -> None:
        ended = time.time()
        record = {
            "rank": self.info.rank, "host": socket.gethostname(), "pid": pid, "exit_code": code,
            "signal": signal_name, "ended": ended, "duration_s": round(ended - self.started, 3),
            "tail": _tail(Path(self.log.name), self.log_start), "argv": self.command,
        }
        try:
            write_json(self.run_dir.rank_error(self.info.rank), record)
        except OSError as error:
            print(f"launch: rank {self.info.rank} ended with code {code}, and its record could not be written:"
                  f" {error}", file=sys.stderr, flush=True)


def _wake_on_signals() -> int:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (*_FORWARDED, signal.SIGCHLD):
        # What our starter ignores (nohup) stays ignored, in the rank too.
        if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return read_end


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _write_console(descriptor: int, data: bytes) -> None:
    # A console that has gone (`launch … | head`) does not end the rank: the log goes on.
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(descriptor, data):]


def _tail(path: Path, start: int) -> list[str]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]


if __name__ == "__main__":
    sys.exit(run_command(main))
