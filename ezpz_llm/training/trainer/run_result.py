"""Result of a run: exit code, plots, tables, summary."""

from __future__ import annotations

import sys

from ezpz_llm.core.base import print_lines
from ezpz_llm.core.rundir.summary_record import Bubble, Straggler
from ezpz_llm.launcher.basics.variables import ENDING
from ezpz_llm.training.observe import (
    PythonProfile,
    breakdown_tables,
    final_text,
    plot_run,
    summarize,
    wants_color,
)
from ezpz_llm.training.observe.history import whole_history
from ezpz_llm.training.observe.machine_load import load_now
from ezpz_llm.training.report.run_page import write_own_page
from ezpz_llm.training.trainer.callbacks.memory_watch import MemoryWatch, memory_table
from ezpz_llm.training.trainer.callbacks.profiles import StepProfile
from ezpz_llm.training.trainer.callbacks.selfcheck import SelfChecks
from ezpz_llm.training.trainer.checkpoint_saves import checkpoint_cost
from ezpz_llm.training.trainer.config import RunConfig
from ezpz_llm.training.trainer.next_commands import next_commands
from ezpz_llm.training.trainer.session import Session


def finish(session: Session) -> int:
    """End the callbacks, and on rank 0 plot, print and record the result. Collective.

    Returns:
        Exit code: 1 if the run failed, its last loss is NaN or Inf, or its last checkpoint could not be written.
    """
    session.heartbeat.beat(ENDING, session.step)
    data, optional = session.data, session.dist.optional
    data.position = data.position.agree(session.dist)
    session.callbacks.train_end()
    straggler = optional.attempt_together("the comparison of ranks", session.metrics.straggler)
    bubble = optional.attempt_together("the idle time of pipeline stages", session.metrics.bubble)
    stopped = None if session.stop is None else session.stop.reason
    errors = _errors(session)
    if session.dist.is_main:
        session.dist.side.update_record(
            session.dist.run_dir, val_tokens=data.validation.predictions, steps=session.step,
            stopped=stopped, samples_consumed=data.position.consumed, sample_hash=data.position.sample_hash,
            checkpoints=checkpoint_cost(session))
        optional.attempt("the summary", lambda: report(session, straggler, bubble, failed=bool(errors)))
    if stopped is not None and session.dist.is_main and not session.has_failed:
        print_lines(f"stopped after step {session.step} of {session.config.steps}: {stopped}")
    # Every rank prints them, since the post-mortem may quote the log of any rank.
    for error in errors:
        print_lines(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


def _errors(session: Session) -> list[str]:
    """Return the errors of a run that has ended. They are the same on every rank."""
    stopped = session.stop.reason if session.stop else None
    errors = []
    [checks] = session.callbacks.of_kind(SelfChecks)
    if session.config.overfit_one_batch and not stopped and (failure := checks.overfit_failure()):
        errors.append(f"{failure}\n  instead: more --steps, --dropout 0, a smaller batch, or fix the model")
    if session.has_failed or session.spikes.last_loss_non_finite:
        advice = _bad_steps_advice(session.config, session.plan.resolved.clip)
        errors.append(f"the run failed after step {session.step} of {session.config.steps}: "
                      f"{stopped or session.spikes.reason()}\n  instead: {advice}")
    if session.checkpoints.error is not None:
        errors.append(str(session.checkpoints.error))
    return errors


def _bad_steps_advice(config: RunConfig, clip: float | None) -> str:
    """Return the settings to try after too many bad steps, without those that the run has."""
    advice = [f"--lr below {config.lr:g}"]
    if not clip or clip > 1:
        advice.append("--grad-clip 1")
    if config.on_bad_steps != "rollback":
        advice.append("--on-bad-steps rollback")
    return " or ".join(filter(None, [", ".join(advice[:-1]), advice[-1]]))


def report(session: Session, straggler: Straggler | None, bubble: Bubble | None, *, failed: bool) -> None:
    """Print plots, tables and the closing summary, and record the summary in run.json. Call on rank 0."""
    run_dir, side, optional = session.dist.run_dir, session.dist.side, session.dist.optional
    history = whole_history(run_dir, side)
    summary = summarize(run_dir, session.metrics.work, session.clock.split(), first_step=session.first_step,
                        unigram_entropy=session.data.tokens.unigram_entropy, straggler=straggler, bubble=bubble,
                        history=history)
    color = wants_color()
    profile = next((profile.watch.path for profile in session.callbacks.of_kind(StepProfile)
                    if isinstance(profile.watch, PythonProfile)), None)
    [watch] = session.callbacks.of_kind(MemoryWatch)
    memory = watch.memory
    charts = optional.attempt("plotting", lambda: plot_run(run_dir, color=color, history=history, side=side))
    if charts is not None and (session.stop is None or session.has_failed):
        # Not after an early stop, to keep the output short; plots/ and report.html have the charts.
        print_lines("\n" + charts, keeps_colors=color)
    if session.plan.verbose:
        if summary is not None:
            print_lines(breakdown_tables(summary, session.dist.world_size, rich=color), keeps_colors=color)
        if memory is not None:
            print_lines(memory_table(memory, rich=color), keeps_colors=color)
    side.update_record(
        run_dir, val_loss=summary and summary.val_loss, summary=summary,
        memory=memory, load_at_end=load_now())
    side.attempt("report.html", lambda: write_own_page(run_dir, history))
    if summary is None:
        print_lines(f"warning: {run_dir.metrics} contains no steps: no summary")
    else:
        result = final_text(summary, run_dir, profile, memory and memory.peak)
        print_lines(f"{result}\n{next_commands(session, failed)}", end="")
