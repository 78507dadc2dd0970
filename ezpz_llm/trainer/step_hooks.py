"""Hooks after a step and at the end of a run: log, validation, samples, checkpoints, result. All collective."""

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
    HostProfile,
    Straggler,
    final_text,
    plot_run,
    summarise,
    wants_colour,
    where_time_went,
)
from ezpz_llm.observe.history import whole_history
from ezpz_llm.observe.machine_load import load_now
from ezpz_llm.report.document import report_page
from ezpz_llm.report.runs import run_of
from ezpz_llm.rundir import read_record, update_record, write_atomic
from ezpz_llm.trainer.memory_table import Memory, memory_table
from ezpz_llm.trainer.next_commands import next_commands
from ezpz_llm.trainer.plan import check_state
from ezpz_llm.trainer.profiling import OptionalWatch
from ezpz_llm.trainer.session import Session


def after_step(session: Session) -> None:
    """Do what is due after the step that has just finished; after the last one, everything."""
    config, step = session.config, session.step
    last = step == config.steps
    evaluates = last or _due(step, config.eval_every)
    scores = bool(session.hellaswag) and (last or _due(step, config.hellaswag_every))
    saves = config.save_every >= 0 and (last or _due(step, config.save_every))
    samples = session.prompt is not None and (last or _due(step, config.sample_every))
    flushes = saves or scores or evaluates or session.metrics.due
    if flushes or samples:
        session.metrics.erase_live_line()
        with session.clock.span("training"):  # else what is due would be charged with the step that it waits for
            session.timeline.wait()
    optional = session.dist.optional
    if evaluates:
        with session.clock.span("evaluation"):
            optional.attempt_together(f"the validation after step {step}", lambda: validate(session))
    # Before a save, so that a run that resumes from it finds the lines of the steps before. Only where HellaSwag is
    # due does the line of this step wait for its figures: the save comes first, since minutes may pass until then.
    conclusions = reduce_metrics(session) if flushes else []
    if flushes and not scores:
        write_metrics(session, conclusions)
    # Not among bad steps: there has to be something good to go back to. The last one is written whatever it is,
    # unless the run goes back from there, or stops.
    if saves and (not session.spikes.streak or (last and not session.spikes.should_stop)):
        with session.clock.span("checkpoints"):
            save(session, at_once=last)
    if scores:
        try:
            with session.clock.span("evaluation"):
                optional.attempt_together(f"HellaSwag after step {step}", lambda: score_hellaswag(session))
        finally:
            write_metrics(session, conclusions)
    if samples:
        with session.clock.span("sampling"):
            optional.attempt_together(f"the sample after step {step}", lambda: show_sample(session))


def end_early(session: Session, why: str) -> None:
    """Keep what there is: the log and, where the run saves at all, a checkpoint of this step."""
    session.stopped = why
    flush(session)
    if session.config.save_every >= 0:
        with session.clock.span("checkpoints"):
            save(session, at_once=True)


def flush(session: Session) -> None:
    """Observe the lines that wait, and write them. Collective."""
    write_metrics(session, reduce_metrics(session))


def reduce_metrics(session: Session) -> list[str]:
    """Reduce the lines that wait, observe them, and limit the gradient norm of the next steps. Collective.

    Returns:
        The conclusions of the self-checks.
    """
    with session.clock.span("logging"):
        session.metrics.reduce(session.timeline, session.observe)
        conclusions = session.checks.conclude(session.dist)
    session.engine.step_skip.limit = session.spikes.limit
    return conclusions


def write_metrics(session: Session, told: list[str]) -> None:
    """Write the reduced lines, and print what was found in them."""
    spikes = session.spikes
    with session.clock.span("logging"):
        session.metrics.write()
    if told and session.dist.is_main:
        shown = ["checks     " + "\n           ".join(told)] if session.verbose else [
            text for text in told if text.startswith("warning: ")]
        print("".join(f"{text}\n" for text in shown), end="", flush=True)
        session.dist.side.update_record(session.dist.run_dir, checks=told)
    if session.dist.is_main:
        for skipped in spikes.unreported:
            print(f"warning: {skipped}", flush=True)
    spikes.unreported = []


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def validate(session: Session) -> None:
    """Measure the validation loss on the run's fixed tokens and put it on this step's line."""
    session.heartbeat.beat(EVALUATING, session.step)
    engine, mesh = session.engine, session.dist.mesh
    with engine.evaluating(), eager():
        loss, tokens = validation_loss(
            engine.loss_sum, session.validation.batches(session.batches.micro_batch, mesh.dp_rank, mesh.dp_size),
            device=engine.device, mesh=mesh)
    session.metrics.record_validation(session.step, loss, tokens)


def score_hellaswag(session: Session) -> None:
    """Put HellaSwag's accuracies on this step's line, and print them."""
    session.heartbeat.beat(EVALUATING, session.step)
    engine, dist = session.engine, session.dist
    with engine.evaluating(), eager():
        found = hellaswag.score(
            engine.row_losses, session.hellaswag, session.data.tokenizer, device=engine.device, mesh=dist.mesh,
            block_size=session.plan.model.block_size,
            items_at_once=max(1, session.batches.micro_batch // hellaswag.ENDINGS))
    session.metrics.record_task(session.step, hellaswag_acc=found.acc, hellaswag_acc_norm=found.acc_norm)
    if dist.is_main:
        dist.side.update_record(dist.run_dir, hellaswag={"step": session.step, **found.as_record()})
        print(f"HellaSwag after step {session.step}: acc_norm {found.acc_norm:.4f}, acc {found.acc:.4f} "
              f"({found.items} items, normalised by tokens)", flush=True)


def show_sample(session: Session) -> None:
    """Generate a short text and print it on rank 0. Every rank takes part, since parameters may be sharded."""
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


# The end of a run: plots, step-time breakdown, and the result in run.json.
def finish(session: Session) -> int:
    """Close the profiles, draw and print on rank 0; return the exit code: 1 if the last loss is NaN or Inf, or
    the last checkpoint could not be written."""
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
        errors.append(f"{failure}\n  instead: more --steps, --dropout 0, a smaller batch, or find the fault")
    if session.failed or session.spikes.last_loss_non_finite:
        errors.append(f"the run ends after step {session.step} of {session.config.steps}: "
                      f"{session.stopped or session.spikes.reason()}\n"
                      "  instead: a lower --lr, --grad-clip 1, or --on-bad-steps rollback")
    if session.unsaved is not None:
        errors.append(str(session.unsaved))
    if session.dist.is_main:
        for error in errors:
            print(f"error: {error}", file=sys.stderr, flush=True)
    return 1 if errors else 0


def report(session: Session, straggler: Straggler | None, bubble: Bubble | None, memory: Memory | None) -> None:
    """Print plots, tables and the closing block, and put the summary into run.json."""
    run_dir, side, optional = session.dist.run_dir, session.dist.side, session.dist.optional
    history = whole_history(run_dir, side)
    summary = summarise(run_dir, session.work, session.clock.split(), first_step=session.first_step,
                        unigram_entropy=session.data.unigram_entropy, straggler=straggler, bubble=bubble,
                        history=history)
    colour = wants_colour()
    profile = next((profile.watch.path for profile in session.profiles
                    if isinstance(profile, OptionalWatch) and isinstance(profile.watch, HostProfile)), None)
    charts = optional.attempt("plotting", lambda: plot_run(run_dir, colour=colour, history=history, side=side))
    if charts is not None and (session.stopped is None or session.failed):
        # Who stops a run wants the prompt back; plots/ and report.html have the charts.
        print("\n" + charts)
    if session.verbose:
        if summary is not None:
            print(where_time_went(summary, session.dist.world_size, rich=colour))
        if memory is not None:
            print(memory_table(memory, rich=colour))
    side.update_record(
        run_dir, val_loss=summary and summary.val_loss, summary=summary and asdict(summary),
        memory=memory and memory.as_record(), load_at_end=load_now())
    side.attempt("report.html", lambda: write_atomic(run_dir.report, report_page([run_of(run_dir, history)])))
    if summary is None:
        print(f"warning: nothing is left of {run_dir.metrics} to sum up", flush=True)
    else:
        told = final_text(summary, run_dir, profile, memory and memory.peak)
        print(told, next_commands(session), sep="\n", end="", flush=True)


# Saving of checkpoints in a run in progress, and rollback to one after too many bad steps; all of it collective.
def save(session: Session, *, at_once: bool = False) -> None:
    """Begin to write the checkpoint of this step; with `at_once` it is complete on return.

    One that cannot be written costs a warning, and the next one is tried in its turn: training continues, and
    nothing is lost but the chance to go back to this step. At the end of a run there is no next one (`finish` says
    so).
    """
    session.heartbeat.beat(SAVING, session.step)
    settle(session)
    if session.saved_step == session.step:
        return
    session.position = session.position.agree(session.dist)

    def start() -> checkpoint.Saved | None:
        """Begin to save; if it has to be done at once, what was saved."""
        note = session.saver.start(session.engine, _state(session), at_once=at_once)
        if note and session.dist.is_main:
            session.metrics.erase_live_line()
            print(f"note: checkpoints are not written in the background: {note}", flush=True)
        return session.saver.finish() if at_once or not session.saver.in_background else None

    _attempt(session, start)


def settle(session: Session) -> None:
    """Complete the save in progress, if there is one."""
    _attempt(session, session.saver.finish)


def go_on_saving(session: Session) -> None:
    """Take the save in progress, which no rank is busy with, one step further."""
    with session.clock.span("checkpoints"):
        _attempt(session, session.saver.advance)


def _state(session: Session) -> dict[str, Any]:
    position = session.position
    return {"step": session.step, "consumed": position.consumed, "sample_hash": position.sample_hash,
            "seed": session.config.seed, "data": session.data.fingerprint,
            "tokenizer": session.data.manifest.get("tokenizer"), "model": asdict(session.plan.model),
            "guard": session.spikes.state()}


def _attempt(session: Session, action: Callable[[], checkpoint.Saved | None]) -> None:
    """Take a save further, and note the checkpoint that it completed, if any, or why it could not."""
    try:
        saved = action()
    except checkpoint.NotWritten as error:
        session.unsaved = error
        if session.dist.is_main and session.step < session.config.steps and session.stopped is None:
            session.metrics.erase_live_line()
            print(f"warning: {error}\n  training continues, and the next checkpoint is tried when it is due",
                  file=sys.stderr, flush=True)
        return
    if saved is not None:
        session.unsaved, session.saved_step = None, saved.step
        session.saves.append(saved)
        session.early_end.saved(saved.seconds)


def checkpoint_cost(session: Session) -> dict[str, Any]:
    """Return the cost of checkpoints for run.json: seconds until one was complete, seconds that training waited."""
    saves = session.saves
    return {"written": len(saves), "bytes": saves[-1].size if saves else None,
            "complete_after_s": statistics.median(save.seconds for save in saves) if saves else None,
            "training_waited_s": session.clock.split().get("checkpoints", 0.0)}


# Rollback to the last checkpoint after too many bad steps, or the end of the run.
MOST = 3
"""Rollbacks to one checkpoint before the run stops."""


def try_rollback(session: Session) -> bool:
    """Stop after too many bad steps, or load the last checkpoint; return whether the run continues.

    All ranks have looked at the same numbers (see spike_detector.py), and so all get here after the same step.
    """
    spikes, config = session.spikes, session.config
    why = spikes.reason()
    settle(session)
    if config.on_bad_steps == "stop":
        return _stop(session, why)
    if session.rollbacks[-MOST:] == [session.saved_step] * MOST:
        return _stop(session, f"{why}; going back to step {session.saved_step} did not help {MOST} times")
    where = config.resume if session.saved_step is None else session.dist.run_dir.path
    if where is None:
        return _stop(session, f"{why}; there is no checkpoint to go back to yet")
    _roll_back(session, where, why)
    return True


def _stop(session: Session, why: str) -> bool:
    session.stopped, session.failed = why, True
    return False


def _roll_back(session: Session, where: str | Path, why: str) -> None:
    """Load the checkpoint and continue with the samples that come next: those of the bad steps are skipped.

    As Chowdhery et al. 2022 (arXiv:2204.02311, section 5.1) did it: neither the state nor the samples alone had
    brought their spikes about, and other samples from the same state made none.
    """
    def accept(folder: Path, state: dict[str, Any]) -> None:
        """Refuse a checkpoint of another run, and one written among bad steps where there is an older one."""
        check_state(session.plan, folder, state, session.data.fingerprint)
        # An early end writes its state as it is; where there is an older one, that is no place to begin again.
        if (state.get("guard") or {}).get("streak") and folder != candidates(where)[-1]:
            raise checkpoint.Damaged("the checkpoint was written among bad steps", where=str(folder))

    found = checkpoint.load_newest(where, session.engine, session.dist, accept)
    reached, session.step = session.step, found.state["step"]
    session.spikes.restore(found.state.get("guard"))
    session.spikes.streak = 0
    session.engine.step_skip.limit = session.spikes.limit
    session.rollbacks.append(session.step)
    session.saved_step = session.step
    session.early_end.rolled_back()
    session.metrics.rewind(session.step)
    for profile in session.profiles:
        profile.close()
    passed_over = session.position.consumed - found.state["consumed"]
    if session.dist.is_main:
        print(f"warning: {why}\n  back from step {reached} to the checkpoint of step {session.step}; the "
              f"{passed_over} samples since then are skipped", file=sys.stderr, flush=True)
        run_dir, rollback = session.dist.run_dir, {"from_step": reached, "to_step": session.step,
                                                   "samples_passed_over": passed_over, "why": why}
        session.dist.side.attempt("the rollback in run.json", lambda: update_record(
            run_dir, rollbacks=[*read_record(run_dir).get("rollbacks", []), rollback]))
