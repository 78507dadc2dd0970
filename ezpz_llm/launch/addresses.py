"""Rendezvous address of a run: an address of rank 0's node and a port, and sockets that listen there only."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, command_line, system_link, system_text
from ezpz_llm.launch.hostnames import NodeNames, first_label, match_names, normalize
from ezpz_llm.launch.master_variables import require_master_address, require_master_port

_LOOPBACK = "127.0.0.1"
_ANY_ADDRESS = ("0.0.0.0", "::")
_RESOLVE_LIMIT_S = 3.0
_PEERS_TRIED = 3
_DISCARD_PORT = 9


@dataclass(frozen=True)
class Rendezvous:
    """The address and port at which rank 0 listens and the others connect, and why these."""

    address: str
    port: int
    address_source: str
    port_source: str
    notes: tuple[str, ...] = ()


def is_here(host: str) -> bool:
    """Return True if `host` is this machine, by its name or one of its addresses."""
    return find_here([host]) is not None


def is_among(hosts: Sequence[str]) -> bool:
    """Return True if one of `hosts` is this machine."""
    return find_here(hosts) is not None


def find_here(hosts: Sequence[str]) -> int | None:
    """Return the position of this machine in a list of hosts, by name or address; None if absent."""
    own_addresses = {"localhost", _LOOPBACK, *filter(None, own_interfaces().values())}
    own_name = socket.gethostname()
    for place, host in enumerate(hosts):
        if host == own_name or normalize(host) in own_addresses:
            return place
    places = _with_own_label(hosts)
    names = [hosts[place] for place in places]
    found = NodeNames(names).find(own_name)
    if len(found) > 1:
        # Several full names begin with this short name: the name service knows this machine's own domain.
        found = NodeNames(names).find(canonical_name(own_name) or own_name)
    if len(found) == 1:
        return places[found[0]]
    if match_names([own_name], names).other_domains and _is_own_name(names[0]):
        return places[0]
    return None


def domain_notes(hosts: Sequence[str], source: str) -> tuple[str, ...]:
    """Return a note if the list has this machine's name in another domain."""
    own_name = socket.gethostname()
    for _, host in match_names([own_name], [hosts[place] for place in _with_own_label(hosts)]).other_domains:
        same = "the same node, by its address" if find_here(hosts) is not None else "another node"
        return (f"the domains differ: this node is {own_name}, {source} has {host}; launch takes it for {same}",)
    return ()


def _with_own_label(hosts: Sequence[str]) -> list[int]:
    label = first_label(normalize(socket.gethostname()))
    return [place for place, host in enumerate(hosts) if first_label(normalize(host)) == label]


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
    """Where the ranks on `hosts` meet; rank 0 is on the first.

    On one host that is the loopback. On several, where this is the first of them: the address of `interface`, else
    of its name if that is not the loopback, else the address by which this host reaches the others. Where the first
    host is another one: its name, with the site's `suffix`. `address` and `port` are the user's own, which stay.

    `key` tells this launch from others and is known to nobody else: the port is derived from it. It is really bound
    where this is rank 0's host.

    Raises:
        UserError: no such interface here, a name that means another host on each of them, a port that is taken, an
            `address` that no rank can connect to.
    """
    at_home = find_here(hosts) == 0
    if interface and at_home:
        named, own = interface_address(interface, interface_source)
    notes: tuple[str, ...] = ()
    if address:
        source = "yours"
        notes = _check_users_address(address, hosts, at_home)
    elif len(hosts) == 1:
        address, source = _LOOPBACK, "all ranks on one host"
    elif interface and at_home:
        address, source = own, f"interface {named} of {hosts[0]} ({interface_source})"
        _refuse_loopback(address, hosts, source)
    elif at_home and not suffix:
        address, source = _own_address(hosts)
    else:
        address, source, notes = _name_elsewhere(hosts, suffix)
    # The user's own address may lead here by ways that this host does not know of.
    number, port_source = _port("" if source == "yours" else address, key, port, at_home, hosts[0])
    return Rendezvous(address, number, source, port_source, notes)


