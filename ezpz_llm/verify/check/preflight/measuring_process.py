"""Subprocess of a rank that measures, and the rank's connection to it.

torch, drivers and collectives can hang or abort in the subprocess without affecting the rank.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, cast

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.basics.cleanup import die_with_parent
from ezpz_llm.training.dist.collective_network import is_about_network, parse_network
from ezpz_llm.verify.check.facts import Failed, Measurement, Network
from ezpz_llm.verify.check.node_facts import first_line
from ezpz_llm.verify.check.preflight.messages import END, Reply, Request, receive, send
from ezpz_llm.verify.check.preflight.rules.gathered import MPI

_EXIT_WITHIN_S = 3.0
_KEPT_LINES = 6


class MeasuringProcess:
    """The subprocess, which replies to one request at a time."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._last: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._network: list[str] = []
        self._connection, inherited = Pipe()
        os.set_inheritable(inherited.fileno(), True)
        # Other descriptors stay open too, because MPI needs the descriptor that its launcher passed to the rank.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ezpz_llm.verify.check.preflight.measuring_process", str(inherited.fileno())],
            close_fds=False, env=_logging_environment(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT)
        inherited.close()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def measure(self, request: Request) -> Reply:
        """Return the process's reply to a request, or an error that says how the process ended."""
        try:
            send(self._connection, request)
            reply = receive(self._connection, Reply)
        except (EOFError, OSError, UserError):
            self._listener.join(1.0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            return Reply(request.stage, Failed(
                f"the measuring process {_describe_exit(self._process.returncode)}: "
                f"{' | '.join(self._last) or 'it printed nothing'}"))
        if request.stage == MPI:
            # MPICH's launcher treats this rank as failed if it exits before the process that started MPI.
            self._process.wait()
        return reply

    def network(self) -> Network:
        """Return the network that the communication library chose, from its log."""
        return Network(**parse_network(self._network))

    def close(self) -> None:
        """Let the process exit, and kill it if it has not exited after 3 s."""
        with contextlib.suppress(OSError):
            send(self._connection, Request(END))
        try:
            self._process.wait(_EXIT_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _listen(self) -> None:
        for line in cast("IO[bytes]", self._process.stdout):
            text = line.decode(errors="replace").rstrip()
            if is_about_network(text):
                self._network.append(text)
            elif text:
                self._last.append(text)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "does not reply"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _logging_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the rank's environment with NCCL, RCCL and oneCCL set to log the network they choose."""
    log_settings = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "CCL_LOG_LEVEL": "info"}
    return {name: value for name, value in env.items() if name != "NCCL_DEBUG_FILE"} | log_settings


def main() -> None:
    """Reply to the rank's requests until the END request, or until the MPI request, which is also the last."""
    die_with_parent(signal.SIGKILL)
    connection, worker = Connection(int(sys.argv[1])), None
    while (request := receive(connection, Request)).stage != END:
        failed = False
        try:
            if worker is None:
                # Imports torch, whose failure is a result of the check.
                from ezpz_llm.verify.check.preflight.measurements import Worker

                worker = Worker()
            answer: Measurement = worker.measure(request)
        except Exception as error:  # the error is the result of the check
            answer, failed = Failed(f"{type(error).__name__}: {first_line(str(error)) or ''}"), True
        send(connection, Reply(request.stage, answer))
        if worker is not None and failed:
            worker.leave_failed_group(request)
        if request.stage == MPI:
            break
    if worker is not None:
        worker.exit_if_stuck()


if __name__ == "__main__":
    main()
