"""Findings from gathered facts, as pure functions that read no machine state."""

from __future__ import annotations

from ezpz_llm.check.rules import network, nodes
from ezpz_llm.check.rules.gathered import Finding, Gathered

_JUDGES = (*nodes.RANK_JUDGES, *network.REACH_JUDGES, *nodes.NODE_JUDGES, *network.LINK_JUDGES)


def judge(gathered: Gathered) -> list[Finding]:
    """Return all findings, `bad` ones first."""
    findings = [finding for check in _JUDGES for finding in check(gathered)]
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.level != "bad")
