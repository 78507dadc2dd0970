"""Sockets on which rank 0 listens: on the one address at which the others reach it, not on all of its host's."""

from __future__ import annotations

import errno
import socket

from ezpz_llm.launch.addresses import is_loopback, resolve


def listen(master: str, port: int, backlog: int = 4096) -> socket.socket:
    """A listening socket on the address that `master` (MASTER_ADDR) means here; `port` 0 is any.

    On all addresses only where the name does not tell: it is no address of this host, to which it may lead by ways
    unknown here, or it is the host's name and means the loopback here alone, as Debian's installer has it.

    Raises:
        OSError: the port is taken.
    """
    address = resolve(master)
    if address is not None and (not is_loopback(address) or master in ("localhost", address)):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if dual else socket.AF_INET, backlog=backlog,
                                dualstack_ipv6=dual)


def own_end(listener: socket.socket) -> str:
    """The address by which a process of this host reaches the listener."""
    address = str(listener.getsockname()[0])
    return "127.0.0.1" if address in ("::", "0.0.0.0") else address
