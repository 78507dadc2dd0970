"""Certify one case: train a layout from the seed checkpoint and compare it with the reference. Collective.

Cases with a shared fault are compared with the step definition instead; see `certify_shared_fault`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace

from ezpz_llm.core.base.records import as_record
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training import checkpoint
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather
from ezpz_llm.training.dist.deepspeed_internals import shard_of
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.collectives import CollectiveCounter, by_ranks
from ezpz_llm.training.engine.live_memory import live_storages, live_tensor_memory
from ezpz_llm.training.layout.batch import Batch
from ezpz_llm.training.layout.knobs import KNOBS
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.memory import held_parameters, memory_per_rank
from ezpz_llm.training.layout.precision_recipes import FP32_GRADIENTS, RECIPES, GradientDtypes
from ezpz_llm.training.layout.resolve import Resolved
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.model.parameters import parameter_count
from ezpz_llm.verify.certify import recipe, verdict
from ezpz_llm.verify.certify.cases import Case, resolve_case
from ezpz_llm.verify.certify.copies import differing_copies
from ezpz_llm.verify.certify.injected_faults import find_fault
from ezpz_llm.verify.certify.middle_checkpoints import MiddleCheckpoints
from ezpz_llm.verify.certify.recipe import Shape
from ezpz_llm.verify.certify.records import CaseResult, MemoryPart, RankCollectives, ReferenceSummary, SummaryNoise
from ezpz_llm.verify.certify.reference import (
    Reference,
    Trajectory,
    compare,
    compared_elements,
    free_memory,
    make_engine,
    own_rows,
    read_reference,
    seed_checkpoint,
    train,
    train_step,
)
from ezpz_llm.verify.certify.uncovered_paths import certify_shared_fault

_MEMORY_STEP = 1
"""Step, counted from 0, in which memory is measured; step 0 would include setup.

