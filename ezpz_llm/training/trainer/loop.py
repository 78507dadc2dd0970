"""Training loop and training step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ezpz_llm.launcher.basics.variables import COMPILING, TRAINING
from ezpz_llm.training.layout.ds_defaults import uses_nvme
from ezpz_llm.training.trainer.checkpoint_saves import advance_async_save
from ezpz_llm.training.trainer.device_copy import to_device
from ezpz_llm.training.trainer.rollback import try_rollback
from ezpz_llm.training.trainer.run_data import hash_samples
from ezpz_llm.training.trainer.schedule import learning_rate
from ezpz_llm.training.trainer.session import Session
from ezpz_llm.training.trainer.step_end import after_step, end_early


def train(session: Session) -> None:
    """Run the remaining optimizer steps, until the run is complete or ends early. Every rank calls this."""
    while session.step < session.config.steps:
        step = session.step
        compiles = session.config.compile and step == session.first_step
        session.heartbeat.beat(COMPILING if compiles else TRAINING, step)
        session.callbacks.step_begin()
        with session.clock.span("training"):
            train_step(session, step)
            if step == session.first_step:
                session.timeline.wait()
        session.step = step + 1
        session.callbacks.step_end()
        after_step(session)
        if session.spikes.should_stop and not try_rollback(session):
            return
        if session.step == session.config.steps:
            return
        agreed = session.early_end.agree(session.step, session.checkpoints.saver.is_busy)
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
            hashes: list[int] = []
            loss, grad_norm = engine.train_step(micro_batches(session, hashes), rate, timeline.span)
        timeline.end_step()
    if not config.overfit_one_batch:
        data = session.data
        data.position = data.position.advance(data.batches.global_batch, sum(hashes))
    session.metrics.record(step + 1, loss, grad_norm, rate, engine.step_skip.measured())


def micro_batches(session: Session, hashes: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the micro-batches of the next step: tokens and targets (B, T) on the device.

    Args:
        hashes: list to which the hashes of this rank's samples are added (see `Position`).
    """
    device, timeline, batches = session.engine.device, session.timeline, session.data.batches
    consumed, mesh = session.data.position.consumed, session.dist.mesh
    # Tensor-, pipeline- and sequence-parallel peers get the same samples; only the first peer hashes them.
    owns_samples = (mesh.tp_rank, mesh.pp_rank, mesh.sp_rank) == (0, 0, 0)
    with timeline.span("data"):
        arrays = batches.micro_batches(consumed)
    first = consumed + batches.dp_rank * (batches.global_batch // batches.dp_size)
    for pair in arrays:
        with timeline.span("data"):
            if owns_samples:
                hashes.append(hash_samples(first, pair[0]))
                first += len(pair[0])
            tokens, targets = to_device(map(torch.from_numpy, pair), device)
        yield tokens, targets
