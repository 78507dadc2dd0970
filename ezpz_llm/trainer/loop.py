"""The training step, to be read on one screen, and what happens between steps."""

from __future__ import annotations

import torch

from ezpz_llm.trainer.between import after_step
from ezpz_llm.trainer.schedule import learning_rate
from ezpz_llm.trainer.session import Session


def train_steps(session: Session) -> None:
    """Run the optimizer steps that are left, then flush what was measured."""
    for step in range(session.step, session.config.steps):
        session.heartbeat.beat("train", step)
        session.profiles.before_step(step)
        train_step(session, step)
        session.step = step + 1
        session.profiles.after_step(step)
        after_step(session)
    session.flush()


def train_step(session: Session, step: int) -> None:
    """One optimizer step on the next `global_batch` samples.

    Nothing in it waits for the device: the loss and the norm stay there until the next flush, and only the
    timeline synchronises, at the end of the step.
    """
    engine, timeline, batches = session.engine, session.timeline, session.batches
    config = session.config
    rate = learning_rate(step, peak=config.lr, floor=session.min_lr, warmup_steps=config.warmup_steps,
                         max_steps=config.steps)
    timeline.begin_step()
    with timeline.span("data"):
        micro_batches = batches.micro_batches(session.position.consumed)
    loss = torch.zeros((), device=engine.device)
    for index, arrays in enumerate(micro_batches):
        with timeline.span("data"):
            tokens, targets = (torch.from_numpy(array).to(engine.device, non_blocking=True) for array in arrays)
        with timeline.span("forward"):
            micro_loss = engine.forward(tokens, targets, last_micro_step=index == len(micro_batches) - 1)
        with timeline.span("backward"):
            engine.backward(micro_loss)
        loss += micro_loss.detach() / len(micro_batches)
    with timeline.span("optimizer"):
        grad_norm = engine.step(rate)
    timeline.end_step()
    session.position = session.position.advance(session.plan.resolved.batch.global_batch)
    session.metrics.record(step + 1, loss, grad_norm, rate)
