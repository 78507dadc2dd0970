"""Rendezvous address and port of a run, and sockets that listen only on that address."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import socket
import struct
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ezpz_llm.core.base import UserError, command_line, system_link, system_text
from ezpz_llm.launcher.basics.hostnames import NodeNames, first_label, match_names, normalize
from ezpz_llm.launcher.basics.master_variables import require_master_address, require_master_port

_LOOPBACK = "127.0.0.1"
_ANY_ADDRESS = ("0.0.0.0", "::")
_RESOLVE_LIMIT_S = 3.0
_PEERS_TRIED = 3
_DISCARD_PORT = 9
_USER_SOURCE = "your environment"


class Rendezvous(NamedTuple):
    """Address and port where rank 0 listens and the other ranks connect, with the source of each."""

    address: str
    port: int
    address_source: str
    port_source: str
    notes: tuple[str, ...] = ()


def is_local_address(host: str) -> bool:
    """Return True if `host` is the name or an address of this node."""
    return find_local_node([host]) is not None


def is_local_node_among(hosts: Sequence[str]) -> bool:
    """Return True if one of `hosts` is this node."""
    return find_local_node(hosts) is not None


def find_local_node(hosts: Sequence[str]) -> int | None:
    """Return the position of this node in a list of hostnames or addresses, or None."""
    own_addresses = {"localhost", _LOOPBACK, *filter(None, list_interfaces().values())}
    own_name = socket.gethostname()
    for position, host in enumerate(hosts):
        if host == own_name or normalize(host) in own_addresses:
            return position
    positions = _with_own_label(hosts)
    names = [hosts[position] for position in positions]
    matches = NodeNames(names).find(own_name)
    if len(matches) > 1:
        # Several full names begin with this short name: ask the name service for this node's full name.
        matches = NodeNames(names).find(canonical_name(own_name) or own_name)
    if len(matches) == 1:
        return positions[matches[0]]
    if match_names([own_name], names).other_domains and _is_own_name(names[0]):
        return positions[0]
    return None


def domain_notes(hosts: Sequence[str], source: str) -> tuple[str, ...]:
    """Return a note if the list has the name of this node in another domain."""
    own_name = socket.gethostname()
    for _, host in match_names([own_name], [hosts[position] for position in _with_own_label(hosts)]).other_domains:
        same = "the same node (by its address)" if find_local_node(hosts) is not None else "different nodes"
        return (f"the domains differ: this node is {own_name}, {source} has {host}; launch treats them as {same}",)
    return ()


def _with_own_label(hosts: Sequence[str]) -> list[int]:
    label = first_label(normalize(socket.gethostname()))
    return [position for position, host in enumerate(hosts) if first_label(normalize(host)) == label]


def _is_own_name(name: str) -> bool:
    return any(_can_bind(address) and not is_loopback(address) for address in addresses_of(name))


def _can_bind(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def find_rendezvous(hosts: Sequence[str], key: str, *, interface: str | None = None,
                    interface_source: str = "--interface", suffix: str | None = None, address: str | None = None,
                    port: str | None = None) -> Rendezvous:
    """Return the rendezvous address and port of the ranks on `hosts`; rank 0 is on the first.

    The address is, in this order:

    - `address`, if the user set one.
    - With one node: the loopback address.
    - If this is the first of several nodes: the address of `interface`; else, if there is no `suffix`, the node's
      name, or the address from which it reaches the others if the name resolves to the loopback address.
    - Otherwise: the first node's name, with the site's `suffix`.

    Args:
        key: secret that is unique to this launch; the port is derived from it. On rank 0's node, the port is
            bound once to check that it is free.
        address, port: the user's MASTER_ADDR and MASTER_PORT, used unchanged.

    Raises:
        UserError: the interface does not exist here, the address of several nodes is the loopback address, the port
            is in use, or no rank can connect to `address`.
    """
    on_first_node = find_local_node(hosts) == 0
    if interface and on_first_node:
        interface_name, interface_ip = interface_address(interface, interface_source)
    notes: tuple[str, ...] = ()
    if address:
        source = _USER_SOURCE
        notes = _check_users_address(address, hosts, on_first_node)
    elif len(hosts) == 1:
        address, source = _LOOPBACK, "all ranks on one node"
    elif interface and on_first_node:
        address, source = interface_ip, f"interface {interface_name} of {hosts[0]} ({interface_source})"
        _reject_loopback(address, hosts, source)
    elif on_first_node and not suffix:
        address, source = _own_address(hosts)
    else:
        address, source, notes = _address_of_first_node(hosts, suffix)
    # The user's address may be routed here although no interface of this node has it.
    rank_0_address = "" if source == _USER_SOURCE else address
    number, port_source = _choose_port(rank_0_address, key, port, on_first_node, hosts[0])
    return Rendezvous(address, number, source, port_source, notes)


def _check_users_address(address: str, hosts: Sequence[str], on_first_node: bool) -> tuple[str, ...]:
    """Check the user's MASTER_ADDR; return a note if it does not resolve here.

    With several nodes, only the ranks' nodes have to resolve it.

    Raises:
        UserError: it is not a hostname or an address, is the loopback address although there are several nodes, or
            is not an address of this node although all ranks run here.
    """
    require_master_address(address)
    resolved = addresses_of(address)
    if len(hosts) > 1 and resolved and (is_loopback(resolved[0]) or resolved[0] in _ANY_ADDRESS):
        raise _loopback_error(address, resolved[0], hosts, "MASTER_ADDR")
    hostname = socket.gethostname()
    if len(hosts) == 1 and on_first_node and not any(map(_can_bind, resolved)):
        problem = f"is not an address of {hostname}" if resolved else f"does not resolve on {hostname}"
        raise UserError(f"MASTER_ADDR={address} {problem}, and all ranks are on this node", where="environment",
                        instead="unset MASTER_ADDR: launch sets it")
    if resolved:
        return ()
    return (f"MASTER_ADDR={address} does not resolve on {hostname}; it must resolve on the ranks' nodes",)


def _own_address(hosts: Sequence[str]) -> tuple[str, str]:
    """Return the name of this node, or its address if the name resolves to the loopback address or not at all.

    The address is the one from which packets to the other nodes leave.
    """
    name = socket.gethostname() if hosts[0] in ("localhost", _LOOPBACK) else hosts[0]
    resolved = resolve(name)
    if resolved and not is_loopback(resolved):
        return name, "the first node"
    # Debian's installer writes 127.0.1.1 for the node's own name into /etc/hosts.
    reason = f"{name} is {resolved} here" if resolved else f"{name} does not resolve here"
    for peer in hosts[1:1 + _PEERS_TRIED]:
        address = address_towards(peer)
        if address and not is_loopback(address):
            return address, f"{reason}; this is the address from which it reaches {peer}"
    raise UserError(f"{reason}, and no other address of this node has a route to {hosts[1]}",
                    where=f"the first of {len(hosts)} nodes",
                    instead="pass --interface NAME for the network that connects the nodes, or set MASTER_ADDR")


def _address_of_first_node(hosts: Sequence[str], suffix: str | None) -> tuple[str, str, tuple[str, ...]]:
    name = hosts[0] if not suffix else first_label(hosts[0]) + suffix
    source = "the first node" if not suffix else f"the first node, with the site's {suffix}"
    if resolve(name) is None:
        return name, source, (f"{name} does not resolve on {socket.gethostname()}; it must resolve on the ranks' "
                              "nodes",)
    _reject_loopback(name, hosts, source)
    return name, source, ()


def _reject_loopback(name: str, hosts: Sequence[str], where: str) -> None:
    resolved = resolve(name) if len(hosts) > 1 else None
    if resolved and is_loopback(resolved):
        raise _loopback_error(name, resolved, hosts, where)


def _loopback_error(name: str, address: str, hosts: Sequence[str], where: str) -> UserError:
    return UserError(f"{name} is {address} here: ranks on {hosts[1]} would look for rank 0 on their own node",
                     where=where, instead="set MASTER_ADDR to an address of the first node that the others can "
                                          "reach, or pass --interface NAME on that node")


def _choose_port(address: str, key: str, user_port: str | None, on_first_node: bool, host: str) -> tuple[int, str]:
    if user_port is None:
        source = "derived for this launch"
        if on_first_node:
            return free_port(address, key), f"{source}; free when tested"
        return next(derived_ports(key)), f"{source}; not tested, since {host} is not this node"
    require_master_port(user_port)
    error_number = bind_error("", int(user_port)) if on_first_node else 0
    if error_number:
        process = f": {describe_port_holder(int(user_port))}" if error_number == errno.EADDRINUSE else ""
        raise UserError(f"MASTER_PORT={user_port} cannot be used on {host}: {os.strerror(error_number)}{process}",
                        where="environment", instead="unset MASTER_PORT: launch finds a free port")
    return int(user_port), _USER_SOURCE


def resolve(name: str) -> str | None:
    """Return the first address of `name`, or None if it does not resolve within 3 s."""
    return next(iter(addresses_of(name)), None)


def addresses_of(name: str) -> tuple[str, ...]:
    """Return the addresses of `name`; empty if it does not resolve within 3 s."""
    return tuple(dict.fromkeys(str(sockaddr[0]) for _, _, _, _, sockaddr in _look_up(name)))


def canonical_name(name: str) -> str | None:
    """Return the canonical full name of `name`, or None if it does not resolve within 3 s."""
    return next((full_name for _, _, _, full_name, _ in _look_up(name, socket.AI_CANONNAME) if full_name), None)


def _look_up(name: str, flags: int = 0) -> list[tuple[Any, ...]]:
    results: list[tuple[Any, ...]] = []

    def resolve_name() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            results.extend(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=flags))

    # getaddrinfo blocks for many seconds if the DNS servers do not reply, and cannot be interrupted.
    resolver = threading.Thread(target=resolve_name, daemon=True)
    resolver.start()
    resolver.join(_RESOLVE_LIMIT_S)
    return list(results)


def address_towards(peer: str) -> str | None:
    """Return the local address from which packets to `peer` would leave, or None if there is no route."""
    target = resolve(peer)
    if target is None:
        return None
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    # connect() on a datagram socket selects a route without sending a packet.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, _DISCARD_PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Return True for a loopback address."""
    return address.startswith("127.") or address == "::1"


