"""Real ranks that start fast: forked from a process that has loaded torch and DeepSpeed.

Tests use `Server`. Run as a program, this file is the parent process of the ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slowness import scaled

from ezpz_llm.core.rundir import RUN_DIR_VARIABLE
from ezpz_llm.launcher.basics.variables import HEARTBEAT_VARIABLE

TRAIN = "ezpz_llm.train:main"


class Job:
    """The ranks of one run, with their process ids `pids`."""

    def __init__(self, server: Server, folder: Path, pids: list[int]) -> None:
        self._server = server
        self._folder = folder
        self._codes: dict[int, int] = {}
        self.pids = pids

    @property
    def output(self) -> str:
        """Everything that the ranks have printed so far."""
        return "".join(f"-- rank {rank}\n{(self._folder / f'rank{rank}.log').read_text(errors='replace')}"
                       for rank in range(len(self.pids)))

    def phase(self, rank: int) -> str:
        """Return the phase that the rank reports (launcher/basics/variables.py); "" before the first report."""
        path = self._folder / f"heartbeat{rank}"
        return path.read_text().split("\n")[0] if path.exists() else ""

    def codes(self) -> list[int | None]:
        """Return the ranks' exit codes: -N for signal N, None for a running rank."""
        for pid in self.pids:
            if pid not in self._codes and (code := self._server.ask({"poll": pid})) is not None:
                self._codes[pid] = code
        return [self._codes.get(pid) for pid in self.pids]

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        """Send SIGKILL, as on a node failure or out of memory."""
        for rank, code in enumerate(self.codes()):
            if code is None and (ranks is None or rank in ranks):
                os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self, timeout_s: float = 240) -> list[int]:
        """Wait for all ranks to end. If a rank fails, kill the others, as launch does."""
        deadline = time.monotonic() + scaled(timeout_s)
        while None in (codes := self.codes()):
            if any(codes):
                time.sleep(1)
                self.kill()
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)
        return codes


class Server:
    """Process with all modules loaded. Leaving the `with` block ends it and the ranks that it started."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._jobs = folder, 0
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "80"}
        env = {name: value for name, value in env.items() if not name.startswith(("PMI_", "SLURM_", "MASTER_"))}
        self._process = subprocess.Popen([sys.executable, __file__], env=env, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(scaled(30))

    def ask(self, question: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, ranks: int, words: Sequence[str], run_dir: Path, program: str = TRAIN, **env: str) -> Job:
        """Start a run: each rank calls `program` (module:function) with `words` as arguments."""
        self._jobs += 1
        folder = self._folder / f"job{self._jobs}"
        folder.mkdir(parents=True)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        common = {RUN_DIR_VARIABLE: str(run_dir), **env}
        if ranks > 1:
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
                       "LOCAL_WORLD_SIZE": str(ranks)}
        pids = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            pids.append(self.ask({"program": program, "words": list(words), "log": str(folder / f"rank{rank}.log"),
                                  "env": {**common, **own, HEARTBEAT_VARIABLE: str(folder / f"heartbeat{rank}")}}))
        return Job(self, folder, pids)

    def run(self, ranks: int, words: Sequence[str], run_dir: Path, program: str = TRAIN, **env: str) -> Job:
        """Run to the end and check that all ranks succeed."""
        job = self.start(ranks, words, run_dir, program, **env)
        assert job.wait() == [0] * ranks, job.output
        return job


def wait_for(condition: Callable[[], object], job: Job, timeout_s: float = 120) -> bool:
    """Wait for a condition. Return False if a rank ended first."""
    deadline = time.monotonic() + scaled(timeout_s)
    polled = time.monotonic()
    while not condition():
        if time.monotonic() - polled > 0.1:
            if job.codes() != [None] * len(job.pids):
                return False
            polled = time.monotonic()
        assert time.monotonic() < deadline, job.output
        time.sleep(0.0005)
    return True


def _serve() -> None:
    """Serve requests from standard input: fork a rank, or return its exit code. Finally kill remaining ranks."""
    from ezpz_llm.training.engine.deepspeed_import import import_deepspeed

    import_deepspeed("cpu")
    importlib.import_module("ezpz_llm.training.trainer.run")
    running: set[int] = set()
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            running.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = _fork(question)
            running.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _fork(question: dict[str, Any]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        os.environ.update(question["env"])
        module, function = question["program"].split(":")
        from ezpz_llm.core.base.errors import run_command

        code = run_command(getattr(importlib.import_module(module), function), question["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
