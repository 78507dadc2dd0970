"""Hooks after a step and at the end of a run: logs, validation, samples, checkpoints, result.

Functions marked Collective must be called on all ranks.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ezpz_llm import checkpoint
from ezpz_llm.checkpoint.retention import candidates
from ezpz_llm.dist.seeds import seed_for
from ezpz_llm.evaluate import hellaswag
from ezpz_llm.evaluate.validation import sample, validation_loss
from ezpz_llm.launch.variables import ENDING, EVALUATING, SAMPLING, SAVING
from ezpz_llm.model.compile import eager
from ezpz_llm.observe import (
    Bubble,
    PythonProfile,
    Straggler,
    breakdown_tables,
    final_text,
    plot_run,
    summarize,
    wants_color,
)
from ezpz_llm.observe.history import whole_history
from ezpz_llm.observe.machine_load import load_now
from ezpz_llm.report.run_page import write_own_page
from ezpz_llm.rundir.records import CheckpointCost, Rollback, read_record, update_record
from ezpz_llm.trainer.memory_table import Memory, memory_table
from ezpz_llm.trainer.next_commands import next_commands
from ezpz_llm.trainer.plan import check_state
from ezpz_llm.trainer.profiling import OptionalWatch
from ezpz_llm.trainer.session import Session


def after_step(session: Session) -> None:
    """Log, validate, score HellaSwag, save and sample when due; after the last step, do all that are enabled.

    Collective.
    """
    config, step = session.config, session.step
    last = step == config.steps
    evaluates = last or _due(step, config.eval_every)
    scores = bool(session.hellaswag) and (last or _due(step, config.hellaswag_every))
    saves = config.save_every >= 0 and (last or _due(step, config.save_every))
    samples = session.prompt is not None and (last or _due(step, config.sample_every))
    flushes = saves or scores or evaluates or session.metrics.due
    if flushes or samples:
        session.metrics.erase_live_line()
        with session.clock.span("training"):  # otherwise the step's time would be added to the evaluation's
            session.timeline.wait()
    optional = session.dist.optional
    if evaluates:
        with session.clock.span("evaluation"):
            optional.attempt_together(f"the validation after step {step}", lambda: validate(session))
    # Write metrics before saving, so that a run that resumes from the checkpoint finds the earlier lines. If
    # HellaSwag is due, its scores belong on this step's line but may take minutes, so save the checkpoint first.
    check_results = reduce_metrics(session) if flushes else []
    if flushes and not scores:
        write_metrics(session, check_results)
    # Do not save during bad steps, so that a rollback can use the last checkpoint. Always save the last step,
    # unless the run rolls back or stops there.
    if saves and (not session.spikes.streak or (last and not session.spikes.should_stop)):
        with session.clock.span("checkpoints"):
            save(session, blocking=last)
    if scores:
        try:
            with session.clock.span("evaluation"):
                optional.attempt_together(f"HellaSwag after step {step}", lambda: score_hellaswag(session))
        finally:
            write_metrics(session, check_results)
    if samples:
        with session.clock.span("sampling"):
            optional.attempt_together(f"the sample after step {step}", lambda: show_sample(session))


def end_early(session: Session, reason: str) -> None:
    """Write the log and, unless checkpoints are disabled, a checkpoint of this step. Collective."""
    session.stopped = reason
    flush(session)
    if session.config.save_every >= 0:
        with session.clock.span("checkpoints"):
            save(session, blocking=True)


def flush(session: Session) -> None:
    """Reduce, observe and write the pending metrics lines. Collective."""
    write_metrics(session, reduce_metrics(session))


def reduce_metrics(session: Session) -> list[str]:
    """Reduce and observe the pending lines, and set the gradient-norm limit of the next steps. Collective.

    Returns:
        Results of the self-checks.
    """
    with session.clock.span("logging"):
        session.metrics.reduce(session.timeline, session.observe)
        check_results = session.checks.results(session.dist)
    session.engine.step_skip.limit = session.spikes.limit
    return check_results


def write_metrics(session: Session, check_results: list[str]) -> None:
    """Write the reduced lines, and print the self-checks' results and skipped steps."""
    spikes = session.spikes
    with session.clock.span("logging"):
        session.metrics.write()
    if check_results and session.dist.is_main:
        shown = ["checks     " + "\n           ".join(check_results)] if session.verbose else [
            text for text in check_results if text.startswith("warning: ")]
        print("".join(f"{text}\n" for text in shown), end="", flush=True)
        session.dist.side.update_record(session.dist.run_dir, checks=check_results)
    if session.dist.is_main:
        for skipped in spikes.unreported:
            print(f"warning: {skipped}", flush=True)
    spikes.unreported = []


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def validate(session: Session) -> None:
    """Measure the validation loss on a fixed set of tokens, and record it on this step's line. Collective."""
    session.heartbeat.beat(EVALUATING, session.step)
    engine, mesh = session.engine, session.dist.mesh
    with engine.evaluating(), eager():
        loss, tokens = validation_loss(
            engine.loss_sum, session.validation.batches(session.batches.micro_batch, mesh.dp_rank, mesh.dp_size),
            device=engine.device, mesh=mesh)
    session.metrics.record_validation(session.step, loss, tokens)


