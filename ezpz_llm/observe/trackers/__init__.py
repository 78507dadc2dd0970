"""Trackers: other places that a run's numbers go to besides metrics.jsonl, each an extra of the package."""

from ezpz_llm.observe.trackers.tracking import Choice, Tracking, choose

__all__ = ["Choice", "Tracking", "choose"]
