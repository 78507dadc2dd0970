"""The run's folder on one node, in memory: what ranks, shims and the node's agent tell one another there.

It is private, and its name cannot be guessed before it is there: it follows from the run's secret and the node's
name, so that all ranks of a node find the same one. Who was not told the secret (`ezpz-llm why`, a later launch)
looks through this user's folders for the one that says it is the run's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ezpz_llm.base import (
    SECRET_VARIABLE,
    NotPrivate,
    PrivateFolder,
    derived,
    is_out_of_reach,
    make_private,
    open_private,
    remove_private,
    run_secret,
)
from ezpz_llm.launch.node.processes import Kin, is_alive, marked, place, started_at
from ezpz_llm.launch.ranks import RankInfo
from ezpz_llm.launch.variables import RUN_ID_VARIABLE

AGENT = "agent"
"""The agent's identity; made by the one that begins."""

STRAYS = "strays"
"""The identities of processes of ranks that do not carry the run's marker."""

_MEMORY = "/dev/shm"
_RUN = "run"
_WAKE = "wake"
_LEAVE_WAIT_S = 3.0
_MOST_DIGITS = 18


def base() -> Path:
    """Where such folders lie: in memory, else in the temporary folder."""
    if os.access(_MEMORY, os.W_OK):
        return Path(_MEMORY)
    # Imported here: every rank's shim imports this module.
    import tempfile

    return Path(tempfile.gettempdir())


def prefix() -> str:
    """What the names of this user's folders begin with."""
    return f"ezpz_llm-node-{os.getuid()}-"


HEARTBEAT, LOG, STACKS, MARK, SHIM, GROUP = "", ".log", ".stacks", ".ended", ".shim", ".group"
"""A rank's files: what it beats into; its log, where logs are kept on the node; what its fault handler writes; the
mark of its end, with its exit code and the seconds that it lived; the identity of its shim; and the path of its
control group, where it has one."""


def file_of(rank: int, kind: str) -> str:
    """The name of a file of the rank's."""
    return f"rank{rank:04d}{kind}"


def read_beat(text: str) -> tuple[str | None, int | None]:
    """Phase and step of a heartbeat, `PHASE STEP` on a line; None for what it does not tell."""
    phase, _, step = text.rstrip("\n").rpartition(" ")
    return phase or None, int(step) if step.isascii() and step.isdigit() and len(step) <= _MOST_DIGITS else None


def enter(info: RankInfo, env: Mapping[str, str]) -> PrivateFolder:
    """Make the run's folder on this node if it is not there, and register this process as the rank's shim.

    Raises:
        OSError: the node has no place to write to, or none that is safe from other users.
    """
    secret = run_secret(env)
    if secret is None:
        raise NotPrivate(f"the launcher did not hand {SECRET_VARIABLE} on", base())
    if not is_out_of_reach(base()):
        raise NotPrivate("other users can replace what is made there", base())
    path = base() / f"{prefix()}{derived(secret, 'node folder', os.uname().nodename)[:32]}"
    while True:
        folder = make_private(path)
        try:
            folder.write(_RUN, f"{env[RUN_ID_VARIABLE]}\n{place()}".encode())
            folder.write(file_of(info.rank, SHIM), identity(os.getpid()).encode())
        except FileNotFoundError:
            # An agent whose ranks have all ended has just removed it.
            folder.close()
            continue
        folder.make_fifo(_WAKE)
        _wake(folder)
        return folder


def mark_end(folder: PrivateFolder, rank: int, code: int, lived_s: float) -> None:
    """Mark the rank as ended, `lived_s` after its start."""
    with contextlib.suppress(OSError):
        folder.write(file_of(rank, MARK), f"{code} {lived_s:.1f}".encode())
        _wake(folder)


def await_agent(folder: PrivateFolder, local_size: int) -> None:
    """The shim that is the last on its node waits (for 3 s at most) for the agent's last work, since a launcher may
    end what is left of its step on the node once the last shim has gone."""
    deadline = time.monotonic() + _LEAVE_WAIT_S
    while are_all_over(folder, local_size) and _agent(folder) and time.monotonic() < deadline:
        time.sleep(0.02)


def are_all_over(folder: PrivateFolder, local_size: int) -> bool:
    """Have all ranks of this node come, and ended?"""
    with contextlib.suppress(OSError):
        return len(registered(folder)) >= local_size and not running(folder)
    return False


