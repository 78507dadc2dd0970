"""Certify under a launcher: these ranks are the only world there is."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from ezpz_llm.certify import report
from ezpz_llm.certify.lead import Job, references_of
from ezpz_llm.certify.options import Work
from ezpz_llm.certify.report import conclude
from ezpz_llm.certify.worker import COLLECTIVE_TIMEOUT_S, work
from ezpz_llm.dist.setup import setup
from ezpz_llm.observe import run_environment


def follow(todo: Work, options: Namespace, argv: Sequence[str], began: float) -> int:
    """Do what fits these ranks; every rank returns the same exit code. Collective."""
    with setup(device=options.device, run_dir=options.run_dir, name="certify",
               timeout_s=COLLECTIVE_TIMEOUT_S) as dist:
        environment = run_environment(dist)
        job = Job(dist.run_dir.path, references_of(todo.cases), todo.cases, todo.steps, options.device)
        found = work(job, dist, say=lambda line: print(line, flush=True) if dist.is_main else None)
        if dist.is_main:
            conclude(todo, options, argv, began, dist.run_dir, environment)
        dist.barrier()
    return 0 if report.all_passed(found, todo.skipped) else 1
