"""Report of preflight: its lines on the console, and preflight.json."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import counted
from ezpz_llm.check.judge import Finding, Gathered
from ezpz_llm.check.judge.gathered import (
    COMPUTE,
    MPI,
    NETWORK,
    NODE,
    READY,
    Facts,
    answer_of,
    findings_text,
    format_bytes,
    format_rate,
)
from ezpz_llm.check.judge.network import link_rates, talks_over
from ezpz_llm.launch.hostlist import fold_numbers
from ezpz_llm.observe.tables import table
from ezpz_llm.rundir import RunDir, without_secrets, write_json

_MOST_HOSTS = 24
"""Longer tables are printed without their middle."""


@dataclass(frozen=True)
class Report:
    """The outcome, and how many seconds it took."""

    gathered: Gathered
    findings: Sequence[Finding]
    seconds: float

    @property
    def is_fit(self) -> bool:
        """True if no finding is `bad`."""
        return not any(finding.level == "bad" for finding in self.findings)


def report_path(run_dir: RunDir) -> Path:
    """Where the report is written."""
    return run_dir.path / "preflight.json"


def as_text(report: Report) -> str:
    """The hosts, what they have in common, the findings with what to do, and the verdict."""
    gathered = report.gathered
    parts = (_hosts(gathered), _common(gathered), findings_text(report.findings), _verdict(report))
    return "\n".join(filter(None, parts))


def _hosts(gathered: Gathered) -> str:
    links, used = link_rates(gathered), talks_over(gathered)
    rows = [_row(host, ranks, links.get(host), used.get(host)) for host, ranks in gathered.by_host().items()]
    if len(rows) > _MOST_HOSTS:
        half = _MOST_HOSTS // 2
        rows[half:-half] = [(f"… {len(rows) - 2 * half} more", *[""] * (len(rows[0]) - 1))]
    columns = ("host", "ranks", "device", "cores", "free memory", "interface", "matrix product", "on the host",
               "to others")
    return table("Preflight", columns, rows) if rows else ""


def _row(host: str, ranks: Sequence[Facts], link: float | None, used: str | None) -> tuple[str, ...]:
    route = ranks[0].get("route", {})
    compute, node = _median(ranks, COMPUTE, "flops_per_second"), _median(ranks, NODE, "bytes_per_second")
    cores = {fold_numbers(facts["cores"]) for facts in ranks}
    return (host, fold_numbers(facts["rank"] for facts in ranks), _device(ranks),
            cores.pop() if len(cores) == 1 else f"{len(ranks[0]['cores'])} each",
            format_bytes(ranks[0]["memory"]["free"]), used or route.get("interface") or "-",
            format_rate(compute, "FLOP/s") if compute else "-", format_rate(node, "B/s") if node else "-",
            format_rate(link, "B/s") if link else "-")


def _device(ranks: Sequence[Facts]) -> str:
    devices = [answer_of(facts, READY).get("device") for facts in ranks]
    names = [device.get("name", device["kind"]) if device else "?" for device in devices]
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _median(ranks: Sequence[Facts], stage: str, member: str) -> float | None:
    values = [answer[member] for facts in ranks if member in (answer := answer_of(facts, stage))]
    return statistics.median(values) if values else None


def _common(gathered: Gathered) -> str:
    """Versions, MPI and the network of rank 0; where others differ, a finding says so."""
    if not gathered.told:
        return ""
    first = gathered.told[0]
    stages = first.get("stages", {})
    lines = ["versions  " + ", ".join(f"{name} {version}" for name, version in first["versions"].items())]
    if "library" in stages.get(MPI, {}):
        lines.append(f"MPI       {stages[MPI]['library']}")
    if network := stages.get(NETWORK, {}).get("network"):
        lines.append(f"network   {stages[NETWORK]['library']} over {network}")
    if master := first.get("master"):
        lines.append(f"rendezvous MASTER_ADDR {master['address']}:{master['port']}")
    return "\n".join(lines) + "\n"


def _verdict(report: Report) -> str:
    levels = [finding.level for finding in report.findings]
    bad, warn = levels.count("bad"), levels.count("warn")
    what = (f"{len(report.gathered.told)} of {report.gathered.world_size} ranks on "
            f"{counted(len(report.gathered.by_host()), 'host')} in {report.seconds:.1f} s")
    warned = f", {counted(warn, 'warning')}" if warn else ""
    verdict = "fit" if report.is_fit else f"unfit: {counted(bad, 'thing')} to mend"
    return f"preflight: {verdict}{warned} ({what})"


def write_report(run_dir: RunDir, report: Report) -> None:
    """Write preflight.json: the verdict, the findings, and the facts, what ranks have in common only once."""
    gathered = report.gathered
    common, own = split_common(gathered.facts)
    write_json(report_path(run_dir), without_secrets({
        "fit": report.is_fit, "seconds": round(report.seconds, 3), "world_size": gathered.world_size,
        "findings": [asdict(finding) for finding in report.findings],
        "unreached": list(gathered.unreached), "common": common, "ranks": own,
    }, os.environ))


def split_common(facts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What most ranks tell alike, and for each rank the members that it tells otherwise (null: not at all)."""
    common = {}
    for name in dict.fromkeys(name for one in facts for name in one):
        values = [one[name] for one in facts if name in one]
        counts = Counter(repr(value) for value in values)
        usual, count = counts.most_common(1)[0]
        if count > len(facts) / 2 and len(facts) > 1:
            common[name] = next(value for value in values if repr(value) == usual)
    return common, [{name: one.get(name) for name in dict.fromkeys((*one, *common))
                     if name not in common or one.get(name) != common[name]} for one in facts]
