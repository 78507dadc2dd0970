"""Causes visible in rank 0's step times without traces: slow first steps, pauses, drift, variation (no torch)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ezpz_llm.core.base import count_noun
from ezpz_llm.training.observe.history import PHASES, History, steady_steps
from ezpz_llm.verify.explain.causes import DATA_ADVICE, Cause

_MIN_STEPS = 5
"""Minimum number of steady steps for reporting any cause."""
_MIN_DRIFT_STEPS = 8
"""Minimum number of steady steps without pauses for reporting drift, so that each quarter has at least two."""
_PAUSE = 3.0
"""A step that takes more than this multiple of the median is a pause."""
_DRIFT = 1.1
"""Minimum ratio of the last quarter's mean to the first quarter's for reporting drift."""
_UNSTEADY = 1.25
"""Minimum ratio of the 90th to the 10th percentile for reporting variation. On idle machines it is 1.1 or less."""
_LOW_SHARE = 0.2
"""Share of the matmul peak below which `sentence` includes advice."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a steady step (median, 10th and 90th percentile), and the share of the matmul peak, if known."""

    median: float
    low: float
    high: float
    peak_share: float | None
    advice: tuple[str, ...] = ()
    """Options that may raise a low share of the peak."""

    def sentence(self) -> str:
        """Return a summary in words."""
        spread = f"{self.low * 1e3:.3g} to {self.high * 1e3:.3g} ms for the middle 80 %"
        text = f"A step takes {self.median * 1e3:.3g} ms (median); {spread}."
        if self.peak_share is None:
            return text
        if self.peak_share > 1:
            return f"{text} The measured matmul peak is unreliable (the machine was busy)."
        text += f" Steps reach {self.peak_share:.1%} of the measured matmul peak."
        if self.peak_share < _LOW_SHARE:
            text += " Most of a step is not spent in matmuls" + (
                f"; try {_join_alternatives(self.advice)}." if self.advice else ".")
        return text


def _join_alternatives(options: Sequence[str]) -> str:
    """Join options as "a, b, or c"."""
    *first, last = options
    return f"{', '.join(first)}, or {last}" if first else last


def step_times(rows: History, peak_share: float | None, advice: Sequence[str] = ()) -> StepTimes | None:
    """Summarize the steady steps, or return None if there are none. See `StepTimes` for the other arguments."""
    times = steady_steps(rows).finite("step_time_s")
    if not times:
        return None
    low, median, high = np.quantile(times, (0.1, 0.5, 0.9))
    return StepTimes(float(median), float(low), float(high), peak_share, tuple(advice))


def step_time_causes(rows: History, whole_s: float, *, ranks: int = 2, can_trace: bool = True) -> list[Cause]:
    """Return the causes visible in rank 0's step times, with the seconds that faster steps would save.

    Args:
        whole_s: seconds of the run without set-up.
        ranks: world size.
        can_trace: False for programs other than the trainer, which have no --trace-steps.
    """
    timed = steady_steps(rows)
    timed = timed.select(map(math.isfinite, timed.column("step_time_s")))
    if len(timed) < _MIN_STEPS or whole_s <= 0:
        return []
    return [Cause(kind, text, seconds, seconds / whole_s, advice)
            for kind, text, seconds, advice in _find_causes(rows, timed, ranks, can_trace) if seconds > 0]


def _find_causes(rows: History, steady_rows: History, ranks: int,
                 can_trace: bool) -> Iterator[tuple[str, str, float, tuple[str, ...]]]:
    times = np.asarray(steady_rows.column("step_time_s"))
    median = float(np.median(times))
    first = np.asarray(rows.select(step < steady_rows.steps[0] for step in rows.steps).finite("step_time_s"))
    yield ("first_steps", f"the first {count_noun(len(first), 'step')} ran slower than the median step",
           float(np.sum(first - median)) if len(first) else 0.0,
           ("ignore these steps when you compare runs; a long run needs no change, because libraries, kernels and "
            "caches are set up once",))
    paused = times > _PAUSE * median
    if count := int(paused.sum()):
        yield ("pauses", f"{count_noun(count, 'step')} took more than {_PAUSE:g} times the median step",
               float(np.sum(times[paused] - median)),
               ("check if a checkpoint or an evaluation came before: metrics.jsonl has each step's time",
                "check for other jobs on the nodes and for file systems that stall: ezpz-llm doctor, "
                "launch --preflight"))
    without_pauses = steady_rows.select(~paused)
    times = np.asarray(without_pauses.column("step_time_s"))
    quarters = np.array_split(times, 4)
    begin, end = float(np.mean(quarters[0])), float(np.mean(quarters[-1]))
    drifted = 0.0
    if end > _DRIFT * begin and len(without_pauses) >= _MIN_DRIFT_STEPS:
        drifted = sum(max(0.0, float(np.mean(part)) - begin) * len(part) for part in quarters)
        yield ("drift", f"steps become slower: {begin * 1e3:.3g} ms in the first quarter of the run, "
               f"{end * 1e3:.3g} ms in the last", drifted,
               ("check clocks and temperature of the devices, and memory usage (metrics.jsonl, the site's tools)",
                "check what was started on the nodes during the run"))
    low, high = np.quantile(times, (0.1, 0.9))
    if high > _UNSTEADY * low:
        by_phase = {phase: _seconds_beyond_fast(without_pauses.finite(f"{phase}_s")) for phase in PHASES}
        phase = max(by_phase, key=by_phase.__getitem__)
        advice = DATA_ADVICE if phase == "data" else (
            "check for other programs on the nodes (ezpz-llm doctor), and give each rank separate cores "
            "(launch --explain shows the binding)",
            *(["--trace-steps 10, to find a slow rank or link"] if can_trace and ranks > 1 else []))
        reason = "the machine is shared" + (", or ranks wait for a slow rank" if ranks > 1 else "")
        yield ("unsteady", f"steps vary by a factor of {high / low:.2g} ({low * 1e3:.3g} to {high * 1e3:.3g} ms), "
               f"mostly in {phase}; perhaps {reason}", _seconds_beyond_fast(times) - drifted, advice)


def _seconds_beyond_fast(seconds: Sequence[float] | np.ndarray) -> float:
    """Return the total excess of steps over the 10th percentile, in seconds."""
    return float(np.sum(np.maximum(0.0, np.asarray(seconds) - np.quantile(seconds, 0.1)))) if len(seconds) else 0.0
