"""Ranks, devices, process groups and seeds of a run.

What needs torch is imported when it is first asked for, so that seeds and heartbeats stay light.
"""

from __future__ import annotations

from ezpz_llm.base import lazy
from ezpz_llm.dist.heartbeat import Heartbeat

__all__ = ["Degrees", "Dist", "Heartbeat", "Mesh"]

__getattr__ = lazy(__name__, {"Degrees": "degrees", "Mesh": "mesh", "Dist": "setup"})
