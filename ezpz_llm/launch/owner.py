"""Ownership of a run directory: at most one live process writes to it.

`launch` owns the directory of its run; if ranks were started without launch, rank 0 owns it. The owner creates the
file `control/owner-NNNNNN` with O_EXCL, and increments a counter in it every 5 s. Locks and timestamps are no
alternative: some shared file systems have no locks, and the clocks of nodes differ. A successor creates the file
with the next number. If two processes try at the same time, one of them cannot create the file and checks for an
owner again. No file is replaced while another process reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ezpz_llm.base import (
    Epoch,
    PrivateFolder,
    UserError,
    as_dataclass,
    ask_command,
    make_private,
    open_private,
    parse_json,
    whole_number,
)
from ezpz_llm.launch.node.processes import is_alive, pid_namespace_id, started_at
from ezpz_llm.launch.schedulers import scheduler_here, schedulers
from ezpz_llm.rundir import RunDir

HEARTBEAT_INTERVAL_S = 5.0
"""Interval between heartbeats of the owner; each is one small write."""
HEARTBEAT_TIMEOUT_S = 60.0
"""Time without a heartbeat after which an owner on another node is considered dead."""

_MISSED_HEARTBEATS = 3
_POLL_S = 0.2
_TIMEOUT_S = 10.0
_RECORD_BYTES = 512
_MAX_BYTES = 4096
_FILE_NAME = re.compile(r"owner-(\d{6,})")


@dataclass(frozen=True)
class Owner:
    """Owner of a run directory.

    Attributes:
        begun: start time of its process, in clock ticks since boot.
        place: boot id and PID namespace in which `pid` is valid.
        job: the scheduler's job variable and its value, such as "SLURM_JOB_ID 123"; None outside a job.
        restarts: number of times that Slurm had requeued the job when the process started.
        launch: run id; "" if rank 0 is the owner.
        since: time at which it became the owner.
        beat: heartbeat counter.
    """

    host: str
    pid: int
    begun: int
    place: str
    job: str | None
    restarts: int
    launch: str
    since: Epoch
    beat: int = 0
    released: bool = False

    def __str__(self) -> str:
        process = "launch" if self.launch else "rank 0"
        job = f", job {self.job.partition(' ')[2]}" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{process}, pid {self.pid} on {self.host}{job}, since {since}"


class Ownership(contextlib.AbstractContextManager["Ownership"]):
    """Ownership of a run directory until `release` or the end of a `with` block."""

    def __init__(self, path: Path, number: int, handle: int, owner: Owner, dead_owner: Owner | None) -> None:
        self.killed_run_id = dead_owner.launch if dead_owner is not None and dead_owner.place == owner.place else ""
        """Run id of a launch that was killed on this node and may have left processes behind, or ""."""
        self._path, self._number, self._handle, self._owner = path, number, handle, owner
        self._is_released = threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._beat, name="owner", daemon=True)
        self._heartbeat_thread.start()

    def release(self) -> None:
        """Release the directory; a second call does nothing."""
        if self._is_released.is_set():
            return
        self._is_released.set()
        self._heartbeat_thread.join(_TIMEOUT_S)
        with contextlib.suppress(OSError):
            _write(self._handle, replace(self._owner, released=True))
        with contextlib.suppress(OSError):
            os.close(self._handle)

    def _beat(self) -> None:
        while not self._is_released.wait(HEARTBEAT_INTERVAL_S):
            # The file system may be full or unavailable for a moment: try again at the next beat.
            with contextlib.suppress(OSError):
                if (successor := self._successor()) is not None:
                    _kill_this_process(successor)
                self._owner = replace(self._owner, beat=self._owner.beat + 1)
                _write(self._handle, self._owner)

    def _successor(self) -> str | None:
        """Return the process that took the directory over, as text.

        Return None if none did, or if the directory was removed or now belongs to another user.
        """
        try:
            folder = open_private(self._path)
        except OSError:
            return None
        with folder:
            newest = _newest_number(folder)
            if not newest:
                return None
            is_own_file = os.path.samestat(folder.stat(_file_name(newest)), os.fstat(self._handle))
            return None if is_own_file else str(_read(folder, newest))

    def __exit__(self, *exception: object) -> None:
        self.release()


def become_owner(run_dir: RunDir, launch: str, env: Mapping[str, str]) -> Ownership:
    """Become the owner of an existing run directory; print a line if it is taken over from a dead owner.

    If another process later takes the directory over, for example because the file system was unavailable here,
    this process kills itself. Waits up to `HEARTBEAT_TIMEOUT_S` for a heartbeat of an owner on another node.

    Args:
        launch: run id; "" if rank 0 becomes the owner.

    Raises:
        UserError: the directory has a live owner, or its control folder cannot be created.
    """
    try:
        folder = make_private(run_dir.control)
    except OSError as error:
        raise _creation_error(error, run_dir) from error
    with folder:
        while True:
            number, dead_owner = _require_no_live_owner(run_dir, folder, env)
            new_owner = _make_owner(launch, env)
            try:
                handle = folder.open(_file_name(number + 1), os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            except OSError as error:
                raise _creation_error(error, run_dir) from error
            _write(handle, new_owner)
            if _newest_number(folder) != number + 1:
                # In the meantime, another process became the owner and released the directory.
                os.close(handle)
                folder.remove(_file_name(number + 1))
                continue
            for older in _numbers(folder):
                if older <= number:
                    folder.remove(_file_name(older))
            return Ownership(run_dir.control, number + 1, handle, new_owner, dead_owner)


def is_launch_running(run_dir: RunDir, launch: str) -> bool:
    """Return True if the launch with this run id is running; do not wait for a heartbeat.

    A launch on another node counts as running if its last heartbeat is recent by this node's clock. The result is
    False if the directory cannot be read.
    """
    try:
        with open_private(run_dir.control) as folder:
            number = _newest_number(folder)
            owner = _read(folder, number) if number else None
            if owner is None or owner.launch != launch or owner.released:
                return False
            if owner.place == pid_namespace_id():
                return is_alive(owner.pid, owner.begun)
            age_s = time.time() - folder.stat(_file_name(number)).st_mtime
            return age_s < _MISSED_HEARTBEATS * HEARTBEAT_INTERVAL_S
    except OSError:
        return False


def _creation_error(error: OSError, run_dir: RunDir) -> UserError:
    return UserError(f"cannot use the control folder of the run directory: {error.strerror}",
                     where=str(run_dir.control), instead="--run-dir DIR, with a writable directory")


def _require_no_live_owner(run_dir: RunDir, folder: PrivateFolder,
                           env: Mapping[str, str]) -> tuple[int, Owner | None]:
    """Return the number of the newest owner file, or 0, and the owner if it died without releasing the directory.

    Waits until it is known whether the owner is alive, and announces a takeover on stderr.

    Raises:
        UserError: the owner is alive.
    """
    while True:
        number = _newest_number(folder)
        if not number:
            return 0, None
        owner = _read(folder, number)
        if owner is not None and owner.released:
            return number, None
        reason = owner and _death_reason(owner, env)
        if reason is None and not (reason := _silence_reason(folder, number, owner)):
            if owner is None or _newest_number(folder) != number:
                continue  # the file is being written, or there is a successor
            if (latest := _read(folder, number)) is not None and latest.released:
                return number, None
            raise UserError(f"the run directory is in use: {owner}", where=str(run_dir.path),
                            instead="wait until that run ends, stop it there, or use another --run-dir")
        name = owner or "an owner whose file is damaged"
        print(f"taking over the run directory {run_dir.path} from {name}: {reason}", file=sys.stderr, flush=True)
        return number, owner


def _death_reason(owner: Owner, env: Mapping[str, str]) -> str | None:
    """Return the reason why the owner must be dead, or None if only a missing heartbeat can show it."""
    if owner.place == pid_namespace_id():
        return None if is_alive(owner.pid, owner.begun) else "that process has ended"
    variable, _, job = (owner.job or "").partition(" ")
    if not job:
        return None
    if env.get(variable) == job:
        # Slurm ends every process of a job before it requeues the job.
        return "its job has been requeued" if owner.restarts < _restarts(env) else None
    queries = {scheduler.JOB_VARIABLE: scheduler.JOB_QUERY for scheduler in schedulers().values()}
    if variable not in queries:
        return None
    query, end_texts = queries[variable]
    answer = ask_command([*query, job], env, _TIMEOUT_S, 1)
    has_ended = answer.text is None and any(text in answer.complaint for text in end_texts)
    return f"job {job} has ended" if has_ended else None


def _silence_reason(folder: PrivateFolder, number: int, owner: Owner | None) -> str | None:
    """Wait for a heartbeat of an owner on another node; return the reason why it is considered dead.

    Return None if there was a heartbeat, or if the owner is on this node.
    """
    if owner is not None and owner.place == pid_namespace_id():
        return None
    first, deadline = _read_bytes(folder, number), time.monotonic() + HEARTBEAT_TIMEOUT_S
    note_at = time.monotonic() + 2 * HEARTBEAT_INTERVAL_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        if _read_bytes(folder, number) != first:
            return None
        if note_at and time.monotonic() > note_at:
            note_at = 0.0
            name = owner or "an owner whose file is damaged"
            print(f"the run directory has an owner: {name}; "
                  f"waiting up to {HEARTBEAT_TIMEOUT_S:g} s for its heartbeat",
                  file=sys.stderr, flush=True)
    return f"no heartbeat for {HEARTBEAT_TIMEOUT_S:g} s"


def _make_owner(launch: str, env: Mapping[str, str]) -> Owner:
    scheduler = scheduler_here(env)
    job = f"{name} {env[name]}" if scheduler and (name := scheduler.mark(env)) else None
    return Owner(socket.gethostname(), os.getpid(), started_at(os.getpid()), pid_namespace_id(), job,
                 _restarts(env), launch,
                 time.time())


def _restarts(env: Mapping[str, str]) -> int:
    return whole_number(env.get("SLURM_RESTART_COUNT", "")) or 0


def _file_name(number: int) -> str:
    return f"owner-{number:06d}"


def _numbers(folder: PrivateFolder) -> list[int]:
    """Return the numbers of all owner files that belong to this user."""
    return [int(match[1]) for name in folder.names("owner-")
            if (match := _FILE_NAME.fullmatch(name)) and folder.has(name)]


def _newest_number(folder: PrivateFolder) -> int:
    """Return the highest number of an owner file, or 0 if there is none."""
    return max(_numbers(folder), default=0)


def _read_bytes(folder: PrivateFolder, number: int) -> bytes:
    try:
        return folder.read(_file_name(number), _MAX_BYTES)
    except OSError:
        return b""


def _read(folder: PrivateFolder, number: int) -> Owner | None:
    """Read an owner file; return None if it is damaged, or being written."""
    where = str(folder.path / _file_name(number))
    try:
        return as_dataclass(Owner, parse_json(_read_bytes(folder, number), where), where)
    except UserError:
        return None


def _write(handle: int, owner: Owner) -> None:
    # Constant length: a heartbeat needs no new disk space. A partial read is not valid JSON.
    os.pwrite(handle, json.dumps(asdict(owner)).ljust(_RECORD_BYTES).encode() + b"\n", 0)
    os.fsync(handle)


def _kill_this_process(successor: str) -> None:
    """Kill this process, since the new owner writes to the directory."""
    print(f"{successor} took over the run directory: this run ends", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
