"""The one owner of a run directory: who writes there, whether that one still lives, and how it is succeeded.

`launch` owns the directory of its run; where ranks were started without it, rank 0 does. The owner is a file
`control/owner-NNNNNN`, made exclusively, in which a counter goes up every few seconds: locks are not to be had on
every shared file system, and clocks of hosts differ. A successor makes the file of the next number, so that of two
that try at once one fails, and a file is never replaced under somebody who reads it.
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
from ezpz_llm.launch.node.processes import is_alive, place, started_at
from ezpz_llm.launch.schedulers import scheduler_here, schedulers
from ezpz_llm.rundir import RunDir

BEAT_S = 5.0
"""How often the owner gives a sign of life: one small write."""
SILENT_S = 60.0
"""An owner on another host that gives none for this long, while we look, is gone."""

_BEATS_LOST = 3
_LOOK_S = 0.2
_ASK_S = 10.0
_WIDTH = 512
_MOST_BYTES = 4096
_NAME = re.compile(r"owner-(\d{6,})")


@dataclass(frozen=True)
class Owner:
    """Who owns a run directory.

    `begun` is when its process began, in clock ticks since boot; `place` its boot and process namespace, in which
    its number means something; `job` is "VARIABLE ID"; `restarts` counts how often Slurm had started that job
    again; `launch` is its run id, "" without launch.
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
        what = "launch" if self.launch else "rank 0"
        job = f", job {self.job.partition(' ')[2]}" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{what}, pid {self.pid} on {self.host}{job}, since {since}"


