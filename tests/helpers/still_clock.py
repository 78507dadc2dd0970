"""Clock for tests of times."""

from __future__ import annotations


class StillClock:
    """Clock that only `wait` advances. Sums of eighths of a second are exact."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds
