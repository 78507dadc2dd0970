"""Training loop and training step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ezpz_llm.launch.variables import COMPILING, TRAINING
from ezpz_llm.layout.ds_defaults import uses_nvme
from ezpz_llm.trainer.device_copy import to_device
from ezpz_llm.trainer.position import hash_samples
from ezpz_llm.trainer.schedule import learning_rate
from ezpz_llm.trainer.session import STEPS_TIMED, Session, print_expected_end, print_startup
from ezpz_llm.trainer.step_hooks import advance_async_save, after_step, end_early, try_rollback


def train(session: Session) -> None:
    """Run the remaining optimizer steps, until the run is complete or ends early. Every rank calls this."""
    while session.step < session.config.steps:
        step = session.step
        compiles = session.config.compile and step == session.first_step
        session.heartbeat.beat(COMPILING if compiles else TRAINING, step)
        with session.clock.span("profiles"):
            for profile in session.profiles:
                profile.before_step(step)
        with session.clock.span("training"):
            train_step(session, step)
            if step == session.first_step:
                session.timeline.wait()
        if step == session.first_step and session.dist.is_main and not session.rollbacks:
            print_startup(session)
        session.step = step + 1
        if session.step == session.first_step + 1 + STEPS_TIMED and session.dist.is_main and not session.rollbacks:
            print_expected_end(session)
        with session.clock.span("profiles"):
            for profile in session.profiles:
                profile.after_step(step)
        after_step(session)
        if session.spikes.should_stop and not try_rollback(session):
            return
        if session.step == session.config.steps:
            return
        agreed = session.early_end.agree(session.step, session.saver.is_busy)
        if agreed and agreed.reason:
            end_early(session, agreed.reason)
            return
        if agreed and not agreed.busy:
            advance_async_save(session)
        session.metrics.tick(session.step)


def train_step(session: Session, step: int) -> None:
    """Run optimizer step `step` (from 0) on the next `global_batch` samples.

    It waits for the device only once, at its end, until the previous step is finished (`StepTimeline`). Loss and
    gradient norm stay on the device until the next flush.
    """
    config, engine, timeline = session.config, session.engine, session.timeline
    rate = learning_rate(step, config)
    if session.metrics.is_due(step + 1) and not uses_nvme(engine.layout):
        engine.step_skip.measure(engine.training_state())
    with torch.profiler.record_function(f"step {step + 1}"):
        timeline.begin_step()
        skipped = -1
        while skipped != engine.skipped_steps:
            # If fp16 overflows, repeat the same samples with half the loss scale.
            skipped = engine.skipped_steps
            loss, grad_norm = engine.train_step(micro_batches(session), rate, timeline.span)
        timeline.end_step()
    if not config.overfit_one_batch:
        session.position = session.position.advance(session.batches.global_batch, session.step_hash)
    measured = engine.step_skip.measured()
    session.checks.record_stepped(measured)
    session.metrics.record(step + 1, loss, grad_norm, rate, measured)


def micro_batches(session: Session) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the micro-batches of the next step: tokens and targets (B, T) on the device."""
    device, timeline, batches = session.engine.device, session.timeline, session.batches
    mesh = session.dist.mesh
    # Tensor-, pipeline- and sequence-parallel peers get the same samples; only the first peer hashes them.
    owns_samples = (mesh.tp_rank, mesh.pp_rank, mesh.sp_rank) == (0, 0, 0)
    session.step_hash = 0
    with timeline.span("data"):
        arrays = batches.micro_batches(session.position.consumed)
    first = session.position.consumed + batches.dp_rank * (batches.global_batch // batches.dp_size)
    for pair in arrays:
        with timeline.span("data"):
            if owns_samples:
                session.step_hash += hash_samples(first, pair[0])
                first += len(pair[0])
            tokens, targets = to_device(map(torch.from_numpy, pair), device)
        yield tokens, targets
