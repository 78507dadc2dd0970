"""Where the ranks of a run meet."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from ezpz_llm.errors import UserError
from ezpz_llm.launch.allocation import short_name

# Below 32768, where Linux begins to hand out ports for outgoing connections.
_FIRST_PORT, _LAST_PORT = 20000, 31999
_TRIES = 200


def is_here(host: str) -> bool:
    """Is `host` this machine, by one of its own names?"""
    return host in ("localhost", "127.0.0.1") or short_name(host) == short_name(socket.gethostname())


def meeting_host(hosts: tuple[str, ...]) -> str:
    """The address that every rank can reach rank 0 at: the loopback on one host, else the first host's name."""
    if len(hosts) == 1:
        return "127.0.0.1"
    return socket.gethostname() if hosts[0] in ("localhost", "127.0.0.1") else hosts[0]


def free_port(address: str, seed: int) -> int:
    """A port that could be bound just now; the search starts where `seed` says, so that two runs differ.

    `address` is the loopback where all ranks are on one host, and "" (every interface) for several hosts.

    Raises:
        UserError: none of many ports is free.
    """
    for port in _ports(seed):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As the rendezvous itself does: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise UserError(f"no free port among {_TRIES} between {_FIRST_PORT} and {_LAST_PORT}", where="MASTER_PORT",
                    instead="set MASTER_PORT yourself")


def _ports(seed: int) -> Iterator[int]:
    span = _LAST_PORT - _FIRST_PORT + 1
    for step in range(_TRIES):
        yield _FIRST_PORT + (seed + step) % span
