"""What one check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Check:
    """One line: what was found, whether a run can live with it, and what mends it (empty where all is well)."""

    level: Level
    name: str
    found: str
    instead: str = ""
