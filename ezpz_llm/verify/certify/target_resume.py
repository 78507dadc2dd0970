"""Resume a target from a checkpoint in the middle of its steps, and compare it with the uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather
from ezpz_llm.training.library.script_models import ScriptModels
from ezpz_llm.training.library.wrapped import Wrapped
from ezpz_llm.verify.certify import recipe, verdict
from ezpz_llm.verify.certify.cases import Case
from ezpz_llm.verify.certify.local_launches import Job
from ezpz_llm.verify.certify.middle_checkpoints import MiddleCheckpoints
from ezpz_llm.verify.certify.reference import Reference
from ezpz_llm.verify.certify.target_file import ACCUMULATION, RESUMED, load
from ezpz_llm.verify.certify.target_run import (
    Batches,
    Observations,
    first_epoch_steps,
    mean_held_out,
    mean_losses,
    train,
    wrap_target,
)
from ezpz_llm.verify.certify.verdict import Finding

WeightSlices = list[tuple[str, Tensor]]
"""Slices of weights on a rank, with parameter names."""


def copy_weights(model: Wrapped) -> WeightSlices:
    """Copy this rank's slices of the weights to the CPU."""
    return [(piece.name, piece.tensors["weight"].detach().cpu().clone())
            for piece in model.engine.training_state().slices()]


def resume(case: Case, job: Job, dist: Dist, ds_config: Path, clip: float,
           checkpoints: MiddleCheckpoints) -> tuple[Observations, WeightSlices]:
    """Load the checkpoint into a module with other initial weights and take the remaining steps. Collective.

    Returns:
        This rank's trajectory and its weights after the last step.
    """
    assert job.target is not None
    target = load(job.target)
    model = wrap_target(target, dist, ds_config, ACCUMULATION, clip, seed=recipe.SEED + 1)
    rates = [group["lr"] for group in model.optimizer.param_groups]
    ScriptModels({"": model}, dist).load(checkpoints.chosen)
    for group, rate in zip(model.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # not that of the checkpoint's step, since `train` has its own schedule
    batches = Batches(target, job.steps, dist.device, (dist.mesh.dp_rank,), dist.mesh.dp_size)
    trajectory = train(model, batches, use_own_step=True, first=first_epoch_steps(job.steps))
    return trajectory, copy_weights(model)


def compare_resumed(dist: Dist, reference: Reference, whole: tuple[Observations, WeightSlices],
                    resumed: tuple[Observations, WeightSlices]) -> list[Finding]:
    """Compare the resumed run with the uninterrupted run of the same layout. Collective."""
    noise = reference.noise
    again, full = (all_gather(dist, trajectory) for trajectory, _ in (resumed, whole))
    first = len(full[0].losses) - len(again[0].losses)

    def finding(label: str, apart: float, size: float, noise: float) -> Finding:
        """Return a finding for a difference relative to `size`; its bound is RESUMED or FACTOR x `noise`."""
        size = size or 1.0
        bound = max(RESUMED, verdict.FACTOR * noise / size)
        return Finding(f"{label} after a resume", apart / size, bound, " (relative)")

    def steps() -> Iterator[Finding]:
        """Compare losses and gradient norms."""
        for step, (a, b) in enumerate(zip(mean_losses(again), mean_losses(full)[first:], strict=True), first):
            yield finding(f"loss at step {step + 1}", abs(a - b), abs(b), noise.loss)
            a, b = again[0].norms[step - first], full[0].norms[step]
            yield finding(f"gradient norm at step {step + 1}", abs(a - b), b, noise.norm[step])
        a, b = mean_held_out(again), mean_held_out(full)
        yield finding("loss after the last step", abs(a - b), abs(b), noise.loss)

    sums: dict[str, Any] = {}
    for (name, a), (_, b) in zip(resumed[1], whole[1], strict=True):
        apart, size = sums.get(name, (0.0, 0.0))
        sums[name] = apart + (a - b).double().square().sum().item(), size + b.double().square().sum().item()
    ranks = all_gather(dist, sums)
    weights = []
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        apart, size = (sum(rank.get(name, (0.0, 0.0))[place] for rank in ranks) ** 0.5 for place in (0, 1))
        weights.append(finding(f"weights of {name}", apart, size, noise.weight[name]))
    return [*steps(), *weights]
