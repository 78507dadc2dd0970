"""What a job asks its scheduler for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """`time_s` is the limit in seconds; `devices` the accelerators of a node, None where the site does not say;
    `output` the folder for what the job prints."""

    name: str
    nodes: int
    time_s: int
    output: Path
    account: str | None
    queue: str | None
    reservation: str | None
    requeue: bool
    devices: int | None
