"""Check this machine's software and devices and suggest fixes, or compile DeepSpeed's ops before a run.

Exit code 0: no check failed. 1: a check or a build failed. 2: an option or an op is invalid.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from ezpz_llm.core.base import UserError, print_lines, run_command
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.training.layout.ops import OPS


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = CommandParser("doctor", description=__doc__, shown=(
        "ezpz-llm doctor",
        "ezpz-llm doctor --build-ops cpu_adam  compile cpu_adam now, not during the first run"))
    parser.add_argument("--build-ops", nargs="*", metavar="OP",
                        help="compile these ops into the cache; without OP, all that the shipped layouts need:"
                             f" {', '.join(OPS)}")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    options = parser.parse_args(argv)
    if options.build_ops is not None:
        if options.json:
            raise UserError("--json cannot be combined with --build-ops", instead="--build-ops or --json")
        return _build(options.build_ops or list(OPS))
    from ezpz_llm.core.base.records import as_plain
    from ezpz_llm.verify.check.doctor.machine import run_checks
    from ezpz_llm.verify.check.findings import DoctorReport, findings_text, is_fit, verdict

    findings = run_checks(os.environ)
    if options.json:
        print_lines(json.dumps(as_plain(DoctorReport(is_fit(findings), list(findings))), indent=2))
    else:
        print_lines(findings_text(findings) + verdict("doctor", findings, f"{len(findings)} checks"))
    return 0 if is_fit(findings) else 1


def _build(names: Sequence[str]) -> int:
    from ezpz_llm.training.layout.ops import build

    for name in names:
        build(name)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