def registered(folder: PrivateFolder) -> dict[int, str]:
    """The ranks that have come to this node, with the identities of their shims."""
    return {int(name[4:-len(SHIM)]): folder.read(name).decode(errors="replace")
            for name in folder.names("rank") if name.endswith(SHIM) and name[4:-len(SHIM)].isascii()
            and name[4:-len(SHIM)].isdigit()}


def shims(folder: PrivateFolder) -> list[Kin]:
    """The shims of the ranks that have come to this node."""
    return _identities(who.encode() for who in registered(folder).values())


def _identities(lines: Iterable[bytes]) -> list[Kin]:
    """The processes that `lines` name. A line half written names none, and costs no other line."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(Kin.parse(line.decode()))
    return found


def groups(folder: PrivateFolder) -> list[Path]:
    """The control groups of the node's ranks."""
    return [Path(os.fsdecode(folder.read(name))) for name in folder.names("rank") if name.endswith(GROUP)]


def running(folder: PrivateFolder) -> dict[int, int]:
    """The shims that have neither marked an end nor vanished, as rank to process number."""
    found = {}
    for rank, who in registered(folder).items():
        # What a program has written over a shim's file names none.
        with contextlib.suppress(ValueError):
            if not folder.has(file_of(rank, MARK)) and lives(who):
                found[rank] = Kin.parse(who).pid
    return found


def identity(pid: int) -> str:
    """A process number and what makes it unique: a number is given out again."""
    return f"{pid} {started_at(pid)}"


def lives(who: str) -> bool:
    """Is there still a process of that `identity`? A file half written names none yet."""
    pid, _, start = who.partition(" ")
    return not start or is_alive(int(pid), int(start))


def own_folders() -> Iterator[tuple[PrivateFolder, str, str]]:
    """This user's folders on this node, open, each with the run id and the place of processes (`processes.place`)
    that it names; "" where it names none."""
    for name in sorted(os.listdir(base())):
        if name.startswith(prefix()):
            with contextlib.suppress(OSError), open_private(base() / name) as folder:
                run_id, _, where = (folder.read(_RUN).decode() if folder.has(_RUN) else "").partition("\n")
                yield folder, run_id, where


def agents(run_id: str) -> frozenset[int]:
    """The process number of the node's agent, if it has one."""
    return frozenset(pid for folder in _folders_of(run_id) if (pid := _agent(folder)))


def strays(run_id: str) -> list[Kin]:
    """The run's processes on this node that its agent has noted (see strays.py)."""
    found: list[Kin] = []
    for folder in _folders_of(run_id):
        with contextlib.suppress(OSError):
            found += _identities(folder.read(STRAYS).splitlines())
    return found


def wake(run_id: str) -> None:
    """Have the run's agent on this node look at once; nothing where none listens."""
    for folder in _folders_of(run_id):
        _wake(folder)


def remove(run_id: str) -> None:
    """Remove the run's folder on this node."""
    for folder in _folders_of(run_id):
        remove_private(folder.path)


def open_wake(folder: PrivateFolder) -> int:
    """The agent's end of `wake`."""
    # Open for writing too: a FIFO without writers is readable all the time.
    return folder.open(_WAKE, os.O_RDWR)


def _folders_of(run_id: str) -> Iterator[PrivateFolder]:
    with contextlib.suppress(OSError):
        yield from (folder for folder, named, _ in own_folders() if named == run_id)


def _wake(folder: PrivateFolder) -> None:
    with contextlib.suppress(OSError), os.fdopen(folder.open(_WAKE, os.O_WRONLY), "wb") as fifo:
        fifo.write(b"!")


def _agent(folder: PrivateFolder) -> int | None:
    """The process number of the agent that lives, if one does."""
    with contextlib.suppress(OSError, ValueError):
        who = folder.read(AGENT).decode()
        return int(who.partition(" ")[0]) if lives(who) else None
    return None


# Folders in memory that runs left on this node when node and agent were ended without warning.
_QUIET_S = 600.0
"""A folder written to within this time is kept where its processes may not be seen: in a container."""


def remove_stale(own_run_id: str) -> None:
    """Remove this user's folders of runs of which no process lives."""
    here = place()
    for folder, run_id, where in own_folders():
        if run_id != own_run_id and (where == here or _is_quiet(folder)) and not any(marked(run_id)):
            remove_private(folder.path)


def _is_quiet(folder: PrivateFolder) -> bool:
    try:
        newest = max(folder.path.stat().st_mtime, *(folder.stat(name).st_mtime for name in folder.names()), 0.0)
    except OSError:
        return False
    return time.time() - newest > _QUIET_S
