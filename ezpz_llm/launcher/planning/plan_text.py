"""Launch plans as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from ezpz_llm.core.base import count_noun
from ezpz_llm.core.base.label_rows import align_rows
from ezpz_llm.core.rundir import redact, redact_words
from ezpz_llm.launcher.planning.dialects.work import DIRECT
from ezpz_llm.launcher.planning.plan import LaunchPlan

_Row = TypeVar("_Row")
_Gap = TypeVar("_Gap")

_ROWS = 24
"""Rank tables and files with more rows are printed without the middle ones."""
_MAX_RANKS_INDENTED = 1000


def summary(plan: LaunchPlan) -> str:
    """Return a summary of the plan, with one line per item."""
    lines = [
        f"scheduler  {_scheduler(plan)}",
        f"launcher   {_launcher(plan)}",
        f"ranks      {_ranks(plan)}",
        f"site       {plan.site.name} ({plan.site.source})",
        f"binding    {_binding(plan)}",
        *_container(plan),
        f"run        {plan.run_dir.path}",
        f"command    {plan.command_line}",
    ]
    lines += [f"note       {note}" for note in plan.notes]
    return "\n".join(lines)


def opening_lines(plan: LaunchPlan, width: int) -> str:
    """Return the lines printed before a run: ranks, nodes, run directory and notes, wrapped to `width` columns."""
    hosts = ", ".join(plan.hosts[:4]) + (", …" if len(plan.hosts) > 4 else "")
    ranks, nodes = count_noun(len(plan.ranks), "rank"), count_noun(len(plan.hosts), "node")
    job = f" in {plan.allocation.scheduler} job {plan.allocation.job_id}" if plan.allocation.job_id else ""
    by = "" if plan.launcher.kind == "none" else f", started by {plan.launcher.kind}"
    return align_rows([("launch", f"{ranks} on {nodes} ({hosts}){job}{by}"), ("files", str(plan.run_dir.path)),
                       *(("note", note) for note in plan.notes)], width).rstrip()


def details(plan: LaunchPlan) -> str:
    """Return the summary, the changes to the environment with their sources, the rank table, and the files."""
    lines = [summary(plan), "", "environment changes"]
    settings = {name: (redact(setting.value, name), setting.source) for name, setting in plan.env.items()}
    lines += _columns([(f"{name}={value}", source) for name, (value, source) in settings.items()]) or ["  none"]
    lines += ["", *_columns([_HEADINGS, *_table(plan)])]
    for path, content in plan.files.items():
        rows = content.splitlines()
        lines += ["", f"file {path}", *(f"  {row}" for row in _without_middle(rows, f"… {len(rows) - _ROWS} more"))]
    return "\n".join(lines)


def json_text(plan: LaunchPlan) -> str:
    """Return the plan as JSON text, indented for up to 1000 ranks."""
    return json.dumps(as_json(plan), indent=2 if len(plan.ranks) <= _MAX_RANKS_INDENTED else None)


def as_json(plan: LaunchPlan) -> dict[str, Any]:
    """Return the plan as JSON values."""
    return {
        "argv": redact_words(plan.argv),
        "env": {name: redact(setting.value, name) for name, setting in plan.env.items()},
        "hosts": list(plan.hosts),
        "ranks": [place._asdict() for place in plan.ranks],
        "launcher": plan.launcher.kind,
        "dialect": plan.launcher.title,
        "scheduler": plan.allocation.scheduler,
        "job_id": plan.allocation.job_id,
        "site": plan.site.name,
        "binding": plan.binding._asdict(),
        "container": plan.container.image or None,
        "run_dir": str(plan.run_dir.path),
        "files": {str(path): content for path, content in plan.files.items()},
        "notes": list(plan.notes),
        "sources": {
            "hosts": plan.allocation.source,
            "ranks": plan.ranks_source,
            "launcher": plan.launcher.source,
            "site": plan.site.source,
            "binding": plan.binding.source,
            **({"container": plan.container.source} if plan.container.image else {}),
            **{name: f"{origin.source} ({origin.place.value})" for name, origin in (
                ("devices", plan.allocation.devices_from), ("cores", plan.allocation.cores_from)) if origin},
            **{name: setting.source for name, setting in plan.env.items()},
        },
    }


def _scheduler(plan: LaunchPlan) -> str:
    job = f" job {plan.allocation.job_id}" if plan.allocation.job_id else ""
    return f"{plan.allocation.scheduler}{job} ({plan.allocation.source})"


def _launcher(plan: LaunchPlan) -> str:
    launcher = plan.launcher
    dialect = "" if launcher.dialect == DIRECT or launcher.title == launcher.kind else launcher.title
    return f"{', '.join(filter(None, (launcher.kind, dialect, launcher.program)))} ({launcher.source})"


def _ranks(plan: LaunchPlan) -> str:
    hosts = ", ".join(plan.hosts[:4]) + (", …" if len(plan.hosts) > 4 else "")
    return f"{len(plan.ranks)} on {count_noun(len(plan.hosts), 'node')}: {hosts} ({plan.ranks_source})"


def _container(plan: LaunchPlan) -> list[str]:
    container = plan.container
    return ([f"container  {container.image}, run with {container.runtime} ({container.source})"]
            if container.image else [])


def _binding(plan: LaunchPlan) -> str:
    binding = plan.binding
    if binding.kind == "list":
        how = "each rank to its own cores" + (", set by the rank shim" if binding.by_shim else "")
    elif binding.kind == "depth":
        how = f"{binding.cpus_per_rank} CPUs each, placed by {plan.launcher.kind}"
    else:
        how = "none"
    far = sum(distance == "far" for distance in binding.distances)
    more = f"; {count_noun(far, 'rank')} per node on a different socket from their device" if far else ""
    return f"{how} ({binding.source}){more}"


_HEADINGS = ("rank", "host", "local rank", "cores", "NUMA domain", "device", "distance")


def _table(plan: LaunchPlan) -> list[tuple[str, ...]]:
    unlisted_cores = (f"{plan.binding.cpus_per_rank}, chosen by the launcher" if plan.binding.kind == "depth"
                      else "all on the node")
    return [(f"… {len(plan.ranks) - _ROWS} more", *[""] * (len(_HEADINGS) - 1)) if place is None else
            (str(place.rank), place.host, str(place.local_rank), place.cores or unlisted_cores,
             place.domains or "-", place.device or "-", place.distance or "-")
            for place in _without_middle(plan.ranks, None)]


def _without_middle(rows: Sequence[_Row], gap: _Gap) -> list[_Row | _Gap]:
    return list(rows) if len(rows) <= _ROWS else [*rows[:_ROWS // 2], gap, *rows[-_ROWS // 2:]]


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [("  " + "  ".join(map(str.ljust, row, widths))).rstrip() for row in rows]
