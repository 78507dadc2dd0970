"""How a plan is printed: as text, as JSON, and as the few lines before a run."""

from __future__ import annotations

from typing import Any

from ezpz_llm.launch.plan import LaunchPlan, RankPlace
from ezpz_llm.rundir.record import redact

_ROWS = 24
"""Longer rank tables are printed without their middle."""


def summary(plan: LaunchPlan) -> str:
    """What runs where, in a handful of lines."""
    lines = [
        f"scheduler  {_scheduler(plan)}",
        f"launcher   {_launcher(plan)}",
        f"ranks      {_ranks(plan)}",
        f"run        {plan.run_dir.path}",
        f"command    {plan.command_line}",
    ]
    lines += [f"note       {note}" for note in plan.notes]
    return "\n".join(lines)


def details(plan: LaunchPlan) -> str:
    """The summary, the changes to the environment with their sources, and the rank table."""
    lines = [summary(plan), "", "environment changes"]
    settings = {name: (redact(setting.value, name), setting.source) for name, setting in plan.env.items()}
    lines += _columns([(f"{name}={value}", source) for name, (value, source) in settings.items()]) or ["  none"]
    lines += ["", *_columns([("rank", "host", "local rank", "cores", "device"), *_table(plan.ranks)])]
    for path, content in plan.files.items():
        lines += ["", f"file {path}", *(f"  {line}" for line in content.splitlines())]
    return "\n".join(lines)


def as_json(plan: LaunchPlan) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        "argv": list(plan.argv),
        "env": {name: redact(setting.value, name) for name, setting in plan.env.items()},
        "hosts": list(plan.hosts),
        "ranks": [vars(place) for place in plan.ranks],
        "launcher": plan.launcher.kind,
        "dialect": plan.launcher.dialect,
        "scheduler": plan.allocation.scheduler,
        "job_id": plan.allocation.job_id,
        "run_dir": str(plan.run_dir.path),
        "files": {str(path): content for path, content in plan.files.items()},
        "notes": list(plan.notes),
        "sources": {
            "hosts": plan.allocation.source,
            "ranks": plan.ranks_source,
            "launcher": plan.launcher.source,
            **{name: setting.source for name, setting in plan.env.items()},
        },
    }


def _scheduler(plan: LaunchPlan) -> str:
    job = f" job {plan.allocation.job_id}" if plan.allocation.job_id else ""
    return f"{plan.allocation.scheduler}{job} ({plan.allocation.source})"


def _launcher(plan: LaunchPlan) -> str:
    parts = [plan.launcher.kind]
    if plan.launcher.dialect != "none":
        parts.append(f"{plan.launcher.dialect}")
    if plan.launcher.program:
        parts.append(plan.launcher.program)
    return f"{', '.join(parts)} ({plan.launcher.source})"


def _ranks(plan: LaunchPlan) -> str:
    hosts = ", ".join(plan.hosts[:4]) + (", …" if len(plan.hosts) > 4 else "")
    return f"{len(plan.ranks)} on {len(plan.hosts)} host(s): {hosts} ({plan.ranks_source})"


def _table(ranks: tuple[RankPlace, ...]) -> list[tuple[str, ...]]:
    rows = [(str(place.rank), place.host, str(place.local_rank), place.cores or "its host's", place.device or "-")
            for place in ranks]
    if len(rows) > _ROWS:
        half = _ROWS // 2
        rows[half:-half] = [(f"… {len(rows) - 2 * half} more", "", "", "", "")]
    return rows


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [("  " + "  ".join(map(str.ljust, row, widths))).rstrip() for row in rows]
