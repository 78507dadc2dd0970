"""Steps that a run profiles or traces (imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass

_SKIP_STEPS = 5
"""Number of steps before a profile starts. The first steps build caches, optimizer state, and kernels."""
PROFILE_STEPS = 20


@dataclass(frozen=True)
class Window:
    """Profiled steps: `first` to `first + steps - 1`, numbered from 0 as in the training loop."""

    first: int
    steps: int

    @property
    def last(self) -> int:
        """The last profiled step."""
        return self.first + self.steps - 1


def profile_window(first_step: int, total_steps: int, steps: int = PROFILE_STEPS,
                   skip: int = _SKIP_STEPS) -> Window | None:
    """Return the window of `steps` steps after `skip` steps, both reduced in a short run; None if no step
    remains."""
    remaining = total_steps - first_step
    if remaining < 1:
        return None
    skip = min(skip, remaining // 2)
    return Window(first_step + skip, min(steps, remaining - skip))


def trace_window(first_step: int, total_steps: int, steps: int, *, has_profile: bool) -> Window | None:
    """Return the window of traced steps, None if no step remains. It follows the Python profile, if there is one.

    One step before the trace is left for `StepTrace`, and the last step is excluded, since the work at the end of
    the run follows it.
    """
    skip = _SKIP_STEPS + (PROFILE_STEPS if has_profile else 0)
    return profile_window(first_step + 1, total_steps - 1, steps, skip) if steps else None
