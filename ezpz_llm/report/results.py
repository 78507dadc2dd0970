"""Rows of text of a report: results, notes, and the settings in which runs differ."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ezpz_llm.observe.history import OTHER, PHASES, steady
from ezpz_llm.observe.throughput import short_number
from ezpz_llm.observe.trackers.tracking import flat
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


# Which settings of several runs differ: a difference between curves has one cause only if one of them does.
_NO_BEARING = {"run_dir", "resume", "track", "profile", "trace_steps", "log_every", "save_every", "keep_last",
               "eval_every", "sample_every", "sample_tokens", "prompt", "nvme_path", "tokenizer", "precision",
               "global_batch", "micro_batch", "accumulation", "ds_config", "device"}
"""Options that leave the curves as they are, or whose outcome is compared in their place."""
_NAMED = 5
_DERIVED = ("default", "a tenth of", "follows from")
"""Beginnings of the sources of values that nobody chose."""


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Settings chosen differently, and what came of others, with each run's value as text ("-" for none)."""
    if len(runs) < 2:
        return {}
    found = {}
    for tables, counts in (([_options(run) for run in runs], _is_chosen), ([_outcomes(run) for run in runs], None)):
        for name in dict.fromkeys(name for table in tables for name in table):
            values = [table.get(name, "-") for table in tables]
            if len(set(values)) > 1 and (counts is None or any(counts(run, name) for run in runs)):
                found[name] = values
    return found


def _is_chosen(run: Run, name: str) -> bool:
    """True if somebody decided on this option; one that the run's version did not have yet was not."""
    known = name in (run.record.get("config") or {})
    return known and not (run.record.get("sources") or {}).get(name, "").startswith(_DERIVED)


def verdict(found: dict[str, list[str]]) -> str:
    """Return in one sentence what differing settings mean for comparing the curves."""
    if not found:
        return "The runs have the same settings."
    if len(found) == 1:
        return f"The runs differ in one setting: {next(iter(found))}."
    names = [*list(found)[:_NAMED], *([f"{len(found) - _NAMED} more"] if len(found) > _NAMED else [])]
    return (f"warning: the runs differ in {len(found)} settings ({', '.join(names)}): what their curves differ in "
            "has no single cause.")


def describe_layout(run: Run) -> str:
    """The layout's name with its degrees, "-" where it is not known."""
    layout = run.layout.get("layout") or {}
    if not layout:
        return str((run.record.get("config") or {}).get("ds_config", "-"))
    sizes = {"dp": (run.layout.get("batch") or {}).get("dp_size", 1),
             **{axis: layout.get(axis, 1) for axis in ("tp", "pp", "sp")}}
    degrees = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    name = layout.get("name", "-")
    return f"{name} ({degrees})" if degrees else name


def describe_batch(run: Run) -> str:
    """Sequences of a step and how they are divided."""
    batch = run.layout.get("batch") or {}
    sizes = [batch.get(name) for name in ("global_batch", "micro_batch", "accumulation", "dp_size")]
    if None in sizes:
        return "-"
    return "{} ({} x {} micro-steps x {} ranks)".format(*sizes)


def describe_device(run: Run) -> str:
    """Return the kind of device that the ranks ran on."""
    device = (run.record.get("environment") or {}).get("device") or {}
    return str(device.get("name") or device.get("type") or "-")


def _options(run: Run) -> dict[str, str]:
    return _text({name: value for name, value in (run.record.get("config") or {}).items()
                  if name not in _NO_BEARING})


def _outcomes(run: Run) -> dict[str, str]:
    environment, data = run.record.get("environment") or {}, run.record.get("data") or {}
    versions = environment.get("versions") or {}
    return _text({
        "data": f"{data.get('tokenizer', '-')} {str(data.get('fingerprint', '-'))[:12]}",
        "precision": run.record.get("precision"),
        "batch": (run.layout.get("batch") or {}).get("global_batch"),
        "layout": describe_layout(run),
        "ranks": run.world_size,
        "device": describe_device(run),
        **{f"{name} version": versions.get(name) for name in ("torch", "deepspeed", "ezpz_llm")},
    })


def _text(settings: dict[str, Any]) -> dict[str, str]:
    return {name: "-" if value is None else str(value) for name, value in flat(settings).items()}
