"""Ranks, devices, process groups, and seeds of a run.

Modules that need torch are imported on first access, so that seeds and heartbeats load quickly.
"""

from __future__ import annotations

from ezpz_llm.core.base import lazy_names
from ezpz_llm.training.dist.heartbeat import Heartbeat

__all__ = ["Degrees", "Dist", "Heartbeat", "Mesh"]

__getattr__ = lazy_names(__name__, {"Degrees": "degrees", "Mesh": "mesh", "Dist": "setup"})
