"""Signs of life: a small file a rank, rewritten at most once a second (standard library only)."""

from __future__ import annotations

import time

from ezpz_llm.rundir import RunDir


class Heartbeat:
    """Writes this rank's phase and step to its heartbeat file, whose time stamp tells a watchdog that it lives."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self._path = run_dir.rank_heartbeat(rank)
        self._last = ("", 0.0)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Say what this rank is doing. A new phase is written at once, the same one at most once a second."""
        now = time.monotonic()
        if phase == self._last[0] and now - self._last[1] < 1.0:
            return
        self._last = (phase, now)
        # In place: a reader may see half a line, but the step is spared a rename.
        self._path.write_text(f"{phase} {'' if step is None else step}\n")
