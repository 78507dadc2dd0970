"""No scheduler: this host alone."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ezpz_llm.launch.allocation import Allocation, Host

NAME = "none"


def detect(env: Mapping[str, str]) -> Allocation:
    """This host, always."""
    return Allocation(scheduler=NAME, job_id=None, hosts=(Host(socket.gethostname()),), ends_at=None,
                      source="no scheduler's variables in the environment")
