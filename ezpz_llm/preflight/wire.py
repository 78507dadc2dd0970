"""How rank 0 and the others talk before there is any process group: JSON lines over TCP.

Not through torch's store: what has to be found includes a torch that cannot be imported, or hangs in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ezpz_llm.errors import UserError
from ezpz_llm.launch.variables import RUN_ID_VARIABLE

PORTS_TRIED = 8
"""MASTER_PORT and the numbers after it: the port itself may be held, by torchrun's agent or by a stranger."""


def candidate_ports(port: int) -> list[int]:
    """Where rank 0 listens: the first of these that it can bind."""
    return [one for one in range(port, port + PORTS_TRIED) if one < 65536]


def meeting_point(env: Mapping[str, str], world_size: int) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT; the loopback and any port for a single rank.

    Raises:
        UserError: several ranks and no address, or no number.
    """
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if world_size == 1:
        return "127.0.0.1", 0
    if not address or not port:
        missing = "MASTER_PORT" if address else "MASTER_ADDR"
        raise UserError(f"{world_size} ranks have no {missing} to meet at", where="environment",
                        instead="launch python3 -m ezpz_llm.preflight, which sets both")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"MASTER_PORT={port!r} is not a port number", where="environment")
    return address, int(port)


def encode(message: Mapping[str, Any]) -> bytes:
    """One message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Puts the bytes that come in back together into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes.

        Raises:
            ValueError: the other side does not speak JSON: it is not one of ours.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message")
        return messages


def token_of(env: Mapping[str, str]) -> str:
    """The word by which the ranks of one run know each other on a port that strangers may listen on, too."""
    return env.get(RUN_ID_VARIABLE) or env.get("TORCHELASTIC_RUN_ID") or "ezpz_llm.preflight"
