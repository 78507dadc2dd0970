"""Certify one case of a target: compare a layout with the single-process reference."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from ezpz_llm.core.base import count_noun, read_json
from ezpz_llm.core.base.records import as_record
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather
from ezpz_llm.training.engine.running_statistics import statistics_of
from ezpz_llm.training.library.script_models import ScriptModels
from ezpz_llm.verify.certify import recipe, verdict
from ezpz_llm.verify.certify.case import expected_numbers, make_result
from ezpz_llm.verify.certify.cases import Case, load_layout
from ezpz_llm.verify.certify.copies import differing_copies
from ezpz_llm.verify.certify.local_launches import Job, reference_file
from ezpz_llm.verify.certify.middle_checkpoints import MiddleCheckpoints
from ezpz_llm.verify.certify.records import CaseResult, TargetProperties
from ezpz_llm.verify.certify.reference import Reference, compare, free_memory, read_reference
from ezpz_llm.verify.certify.target_file import ACCUMULATION, SAME, load
from ezpz_llm.verify.certify.target_reference import STATISTIC, clip_factor, scaled_ds_config
from ezpz_llm.verify.certify.target_resume import WeightSlices, compare_resumed, copy_weights, resume
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

PHASES = {"data": "data", **verdict.PHASES, "statistics": "running statistics", "random": "random numbers",
          "evaluation": "evaluation", "resume": "resume"}
"""Phase by kind of finding: `verdict.PHASES` and the checks that only targets have."""
_MIN_STATISTIC = verdict.K * verdict.ROUNDING["fp32"]
"""Minimum relative bound of running statistics, which are fp32 in every precision."""


class _Count(Finding):
    """Number of violations, with a bound of 0."""

    def __str__(self) -> str:
        return f"{count_noun(int(self.value), self.what)}{self.detail}"


def certify_target(case: Case, job: Job, dist: Dist) -> CaseResult:
    """Train a layout with the target's functions, resume it, and compare both runs with the reference.

    Collective; every rank gets the same result.

    Returns:
        A result like that of `certify_case`, with `resumed_from`: the layout that saved the loaded checkpoint.
    """
    began = time.perf_counter()
    reference = read_reference(job.root, case.model, case.dtype, job.steps, case.world)
    path = reference_file(job.root, case.model, case.dtype, job.steps, case.world).with_name("about.json")
    about = as_record(TargetProperties, read_json(path), str(path))
    checkpoints = MiddleCheckpoints(job.root, f"{case.dtype}-{case.world}", load_layout(case.layout).name,
                                    case.world, dist)
    run = _train(case, job, dist, reference, about, checkpoints)
    free_memory(dist.device)
    measured, expected = run.numbers, expected_numbers(reference, None)
    findings = {"data": _data_findings(run.drawn, about.batches),
                **verdict.findings(measured, expected, 0, case.dtype),
                "statistics": _statistics_findings(run.statistics, reference, about),
                "random": _random_findings(run.all_ranks, about.drops),
                "evaluation": _evaluation_findings(run.all_ranks)}
    resumed = resume(case, job, dist, run.ds_config, about.clip, checkpoints)
    free_memory(dist.device)
    findings["resume"] = compare_resumed(dist, reference, (run.seen, run.weights), resumed)
    failures = [*verdict.failures(findings, PHASES),
                *_likely_causes(findings, measured, expected, dist.mesh.dp_size)]
    checkpoints.close(passed=not failures)
    return replace(make_result(case, findings, failures, measured, expected, reference, began),
                   parameters=about.parameters, clip=about.clip, resumed_from=checkpoints.loaded)


@dataclass(frozen=True)
class _Run:
    """Outcome of a layout's run.

    Attributes:
        numbers: numbers to compare with the reference.
        seen, all_ranks: trajectory of this rank, and those of all ranks.
        drawn: for each data-parallel rank, the sample hashes of each micro-batch.
        weights: this rank's weights after the last step.
        statistics: for each running statistic, the largest difference from the reference on any rank.
    """

    ds_config: Path
    numbers: verdict.Numbers
    seen: Observations
    all_ranks: list[Observations]
    drawn: list[dict[int, list[str]]]
    weights: WeightSlices
    statistics: dict[str, float]


def _train(case: Case, job: Job, dist: Dist, reference: Reference, about: TargetProperties,
           checkpoints: MiddleCheckpoints) -> _Run:
    assert job.target is not None
    target = load(job.target)
    file = scaled_ds_config(job.root / "ds_configs", case.layout, case.dtype, about.parameters,
                           write=dist.is_main)
    dist.barrier()
    model = wrap_target(target, dist, file, ACCUMULATION, about.clip)
    batches = Batches(target, job.steps, dist.device, (dist.mesh.dp_rank,), dist.mesh.dp_size)
    measured: verdict.Numbers = {"first": compare(model.engine, None, reference, "weight", "first", dist)}

    def after_step(step: int, trajectory: Observations) -> None:
        """Compare the gradients of the first step, and save a checkpoint in the middle of the run."""
        if step == 0:
            scale = 1 / about.gradient_factor / clip_factor(about.clip, trajectory)
            measured["gradient"] = compare(model.engine, None, reference, about.gradient_state, "gradient", dist,
                                           scale=scale)
        if step == first_epoch_steps(job.steps) - 1:
            ScriptModels({"": model}, dist).save(RunDir(checkpoints.own), step + 1, {})

    torch.manual_seed(recipe.SEED + 1 + dist.rank)
    trajectory = train(model, batches, use_own_step=True, after=after_step)
    all_ranks = all_gather(dist, trajectory)
    measured["weight"] = compare(model.engine, None, reference, "weight", "weight", dist)
    measured["copy"] = {**differing_copies(model.engine, dist), **_compare_buffers(all_ranks)}
    measured["losses"] = mean_losses(all_ranks)
    measured["norms"] = list(zip(*(rank.norms for rank in all_ranks), strict=True))
    measured["held_out"] = mean_held_out(all_ranks)
    apart = {name: (value.float().cpu() - reference.tensors[f"{STATISTIC}{name}"]).norm().item()
             for name, value in statistics_of(model.module).items()}
    statistics = {name: max(rank[name] for rank in ranks) for ranks in [all_gather(dist, apart)] for name in apart}
    drawn = dict(all_gather(dist, (dist.mesh.dp_rank, batches.seen)))  # tensor-parallel peers draw the same samples
    return _Run(file, measured, trajectory, all_ranks, list(drawn.values()), copy_weights(model), statistics)


def _compare_buffers(ranks: Sequence[Observations]) -> dict[str, dict[str, Any]]:
    """Compare buffers across ranks bit by bit, because a checkpoint saves only rank 0's. See `differing_copies`."""
    differences = {}
    for name, content in ranks[0].buffers.items():
        differing = [rank for rank, trajectory in enumerate(ranks) if trajectory.buffers[name] != content]
        differences[f"buffer {name}"] = {"compared": 1, "apart": bool(differing),
                                         "where": f" on ranks 0 and {differing[0]}" if differing else ""}
    return differences


