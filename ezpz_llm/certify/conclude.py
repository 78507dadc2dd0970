"""What a certify run says and leaves behind at its end (imports no torch)."""

from __future__ import annotations

import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.certify import report
from ezpz_llm.certify.job import results
from ezpz_llm.certify.options import Work
from ezpz_llm.rundir import RunDir, update_record, write_atomic


def conclude(work: Work, options: Namespace, argv: Sequence[str], began: float, run_dir: RunDir,
             environment: dict) -> int:
    """Print and write the outcome; the exit code. One process calls it."""
    found = results(run_dir.path)
    command = shlex.join(["ezpz-llm", "certify", *argv])
    kept = report.record(work, found, environment, command, time.perf_counter() - began)
    for path in (run_dir.path / "certify.json", *([options.json] if options.json else [])):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), report.as_json(kept))
    update_record(run_dir, certify={"passed": kept["passed"], "command": command})
    print(report.verdict_table(found, rich=sys.stdout.isatty()))
    print(report.closing(found, work.skipped))
    print(f"{kept['seconds']:.0f} s; all numbers: {run_dir.path / 'certify.json'}", flush=True)
    if options.write_docs:
        from ezpz_llm.certify.docs import write_docs

        write_docs(kept)
    return 0 if kept["passed"] else 1
