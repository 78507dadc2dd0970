"""What a run leaves behind to be read: metrics, where the time went, plots, profiles."""

from ezpz_llm.observe.environment import run_environment
from ezpz_llm.observe.metrics import MetricsLog, Straggler
from ezpz_llm.observe.peaks import Peak, peak_flops
from ezpz_llm.observe.plots import plot_run, series_plot, wants_colour
from ezpz_llm.observe.profile import HostProfile, TraceProfile, Window, profile_window
from ezpz_llm.observe.summary import Summary, final_text, summarise, where_time_went
from ezpz_llm.observe.throughput import Rates, StepWork
from ezpz_llm.observe.timeline import PHASES, StepTimeline, StepTimes

__all__ = [
    "PHASES",
    "HostProfile",
    "MetricsLog",
    "Peak",
    "Rates",
    "StepTimeline",
    "StepTimes",
    "StepWork",
    "Straggler",
    "Summary",
    "TraceProfile",
    "Window",
    "final_text",
    "peak_flops",
    "plot_run",
    "profile_window",
    "run_environment",
    "series_plot",
    "summarise",
    "wants_colour",
    "where_time_went",
]