class Ownership(contextlib.AbstractContextManager["Ownership"]):
    """A run directory that is ours until `release`, or the end of a `with` block."""

    def __init__(self, path: Path, number: int, handle: int, owner: Owner, before: Owner | None) -> None:
        self.killed = before.launch if before is not None and before.place == owner.place else ""
        """The run id of a launch that was killed on this host, and left its run behind; "" where none was."""
        self._path, self._number, self._handle, self._owner = path, number, handle, owner
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="owner", daemon=True)
        self._beating.start()

    def release(self) -> None:
        """Let go of the directory. A second time does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        self._beating.join(_ASK_S)
        with contextlib.suppress(OSError):
            _write(self._handle, replace(self._owner, released=True))
        with contextlib.suppress(OSError):
            os.close(self._handle)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            # A file system that is full or away for a moment: the next beat may come through.
            with contextlib.suppress(OSError):
                if (successor := self._taken_by()) is not None:
                    _end(successor)
                self._owner = replace(self._owner, beat=self._owner.beat + 1)
                _write(self._handle, self._owner)

    def _taken_by(self) -> str | None:
        """Who took the directory over. One that was removed, with our file in it, is nobody's; so is one in which
        somebody else put another folder in the place of ours."""
        try:
            folder = open_private(self._path)
        except OSError:
            return None
        with folder:
            newest = _newest(folder)
            if not newest:
                return None
            is_ours = os.path.samestat(folder.stat(_file(newest)), os.fstat(self._handle))
            return None if is_ours else str(_read(folder, newest))

    def __exit__(self, *exception: object) -> None:
        self.release()


def own(run_dir: RunDir, launch: str, env: Mapping[str, str]) -> Ownership:
    """Become the owner of a run directory that stands. One whose owner has gone is taken over, in words.

    Should somebody take it over from us (since the file system was away from us, say), this process ends.

    Args:
        launch: the run id; "" without launch.

    Raises:
        UserError: it has an owner that lives. Found at once on this host; else after a sign of life from there.
    """
    try:
        folder = make_private(run_dir.control)
    except OSError as error:
        raise _unusable(error, run_dir) from error
    with folder:
        while True:
            number, before = _settle(run_dir, folder, env)
            mine = _this_process(launch, env)
            try:
                handle = folder.open(_file(number + 1), os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            except OSError as error:
                raise _unusable(error, run_dir) from error
            _write(handle, mine)
            if _newest(folder) != number + 1:
                # Somebody came and went while we looked; what we took was out of date.
                os.close(handle)
                folder.remove(_file(number + 1))
                continue
            for older in _numbers(folder):
                if older <= number:
                    folder.remove(_file(older))
            return Ownership(run_dir.control, number + 1, handle, mine, before)


def launch_lives(run_dir: RunDir, launch: str) -> bool:
    """Is the launch of this run id at work, its own end not written yet? As a look tells at once: one on another
    host is, if it gave a sign of life lately; what cannot be read is taken for no."""
    try:
        with open_private(run_dir.control) as folder:
            number = _newest(folder)
            owner = _read(folder, number) if number else None
            if owner is None or owner.launch != launch or owner.released:
                return False
            if owner.place == place():
                return is_alive(owner.pid, owner.begun)
            return time.time() - folder.stat(_file(number)).st_mtime < _BEATS_LOST * BEAT_S
    except OSError:
        return False


def _unusable(error: OSError, run_dir: RunDir) -> UserError:
    return UserError(f"cannot make the run directory: {error.strerror}", where=str(run_dir.control),
                     instead="name a writable place with --run-dir DIR")


def _settle(run_dir: RunDir, folder: PrivateFolder, env: Mapping[str, str]) -> tuple[int, Owner | None]:
    """The number of the newest owner's file (0: there is none), and that owner if it vanished without a word.

    Raises:
        UserError: it lives.
    """
    while True:
        number = _newest(folder)
        if not number:
            return 0, None
        owner = _read(folder, number)
        if owner is not None and owner.released:
            return number, None
        why = owner and _gone(owner, env)
        if why is None and not (why := _silent(folder, number, owner)):
            if owner is None or _newest(folder) != number:
                continue  # it was just being written, or succeeded
            if (now := _read(folder, number)) is not None and now.released:
                return number, None
            raise UserError(f"the run directory is in use: {owner}", where=str(run_dir.path),
                            instead="wait for its end, end it there, or name another --run-dir")
        name = owner or "somebody whose name was cut short"
        print(f"the run directory {run_dir.path} is taken over from {name}: {why}", file=sys.stderr, flush=True)
        return number, owner


def _gone(owner: Owner, env: Mapping[str, str]) -> str | None:
    """Why the owner cannot live any more, as far as that is known at once."""
    if owner.place == place():
        return None if is_alive(owner.pid, owner.begun) else "that process has ended"
    variable, _, job = (owner.job or "").partition(" ")
    if not job:
        return None
    if env.get(variable) == job:
        # Slurm ends every process of a job before it starts it again.
        return "its job has been started again" if owner.restarts < _restarts(env) else None
    queries = {scheduler.JOB_VARIABLE: scheduler.JOB_QUERY for scheduler in schedulers().values()}
    if variable not in queries:
        return None
    words, over = queries[variable]
    answer = ask_command([*words, job], env, _ASK_S, 1)
    is_over = answer.text is None and any(said in answer.complaint for said in over)
    return f"job {job} is over" if is_over else None


def _silent(folder: PrivateFolder, number: int, owner: Owner | None) -> str | None:
    """Why an owner that may live is taken to be gone: no change of its file while we watch."""
    if owner is not None and owner.place == place():
        return None
    first, deadline = _bytes(folder, number), time.monotonic() + SILENT_S
    told = time.monotonic() + 2 * BEAT_S
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        if _bytes(folder, number) != first:
            return None
        if told and time.monotonic() > told:
            told = 0.0
            print(f"the run directory has an owner: {owner}; no sign of life so far, waiting for one for "
                  f"{SILENT_S:g} s in all", file=sys.stderr, flush=True)
    return f"no sign of life from it for {SILENT_S:g} s"


def _this_process(launch: str, env: Mapping[str, str]) -> Owner:
    here = scheduler_here(env)
    job = f"{name} {env[name]}" if here and (name := here.mark(env)) else None
    return Owner(socket.gethostname(), os.getpid(), started_at(os.getpid()), place(), job, _restarts(env), launch,
                 time.time())


def _restarts(env: Mapping[str, str]) -> int:
    return whole_number(env.get("SLURM_RESTART_COUNT", "")) or 0


def _file(number: int) -> str:
    return f"owner-{number:06d}"


def _numbers(folder: PrivateFolder) -> list[int]:
    """Of all owners whose files are there, and ours."""
    return [int(found[1]) for name in folder.names("owner-")
            if (found := _NAME.fullmatch(name)) and folder.has(name)]


def _newest(folder: PrivateFolder) -> int:
    """The highest number of an owner; 0 where there is none."""
    return max(_numbers(folder), default=0)


def _bytes(folder: PrivateFolder, number: int) -> bytes:
    try:
        return folder.read(_file(number), _MOST_BYTES)
    except OSError:
        return b""


def _read(folder: PrivateFolder, number: int) -> Owner | None:
    """None for one that is just being written, or damaged."""
    where = str(folder.path / _file(number))
    try:
        return as_dataclass(Owner, parse_json(_bytes(folder, number), where), where)
    except UserError:
        return None


def _write(handle: int, owner: Owner) -> None:
    # Of one length, so that a full disk does not keep a beat away; read whole, or not understood.
    os.pwrite(handle, json.dumps(asdict(owner)).ljust(_WIDTH).encode() + b"\n", 0)
    os.fsync(handle)


def _end(name: str) -> None:
    """End this run at once: whoever took the directory over writes there."""
    print(f"the run directory was taken over by {name}: this run ends", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
