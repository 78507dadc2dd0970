"""TCP ports of this host: which one to meet at, whether it can be bound, and who holds it if not."""

from __future__ import annotations

import errno
import os
import pwd
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

from ezpz_llm.base.errors import UserError

# Below 32768, where Linux begins to hand out ports for outgoing connections.
_FIRST_PORT, _LAST_PORT = 20000, 31999
_TRIES = 200

_PROC = Path("/proc")
_LISTENING = "0A"


def derived_ports(key: str) -> Iterator[int]:
    """Ports to try, in order: the same for the same `key`, and by all odds others for another."""
    span = _LAST_PORT - _FIRST_PORT + 1
    for step in range(_TRIES):
        yield _FIRST_PORT + (zlib.crc32(os.fsencode(key)) + step) % span


def free_port(address: str, key: str) -> int:
    """The first of the key's ports that can be bound on `address` just now.

    Raises:
        UserError: `address` is not this host's, or none of many ports is free.
    """
    for port in derived_ports(key):
        number = bind_error(address, port)
        if number == errno.EADDRNOTAVAIL:
            raise UserError(f"{address} is no address of {socket.gethostname()}, where rank 0 is to listen",
                            where="MASTER_ADDR", instead="--interface with one of this host's interfaces")
        if number == 0:
            return port
    raise UserError(f"no free port among {_TRIES} from {next(derived_ports(key))} on {address}; the first: "
                    f"{holder(next(derived_ports(key)))}", where="MASTER_PORT", instead="set MASTER_PORT yourself")


def bind_error(address: str, port: int) -> int:
    """0 where rank 0 could listen on `port` and be reached at `address`, else the system's error number."""
    # A store listens on every interface, whichever address it is reached at.
    for name in dict.fromkeys((address or "0.0.0.0", "0.0.0.0")):
        try:
            family, _, _, _, place = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        except OSError:
            return errno.EADDRNOTAVAIL
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the store itself does: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
            except OSError as error:
                return error.errno or errno.EINVAL
    return 0


def holder(port: int) -> str:
    """Who listens on `port` of this host: `pid 41 (python3 x.py) of user ann`, or why that cannot be seen."""
    found = {inode: uid for name in ("tcp", "tcp6") for inode, uid in _listeners(_PROC / "net" / name, port)}
    if not found:
        return "nobody listens there now; it is bound without listening, or has been let go of"
    pid = _owner({f"socket:[{inode}]" for inode in found})
    users = " and ".join(sorted({_user(uid) for uid in found.values()}))
    if pid is None:
        return f"a process of user {users}, which cannot be seen from here"
    return f"pid {pid} ({_command_line(pid)}) of user {users}"


def _listeners(table: Path, port: int) -> Iterator[tuple[str, int]]:
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        # proc(5): local address with the port in hexadecimal, state, …, user, …, inode.
        words = line.split()
        if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
            yield words[9], int(words[7])


def _owner(sockets: set[str]) -> int | None:
    for folder in _PROC.glob("[0-9]*/fd"):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            try:
                if os.readlink(folder / name) in sockets:
                    return int(folder.parent.name)
            except OSError:
                continue
    return None


def _command_line(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:
        words = []
    return " ".join(words)[:200] or "no command line"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
