"""What happens after too many bad steps: the run stops, or goes back to its last checkpoint. Collective."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ezpz_llm import checkpoint
from ezpz_llm.checkpoint.retention import candidates
from ezpz_llm.rundir import RunDir, read_record, update_record
from ezpz_llm.trainer.plan import check_state
from ezpz_llm.trainer.saving import settle
from ezpz_llm.trainer.session import Session

MOST = 3
"""Times that a run goes back to the same checkpoint."""


def goes_on(session: Session) -> bool:
    """Deal with a streak of bad steps as the run was told to; whether there is something to go on from.

    All ranks have looked at the same numbers (see guards.py), and so all get here after the same step.
    """
    guard, config = session.guard, session.config
    why = guard.why()
    settle(session)
    if config.on_bad_steps == "stop":
        return _stop(session, why)
    if session.went_back[-MOST:] == [session.saved_step] * MOST:
        return _stop(session, f"{why}; going back to step {session.saved_step} did not help {MOST} times")
    where = config.resume if session.saved_step is None else session.dist.run_dir.path
    if where is None:
        return _stop(session, f"{why}; there is no checkpoint to go back to yet")
    _go_back(session, where, why)
    return True


def _stop(session: Session, why: str) -> bool:
    session.stopped, session.failed = why, True
    return False


def _go_back(session: Session, where: str | Path, why: str) -> None:
    """Load the checkpoint, and go on with the samples that come next: those of the bad steps are passed over.

    As Chowdhery et al. 2022 (arXiv:2204.02311, section 5.1) did it: neither the state nor the samples alone had
    brought their spikes about, and other samples from the same state made none.
    """
    def accept(folder: Path, state: dict[str, Any]) -> None:
        check_state(session.plan, folder, state, session.data.fingerprint)
        # An early end writes its state as it is; with an older one at hand, that is no place to begin again.
        if (state.get("guard") or {}).get("streak") and folder != candidates(where)[-1]:
            raise checkpoint.Damaged("the checkpoint was written among bad steps", where=str(folder))

    found = checkpoint.load_newest(where, session.engine, session.dist, accept)
    reached, session.step = session.step, found.state["step"]
    session.guard.restore(found.state.get("guard"))
    session.guard.streak = 0
    session.engine.gate.limit = session.guard.limit
    session.went_back.append(session.step)
    session.saved_step = session.step
    session.early_end.went_back()
    session.metrics.go_back(session.step)
    for profile in session.profiles:
        profile.close()
    passed_over = session.position.consumed - found.state["consumed"]
    if session.dist.is_main:
        print(f"warning: {why}\n  back from step {reached} to the checkpoint of step {session.step}; the "
              f"{passed_over} samples since then are passed over", file=sys.stderr, flush=True)
        session.dist.side.attempt("the rollback in run.json", lambda: _note(session.dist.run_dir, {
            "from_step": reached, "to_step": session.step, "samples_passed_over": passed_over, "why": why}))


def _note(run_dir: RunDir, rollback: dict[str, Any]) -> None:
    update_record(run_dir, rollbacks=[*read_record(run_dir).get("rollbacks", []), rollback])
