"""Trackers: other places that a run's numbers go to besides metrics.jsonl, each an extra of the package."""

from ezpz_llm.observe.trackers.choice import Choice, choose
from ezpz_llm.observe.trackers.tracking import Tracking

__all__ = ["Choice", "Tracking", "choose"]
