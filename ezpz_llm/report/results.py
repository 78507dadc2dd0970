"""What a report says of its runs in rows of text: results, settings, notes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ezpz_llm.observe.history import OTHER, PHASES, steady
from ezpz_llm.observe.progress import short_number
from ezpz_llm.report.compare import describe_batch, describe_device, describe_layout
from ezpz_llm.report.runs import Run

RESULTS = ("run", "step", "tokens", "loss", "val loss", "step ms", "tok/s", "tok/s/dev", "MFU")
SETTINGS = ("run", "model", "parameters", "layout", "ranks", "precision", "sequences a step", "tokens a step",
            "device", "started")


def result_row(run: Run) -> list[str]:
    """A row under RESULTS. The loss is the mean over the last tenth of the steps (at most 50)."""
    validation = run.validation
    step_time = run.median("step_time_s")
    reached = (str(run.rows.steps[-1]), short_number(run.tokens[-1])) if len(run.rows) else ("-", "-")
    return [run.name, *reached,
            _fixed(run.last_loss), _fixed(validation[1] if validation else None),
            f"{step_time * 1e3:.1f}" if step_time is not None else "-", _short(run.median("tokens_per_second")),
            _short(run.median("tokens_per_second_per_device")),
            f"{mfu:.1%}" if (mfu := run.median("mfu")) is not None else "-"]


def setting_row(run: Run) -> list[str]:
    """A row under SETTINGS."""
    record = run.record
    started = (record.get("launch") or {}).get("started")
    return [run.name, str((record.get("config") or {}).get("model", "-")), _short(record.get("parameters")),
            describe_layout(run), str(run.world_size or "-"), str(record.get("precision", "-")),
            describe_batch(run), f"{run.step_tokens[-1]:,}" if len(run.rows) else "-", describe_device(run),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if started else "-"]


def phase_seconds(run: Run) -> dict[str, float]:
    """Mean seconds a steady step spends in each phase (rank 0's); empty where a run has no such record."""
    rows = steady(run.rows)
    names = {phase: f"{phase}_s" for phase in (*PHASES, OTHER)}
    if not len(rows) or not all(np.isfinite(rows.column(name)).all() for name in names.values()):
        return {}
    return {phase: float(np.mean(rows.column(name))) for phase, name in names.items()}


def comments(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(run, what to know of it), the state first."""
    return [(run.name, text) for run in runs for text in (run.state, *run.notes)]


def _short(value: float | None) -> str:
    return short_number(value) if value is not None else "-"


def _fixed(value: float | None) -> str:
    return f"{value:.4f}" if value is not None else "-"