def _check_users_address(address: str, hosts: Sequence[str], at_home: bool) -> tuple[str, ...]:
    """Check the user's own MASTER_ADDR; return a note if it does not resolve here.

    On several nodes it may lead to the first one in ways that this node does not know.

    Raises:
        UserError: not a hostname or an address; the loopback for several nodes; all ranks are on this node, and the
            address is not.
    """
    require_master_address(address)
    found = addresses_of(address)
    if len(hosts) > 1 and found and (is_loopback(found[0]) or found[0] in _ANY_ADDRESS):
        raise _loopback_error(address, found[0], hosts, "MASTER_ADDR")
    here = socket.gethostname()
    if len(hosts) == 1 and at_home and not any(map(_can_bind, found)):
        why = f"is not an address of {here}" if found else f"does not resolve on {here}"
        raise UserError(f"MASTER_ADDR={address} {why}, and all ranks are on this node", where="environment",
                        instead="unset MASTER_ADDR: launch sets it")
    return () if found else (f"MASTER_ADDR={address} does not resolve on {here}: the ranks' nodes must know it",)


def _own_address(hosts: Sequence[str]) -> tuple[str, str]:
    """This host's name where it means this host elsewhere too, else the address that packets to the others leave
    from."""
    name = socket.gethostname() if hosts[0] in ("localhost", _LOOPBACK) else hosts[0]
    found = resolve(name)
    if found and not is_loopback(found):
        return name, "the first host"
    # Debian's installer writes 127.0.1.1 for a host's own name into its /etc/hosts.
    why = f"{name} is {found} here" if found else f"{name} does not resolve here"
    for peer in hosts[1:1 + _PEERS_TRIED]:
        address = address_towards(peer)
        if address and not is_loopback(address):
            return address, f"{why}; this is the address by which it reaches {peer}"
    raise UserError(f"{why}, and no route to {hosts[1]} tells another address",
                    where=f"the first of {len(hosts)} hosts",
                    instead="--interface with the one that hosts reach each other by, or MASTER_ADDR")


def _name_elsewhere(hosts: Sequence[str], suffix: str | None) -> tuple[str, str, tuple[str, ...]]:
    name = hosts[0] if not suffix else first_label(hosts[0]) + suffix
    source = "the first host" if not suffix else f"the first host, with the site's {suffix}"
    if resolve(name) is None:
        return name, source, (f"{name} does not resolve on {socket.gethostname()}: the ranks' hosts must know it",)
    _refuse_loopback(name, hosts, source)
    return name, source, ()


def _refuse_loopback(name: str, hosts: Sequence[str], where: str) -> None:
    found = resolve(name) if len(hosts) > 1 else None
    if found and is_loopback(found):
        raise _loopback_error(name, found, hosts, where)


def _loopback_error(name: str, address: str, hosts: Sequence[str], where: str) -> UserError:
    return UserError(f"{name} is {address} here: ranks on {hosts[1]} would look for rank 0 on their own host",
                     where=where, instead="an address of the first host that the others reach (MASTER_ADDR), or "
                                          "--interface, from that host")


def _port(address: str, key: str, wanted: str | None, at_home: bool, host: str) -> tuple[int, str]:
    if wanted is None:
        source = "drawn for this launch"
        if at_home:
            return free_port(address, key), f"{source}; free just now"
        return next(derived_ports(key)), f"{source}; not tried, since {host} is not this host"
    require_master_port(wanted)
    number = bind_error("", int(wanted)) if at_home else 0
    if number:
        who = f": {holder(int(wanted))}" if number == errno.EADDRINUSE else ""
        raise UserError(f"MASTER_PORT={wanted} cannot be used on {host}: {os.strerror(number)}{who}",
                        where="environment", instead="unset MASTER_PORT: launch finds a free one")
    return int(wanted), "yours"


def resolve(name: str) -> str | None:
    """The first address of `name`, None where it has none or the name service takes too long."""
    return next(iter(addresses_of(name)), None)


def addresses_of(name: str) -> tuple[str, ...]:
    """Return the addresses of `name`; none where the name service takes too long."""
    return tuple(dict.fromkeys(str(place[0]) for _, _, _, _, place in _look_up(name)))


