"""The training step, to be read on one screen."""

from __future__ import annotations

import torch

from ezpz_llm.launch.phases import COMPILING, TRAINING
from ezpz_llm.trainer.between import after_step, end_early
from ezpz_llm.trainer.schedule import learning_rate
from ezpz_llm.trainer.session import Session


def train(session: Session) -> None:
    """Run the optimizer steps that are left, or as many as there is time for. Every rank runs it in lockstep."""
    for step in range(session.step, session.config.steps):
        compiles = session.config.compile and step == session.first_step
        session.heartbeat.beat(COMPILING if compiles else TRAINING, step)
        for profile in session.profiles:
            profile.before_step(step)
        with session.clock.span("training"):
            train_step(session, step)
        session.step = step + 1
        for profile in session.profiles:
            profile.after_step(step)
        after_step(session)
        if session.step < session.config.steps and (why := session.early_end.agreed(session.step)):
            end_early(session, why)
            return


def train_step(session: Session, step: int) -> None:
    """Optimizer step `step` (from 0), on the next `global_batch` samples.

    Nothing in it waits for the device: the loss and the norm stay there until the next flush, and only the
    timeline synchronises, at the end of the step.
    """
    config, engine, timeline = session.config, session.engine, session.timeline
    rate = learning_rate(step, peak=config.lr, floor=config.min_lr, warmup_steps=config.warmup_steps,
                         max_steps=config.steps)
    timeline.begin_step()
    skipped = -1
    while skipped != engine.skipped_steps:
        # Once, unless fp16 overflows: then the same samples again, under half the loss scale.
        skipped = engine.skipped_steps
        loss = forward_backward(session)
        with timeline.span("optimizer"):
            grad_norm = engine.step(rate)
    timeline.end_step()
    session.position = session.position.advance(session.batches.global_batch)
    session.metrics.record(step + 1, loss, grad_norm, rate)


def forward_backward(session: Session) -> torch.Tensor:
    """Accumulate the gradients of a step's micro batches; this rank's mean loss, 0-d on the device."""
    engine, timeline = session.engine, session.timeline
    loss = torch.zeros((), device=engine.device)
    with timeline.span("data"):
        micro_batches = session.batches.micro_batches(session.position.consumed)
    for index, arrays in enumerate(micro_batches):
        with timeline.span("data"):
            tokens, targets = (torch.from_numpy(array).to(engine.device, non_blocking=True) for array in arrays)
        with timeline.span("forward"):
            micro_loss = engine.forward(tokens, targets, last_micro_step=index == len(micro_batches) - 1)
        with timeline.span("backward"):
            engine.backward(micro_loss)
        loss += micro_loss.detach() / len(micro_batches)
    return loss
