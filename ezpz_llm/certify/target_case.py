"""Certify a target: a layout compared with the reference of one process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ezpz_llm.base import as_type, read_json
from ezpz_llm.certify import recipe, verdict
from ezpz_llm.certify.case import numbers_of, result_of
from ezpz_llm.certify.cases import Case
from ezpz_llm.certify.copies import copies_apart
from ezpz_llm.certify.lead import Job, reference_numbers
from ezpz_llm.certify.reference import Reference, compare, read_reference, release
from ezpz_llm.certify.target_file import ACCUMULATION, SAME, load
from ezpz_llm.certify.target_reference import STATISTIC, About, gradient_scale, write_ds_config
from ezpz_llm.certify.target_resume import Held, Middle, compare_resumed, held_weights, resume
from ezpz_llm.certify.target_run import Batches, Seen, mean_held_out, mean_losses, train, wrapped
from ezpz_llm.certify.verdict import Finding
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import all_gather
from ezpz_llm.engine.running_statistics import statistics_of

PHASES = {"data": "data", **verdict.PHASES, "statistics": "running statistics", "random": "random numbers",
          "evaluation": "evaluation", "resume": "resume"}
"""Of a target's step, as `verdict.PHASES`."""
_LEAST_STATISTIC = verdict.K * verdict.ROUNDING["fp32"]
"""Relative difference of a running statistic, which is fp32 in every precision, that is rounding's alone."""


class _Count(Finding):
    """A number of things, which should be none."""

    def __str__(self) -> str:
        return f"{self.value:.0f} {self.what}{self.detail}"


def certify_target(case: Case, job: Job, dist: Dist) -> dict[str, Any]:
    """Train a layout by the target's own functions and judge it; resume it, and judge that. Collective; every rank
    gets the same answer.

    Returns:
        What `certify_case` does, and `resumed_from`, the layout that saved the checkpoint which was loaded.
    """
    began = time.perf_counter()
    reference = read_reference(job.root, case.model, case.dtype, job.steps, case.world)
    path = reference_numbers(job.root, case.model, case.dtype, job.steps, case.world).with_name("about.json")
    about: About = as_type(About, read_json(path), str(path))
    middle = Middle(case, job, dist)
    run = _train(case, job, dist, reference, about, middle)
    release(dist.device)
    ours, theirs = run.numbers, numbers_of(reference, None)
    found = {"data": _data(run.drawn, about["batches"]), **verdict.findings(ours, theirs, 0, case.dtype),
             "statistics": _statistics(run.statistics, reference, about),
             "random": _random(run.everyone, about["drops"]), "evaluation": _evaluation(run.everyone)}
    resumed = resume(case, job, dist, run.ds_config, about["clip"], middle)
    release(dist.device)
    found["resume"] = compare_resumed(dist, reference, (run.seen, run.weights), resumed)
    failures = [*verdict.failures(found, PHASES), *_likely(found, ours, theirs, dist.mesh.dp_size)]
    middle.close(passed=not failures)
    return {**result_of(case, found, failures, ours, theirs, reference), "parameters": about["parameters"],
            "clip": about["clip"], "resumed_from": middle.loaded, "seconds": time.perf_counter() - began}


@dataclass(frozen=True)
class _Run:
    """What a layout's run gave: numbers to compare, what this rank and every rank saw, what data-parallel ranks
    drew, this rank's weights of the end, and by name how far each running statistic is from the reference on some
    rank.
    """

    ds_config: Path
    numbers: verdict.Numbers
    seen: Seen
    everyone: list[Seen]
    drawn: list[dict[int, list[str]]]
    weights: Held
    statistics: dict[str, float]


def _train(case: Case, job: Job, dist: Dist, reference: Reference, about: About, middle: Middle) -> _Run:
    assert job.target is not None
    target = load(job.target)
    file = write_ds_config(job.root / "ds_configs", case.layout, case.dtype, about["parameters"],
                           write=dist.is_main)
    dist.barrier()
    model = wrapped(target, dist, file, ACCUMULATION, about["clip"])
    batches = Batches(target, job.steps, dist.device, (dist.mesh.dp_rank,), dist.mesh.dp_size)
    ours: verdict.Numbers = {"first": compare(model.engine, None, reference, "weight", "first", dist)}

    def look(step: int, seen: Seen) -> None:
        """Compare the gradients of the first step, and save a checkpoint in the middle."""
        if step == 0:
            ours["gradient"] = compare(model.engine, None, reference, "exp_avg", "gradient", dist,
                                       scale=gradient_scale(model.optimizer, about["clip"], seen))
        if step == middle.step - 1:
            middle.save(model)

    torch.manual_seed(recipe.SEED + 1 + dist.rank)
    seen = train(model, batches, own=True, after=look)
    everyone = all_gather(dist, seen)
    ours["weight"] = compare(model.engine, None, reference, "weight", "weight", dist)
    ours["copy"] = {**copies_apart(model.engine, dist), **_buffers_apart(everyone)}
    ours["losses"] = mean_losses(everyone)
    ours["norms"] = list(zip(*(one.norms for one in everyone), strict=True))
    ours["held_out"] = mean_held_out(everyone)
    apart = {name: (value.float().cpu() - reference.tensors[f"{STATISTIC}{name}"]).norm().item()
             for name, value in statistics_of(model.module).items()}
    statistics = {name: max(one[name] for one in found) for found in [all_gather(dist, apart)] for name in apart}
    drawn = dict(all_gather(dist, (dist.mesh.dp_rank, batches.seen)))  # once, of ranks that share a model
    return _Run(file, ours, seen, everyone, list(drawn.values()), held_weights(model), statistics)


