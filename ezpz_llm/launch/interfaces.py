"""This host's network interfaces, and the ones that gloo and NCCL are told to use."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Collection, Mapping

from ezpz_llm.base.errors import UserError

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
    wanted = env.get(variable, "") if variable else ""
    if not wanted:
        return
    own = own_interfaces()
    if missing := missing_interface(variable, wanted, own):
        raise UserError(f"rank {rank} is to use interface {missing}, which {socket.gethostname()} does not have; "
                        f"it has {describe(own)}", where=f"{variable}={wanted}",
                        instead="--interface with one that every host has, or none")


def missing_interface(variable: str, wanted: str, own: Collection[str]) -> str:
    """What of `wanted`, as the library that reads `variable` understands it, is not among the interfaces `own`."""
    return _missing_for_gloo(wanted, own) if variable == _BY_BACKEND["gloo"] else _missing_for_nccl(wanted, own)


def _missing_for_gloo(wanted: str, own: Collection[str]) -> str:
    return next((name for name in wanted.split(",") if name not in own), "")


def _missing_for_nccl(wanted: str, own: Collection[str]) -> str:
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
