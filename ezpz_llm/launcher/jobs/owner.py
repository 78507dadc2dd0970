"""Lock of a run directory, `control/owner.json`: at most one live process writes to the directory.

`launch` locks the directory of its run; if ranks were started without launch, rank 0 does. The owner touches the
file every few seconds, so that processes on other nodes can see that it is alive, and removes it at the end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ezpz_llm.core.base import Epoch, UserError, as_dataclass, make_private, print_lines, read_json
from ezpz_llm.core.rundir import RunDir, locked
from ezpz_llm.launcher.basics.processes import is_alive, pid_namespace_id, started_at
from ezpz_llm.launcher.jobs.schedulers import scheduler_here

HEARTBEAT_INTERVAL_S = 5.0
HEARTBEAT_TIMEOUT_S = 120.0
"""Age of the last heartbeat at which an owner on another node is considered dead."""
_DEAD_AFTER_S = 1200.0
"""Age at which it is dead for certain, whatever the clocks of the nodes."""
_POLL_S = 0.2
_FILE = "owner.json"


@dataclass(frozen=True)
class Owner:
    """Process that owns a run directory: launch, with its run id, or rank 0, with "".

    `begun` is its start in clock ticks since boot, `place` the boot and PID namespace in which `pid` is valid, and
    `restarts` the number of times that Slurm had requeued the job.
    """

    launch: str
    host: str
    pid: int
    begun: int
    place: str
    job: str
    restarts: int
    since: Epoch

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return (f"{'launch' if self.launch else 'rank 0'}, pid {self.pid} on {self.host}{job}, since "
                f"{time.ctime(self.since)}")


class Ownership(contextlib.AbstractContextManager["Ownership"]):
    """Ownership of a run directory until `release` or the end of a `with` block.

    `killed_run_id` is that of a launch that was killed on this node and may have left processes behind, or "".
    """

    def __init__(self, lock: Path, owner: Owner, killed_run_id: str) -> None:
        self.killed_run_id = killed_run_id
        self._lock, self._owner, self._is_released = lock, owner, threading.Event()
        threading.Thread(target=self._beat, name="owner", daemon=True).start()

    def _beat(self) -> None:
        while not self._is_released.wait(HEARTBEAT_INTERVAL_S):
            with contextlib.suppress(OSError):  # the file system may be unavailable for a moment
                # Another launch may have taken the lock over while this process was suspended.
                if _read(self._lock) == self._owner:
                    os.utime(self._lock)

    def release(self) -> None:
        """Remove the lock; a second call does nothing."""
        self._is_released.set()
        with contextlib.suppress(OSError):
            if _read(self._lock) == self._owner:
                self._lock.unlink()

    def __exit__(self, *exception: object) -> None:
        self.release()


def become_owner(run_dir: RunDir, launch: str, env: Mapping[str, str]) -> Ownership:
    """Lock an existing run directory; wait up to `HEARTBEAT_TIMEOUT_S` for a heartbeat of an owner on another node.

    Args:
        launch: run id; "" if rank 0 becomes the owner.

    Raises:
        UserError: the directory has a live owner, or its control folder cannot be used.
    """
    lock, pid, scheduler = run_dir.control / _FILE, os.getpid(), scheduler_here(env)
    job = env.get((scheduler and scheduler.mark(env)) or "", "")
    restarts = scheduler.restart_count(env) if scheduler else 0
    new = Owner(launch, socket.gethostname(), pid, started_at(pid), pid_namespace_id(), job, restarts, time.time())
    killed_run_id = ""
    try:
        make_private(run_dir.control).close()
        with locked(run_dir.control, 2 * HEARTBEAT_TIMEOUT_S):
            while (old := _read(lock)) is not None:
                if (reason := _death_reason(lock, old, new)) is not None:
                    print_lines(f"taking over the run directory {run_dir.path} from {old}: {reason}",
                                file=sys.stderr)
                    killed_run_id = old.launch if old.place == new.place else ""
                    lock.unlink(missing_ok=True)
                elif _read(lock) == old:
                    kill = f"{'' if old.place == new.place else f'ssh {shlex.quote(old.host)} '}kill {old.pid}"
                    raise UserError(f"the run directory is in use: {old}", where=str(run_dir.path),
                                    instead=f"wait until that run ends, end it ({kill}), or use another --run-dir")
            with lock.open("x") as file:  # O_EXCL, for file systems without locks
                json.dump(asdict(new), file)
    except FileExistsError as error:
        raise UserError("another launch is starting in the run directory, or the file of its owner is damaged",
                        where=str(lock), instead="if no run uses the directory, remove that file") from error
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
            raise  # printed with advice by `run_command`
        raise UserError(f"cannot use the control folder of the run directory: {error.strerror}",
                        where=str(run_dir.control), instead="--run-dir DIR, with a writable directory") from error
    return Ownership(lock, new, killed_run_id)


def is_launch_running(run_dir: RunDir, launch: str) -> bool:
    """Return True if the launch with this run id is running; if on another node, by its last heartbeat."""
    owner = _read(lock := run_dir.control / _FILE)
    if owner is None or owner.launch != launch:
        return False
    if owner.place == pid_namespace_id():
        return is_alive(owner.pid, owner.begun)
    with contextlib.suppress(OSError):
        return time.time() - lock.stat().st_mtime < 3 * HEARTBEAT_INTERVAL_S
    return False


def _death_reason(lock: Path, old: Owner, new: Owner) -> str | None:
    """Return the reason why the owner `old` must be dead; None if it is alive or has removed the lock."""
    if old.place == new.place:
        return None if is_alive(old.pid, old.begun) else "that process has ended"
    if old.job and old.job == new.job and old.restarts < new.restarts:
        return "its job has been requeued"  # Slurm ends all processes of a job before it requeues the job
    with contextlib.suppress(FileNotFoundError):
        last = lock.stat().st_mtime
        age_s = max(0.0, time.time() - last)
        # The clock of the file server may differ from this node's, but not by many minutes.
        wait_s = 0 if age_s > _DEAD_AFTER_S else max(3 * HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S - age_s)
        if wait_s:
            print_lines(f"the run directory has an owner: {old}; waiting up to {wait_s:.0f} s for its heartbeat",
                        file=sys.stderr)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            # NFS updates cached times when a file is opened.
            if _read(lock) != old or lock.stat().st_mtime != last:
                return None
        return f"no heartbeat for {HEARTBEAT_TIMEOUT_S:g} s"
    return None


def _read(lock: Path) -> Owner | None:
    """Return the owner in the lock; None if there is no lock, or if it is damaged."""
    try:
        return as_dataclass(Owner, read_json(lock), str(lock))
    except UserError:
        return None
