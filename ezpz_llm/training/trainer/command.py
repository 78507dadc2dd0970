"""Options, checks and start of `python3 -m ezpz_llm.train`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ezpz_llm.core.base import UserError, print_lines
from ezpz_llm.core.base.memory_groups import usable_memory
from ezpz_llm.launcher.basics.addresses import is_local_address
from ezpz_llm.launcher.basics.check_places import read_places
from ezpz_llm.launcher.basics.check_report import CheckReport
from ezpz_llm.launcher.basics.devices import has_no_accelerator
from ezpz_llm.training.checkpoint import find
from ezpz_llm.training.checkpoint.state import read_state
from ezpz_llm.training.layout.layout import Places
from ezpz_llm.training.trainer.callbacks.callback import Callback
from ezpz_llm.training.trainer.callbacks.callback_checks import check_callbacks
from ezpz_llm.training.trainer.check_report import explain_plan, memory_warning, setting_warnings, warning
from ezpz_llm.training.trainer.options import Options, dump, parse
from ezpz_llm.training.trainer.plan import check_run
from ezpz_llm.training.trainer.resume import find_resume_point, resume_warning


def main(argv: Sequence[str], callbacks: Sequence[Callback] = ()) -> int:
    """Run the command and return its exit code. torch is imported only after the options are checked."""
    if {"--check", "--json"} <= set(argv):
        return _check_as_json(argv)
    options = parse(argv)
    check_callbacks(callbacks)
    if options.print_config:
        print_lines(dump(options.config), end="")
        return 0
    if options.check:
        report = _check(options)
        print_lines(report.explanation)
        for text in report.warnings:
            print_lines(text, file=sys.stderr)
        return 0
    from ezpz_llm.training.trainer.callbacks.installed_callbacks import installed_callbacks
    from ezpz_llm.training.trainer.run import run

    return run(options, [*installed_callbacks(), *callbacks])


def _check_as_json(argv: Sequence[str]) -> int:
    """Print the result of a check as JSON, including failures, and return its exit code."""
    code = 0
    try:
        report = _check(parse(argv))
    except UserError as error:
        report, code = CheckReport(error=error.found, where=error.where, instead=error.instead), error.exit_code
    print_lines(json.dumps(asdict(report)))
    return code


def _check(options: Options) -> CheckReport:
    """Check that the run can start; return the report. If the run is complete, the report only says so.

    Raises:
        UserError: the run cannot start.
    """
    point = find_resume_point(options)
    if point.complete:
        return CheckReport(explanation=point.complete)
    options = point.options
    places = read_places(os.environ)
    device = _known_device(places)
    plan = check_run(options, options.world_size or 1, device, renames_old_metrics=point.renames_old_metrics)
    resolved, batch = plan.resolved, plan.resolved.batch
    changes = None
    if plan.config.resume is not None:
        changes = resume_warning(plan, read_state(find(Path(plan.config.resume))).step)
    node_bytes = usable_memory()[0] if device == "cpu" else None
    warnings = (warning(plan, options, places), changes and f"warning: {changes}",
                memory_warning(plan, places[0][1], node_bytes) if node_bytes else None,
                *(f"warning: {remark}" for remark in setting_warnings(plan)))
    explanation = "\n".join((explain_plan(plan, places), *(f"note: {note}" for note in point.notes)))
    return CheckReport(resolved.layout.name, resolved.precision, batch.global_batch, batch.micro_batch,
                       batch.accumulation, explanation, tuple(filter(None, warnings)))


def _known_device(places: Places) -> str | None:
    """Return "cpu" if all ranks are known to run on this machine and it has no accelerator.

    Otherwise return None, since only torch can tell.
    """
    return "cpu" if len(places) == 1 and is_local_address(places[0][0]) and has_no_accelerator(os.environ) else None