def listen(master: str, port: int, backlog: int = 4096) -> socket.socket:
    """Return a socket that listens on the address of `master` (MASTER_ADDR) on this node.

    The socket listens on all addresses only if `master` does not determine one: it does not resolve here, is not an
    address of this node (but may be routed here), or is a name that resolves to the loopback address, as in
    Debian's /etc/hosts.

    Args:
        port: 0 for any free port.

    Raises:
        OSError: the port is in use.
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


def local_address(listener: socket.socket) -> str:
    """Return the address at which processes on this node reach the listener."""
    address = str(listener.getsockname()[0])
    return "127.0.0.1" if address in ("::", "0.0.0.0") else address


_SIOCGIFADDR = 0x8915
"""ioctl that returns the IPv4 address of an interface (linux/sockios.h)."""

_INTERFACE_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def list_interfaces() -> dict[str, str | None]:
    """Return the IPv4 address of each network interface of this node, None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return {name: _address(probe, name) for _, name in socket.if_nameindex()}


def _address(probe: socket.socket, name: str) -> str | None:
    request = struct.pack("16s240x", name.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return None


def interface_address(names: str, where: str) -> tuple[str, str]:
    """Return the first of `names` ("hsn0", or "hsn0,hsn1") that has an IPv4 address, and that address.

    Raises:
        UserError: none of them has one; the message lists the interfaces of this node.
    """
    interfaces = list_interfaces()
    for name in names.split(","):
        if address := interfaces.get(name.strip()):
            return name.strip(), address
    present = [name for name in names.split(",") if name.strip() in interfaces]
    problem = f"interface {present[0]} has no IPv4 address" if present else f"no interface {names!r}"
    raise UserError(f"{problem} on {socket.gethostname()}, which has {format_interfaces(interfaces)}", where=where,
                    instead="pass one of these: --interface NAME")


def require_interfaces(backend: str, rank: int, env: Mapping[str, str]) -> None:
    """Check that this node has the interfaces that `env` names for `backend` ("gloo" or "nccl").

    Raises:
        UserError: one is missing; the message lists the interfaces of this node.
    """
    variable = _INTERFACE_VARIABLES.get(backend)
    if variable is None or not (names := env.get(variable)):
        return
    interfaces = list_interfaces()
    if missing := missing_interface(variable, names, interfaces):
        raise UserError(f"rank {rank} must use interface {missing}, but {socket.gethostname()} has only "
                        f"{format_interfaces(interfaces)}", where=f"{variable}={names}",
                        instead="pass an interface that every node has (--interface NAME), or omit --interface")


def missing_interface(variable: str, wanted: str, own: Collection[str]) -> str:
    """Return what matches no interface in `own`: gloo's first such name, or all of `wanted` for NCCL; else "".

    Args:
        variable: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; each has its own syntax.
    """
    if variable == _INTERFACE_VARIABLES["gloo"]:
        return next((name for name in wanted.split(",") if name not in own), "")
    # NCCL's environment guide: names are prefixes, "=" makes them exact, "^" excludes interfaces.
    if wanted.startswith("^"):
        return ""
    is_exact = wanted.startswith("=")
    names = wanted.lstrip("=").split(",")
    is_present = any(has == name if is_exact else has.startswith(name) for name in names for has in own)
    return "" if is_present else wanted


def format_interfaces(own: Mapping[str, str | None]) -> str:
    """Return the interfaces as text: `lo (127.0.0.1), hsn0 (10.0.0.1), hsn1`."""
    return ", ".join(f"{name} ({address})" if address else name for name, address in own.items())


# Below 32768, where Linux's range for outgoing connections begins.
_FIRST_PORT, _LAST_PORT = 20000, 31999
_TRIES = 200

_PROC = Path("/proc")
_LISTENING = "0A"


def derived_ports(key: str) -> Iterator[int]:
    """Yield the ports to try for `key`, always in the same order; a different key most likely yields others."""
    span = _LAST_PORT - _FIRST_PORT + 1
    for step in range(_TRIES):
        yield _FIRST_PORT + (zlib.crc32(os.fsencode(key)) + step) % span


def free_port(address: str, key: str) -> int:
    """Return the first port derived from `key` that can be bound on `address`.

    Raises:
        UserError: `address` is not an address of this node, or none of 200 ports is free.
    """
    for port in derived_ports(key):
        error_number = bind_error(address, port)
        if error_number == errno.EADDRNOTAVAIL:
            raise UserError(f"{address} is not an address of {socket.gethostname()}, where rank 0 listens",
                            where="MASTER_ADDR", instead="pass an interface of this node: --interface NAME")
        if error_number == 0:
            return port
    first = next(derived_ports(key))
    raise UserError(f"none of the {_TRIES} ports from {first} is free on {address}; port {first}: "
                    f"{describe_port_holder(first)}", where="MASTER_PORT",
                    instead="set MASTER_PORT yourself")


def bind_error(address: str, port: int) -> int:
    """Return 0 if rank 0 can listen on `port` and be reached at `address`, else the errno."""
    # torch's TCPStore listens on every interface, so the port must be free on all of them.
    for name in dict.fromkeys((address or "0.0.0.0", "0.0.0.0")):
        try:
            # For a string, Python would import its codec of international names.
            family, _, _, _, sockaddr = socket.getaddrinfo(os.fsencode(name), port, type=socket.SOCK_STREAM)[0]
        except OSError:
            return errno.EADDRNOTAVAIL
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # TCPStore sets this option too; with it, a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(sockaddr)
            except OSError as error:
                return error.errno or errno.EINVAL
    return 0


def describe_port_holder(port: int) -> str:
    """Return the process that listens on `port` here, as text: `pid 41 (python3 x.py), owned by ann`."""
    uids = {inode: uid for name in ("tcp", "tcp6") for inode, uid in _listeners(_PROC / "net" / name, port)}
    if not uids:
        return "no process listens on it now; a process bound it without listening, or has closed it"
    pid = _owner({f"socket:[{inode}]" for inode in uids})
    users = " and ".join(sorted({_user(uid) for uid in uids.values()}))
    if pid is None:
        return f"a process owned by {users}, which is not visible from here"
    return f"pid {pid} ({command_line(pid)[:200] or 'no command line'}), owned by {users}"


def _listeners(table: Path, port: int) -> Iterator[tuple[str, int]]:
    for line in system_text(table).splitlines()[1:]:
        # proc(5): local address with the port in hexadecimal, state, …, user, …, inode.
        fields = line.split()
        if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
            yield fields[9], int(fields[7])


def _owner(sockets: set[str]) -> int | None:
    for folder in _PROC.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(system_link(folder / name) in sockets for name in os.listdir(folder)):
                return int(folder.parent.name)
    return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
