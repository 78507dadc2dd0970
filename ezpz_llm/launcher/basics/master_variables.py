"""Validation of MASTER_ADDR and MASTER_PORT, before launch, a rank, or the preflight uses them."""

from __future__ import annotations

import ipaddress
import re

from ezpz_llm.core.base import UserError, whole_number
from ezpz_llm.launcher.basics.hostnames import is_address

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_WITH_PORT = re.compile(r"(?:[a-z]+://)?(?P<name>\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+):(?P<port>[0-9]+)/?")
_LONGEST_DNS_NAME = 253
_LAST_PORT = 65535


def require_master_address(address: str) -> None:
    """Check that MASTER_ADDR has the form of a hostname or an address.

    Raises:
        UserError: it does not have that form, for example because a port is appended.
    """
    if _is_valid(address):
        return
    if (match := _WITH_PORT.fullmatch(address)) and _is_valid(name := match["name"].strip("[]")):
        raise UserError(f"MASTER_ADDR={address!r} has a port appended", where="environment",
                        instead=f"MASTER_ADDR={name} MASTER_PORT={match['port']}")
    raise UserError(f"MASTER_ADDR={address!r} is not a hostname or an address", where="environment",
                    instead="set it to a hostname or an address of rank 0's node, or unset it: launch sets it")


def _is_valid(address: str) -> bool:
    if is_address(address):
        try:
            ipaddress.ip_address(address)
        except ValueError:
            return False
        return True
    name = address.removesuffix(".")
    return len(name) <= _LONGEST_DNS_NAME and all(map(_LABEL.fullmatch, name.split(".")))


def require_master_port(port: str) -> int:
    """Return MASTER_PORT as a number.

    Raises:
        UserError: it is not a number from 1 to 65535.
    """
    number = whole_number(port)
    if not number or number > _LAST_PORT:
        raise UserError(f"MASTER_PORT={port!r} is not a port number", where="environment",
                        instead=f"set it to 1 to {_LAST_PORT}, or unset it: launch finds a free port")
    return number
