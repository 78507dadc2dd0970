"""Findings from gathered facts: pure functions, worst first. Nothing here reads a machine."""

from __future__ import annotations

from ezpz_llm.check.judge import hosts, network
from ezpz_llm.check.judge.gathered import Finding, Gathered

_JUDGES = (*hosts.RANK_JUDGES, *network.REACH_JUDGES, *hosts.NODE_JUDGES, *network.LINK_JUDGES)


def judge(gathered: Gathered) -> list[Finding]:
    """Everything that is wrong (`bad`), then everything that is odd (`warn`)."""
    found = [finding for one in _JUDGES for finding in one(gathered)]
    return sorted(dict.fromkeys(found), key=lambda finding: finding.level != "bad")
