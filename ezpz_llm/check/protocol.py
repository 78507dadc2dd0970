"""How rank 0 and the others find and trust each other before there is any process group.

They talk over TCP (`base/frames.py`). Not through torch's store: what has to be found includes a torch that cannot
be imported, or hangs in it. Not through files: thousands of ranks would poll a shared file system, and NFS shows a
new file only after up to half a minute; besides, hosts that cannot reach each other have to be found.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.private import make_private, run_secret
from ezpz_llm.rundir import RunDir

PORTS_TRIED = 8
"""MASTER_PORT and the numbers after it: the port itself may be held, by torchrun's agent or by a stranger."""
FIRST_WORDS_S = 2.0
"""So long one side of a new connection waits for the other's proof."""

_SECRET_FILE, _SECRET_BYTES = "preflight-secret", 32


@dataclass(frozen=True)
class Place:
    """Where rank 0 listens, and the secret by which it is told from strangers."""

    address: str
    port: int
    secret: bytes


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


def secret_of(env: Mapping[str, str], run_dir: RunDir) -> bytes:
    """By what the ranks of one run know each other: launch's secret, else one that the first of them puts into a
    file of the run directory, which the user alone can read.

    Raises:
        UserError: that file cannot be made, or is not the user's alone.
    """
    if (known := run_secret(env)) is not None:
        return known
    try:
        run_dir.control.parent.mkdir(parents=True, exist_ok=True)
        with make_private(run_dir.control) as folder:
            with contextlib.suppress(FileExistsError):
                folder.create(_SECRET_FILE, os.urandom(_SECRET_BYTES))
            # Another rank may be about to write it.
            deadline = time.monotonic() + FIRST_WORDS_S
            while len(found := folder.read(_SECRET_FILE)) < _SECRET_BYTES and time.monotonic() < deadline:
                time.sleep(0.05)
    except OSError as error:
        raise UserError(f"the ranks' common secret cannot be kept: {error.strerror}", where=str(error.filename),
                        instead="start with launch, or --run-dir with a folder of yours") from error
    if len(found) < _SECRET_BYTES:
        raise UserError("the ranks' common secret was never written to its end",
                        where=str(run_dir.control / _SECRET_FILE), instead="remove that file")
    return found