def canonical_name(name: str) -> str | None:
    """Return the full name that the name service has for `name`; None where it has none or takes too long."""
    return next((full_name for _, _, _, full_name, _ in _look_up(name, socket.AI_CANONNAME) if full_name), None)


def _look_up(name: str, flags: int = 0) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []

    def ask() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=flags))

    # A resolver without its servers waits for many seconds; nothing can interrupt it.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_RESOLVE_LIMIT_S)
    return list(found)


def address_towards(peer: str) -> str | None:
    """The own address from which packets to `peer` leave; None where there is no way. Sends nothing."""
    target = resolve(peer)
    if target is None:
        return None
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    # A datagram socket sends nothing to find its route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, _DISCARD_PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Does this address lead nowhere but to the own host?"""
    return address.startswith("127.") or address == "::1"


# Sockets on which rank 0 listens: on the one address at which the others reach it, not on all of its host's.
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


_SIOCGIFADDR = 0x8915
"""linux/sockios.h: the IPv4 address of an interface."""

_BY_BACKEND = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def own_interfaces() -> dict[str, str | None]:
    """Name to IPv4 address of every interface of this host, None for one without."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return {name: _address(probe, name) for _, name in socket.if_nameindex()}


def _address(probe: socket.socket, name: str) -> str | None:
    request = struct.pack("16s240x", name.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return None


def interface_address(names: str, where: str) -> tuple[str, str]:
    """The first of `names` ("hsn0", or "hsn0,hsn1") that has an IPv4 address here, and that address.

    Raises:
        UserError: none has; with the interfaces that there are.
    """
    own = own_interfaces()
    for name in names.split(","):
        if address := own.get(name.strip()):
            return name.strip(), address
    without = [name for name in names.split(",") if name.strip() in own]
    found = f"interface {without[0]} has no IPv4 address" if without else f"no interface {names!r}"
    raise UserError(f"{found} on {socket.gethostname()}, which has {describe(own)}", where=where,
                    instead="--interface with one of them")


def require_interfaces(backend: str, rank: int, env: Mapping[str, str]) -> None:
    """See that this host has the interfaces which `backend` ("gloo", "nccl") is told to use.

    Raises:
        UserError: it has not; with this host, and the interfaces that it has.
    """
    variable = _BY_BACKEND.get(backend)
    if variable is None or not (wanted := env.get(variable)):
        return
    own = own_interfaces()
    if missing := missing_interface(variable, wanted, own):
        raise UserError(f"rank {rank} is to use interface {missing}, which {socket.gethostname()} does not have; "
                        f"it has {describe(own)}", where=f"{variable}={wanted}",
                        instead="--interface with one that every host has, or none")


def missing_interface(variable: str, wanted: str, own: Collection[str]) -> str:
    """What of `wanted`, as the library that reads `variable` understands it, is not among the interfaces `own`."""
    if variable == _BY_BACKEND["gloo"]:
        return next((name for name in wanted.split(",") if name not in own), "")
    # NCCL's environment guide: names are prefixes, exact after "="; "^" says which not to use.
    if wanted.startswith("^"):
        return ""
    is_exact = wanted.startswith("=")
    names = wanted.lstrip("=").split(",")
    fits = any(has == name if is_exact else has.startswith(name) for name in names for has in own)
    return "" if fits else wanted


def describe(own: Mapping[str, str | None]) -> str:
    """`lo (127.0.0.1), hsn0 (10.0.0.1), hsn1`."""
    return ", ".join(f"{name} ({address})" if address else name for name, address in own.items())


# Below 32768, where Linux begins to hand out ports for outgoing connections.
_FIRST_PORT, _LAST_PORT = 20000, 31999
_TRIES = 200

_PROC = Path("/proc")
_LISTENING = "0A"


def derived_ports(key: str) -> Iterator[int]:
    """Ports to try, in order: the same for the same `key`, and almost surely different ones for another."""
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
    return f"pid {pid} ({command_line(pid)[:200] or 'no command line'}) of user {users}"


def _listeners(table: Path, port: int) -> Iterator[tuple[str, int]]:
    for line in system_text(table).splitlines()[1:]:
        # proc(5): local address with the port in hexadecimal, state, …, user, …, inode.
        words = line.split()
        if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
            yield words[9], int(words[7])


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