Collectives are counted in the next step.
"""


def certify_case(case: Case, root: Path, steps: int, dist: Dist) -> CaseResult:
    """Run a case and compare it with the reference. Collective.

    Every rank gets the same result, except for `seconds`.

    Args:
        root: directory below which `make_reference` wrote the reference of this model, dtype and number of steps.
    """
    if case.fault and find_fault(case.fault).shared:
        return certify_shared_fault(case, dist)
    began = time.perf_counter()
    shape, resolved = recipe.shape(case.model), resolve_case(case, dist.device.type)
    config, layout = shape.config, resolved.layout
    dist.arrange(tp=layout.tp, pp=layout.pp, sp=layout.sp)
    reference = read_reference(root, case.model, case.dtype, steps)
    seed = seed_checkpoint(root, case.model, case.dtype, steps)
    checkpoints = MiddleCheckpoints(root, f"{case.model}-{case.dtype}", layout.name, case.world, dist)
    measured, observed = _run(case, shape, resolved, dist, reference, seed, checkpoints, steps)
    free_memory(dist.device)
    expected = expected_numbers(reference, config)
    findings = {**verdict.findings(measured, expected, config.n_layer, case.dtype),
                **verdict.end_findings(measured, expected, config.n_layer, case.dtype),
                "format": dtype_findings(resolved, config, case.world, observed)}
    failures = verdict.failures(findings)
    checkpoints.close(passed=not failures)
    arithmetic, textbook = theoretical_numbers(resolved, config, case.world)
    return replace(make_result(case, findings, failures, measured, expected, reference, began),
                   batch=resolved.batch, parameters=parameter_count(config),
                   collectives=observed.collectives, memory=observed.memory, arithmetic=arithmetic,
                   textbook=textbook, resumed_from=checkpoints.loaded)


def make_result(case: Case, findings: dict[str, list[verdict.Finding]], failures: list[str],
                measured: verdict.Numbers, expected: verdict.Numbers, reference: Reference,
                began: float) -> CaseResult:
    """Return the result of a case that began at `began`: its verdict and the compared numbers."""
    noise = reference.noise
    return CaseResult(
        **asdict(case), passed=not failures, failures=failures,
        kinds=[kind for kind, entries in findings.items() if any(finding.failed for finding in entries)],
        worst=verdict.worst_by_kind(findings), losses=measured["losses"], held_out=measured["held_out"],
        norms=[ranks[0] for ranks in measured["norms"]],
        reference=ReferenceSummary(
            losses=reference.losses, held_out=reference.held_out, norms=reference.norms,
            noise=SummaryNoise(noise.loss, noise.norm), sight=verdict.sensitivity(expected, case.dtype),
            zero_by_symmetry=reference.symmetric, one_process=reference.one_process),
        by_parameter={kind: {finding.what: (finding.value, finding.bound) for finding in findings[kind]}
                      for kind in ("gradient", "weight")},
        seconds=time.perf_counter() - began)


class Observed(NamedTuple):
    """Measured collectives and memory, by rank."""

    collectives: list[RankCollectives]
    memory: list[dict[str, int]]


def _run(case: Case, shape: Shape, resolved: Resolved, dist: Dist, reference: Reference, seed: Path,
         checkpoints: MiddleCheckpoints, steps: int) -> tuple[verdict.Numbers, Observed]:
    config = shape.config
    fault = find_fault(case.fault) if case.fault else None
    if fault is not None and fault.settings is not None:
        resolved = fault.settings(resolved)
    storages = live_storages()
    inject = None if fault is None else fault.model
    engine = make_engine(config, resolved, dist,
                         None if inject is None else lambda model: inject(model, dist, resolved.layout),
                         z_loss=shape.z_loss, recompute=shape.recompute, end_of_text=shape.end_of_text)
    measured: verdict.Numbers = {"first": compare(engine, config, reference, "weight", "initial", dist)}
    _fill_with_nan(engine)
    checkpoint.load(seed, engine, dist)
    if fault is not None and fault.engine is not None:
        fault.engine(engine, dist)
    rows = own_rows(dist)
    if fault is not None and fault.rows is not None:
        rows = fault.rows(rows, dist)

    def after(step: int, trajectory: Trajectory) -> None:
        """Compare the gradients of the first step, and save a checkpoint before the last one."""
        if step == 0:
            # exp_avg is now beta1 times the seed checkpoint's, plus (1 - beta1) times the clipped gradient.
            measured["gradient"] = compare(engine, config, reference, "exp_avg", "gradient", dist,
                                           scale=1 / (1 - recipe.BETAS[0]) / trajectory.clip_factor)
        if step == steps - 2:
            checkpoint.save(engine, dist, RunDir(checkpoints.own), checkpoint.Progress(step=step + 1))

    recorder = _StepRecorder(engine, storages)
    trajectory = train(engine, shape, dist, rows, steps, step_context=recorder.step_context,
                       phase_context=recorder.phase_context, after=after)
    measured["weight"] = compare(engine, config, reference, "weight", "weight", dist)
    measured["copy"] = differing_copies(engine, dist)
    measured["texts"] = trajectory.texts
    # Resume in the engine that has just evaluated, and repeat the last step.
    checkpoint.load(checkpoint.find(checkpoints.chosen), engine, dist)
    again = all_gather(dist, train_step(engine, shape, rows, steps - 1, steps))
    measured["again"] = {"loss": sum(loss for loss, _ in again) / len(again), "norms": [norm for _, norm in again],
                         "weight": compare(engine, config, reference, "weight", "weight", dist)}
    ranks = all_gather(dist, (trajectory.losses, trajectory.norms, recorder.counter.totals(), recorder.memory))
    measured["losses"] = [sum(losses) / len(ranks) for losses in zip(*(rank[0] for rank in ranks), strict=True)]
    measured["norms"] = list(zip(*(rank[1] for rank in ranks), strict=True))
    measured["held_out"] = trajectory.held_out
    collectives = as_record(list[RankCollectives], by_ranks([rank[2] for rank in ranks]), "collectives")
    return measured, Observed(collectives, [rank[3] for rank in ranks])


def theoretical_numbers(resolved: Resolved, config: ModelConfig,
                        world: int) -> tuple[list[MemoryPart], dict[str, int]]:
    """Return the calculated numbers of a result: estimated memory, and traffic as in `published_traffic`."""
    precision, gradients = resolved.precision, resolved.gradients
    parts = memory_per_rank(resolved.layout, config, world, precision=precision, gradients=gradients)
    return ([MemoryPart(part.kind, part.where, part.bytes) for part in parts],
            published_traffic(resolved.layout, config, resolved.batch, precision, gradients))


def dtype_findings(resolved: Resolved, config: ModelConfig, world: int,
                   observed: Observed) -> list[verdict.Finding]:
    """Check that gradients are reduced and held in at least as many bytes as the requested dtypes need.

    Checked only for recipes with master weights: the rounding noise of their bf16 matmuls would hide gradients that
    were summed in bf16 instead of fp32.
    """
    layout, batch, gradients = resolved.layout, resolved.batch, resolved.gradients
    if not RECIPES[resolved.precision].has_masters:
        return []
    expected = published_traffic(layout, config, batch, resolved.precision, gradients)
    # For stages 1 and 2, `published_traffic` counts one reduction per step, but they run with stage 2's settings,
    # which reduce in each micro-step. Pipelines reduce once.
    times = batch.accumulation if layout.zero.stage in (1, 2) and layout.pp == 1 else 1
    by_kind: Counter[str] = Counter()
    for name, size in expected.items():
        by_kind[name.partition(" (")[0]] += size  # names may have a suffix: "reduce_scatter (2 ranks)"
    needed_reduced = by_kind["all_reduce"] + times * by_kind["reduce_scatter"]
    actual_reduced = max(sum(group.kinds[kind].bytes for kind in ("all_reduce", "reduce_scatter")
                             if kind in group.kinds) for group in observed.collectives)
    parts = memory_per_rank(layout, config, world, precision=resolved.precision, gradients=gradients)
    needed_held = sum(part.bytes for part in parts if part.kind == "gradients" and part.where == "device")
    actual_held = max(rank["gradients"] for rank in observed.memory)
    return [verdict.Finding(f"the number of {label} gradient bytes", max(0, need - count), 0.0,
                            f": {count} of {need}")
            for label, count, need in (("reduced", actual_reduced, needed_reduced),
                                       ("held", actual_held, needed_held))]


@torch.no_grad()
def _fill_with_nan(engine: Engine) -> None:
    """Set weights and moments to NaN, so that certify notices those that the checkpoint does not restore.

    This includes the parameters that ranks compute with. Otherwise, an engine that does not copy the loaded master
    weights into them would go unnoticed, because the initial weights equal the checkpoint's.
    """
    for part in engine.training_state().slices():
        for tensor in part.tensors.values():
            tensor.fill_(torch.nan)
    for parameter in engine.module.parameters():
        parameter.fill_(torch.nan)
        shard_of(parameter).fill_(torch.nan)  # under ZeRO-3, the parameter itself is empty


class _StepRecorder:
    """Records the memory at two phases of one step, by kind, and the collectives of the next step."""

    def __init__(self, engine: Engine, storages: dict[int, int]) -> None:
        self.engine, self.storages = engine, storages
        self.counter = CollectiveCounter()
        self.memory: dict[str, int] = {}
        self._measuring = False

    @contextmanager
    def step_context(self, step: int) -> Iterator[None]:
        """Count the collectives of the step after the measured one; see `reference.train`."""
        self._measuring = step == _MEMORY_STEP
        # Measuring memory runs many tensor operations, which are slow under the counter's dispatch mode, so
        # collectives are counted in the next step.
        with self.counter if step == _MEMORY_STEP + 1 else nullcontext():
            yield

    def phase_context(self, phase: str) -> AbstractContextManager[None]:
        """Measure memory at the start of the backward and optimizer phases of one step; see `reference.train`."""
        if self._measuring and phase in ("backward", "optimizer"):
            # Full gradients may exist before the reduction and shards only after it: take the maximum per kind.
            # For "other", keep the value before the optimizer: before the backward pass, it includes activations.
            sizes = live_tensor_memory(self.engine, self.storages)
            self.memory = {kind: max(size, self.memory.get(kind, 0)) if kind != "other" else size
                           for kind, size in sizes.items()}
        return nullcontext()


def expected_numbers(reference: Reference, config: ModelConfig | None) -> verdict.Numbers:
    """Return the reference numbers that a case is compared with; `config` is None for a user's module."""
    tensors = {key: value.double() for key, value in reference.tensors.items()}
    names = [key.removeprefix("weight/") for key in tensors if key.startswith("weight/")]

    def movement(name: str) -> float:
        """Return the 2-norm of the weights' change over the run, without elements that are zero by symmetry."""
        moved = tensors[f"weight/{name}"] - tensors[f"first/{name}"]
        mask = compared_elements(config, name, tuple(moved.shape))
        return (moved if mask is None else moved * mask).norm().item()

    return {
        "losses": reference.losses, "held_out": reference.held_out, "norms": reference.norms,
        "texts": reference.texts, "noise": reference.noise,
        "numel": {name: tensors[f"weight/{name}"].numel() for name in names},
        "movement": {name: movement(name) for name in names},
        **{kind: {name: tensors[f"{kind}/{name}"].norm().item() for name in names}
           for kind in ("gradient", "weight")},
    }