def _statistics_findings(apart: dict[str, float], reference: Reference, about: TargetProperties) -> list[Finding]:
    """Compare running statistics after the last step with those of a single process."""
    findings = []
    for name, value in apart.items():
        size = reference.tensors[f"{STATISTIC}{name}"].norm().item() or 1.0
        bound = max(_MIN_STATISTIC, verdict.FACTOR * about.statistics[name] / size)
        findings.append(Finding(name, value / size, bound, " (relative)"))
    return findings


def _data_findings(ranks: Sequence[dict[int, list[str]]], expected: dict[int, list[str]]) -> list[Finding]:
    """Check that all ranks together draw the samples of one process, and that no rank repeats a micro-batch."""
    wrong, first_wrong = 0, ""
    repeated: set[int] = set()
    first_repeated = ""
    for number, samples in expected.items():
        drawn = Counter(sample for parts in ranks for sample in parts.get(number, []))
        if odd := sum((drawn - Counter(samples)).values()) + sum((Counter(samples) - drawn).values()):
            wrong += odd
            first_wrong = first_wrong or f"; first in micro-batch {number}"
    for rank, parts in enumerate(ranks):
        first_use: dict[tuple[str, ...], int] = {}
        for number, samples in parts.items():
            earlier = first_use.setdefault(tuple(samples), number)
            if earlier != number:
                repeated.add(number)
                first_repeated = (first_repeated
                                  or f": on rank {rank}, micro-batch {number} equals micro-batch {earlier}")
    return [_Count("sample", wrong, 0.0, " drawn too often or not often enough, compared with a single process"
                   f"{first_wrong}", 0),
            _Count("repeat", len(repeated), 0.0, f" of an earlier micro-batch{first_repeated}", 0)]


def _random_findings(ranks: Sequence[Observations], drops: bool) -> list[Finding]:
    """Check that ranks have different random states after each step, if the module has dropout."""
    alike = [step for step, states in enumerate(zip(*(trajectory.random for trajectory in ranks), strict=True), 1)
             if drops and len(set(states)) < len(states)]
    return [_Count("step", len(alike), 0.0,
                   " ended with the same random state on several ranks, so dropout masks are equal"
                   + (f"; first after step {alike[0]}" if alike else ""))]


def _evaluation_findings(ranks: Sequence[Observations]) -> list[Finding]:
    """Check that an evaluation does not change the training state."""
    changed = list(dict.fromkeys(part for trajectory in ranks for part in trajectory.changed))
    return [_Count("part", len(changed), 0.0,
                   f" of the state changed in an evaluation: {', '.join(changed[:3])}")]


def _likely_causes(findings: dict[str, list[Finding]], measured: verdict.Numbers, expected: verdict.Numbers,
                   world: int) -> Iterator[str]:
    """Yield the likely cause if a gradient norm fails and the first one is off by a factor with a known cause."""
    if not any(finding.failed for finding in findings["norm"]):
        return
    ratio = measured["norms"][0][0] / expected["norms"][0]
    causes = {1 / world: f"the loss is divided by the number of ranks ({world}) twice",
              float(world): f"gradients are summed, not averaged, over the {world} ranks",
              1 / ACCUMULATION: f"the loss is divided by the number of micro-batches ({ACCUMULATION}) twice",
              float(ACCUMULATION): f"gradients are summed, not averaged, over the {ACCUMULATION} micro-batches"}
    for factor, cause in causes.items():
        if factor != 1 and abs(ratio / factor - 1) < SAME:
            yield f"likely: {cause} (gradients are {ratio:.4g} times the reference's)"
