"""Failures of optional work: the run continues, unless a rank waits in a collective."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS
from slowness import scaled

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.optional_work import OptionalWork


def test_failed_work_keeps_ranks_in_step_or_ends_the_job(tmp_path: Path) -> None:
    command = [shutil.which("mpiexec") or "mpiexec", "-n", "2", sys.executable,
               str(HELPERS / "optional_ranks.py"), str(tmp_path / "run")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert "[None, 3.0, 3.0, 3.0]" in done.stdout, done.stdout + done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert sorted(warnings) == [
        "warning: everywhere failed: the logits are not finite; the run continues",
        "warning: on rank 1 failed: RuntimeError: not a character; the run continues"]
    # Rank 1 waits in a collective that rank 0 never enters.
    assert done.returncode != 0
    assert "RuntimeError: out of memory" in done.stderr
    assert "continued" not in done.stdout


def test_single_rank_continues_after_any_exception_but_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    work = OptionalWork()

    def fail(error: BaseException) -> None:
        raise error

    assert work.attempt("plotting", lambda: 3) == 3
    assert work.attempt("plotting", lambda: fail(ValueError("first\nsecond"))) is None
    assert work.attempt_together("sampling", lambda: fail(UserError("no tokens", where="there"))) is None
    assert capsys.readouterr().err.splitlines() == [
        "warning: plotting failed: ValueError: first second; the run continues",
        "warning: sampling failed: no tokens; the run continues"]
    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)):
            work.attempt("plotting", lambda error=error: fail(error))
