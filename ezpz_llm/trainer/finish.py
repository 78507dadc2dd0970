"""The end of a run: plots, where the time went, and the result in run.json."""

from __future__ import annotations

import sys

from ezpz_llm.base.errors import UserError
from ezpz_llm.launch.variables import ENDING
from ezpz_llm.observe import (
    Bubble,
    HostProfile,
    Straggler,
    final_text,
    plot_run,
    summarise,
    wants_colour,
    where_time_went,
)
from ezpz_llm.observe.history import History, make_history, read_history
from ezpz_llm.rundir import RunDir, SideFiles
from ezpz_llm.trainer.memory_table import Memory, memory_table
from ezpz_llm.trainer.saving import account
from ezpz_llm.trainer.session import Session


def finish(session: Session) -> int:
    """Close the profiles, draw and print on rank 0; return the exit code: 1 if the last loss is NaN or Inf, or
    the last checkpoint could not be written."""
    session.heartbeat.beat(ENDING, session.step)
    session.position = session.position.agree(session.dist)
    for profile in session.profiles:
        profile.close()
    straggler, bubble = session.metrics.straggler(), session.metrics.bubble()
    memory = session.memory.result(session.plan, session.dist)
    if session.dist.is_main:
        report(session, straggler, bubble, memory)
    if session.stopped is not None and session.dist.is_main and not session.failed:
        print(f"stopped after step {session.step} of {session.config.steps}: {session.stopped}\n"
              f"  go on with: the same command and --resume {session.dist.run_dir.path}", flush=True)
    overfits = session.config.overfit_one_batch and not session.stopped
    overfit_failure = session.checks.overfit_failure() if overfits else None
    if overfit_failure and session.dist.is_main:
        print(f"error: {overfit_failure}\n  instead: more --steps, --dropout 0, a smaller batch, or find the fault",
              file=sys.stderr, flush=True)
    failed = session.failed or session.spikes.last_loss_non_finite
    if failed and session.dist.is_main:
        print(f"error: the run ends after step {session.step} of {session.config.steps}: "
              f"{session.stopped or session.spikes.reason()}\n"
              "  instead: a lower --lr, --grad-clip 1, or --on-bad-steps rollback", file=sys.stderr, flush=True)
    if session.unsaved is not None and session.dist.is_main:
        print(f"error: {session.unsaved}", file=sys.stderr, flush=True)
    return 1 if failed or overfit_failure or session.unsaved is not None else 0


def report(session: Session, straggler: Straggler | None, bubble: Bubble | None, memory: Memory) -> None:
    """Print plots, tables and the closing block, and put the result into run.json."""
    run_dir, side = session.dist.run_dir, session.dist.side
    history = whole_history(run_dir, side)
    summary = summarise(run_dir, session.work, session.clock.split(), first_step=session.first_step,
                        unigram_entropy=session.data.unigram_entropy, straggler=straggler, bubble=bubble,
                        history=history)
    colour = wants_colour()
    profile = next((p.path for p in session.profiles if isinstance(p, HostProfile)), None)
    print("\n" + plot_run(run_dir, colour=colour, history=history, side=side))
    if summary is not None:
        print(where_time_went(summary, session.dist.world_size, rich=colour))
    print(memory_table(memory, rich=colour))
    if summary is None:
        print(f"warning: nothing is left of {run_dir.metrics} to sum up")
    else:
        print(final_text(summary, run_dir, profile), end="", flush=True)
    side.update_record(
        run_dir, val_loss=summary and summary.val_loss, val_tokens=session.validation.predictions,
        steps=session.step, stopped=session.stopped, samples_consumed=session.position.consumed,
        sample_hash=session.position.sample_hash, checkpoints=account(session),
        summary=summary and summary.as_record(), memory=memory.as_record())


def whole_history(run_dir: RunDir, side: SideFiles) -> History:
    """The run's lines, with those that could not be written so far."""
    waiting = side.waiting(run_dir.metrics)
    try:
        return read_history(run_dir, waiting)
    except UserError:  # damaged, or a file system that fails
        return make_history(waiting, str(run_dir.metrics))