def _buffers_apart(ranks: Sequence[Seen]) -> dict[str, dict[str, Any]]:
    """Buffers that are not the same bits on all ranks, as `copies_apart` has copies: a checkpoint has rank 0's."""
    found = {}
    for name, content in ranks[0].buffers.items():
        other = [rank for rank, one in enumerate(ranks) if one.buffers[name] != content]
        found[f"buffer {name}"] = {"compared": 1, "apart": bool(other),
                                   "where": f" on ranks 0 and {other[0]}" if other else ""}
    return found


def _statistics(apart: dict[str, float], reference: Reference, about: About) -> list[Finding]:
    """Running statistics after the last step beside those of one process."""
    found = []
    for name, value in apart.items():
        size = reference.tensors[f"{STATISTIC}{name}"].norm().item() or 1.0
        bound = max(_LEAST_STATISTIC, verdict.FACTOR * about["statistics"][name] / size)
        found.append(Finding(name, value / size, bound, " (relative)"))
    return found


def _data(ranks: Sequence[dict[int, list[str]]], expected: dict[int, list[str]]) -> list[Finding]:
    """Whether the ranks' parts together are what one process had, and none was there before."""
    strange, first_strange = 0, ""
    again: set[int] = set()
    first_again = ""
    for number, samples in expected.items():
        drawn = Counter(sample for parts in ranks for sample in parts.get(number, []))
        if odd := sum((drawn - Counter(samples)).values()) + sum((Counter(samples) - drawn).values()):
            strange += odd
            first_strange = first_strange or f", the first in micro batch {number}"
    for rank, parts in enumerate(ranks):
        before: dict[tuple[str, ...], int] = {}
        for number, samples in parts.items():
            earlier = before.setdefault(tuple(samples), number)
            if earlier != number:
                again.add(number)
                first_again = first_again or f": rank {rank} has micro batch {earlier} again as number {number}"
    return [_Count("samples that the ranks together have more or less often than one process", strange, 0.0,
                   first_strange),
            _Count("micro batches were there before", len(again), 0.0, first_again)]


def _random(ranks: Sequence[Seen], drops: bool) -> list[Finding]:
    """Whether ranks draw dropout masks of their own, where the module has dropout."""
    alike = [step for step, states in enumerate(zip(*(one.random for one in ranks), strict=True), 1)
             if drops and len(set(states)) < len(states)]
    return [_Count("steps leave ranks with the same random numbers, so that their dropout masks are equal",
                   len(alike), 0.0, f": the first is step {alike[0]}" if alike else "")]


def _evaluation(ranks: Sequence[Seen]) -> list[Finding]:
    """Whether an evaluation left everything as it was."""
    changed = list(dict.fromkeys(what for one in ranks for what in one.changed))
    return [_Count("parts of the state were changed by an evaluation", len(changed), 0.0,
                   f": {', '.join(changed[:3])}" if changed else "")]


def _likely(found: dict[str, list[Finding]], ours: verdict.Numbers, theirs: verdict.Numbers,
            world: int) -> Iterator[str]:
    """What the first step's gradient norm says, where gradients are wrong by a factor that has a usual cause."""
    if not any(one.failed for one in found["norm"]):
        return
    ratio = ours["norms"][0][0] / theirs["norms"][0]
    causes = {1 / world: f"the loss is divided by the {world} ranks once too often",
              float(world): f"gradients are added up over the {world} ranks, and not averaged",
              1 / ACCUMULATION: f"the loss is divided by the {ACCUMULATION} micro batches of a step once too often",
              float(ACCUMULATION): f"the {ACCUMULATION} micro batches of a step are added up, and not averaged"}
    for factor, cause in causes.items():
        if factor != 1 and abs(ratio / factor - 1) < SAME:
            yield f"likely: {cause} (gradients are {ratio:.4g} times the reference's)"
