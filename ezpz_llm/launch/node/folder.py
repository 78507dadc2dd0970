"""The run's folder on one node, in memory: what ranks, shims and the node's agent tell one another there."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from ezpz_llm.launch.node.processes import is_alive, started_at
from ezpz_llm.launch.ranks import RankInfo

_MEMORY = "/dev/shm"
_WAKE = "wake"
_LEAVE_WAIT_S = 3.0


def node_dir(run_id: str) -> Path:
    """The run's folder on this host; the same for all its ranks here. It need not exist."""
    return base() / f"{prefix()}{run_id}"


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


def heartbeat_file(folder: Path, rank: int) -> Path:
    """What the rank beats into."""
    return folder / f"rank{rank:04d}"


def log_file(folder: Path, rank: int) -> Path:
    """The rank's log, where logs are kept on the node."""
    return folder / f"rank{rank:04d}.log"


def stacks_file(folder: Path, rank: int) -> Path:
    """Where the rank's own fault handler writes its stacks."""
    return folder / f"rank{rank:04d}.stacks"


def enter(info: RankInfo, run_id: str) -> Path:
    """Make the run's folder on this node if it is not there, and register this process as the rank's shim.

    Raises:
        OSError: the node has no place to write to.
    """
    folder = node_dir(run_id)
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            _shim_file(folder, info.rank).write_text(identity(os.getpid()))
        except FileNotFoundError:
            # An agent whose ranks have all ended has just removed it.
            continue
        with contextlib.suppress(FileExistsError):
            os.mkfifo(folder / _WAKE, 0o600)
        wake(folder)
        return folder


def leave(folder: Path, info: RankInfo, code: int) -> None:
    """Mark the rank as ended. The shim that is the last on its node waits (for 3 s at most) for the agent's last
    work, since a launcher may end what is left of its step on the node once the last shim has gone."""
    with contextlib.suppress(OSError):
        ended_file(folder, info.rank).write_text(str(code))
        wake(folder)
    deadline = time.monotonic() + _LEAVE_WAIT_S
    while _are_all_over(folder, info.local_size) and _agent_lives(folder) and time.monotonic() < deadline:
        time.sleep(0.02)


def ended_file(folder: Path, rank: int) -> Path:
    """The mark of a rank that has ended: its exit code."""
    return folder / f"rank{rank:04d}.ended"


def registered(folder: Path) -> dict[int, str]:
    """The ranks that have come to this node, with the identities of their shims."""
    found = {}
    for path in folder.glob("rank*.shim"):
        found[int(path.name[4:-5])] = path.read_text()
    return found


def running(folder: Path) -> dict[int, int]:
    """The shims that have neither marked an end nor vanished, as rank to process number."""
    return {rank: int(who.split()[0]) for rank, who in registered(folder).items()
            if not ended_file(folder, rank).exists() and lives(who)}


def identity(pid: int) -> str:
    """A process number and what makes it unique: a number is given out again."""
    return f"{pid} {started_at(pid)}"


def lives(who: str) -> bool:
    """Is there still a process of that `identity`? A file half written names none yet."""
    pid, _, start = who.partition(" ")
    return not start or is_alive(int(pid), int(start))


def agent_file(folder: Path) -> Path:
    """The agent's identity; made by the one that begins."""
    return folder / "agent"


def agents(run_id: str) -> frozenset[int]:
    """The process number of the node's agent, if it has one."""
    with contextlib.suppress(OSError, ValueError):
        who = agent_file(node_dir(run_id)).read_text()
        if lives(who):
            return frozenset({int(who.split()[0])})
    return frozenset()


def wake(folder: Path) -> None:
    """Have the agent look at once; nothing where none listens."""
    with contextlib.suppress(OSError):
        handle = os.open(folder / _WAKE, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(handle, b"!")
        finally:
            os.close(handle)


def open_wake(folder: Path) -> int:
    """The agent's end of `wake`."""
    # Open for writing too: a FIFO without writers is readable all the time.
    return os.open(folder / _WAKE, os.O_RDWR | os.O_NONBLOCK)


def _shim_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank:04d}.shim"


def _are_all_over(folder: Path, local_size: int) -> bool:
    with contextlib.suppress(OSError):
        return len(registered(folder)) >= local_size and not running(folder)
    return False


def _agent_lives(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return lives(agent_file(folder).read_text())
    return False
