"""Check that parallel layouts compute the same results as a single process."""

from __future__ import annotations

import os
import signal
import time
from argparse import Namespace
from collections.abc import Sequence

from ezpz_llm.core.base import UserError, print_lines, read_json
from ezpz_llm.core.base.records import as_record
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir, default_run_dir
from ezpz_llm.launcher.basics.ranks import ALONE, find_rank
from ezpz_llm.verify.certify.cases import Work, parser, plan
from ezpz_llm.verify.certify.local_launches import read_reference_error, read_results, run_cases
from ezpz_llm.verify.certify.recheck import compare, read_certificate
from ezpz_llm.verify.certify.records import CertificateRecord
from ezpz_llm.verify.certify.report import conclude


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 0 only if every case passes."""
    options = parser().parse_args(argv)
    if options.check:
        if options.recheck is None:
            plan(options, options.world_size)
        else:
            read_certificate(options.recheck)
        return 0
    began = time.perf_counter()
    info = find_rank(os.environ)
    if options.recheck is not None:
        if info.source != ALONE:
            raise UserError("--recheck starts its own ranks and cannot run under launch", where="--recheck",
                            instead="ezpz-llm certify --recheck FILE.json, without launch")
        return _recheck(options, began)
    if info.source != ALONE or RUN_DIR_VARIABLE in os.environ:
        work = plan(options, info.world_size)
        from ezpz_llm.verify.certify.worker import run_on_launched_ranks

        return run_on_launched_ranks(work, options, argv, began)
    return _run_locally(plan(options), options, argv, began)


def _run_locally(work: Work, options: Namespace, argv: Sequence[str], began: float) -> int:
    """Run the cases in launches that certify starts, and return the exit code."""
    run_dir = RunDir((options.run_dir or default_run_dir("certify").path).absolute()).create()
    if read_results(run_dir.path) or read_reference_error(run_dir.path):
        raise UserError("the run directory already has results of certify", where=str(run_dir.path),
                        instead="another --run-dir")
    signal.signal(signal.SIGTERM, _exit_on_signal)
    environment = run_cases(work, run_dir.path)
    return conclude(work, options, argv, began, run_dir, environment)


def _recheck(options: Namespace, began: float) -> int:
    """Run a certificate's command again; return 0 if the certificate holds on this machine."""
    certificate = read_certificate(options.recheck)
    rerun_options = parser().parse_args(certificate.arguments)
    run_dir = rerun_options.run_dir = (options.run_dir or default_run_dir("recheck").path).absolute()
    rerun_options.json, rerun_options.write_docs = options.json, False
    _run_locally(plan(rerun_options), rerun_options, certificate.arguments, began)
    path = run_dir / "certify.json"
    holds, message = compare(certificate, as_record(CertificateRecord, read_json(path), str(path)))
    print_lines(message)
    return 0 if holds else 1


def _exit_on_signal(number: int, frame: object) -> None:
    """Raise SystemExit, so that `finally` blocks run and stop the running launch."""
    raise SystemExit(128 + number)
