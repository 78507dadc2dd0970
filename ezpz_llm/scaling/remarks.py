"""What a reader of a study's tables has to know, in sentences (no torch)."""

from __future__ import annotations

from ezpz_llm.scaling.above import explain_above
from ezpz_llm.scaling.efficiency import Curve
from ezpz_llm.scaling.findings import Findings
from ezpz_llm.scaling.tables import STEPS_ONLY


def curve_remarks(curve: Curve) -> list[str]:
    """Notes of a curve; every efficiency above 100 % with its causes."""
    found = [*curve.notes]
    for point in curve.points:
        if causes := explain_above(curve, point):
            found.append(f"{point.name}: {curve.efficiency(point).value:.1%} is above 100 %: {'; '.join(causes)}")
    if any(curve.efficiency(point).basis == "steps" for point in curve.points):
        found.append(STEPS_ONLY)
    return found


def study_remarks(findings: Findings) -> list[str]:
    """Notes of the whole study."""
    left = f"{findings.missing} run(s) are still to be made: ezpz-llm scale --study goes on with them"
    return [*findings.notes, *([left] if findings.missing > 0 else [])]
