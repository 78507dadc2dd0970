"""Folder of a run on one node, in memory, through which ranks, shims and the node's agent communicate.

The folder is private. Its name is derived from the run's secret and the hostname: all ranks of a node find the same
folder, and other users cannot guess the name in advance. Processes without the secret (`ezpz-llm why`, a later
launch) search this user's folders for the run id.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ezpz_llm.core.base import (
    SECRET_VARIABLE,
    NotPrivate,
    PrivateFolder,
    derive_key,
    is_protected_from_others,
    make_private,
    open_private,
    remove_private,
    run_secret,
)
from ezpz_llm.launcher.basics.processes import (
    ProcessIdentity,
    is_alive,
    marked_processes,
    pid_namespace_id,
    started_at,
)
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.launcher.basics.variables import RUN_ID_VARIABLE

AGENT = "agent"
"""File with the agent's identity."""

COLLECTIVES = "collectives"
"""File with the token of the latest order for stacks, at which ranks also write records of their collectives."""

STRAYS = "strays"
"""File with the identities of rank processes that do not carry the run's marker."""

_MEMORY = "/dev/shm"
_RUN = "run"
_WAKE = "wake"
_AGENT_WAIT_S = 3.0
_MAX_DIGITS = 18


def parent_dir() -> Path:
    """Return the parent directory of these folders: /dev/shm, else the temporary directory."""
    if os.access(_MEMORY, os.W_OK):
        return Path(_MEMORY)
    # Imported late: every rank's shim imports this module, and must start fast.
    import tempfile

    return Path(tempfile.gettempdir())


def folder_prefix() -> str:
    """Return the prefix of this user's folders."""
    return f"ezpz_llm-node-{os.getuid()}-"


HEARTBEAT, LOG, STACKS, END_MARK, SHIM, GROUP = "", ".log", ".stacks", ".ended", ".shim", ".group"
"""Suffixes of a rank's files.

Heartbeat; log, if logs are kept on the node; faulthandler's output; end mark, with exit code and lifetime in
seconds; identity of the shim; path of the cgroup, if the rank has one.
"""


def file_of(rank: int, kind: str) -> str:
    """Return the name of a rank's file of one kind."""
    return f"rank{rank:04d}{kind}"


def parse_heartbeat(text: str) -> tuple[str | None, int | None]:
    """Parse a heartbeat, a line `PHASE STEP`; None for a missing part."""
    phase, _, step = text.rstrip("\n").rpartition(" ")
    return phase or None, int(step) if step.isascii() and step.isdigit() and len(step) <= _MAX_DIGITS else None


def register_shim(info: RankInfo, env: Mapping[str, str]) -> PrivateFolder:
    """Create the run's folder on this node if it is missing, and register this process as the rank's shim.

    Raises:
        OSError: the node has no writable directory that is safe from other users.
    """
    secret = run_secret(env)
    if secret is None:
        raise NotPrivate(f"the launcher did not pass {SECRET_VARIABLE} to the ranks", parent_dir())
    if not is_protected_from_others(parent_dir()):
        raise NotPrivate("other users can replace files there", parent_dir())
    path = parent_dir() / f"{folder_prefix()}{derive_key(secret, 'node folder', os.uname().nodename)[:32]}"
    while True:
        folder = make_private(path)
        try:
            folder.write(_RUN, f"{env[RUN_ID_VARIABLE]}\n{pid_namespace_id()}".encode())
            folder.write(file_of(info.rank, SHIM), identity(os.getpid()).encode())
        except FileNotFoundError:
            # An agent whose ranks have all ended has just removed the folder.
            folder.close()
            continue
        folder.make_fifo(_WAKE)
        _wake(folder)
        return folder


def mark_end(folder: PrivateFolder, rank: int, code: int, lived_s: float, error: str = "") -> None:
    """Mark the rank as ended, `lived_s` after its start, with its error if its record could not be written."""
    with contextlib.suppress(OSError):
        folder.write(file_of(rank, END_MARK), f"{code} {lived_s:.1f} {error}".encode())
        _wake(folder)


def await_agent(folder: PrivateFolder, local_size: int) -> None:
    """Wait for the agent's cleanup (at most 3 s) in the last shim of a node.

    A launcher may kill the rest of its step on the node once the last shim has exited.
    """
    deadline = time.monotonic() + _AGENT_WAIT_S
    while have_all_ended(folder, local_size) and _agent(folder) and time.monotonic() < deadline:
        time.sleep(0.02)


def have_all_ended(folder: PrivateFolder, local_size: int) -> bool:
    """Return True if all ranks of this node have started and ended."""
    with contextlib.suppress(OSError):
        return len(registered_ranks(folder)) >= local_size and not running_shims(folder)
    return False


