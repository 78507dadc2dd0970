"""The training that is judged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as torch_dist

from ezpz_llm.dist import Dist, Heartbeat
from ezpz_llm.engine.base import Engine
from ezpz_llm.launch.variables import TRAINING
from ezpz_llm.layout.batch import Batch
from ezpz_llm.observe import HostProfile, StepTimeline
from ezpz_llm.rundir import append_line
from ezpz_llm.test_dist.report import LEGEND, iteration
from ezpz_llm.test_dist.task import Samples, held_out

FLUSH_EVERY = 10
HELD_OUT_SAMPLES = 256
LEAST_FALL = 0.01
"""By which part the loss has to fall. Ten iterations give four times that; the same samples give no noise."""

_AGREE = 1e-3
"""Relative difference up to which ranks' losses on the same samples count as equal, since their weights are."""


def train(engine: Engine, dist: Dist, heartbeat: Heartbeat, seed: int, steps: int, lr: float,
          profile: HostProfile | None) -> list[dict[str, Any]]:
    """Train for `steps` iterations; the lines of metrics.jsonl. Every rank gets them, each with its own times."""
    timeline = StepTimeline(dist.device)
    samples, batch = Samples(seed, dist.mesh.dp_rank, dist.device), engine.batch
    lines: list[dict[str, Any]] = []
    losses: list[torch.Tensor] = []
    if dist.is_main:
        print(LEGEND, flush=True)
    for step in range(steps):
        heartbeat.beat(TRAINING, step)
        if profile:
            profile.before_step(step)
        timeline.begin_step()
        loss, _ = engine.train_step(_micro_batches(samples, batch, timeline), lr, timeline.span)
        timeline.end_step()
        losses.append(loss)
        if profile:
            profile.after_step(step)
        if len(losses) == FLUSH_EVERY or step == steps - 1:
            lines += _flush(losses, timeline, len(lines), batch.global_batch, dist)
            losses = []
    return lines


def _micro_batches(samples: Samples, batch: Batch, timeline: StepTimeline) -> Iterator[tuple[torch.Tensor, ...]]:
    for _ in range(batch.accumulation):
        with timeline.span("data"):
            inputs = samples.take(batch.micro_batch)
        yield inputs


def _flush(losses: list[torch.Tensor], timeline: StepTimeline, done: int, global_batch: int,
           dist: Dist) -> list[dict[str, Any]]:
    """Average over ranks what was recorded since the last flush; rank 0 writes and prints it. Collective."""
    means = torch.stack(losses).double()
    if dist.world_size > 1:
        torch_dist.all_reduce(means)
    lines = [{"step": step, "loss": mean if math.isfinite(mean) else None,
              "samples_per_second": global_batch / times.step_time_s, "step_time_s": times.step_time_s,
              **{f"{phase}_s": seconds for phase, seconds in times.phases.items()}}
             for step, (mean, times) in enumerate(zip((means / dist.world_size).tolist(), timeline.drain(),
                                                      strict=True), done + 1)]
    if dist.is_main:
        for line in lines:
            append_line(dist.run_dir.metrics, line)
            print(iteration(line), flush=True)
    return lines


def held_out_loss(engine: Engine, dist: Dist, seed: int) -> float:
    """The loss on samples that are the same on every rank and at any time. Collective."""
    with engine.evaluating():
        return engine.module(*held_out(seed, dist.device).take(HELD_OUT_SAMPLES)).item()


def judge(dist: Dist, lines: list[dict[str, Any]], before: float, after: float,
          wrong_kinds: list[str]) -> list[str]:
    """What is wrong, on any rank; the same list on every rank. Collective.

    Args:
        before, after: this rank's `held_out_loss` before and after the training.
        wrong_kinds: the groups in which this rank got wrong sums.
    """
    found = (dist.rank, after, wrong_kinds)
    ranks: list[Any] = [found]
    if dist.world_size > 1:
        ranks = [None] * dist.world_size
        # Not by an all-reduce: that may be what is broken.
        torch_dist.all_gather_object(ranks, found)
    reasons = [f"rank {rank} got wrong sums in all-reduces ({', '.join(kinds)})"
               for rank, _, kinds in ranks if kinds]
    reference = ranks[0][1]
    bad = next((line["step"] for line in lines if line["loss"] is None), None)
    if bad is not None:
        reasons.append(f"the loss is not a number from iteration {bad} on")
    elif not reference < before * (1 - LEAST_FALL):
        reasons.append(f"the loss did not fall: {before:.6g} before the training, {reference:.6g} after it, on the "
                       "same samples")
    reasons += [f"rank {rank} has other weights than rank 0: a loss of {loss:.6g} and {reference:.6g} on the same "
                "samples" for rank, loss, _ in ranks if not math.isclose(loss, reference, rel_tol=_AGREE)]
    return reasons