def score_hellaswag(session: Session) -> None:
    """Score HellaSwag, record the accuracies on this step's line, and print them. Collective."""
    session.heartbeat.beat(EVALUATING, session.step)
    engine, dist = session.engine, session.dist
    with engine.evaluating(), eager():
        score = hellaswag.score(
            engine.row_losses, session.hellaswag, session.data.tokenizer, device=engine.device, mesh=dist.mesh,
            block_size=session.plan.model.block_size,
            items_at_once=max(1, session.batches.micro_batch // hellaswag.ENDINGS))
    session.metrics.record_task(session.step, hellaswag_acc=score.acc, hellaswag_acc_norm=score.acc_norm)
    if dist.is_main:
        dist.side.update_record(dist.run_dir, hellaswag={"step": session.step, **score.as_record()})
        print(f"HellaSwag after step {session.step}: acc_norm {score.acc_norm:.4f}, acc {score.acc:.4f} "
              f"({score.items} items, normalized by tokens)", flush=True)


def show_sample(session: Session) -> None:
    """Generate a short text and print it on rank 0. Collective, since parameters may be sharded."""
    session.heartbeat.beat(SAMPLING, session.step)
    config, engine, tokenizer = session.config, session.engine, session.data.tokenizer
    prompt = torch.from_numpy(session.prompt)[None].to(engine.device)
    generator = torch.Generator().manual_seed(seed_for(config.seed, "sample", session.step))
    with engine.evaluating():
        ids = sample(engine.next_logits, prompt, new_tokens=config.sample_tokens, generator=generator,
                     block_size=session.plan.model.block_size, vocab_size=session.data.vocab_size,
                     top_k=config.top_k or None, temperature=config.temperature)
    if session.dist.is_main:
        text = tokenizer.decode(ids[0].tolist())
        lines = "\n".join(f"  | {line}" for line in text.splitlines())
        print(f"\nsample after step {session.step}:\n{lines}\n", flush=True)


def finish(session: Session) -> int:
    """Close the profiles, and on rank 0 plot, print and record the result. Collective.

    Returns:
        Exit code: 1 if the run failed, its last loss is NaN or Inf, or its last checkpoint could not be written.
    """
    session.heartbeat.beat(ENDING, session.step)
    session.position = session.position.agree(session.dist)
    for profile in session.profiles:
        profile.close()
    optional = session.dist.optional
    straggler = optional.attempt_together("the comparison of ranks", session.metrics.straggler)
    bubble = optional.attempt_together("the idle time of pipeline stages", session.metrics.bubble)
    memory = optional.attempt_together("the memory report",
                                       lambda: session.memory.result(session.plan, session.dist))
    if session.dist.is_main:
        session.dist.side.update_record(
            session.dist.run_dir, val_tokens=session.validation.predictions, steps=session.step,
            stopped=session.stopped, samples_consumed=session.position.consumed,
            sample_hash=session.position.sample_hash, checkpoints=checkpoint_cost(session))
        optional.attempt("the summary", lambda: report(session, straggler, bubble, memory))
    if session.stopped is not None and session.dist.is_main and not session.failed:
        print(f"stopped after step {session.step} of {session.config.steps}: {session.stopped}\n"
              f"  continue with: the same command and --resume {session.dist.run_dir.path}", flush=True)
    errors = []
    if session.config.overfit_one_batch and not session.stopped and (failure := session.checks.overfit_failure()):
        errors.append(f"{failure}\n  instead: more --steps, --dropout 0, a smaller batch, or fix the model")
    if session.failed or session.spikes.last_loss_non_finite:
        errors.append(f"the run failed after step {session.step} of {session.config.steps}: "
                      f"{session.stopped or session.spikes.reason()}\n"
                      "  instead: a lower --lr, --grad-clip 1, or --on-bad-steps rollback")
    if session.unsaved is not None:
        errors.append(str(session.unsaved))
    if session.dist.is_main:
        for error in errors:
            print(f"error: {error}", file=sys.stderr, flush=True)
    return 1 if errors else 0


def report(session: Session, straggler: Straggler | None, bubble: Bubble | None, memory: Memory | None) -> None:
    """Print plots, tables and the closing summary, and record the summary in run.json. Call on rank 0."""
    run_dir, side, optional = session.dist.run_dir, session.dist.side, session.dist.optional
    history = whole_history(run_dir, side)
    summary = summarize(run_dir, session.work, session.clock.split(), first_step=session.first_step,
                        unigram_entropy=session.data.unigram_entropy, straggler=straggler, bubble=bubble,
                        history=history)
    color = wants_color()
    profile = next((profile.watch.path for profile in session.profiles
                    if isinstance(profile, OptionalWatch) and isinstance(profile.watch, PythonProfile)), None)
    charts = optional.attempt("plotting", lambda: plot_run(run_dir, color=color, history=history, side=side))
    if charts is not None and (session.stopped is None or session.failed):
        # Not after an early stop, to keep the output short; plots/ and report.html have the charts.
        print("\n" + charts)
    if session.verbose:
        if summary is not None:
            print(breakdown_tables(summary, session.dist.world_size, rich=color))
        if memory is not None:
            print(memory_table(memory, rich=color))
    side.update_record(
        run_dir, val_loss=summary and summary.val_loss, summary=summary,
        memory=memory and memory.as_record(), load_at_end=load_now())
    side.attempt("report.html", lambda: write_own_page(run_dir, history))
    if summary is None:
        print(f"warning: {run_dir.metrics} contains no steps: no summary", flush=True)
    else:
        result = final_text(summary, run_dir, profile, memory and memory.peak)
        print(result, next_commands(session), sep="\n", end="", flush=True)


def save(session: Session, *, blocking: bool = False) -> None:
    """Start writing the checkpoint of this step; with `blocking`, return when it is complete. Collective.

    If it cannot be written, print a warning and continue training; the next checkpoint is written when it is due.
    At the end of a run there is no next one, so `finish` reports the error.
    """
    session.heartbeat.beat(SAVING, session.step)
    finish_save(session)
    if session.saved_step == session.step:
        return
    session.position = session.position.agree(session.dist)

    def start() -> checkpoint.Saved | None:
        """Start saving; return the checkpoint if it is complete."""
        note = session.saver.start(session.engine, _state(session), at_once=blocking)
        if note and session.dist.is_main:
            session.metrics.erase_live_line()
            print(f"note: checkpoints are not written in the background: {note}", flush=True)
        return session.saver.finish() if blocking or not session.saver.in_background else None

    _attempt(session, start)


def finish_save(session: Session) -> None:
    """Complete the save in progress, if any. Collective."""
    _attempt(session, session.saver.finish)


def advance_async_save(session: Session) -> None:
    """Advance the save in progress. Call this when no rank is still writing; otherwise it waits. Collective."""
    with session.clock.span("checkpoints"):
        _attempt(session, session.saver.advance)


def _state(session: Session) -> dict[str, Any]:
    position = session.position
    return {"step": session.step, "consumed": position.consumed, "sample_hash": position.sample_hash,
            "seed": session.config.seed, "data": session.data.fingerprint,
            "tokenizer": session.data.manifest.get("tokenizer"), "model": asdict(session.plan.model),
            "guard": session.spikes.state()}


def _attempt(session: Session, action: Callable[[], checkpoint.Saved | None]) -> None:
    """Run one stage of a save, and record the checkpoint if it is complete, or the error."""
    try:
        saved = action()
    except checkpoint.NotWrittenError as error:
        session.unsaved = error
        if session.dist.is_main and session.step < session.config.steps and session.stopped is None:
            session.metrics.erase_live_line()
            print(f"warning: {error}\n  training continues; the next checkpoint will be attempted when it is due",
                  file=sys.stderr, flush=True)
        return
    if saved is not None:
        session.unsaved, session.saved_step = None, saved.step
        session.saves.append(saved)
        session.early_end.saved(saved.seconds)


def checkpoint_cost(session: Session) -> CheckpointCost:
    """Return the cost of checkpoints for run.json: number, size, median seconds to write, seconds training
    waited."""
    saves = session.saves
    return CheckpointCost(
        written=len(saves), bytes=saves[-1].size if saves else None,
        complete_after_s=statistics.median(save.seconds for save in saves) if saves else None,
        training_waited_s=session.clock.split().get("checkpoints", 0.0))


MAX_ROLLBACKS = 3
"""Maximum number of rollbacks to the same checkpoint."""


def try_rollback(session: Session) -> bool:
    """Handle too many bad steps: load the last checkpoint or stop; return True if the run continues. Collective.

    All ranks observe the same numbers (see spike_detector.py), so they all get here after the same step.
    """
    spikes, config = session.spikes, session.config
    reason = spikes.reason()
    finish_save(session)
    if config.on_bad_steps == "stop":
        return _stop(session, reason)
    if session.rollbacks[-MAX_ROLLBACKS:] == [session.saved_step] * MAX_ROLLBACKS:
        return _stop(session,
                     f"{reason}; rolling back to step {session.saved_step} did not help {MAX_ROLLBACKS} times")
    source = config.resume if session.saved_step is None else session.dist.run_dir.path
    if source is None:
        return _stop(session, f"{reason}; there is no checkpoint to roll back to yet")
    _roll_back(session, source, reason)
    return True


def _stop(session: Session, reason: str) -> bool:
    session.stopped, session.failed = reason, True
    return False


def _roll_back(session: Session, source: str | Path, reason: str) -> None:
    """Load the checkpoint and continue with new samples, skipping those consumed since then.

    This follows Chowdhery et al. 2022 (arXiv:2204.02311, section 5.1): their spikes occurred only for a particular
    combination of model state and samples, and did not recur with other samples from the same state.
    """
    def accept(folder: Path, state: dict[str, Any]) -> None:
        """Reject a checkpoint that does not fit, or that was written during bad steps if there is an older one."""
        check_state(session.plan, folder, state, session.data.fingerprint)
        # Only an early end saves during bad steps.
        if (state.get("guard") or {}).get("streak") and folder != candidates(source)[-1]:
            raise checkpoint.DamagedCheckpointError("the checkpoint was written during bad steps",
                                                    where=str(folder))

    loaded = checkpoint.load_newest(source, session.engine, session.dist, accept)
    reached, session.step = session.step, loaded.state["step"]
    session.spikes.restore(loaded.state.get("guard"))
    session.spikes.streak = 0
    session.engine.step_skip.limit = session.spikes.limit
    session.rollbacks.append(session.step)
    session.saved_step = session.step
    session.early_end.rolled_back()
    session.metrics.rewind(session.step)
    for profile in session.profiles:
        profile.close()
    skipped = session.position.consumed - loaded.state["consumed"]
    if session.dist.is_main:
        print(f"warning: {reason}\n  rolled back from step {reached} to the checkpoint of step {session.step}; the "
              f"{skipped} samples since then are skipped", file=sys.stderr, flush=True)
        run_dir = session.dist.run_dir
        rollback = Rollback(from_step=reached, to_step=session.step, samples_passed_over=skipped, why=reason)
        session.dist.side.attempt("the rollback in run.json", lambda: update_record(
            run_dir, rollbacks=[*read_record(run_dir).rollbacks, rollback]))