def registered_ranks(folder: PrivateFolder) -> dict[int, str]:
    """Return the ranks that have started on this node, with the identities of their shims."""
    return {int(name[4:-len(SHIM)]): folder.read(name).decode(errors="replace")
            for name in folder.names("rank") if name.endswith(SHIM) and name[4:-len(SHIM)].isascii()
            and name[4:-len(SHIM)].isdigit()}


def registered_shims(folder: PrivateFolder) -> list[ProcessIdentity]:
    """Return the shims of the ranks that have started on this node."""
    return _identities(shim.encode() for shim in registered_ranks(folder).values())


def _identities(lines: Iterable[bytes]) -> list[ProcessIdentity]:
    """Parse process identities, one per line; skip partly written lines."""
    processes = []
    for line in lines:
        with contextlib.suppress(ValueError):
            processes.append(ProcessIdentity.parse(line.decode()))
    return processes


def rank_cgroups(folder: PrivateFolder) -> list[Path]:
    """Return the cgroups of the node's ranks."""
    return [Path(os.fsdecode(folder.read(name))) for name in folder.names("rank") if name.endswith(GROUP)]


def running_shims(folder: PrivateFolder) -> dict[int, int]:
    """Return the process ids, by rank, of shims that have neither marked the end nor vanished."""
    pids = {}
    for rank, shim in registered_ranks(folder).items():
        # A program may have overwritten the shim's file.
        with contextlib.suppress(ValueError):
            if not folder.has(file_of(rank, END_MARK)) and is_running(shim):
                pids[rank] = ProcessIdentity.parse(shim).pid
    return pids


def identity(pid: int) -> str:
    """Return a process id with its start time, since process ids are reused."""
    return f"{pid} {started_at(pid)}"


def is_running(process: str) -> bool:
    """Return True if a process, given by its `identity`, is alive, or if the identity is partly written."""
    pid, _, start = process.partition(" ")
    return not start or is_alive(int(pid), int(start))


def own_folders() -> Iterator[tuple[PrivateFolder, str, str]]:
    """Yield this user's folders on this node, open, each with its run id and `processes.pid_namespace_id`.

    Both are "" if the folder does not name them.
    """
    for name in sorted(os.listdir(parent_dir())):
        if name.startswith(folder_prefix()):
            with contextlib.suppress(OSError), open_private(parent_dir() / name) as folder:
                run_id, _, namespace = (folder.read(_RUN).decode() if folder.has(_RUN) else "").partition("\n")
                yield folder, run_id, namespace


def agent_pids(run_id: str) -> frozenset[int]:
    """Return the process ids of the run's agents on this node: one, or none."""
    return frozenset(pid for folder in _folders_of(run_id) if (pid := _agent(folder)))


def strays(run_id: str) -> list[ProcessIdentity]:
    """Return the strays of the run on this node that its agent recorded (`agent.Strays`)."""
    processes: list[ProcessIdentity] = []
    for folder in _folders_of(run_id):
        with contextlib.suppress(OSError):
            processes += _identities(folder.read(STRAYS).splitlines())
    return processes


def wake(run_id: str) -> None:
    """Wake the run's agent on this node, if there is one, so that it reads orders at once."""
    for folder in _folders_of(run_id):
        _wake(folder)


def remove(run_id: str) -> None:
    """Remove the run's folder on this node."""
    for folder in _folders_of(run_id):
        remove_private(folder.path)


def open_wake(folder: PrivateFolder) -> int:
    """Open the FIFO on which `wake` writes, for the agent."""
    # Opened for writing too: a FIFO without writers is always readable.
    return folder.open(_WAKE, os.O_RDWR)


def _folders_of(run_id: str) -> Iterator[PrivateFolder]:
    with contextlib.suppress(OSError):
        yield from (folder for folder, folder_run_id, _ in own_folders() if folder_run_id == run_id)


def _wake(folder: PrivateFolder) -> None:
    with contextlib.suppress(OSError), os.fdopen(folder.open(_WAKE, os.O_WRONLY), "wb") as fifo:
        fifo.write(b"!")


def _agent(folder: PrivateFolder) -> int | None:
    """Return the process id of a running agent, if there is one."""
    with contextlib.suppress(OSError, ValueError):
        agent = folder.read(AGENT).decode()
        return int(agent.partition(" ")[0]) if is_running(agent) else None
    return None


_QUIET_S = 600.0
"""Folders written to within this time are kept if their processes may be invisible from here (in a container)."""


def remove_stale(own_run_id: str) -> None:
    """Remove this user's folders of runs without processes, left by agents that were killed."""
    local_namespace = pid_namespace_id()
    for folder, run_id, namespace in own_folders():
        if run_id != own_run_id and (namespace == local_namespace or _is_quiet(folder)) \
                and not any(marked_processes(run_id)):
            remove_private(folder.path)


def _is_quiet(folder: PrivateFolder) -> bool:
    try:
        newest = max(folder.path.stat().st_mtime, *(folder.stat(name).st_mtime for name in folder.names()), 0.0)
    except OSError:
        return False
    return time.time() - newest > _QUIET_S
