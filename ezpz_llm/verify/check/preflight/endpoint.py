"""Address, ports, and shared secret with which ranks find rank 0 during preflight."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ezpz_llm.core.base import UserError, make_private, run_secret
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.master_variables import require_master_address, require_master_port

_PORTS_TRIED = 8
"""Number of ports to try, from MASTER_PORT on: torchrun's agent or another program may hold MASTER_PORT."""

_SECRET_FILE, _SECRET_BYTES, _SECRET_WITHIN_S = "preflight-secret", 32, 2.0


@dataclass(frozen=True)
class Endpoint:
    """Address and port at which rank 0 listens, and the run's shared secret."""

    address: str
    port: int
    secret: bytes


def candidate_ports(port: int) -> list[int]:
    """Return the ports on which rank 0 may listen; it uses the first that it can bind."""
    return [candidate for candidate in range(port, port + _PORTS_TRIED) if candidate < 65536]


def rendezvous_point(env: Mapping[str, str], world_size: int) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT, or, for a single rank, the loopback address and any free port.

    Raises:
        UserError: there are several ranks, and a variable is missing or invalid.
    """
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if world_size == 1:
        return "127.0.0.1", 0
    if not address or not port:
        missing = "MASTER_PORT" if address else "MASTER_ADDR"
        raise UserError(f"{missing} is not set for {world_size} ranks", where="environment",
                        instead="launch python3 -m ezpz_llm.preflight, which sets both")
    require_master_address(address)
    return address, require_master_port(port)


def shared_secret(env: Mapping[str, str], run_dir: RunDir) -> bytes:
    """Return the run's shared secret.

    With launch, it is launch's secret. Without launch, the first rank creates it in a file in the run directory
    that only the user can read.

    Raises:
        UserError: the file cannot be created or is incomplete, or other users have access to its folder.
    """
    if (launch_secret := run_secret(env)) is not None:
        return launch_secret
    try:
        run_dir.control.parent.mkdir(parents=True, exist_ok=True)
        with make_private(run_dir.control) as folder:
            with contextlib.suppress(FileExistsError):
                folder.create(_SECRET_FILE, os.urandom(_SECRET_BYTES))
            # Another rank may still be writing it.
            deadline = time.monotonic() + _SECRET_WITHIN_S
            while len(secret := folder.read(_SECRET_FILE)) < _SECRET_BYTES and time.monotonic() < deadline:
                time.sleep(0.05)
    except OSError as error:
        raise UserError(f"cannot store the ranks' shared secret: {error.strerror}", where=str(error.filename),
                        instead="start with launch, or pass --run-dir with a folder that you own") from error
    if len(secret) < _SECRET_BYTES:
        raise UserError("the file with the ranks' shared secret is incomplete",
                        where=str(run_dir.control / _SECRET_FILE), instead="remove that file")
    return secret