_FP32_BYTES = 4


def published_traffic(layout: Layout, model: ModelConfig, batch: Batch, precision: str = "fp32",
                      gradients: GradientDtypes = FP32_GRADIENTS) -> dict[str, int]:
    """Return the bytes of communication buffers per step, by type of collective, according to the papers below.

    The bytes are those of the rank with the most parameters. An element of parameters and activations
    takes 4 bytes, or 2 in recipes with master weights; an element of gradients takes 4 bytes, or 2 if they are
    reduced in bf16.

    Data parallel: gradients are all-reduced. ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): in stages 1 and
    2, gradients are reduce-scattered and the new parameters all-gathered; in stage 3 and FSDP, parameters are
    all-gathered in both passes, and gradients reduce-scattered, in each micro-step. Tensor parallel (Shoeybi et
    al. 2019, arXiv:1909.08053): two all-reduces of the activations per layer and pass, one after the embedding,
    one before the head. Pipeline (Huang et al. 2019, arXiv:1811.06965): activations and their gradients, sent
    and received between stages. Sequence parallel (Jacobs et al. 2023, arXiv:2309.14509): all-to-all of
    queries, keys, values and attention output in each pass.
    """
    traffic: Counter[str] = Counter()
    parameters = max(held_parameters(layout, model, stage) for stage in range(layout.pp))
    itemsize = 2 if RECIPES[precision].has_masters else _FP32_BYTES
    peers = batch.dp_size * layout.sp
    if peers > 1:
        reduced = 2 if gradients.reduced == "bf16" else _FP32_BYTES
        volume: Mapping[str, int] = {"all_reduce": reduced * parameters, "all_gather": itemsize * parameters}
        for knob in KNOBS:
            if knob.traffic is not None:
                volume = knob.traffic(volume, layout, batch.accumulation, peers)
        traffic.update(volume)
    layers = -(-model.n_layer // layout.pp)
    tokens = batch.micro_batch * batch.accumulation * (model.block_size // layout.sp)
    activations = itemsize * tokens * model.n_embd
    if layout.tp > 1:
        traffic["all_reduce"] += (4 * layers + (2 if layout.pp == 1 else 1)) * activations
    if layout.pp > 1:
        traffic["send"] += activations
        traffic["recv"] += activations
    if layout.sp > 1:
        traffic["all_to_all"] += 2 * layers * itemsize * tokens * (2 * model.q_width + 2 * model.kv_width)
    return dict(sorted(traffic.items()))
