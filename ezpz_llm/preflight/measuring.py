"""The process that measures, seen from its rank: torch, drivers and collectives can hang or abort in there, and the
rank goes on talking."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ezpz_llm.base.outside import parse_json
from ezpz_llm.preflight.facts.netlog import is_about_network, read_network
from ezpz_llm.preflight.worker import LAST

_END_WITHIN_S = 3.0
_LAST_LINES = 6


class Measuring:
    """Starts `ezpz_llm.preflight.worker`, passes questions to it and its answers to `answer(stage, answer)`."""

    def __init__(self, env: Mapping[str, str], answer: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._answer = answer
        self._open_stages: list[str] = []
        self._lock = threading.Lock()
        self._last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._network: list[str] = []
        read_end, write_end = os.pipe()
        os.set_inheritable(write_end, True)
        # Descriptors stay open: MPI needs the one that its launcher gave to the rank.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ezpz_llm.preflight.worker", str(write_end)], env=_talkative(env),
            close_fds=False, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        os.close(write_end)
        self._words = threading.Thread(target=self._listen, daemon=True)
        self._words.start()
        threading.Thread(target=self._pass_on, args=(read_end,), daemon=True).start()

    def ask(self, question: Mapping[str, Any]) -> None:
        """Have it answered, sooner or later; at once where the process has ended."""
        with self._lock:
            self._open_stages.append(question["ask"])
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._give_up()

    def network(self) -> dict[str, str]:
        """What the communication library said about the network it chose."""
        return read_network(self._network)

    def end(self) -> None:
        """Let the process end in order, or end it."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _listen(self) -> None:
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            if is_about_network(text):
                self._network.append(text)
            elif text:
                self._last.append(text)

    def _pass_on(self, read_end: int) -> None:
        with os.fdopen(read_end, "rb") as answers:
            for line in answers:
                message = parse_json(line, "the measuring process")
                with self._lock:
                    self._open_stages.remove(message["stage"])
                if message["stage"] == LAST:
                    # Until the process has ended in order MPI is not over, and to MPICH's launcher a rank that ends
                    # before has failed.
                    self._process.wait()
                self._answer(message["stage"], message["answer"])
        self._give_up()

    def _give_up(self) -> None:
        self._words.join(1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        with self._lock:
            stages, self._open_stages = self._open_stages, []
        for stage in stages:
            self._answer(stage, {"error": f"the measuring process {_how(self._process.returncode)}: "
                                          f"{' | '.join(self._last) or 'it said nothing'}"})


def _how(code: int | None) -> str:
    if code is None:
        return "does not answer"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _talkative(env: Mapping[str, str]) -> dict[str, str]:
    """The rank's environment, with which NCCL, RCCL and oneCCL say what they choose."""
    wanted = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "CCL_LOG_LEVEL": "info"}
    kept = {name: value for name, value in env.items() if name not in (*wanted, "NCCL_DEBUG_FILE")}
    return kept | wanted
