"""Preflight report: console output and preflight.json."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from ezpz_llm.core.base import count_noun
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import RunDir, without_secrets, write_json
from ezpz_llm.core.rundir.records import Finding
from ezpz_llm.launcher.basics.hostlist import fold_numbers
from ezpz_llm.training.observe.tables import table
from ezpz_llm.verify.check.facts import Compute, Facts, Mpi, Network, Reduction, find_answer
from ezpz_llm.verify.check.findings import findings_text, is_fit, verdict
from ezpz_llm.verify.check.preflight.rules import Gathered
from ezpz_llm.verify.check.preflight.rules.gathered import (
    NODE,
    Unreached,
    format_bytes,
    format_rate,
)
from ezpz_llm.verify.check.preflight.rules.network import link_rates, used_interfaces

_MAX_ROWS = 24
"""Maximum number of nodes in the table. A longer table omits the nodes in the middle."""


@dataclass(frozen=True)
class Report:
    """Result of a preflight, and its duration in seconds."""

    gathered: Gathered
    findings: Sequence[Finding]
    seconds: float


class _PreflightReport(Struct, frozen=True):
    """Content of preflight.json. `ranks` has the facts of each rank that differ from the common ones."""

    fit: bool
    findings: list[Finding]
    seconds: float
    world_size: int
    unreached: list[Unreached]
    common: dict[str, Any]
    ranks: list[dict[str, Any]]


def report_path(run_dir: RunDir) -> Path:
    """Return the path of preflight.json."""
    return run_dir.path / "preflight.json"


def as_text(report: Report) -> str:
    """Return the table of nodes, common facts, findings with remedies, and the verdict."""
    gathered = report.gathered
    scope = (f"{len(gathered.reporting)} of {gathered.world_size} ranks on "
             f"{count_noun(len(gathered.by_node()), 'node')} in {report.seconds:.1f} s")
    parts = (_node_table(gathered), _common_facts(gathered), findings_text(report.findings),
             verdict("preflight", report.findings, scope))
    return "\n".join(filter(None, parts))


def _node_table(gathered: Gathered) -> str:
    links, used = link_rates(gathered), used_interfaces(gathered)
    rows = [_row(host, ranks, links.get(host), used.get(host)) for host, ranks in gathered.by_node().items()]
    if len(rows) > _MAX_ROWS:
        half = _MAX_ROWS // 2
        rows[half:-half] = [(f"… {len(rows) - 2 * half} more", *[""] * (len(rows[0]) - 1))]
    columns = ("node", "ranks", "device", "cores", "free memory", "interface", "matmul", "in the node",
               "between nodes")
    return table("Preflight", columns, rows) if rows else ""


def _row(host: str, ranks: Sequence[Facts], link: float | None, used: str | None) -> tuple[str, ...]:
    route, cores = ranks[0].route, {fold_numbers(facts.cores) for facts in ranks}
    flops = [answer.flops_per_second for facts in ranks if (answer := find_answer(facts.stages, Compute))]
    rates = [rate.bytes_per_second for facts in ranks if isinstance(rate := facts.stages.get(NODE), Reduction)]
    compute, node = (statistics.median(values) if values else None for values in (flops, rates))
    return (host, fold_numbers(facts.rank for facts in ranks), _device(ranks),
            cores.pop() if len(cores) == 1 else f"{len(ranks[0].cores)} each",
            format_bytes(ranks[0].memory.free), used or (route and route.interface) or "-",
            format_rate(compute, "FLOP/s") if compute else "-", format_rate(node, "B/s") if node else "-",
            format_rate(link, "B/s") if link else "-")


def _device(ranks: Sequence[Facts]) -> str:
    names = [device.name or device.kind if (device := facts.device) else "?" for facts in ranks]
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _common_facts(gathered: Gathered) -> str:
    """Return rank 0's versions, MPI library and network. Findings list the nodes that differ."""
    if not gathered.reporting:
        return ""
    first = gathered.reporting[0]
    lines = ["versions  " + ", ".join(f"{name} {version}" for name, version in first.versions.items())]
    if mpi := find_answer(first.stages, Mpi):
        lines.append(f"MPI       {mpi.library}")
    if (network := find_answer(first.stages, Network)) and network.network:
        lines.append(f"network   {network.library} over {network.network}")
    if first.master:
        lines.append(f"rendezvous MASTER_ADDR {first.master.address}:{first.master.port}")
    return "\n".join(lines) + "\n"


def write_report(run_dir: RunDir, report: Report) -> None:
    """Write preflight.json with the verdict, the findings, and the facts; facts of most ranks are stored once."""
    gathered = report.gathered
    common, per_rank = split_common_members(as_plain(gathered.facts))
    write_json(report_path(run_dir), without_secrets(as_plain(_PreflightReport(
        fit=is_fit(report.findings), findings=list(report.findings), seconds=round(report.seconds, 3),
        world_size=gathered.world_size, unreached=list(gathered.unreached), common=common, ranks=per_rank)),
        os.environ))


def split_common_members(objects: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the members that most JSON objects share, and each object's differing members (None if missing)."""
    common = {}
    for name in dict.fromkeys(name for members in objects for name in members):
        values = {repr(members[name]): members[name] for members in objects if name in members}
        usual, count = Counter(repr(members[name]) for members in objects if name in members).most_common(1)[0]
        if count > len(objects) / 2 and len(objects) > 1:
            common[name] = values[usual]
    return common, [{name: members.get(name) for name in dict.fromkeys((*members, *common))
                     if name not in common or members.get(name) != common[name]} for members in objects]
