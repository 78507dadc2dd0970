"""Rules that derive findings from gathered facts. They are pure functions."""

from __future__ import annotations

from ezpz_llm.core.rundir.records import Finding
from ezpz_llm.verify.check.preflight.rules import network, nodes
from ezpz_llm.verify.check.preflight.rules.gathered import Gathered

_RULES = (*nodes.RANK_RULES, *network.REACH_RULES, *nodes.NODE_RULES, *network.LINK_RULES)


def apply_rules(gathered: Gathered) -> list[Finding]:
    """Return all findings, `bad` ones first."""
    findings = [finding for rule in _RULES for finding in rule(gathered)]
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.level != "bad")
