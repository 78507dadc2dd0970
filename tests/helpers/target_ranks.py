"""Run by several ranks: certify targets of targets.py and examples/certify/five_models.py, one after another.

Usage: mpiexec -n 2 python3 target_ranks.py FOLDER RUN…, a run being FUNCTION:LAYOUT,…:DTYPE.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from places import ROOT, TESTS
from rank_jobs import take_runs

from ezpz_llm.core.base.records import as_plain
from ezpz_llm.training.dist import Dist
from ezpz_llm.verify.certify.cases import Case
from ezpz_llm.verify.certify.local_launches import Job, needed_references, read_reference_error
from ezpz_llm.verify.certify.target_file import find_target
from ezpz_llm.verify.certify.worker import run_job

STEPS = 8
FIVE_MODELS = ROOT / "examples/certify/five_models.py"


def certified(dist: Dist, run: str) -> dict[str, Any]:
    """Certify a target. Return the rejection of its reference, if any, and a result for each layout."""
    function, layouts, dtype = run.split(":")
    path = FIVE_MODELS if f"\ndef {function}(" in FIVE_MODELS.read_text() else TESTS / "helpers/targets.py"
    file = find_target(f"{path}:{function}")
    cases = tuple(Case(layout, dist.world_size, file.title, dtype) for layout in layouts.split(","))
    root = Path(dist.run_dir.path) / run.replace(":", "-")
    root.mkdir(exist_ok=True)
    results = run_job(Job(root, needed_references(cases), cases, STEPS, "cpu", file), dist)
    dist.barrier()
    return as_plain({"refused": read_reference_error(root),
                     "results": {result.layout: result for result in results}})


if __name__ == "__main__":
    take_runs(certified)
