"""Records of a run: metrics, step-time breakdown, plots, and profiles.

Modules that need torch are imported on first access, so that tables and plots load quickly.
"""

from __future__ import annotations

from ezpz_llm.core.base import lazy_names

_MODULES = {
    "history": ("PHASES",),
    "metrics": ("MetricsLog",),
    "peaks": ("Ceiling", "Peak", "measure_ceiling", "peak_flops", "run_environment"),
    "plots": ("plot_run", "series_plot"),
    "profile": ("PythonProfile", "StepWatch", "TraceProfile"),
    "profile_windows": ("Window", "profile_window", "trace_window"),
    "step_timeline": ("StepTimeline", "StepTimes"),
    "throughput": ("StepWork", "final_text", "summarize", "breakdown_tables"),
    "terminal": ("terminal_width", "wants_ascii", "wants_color"),
    "trackers": ("Tracking",),
    "wall_clock": ("WallClock",),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_LAZY]

__getattr__ = lazy_names(__name__, _LAZY)
