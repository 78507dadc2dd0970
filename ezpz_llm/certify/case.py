"""Certify one case: train a layout from the seed checkpoint, compare it and its traffic. Collective."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ezpz_llm import checkpoint
from ezpz_llm.certify import recipe, verdict
from ezpz_llm.certify.cases import Case, resolve_case
from ezpz_llm.certify.injected_faults import find_fault
from ezpz_llm.certify.reference import (
    Reference,
    Trajectory,
    compare,
    make_engine,
    own_rows,
    read_reference,
    release,
    seed_checkpoint,
    train,
)
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import all_gather
from ezpz_llm.engine.base import Engine
from ezpz_llm.engine.collectives import CollectiveCounter, by_ranks
from ezpz_llm.engine.live_memory import live_storages, live_tensor_memory
from ezpz_llm.layout.batch import Batch
from ezpz_llm.layout.knobs import KNOBS
from ezpz_llm.layout.layout import Layout
from ezpz_llm.layout.memory import held_parameters, memory_per_rank
from ezpz_llm.layout.resolve import Resolved
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.parameters import parameter_count

_STEADY = 1
"""The step (from 0) that is looked at for collectives and memory: the first one has set everything up."""


def certify_case(case: Case, root: Path, steps: int, dist: Dist) -> dict[str, Any]:
    """Run a case and judge it. Collective; every rank gets the same answer.

    Args:
        root: where `make_reference` wrote the reference of this model, dtype and number of steps.

    Returns:
        The case with its numbers, `failures` (what failed, a sentence each) and `passed`.
    """
    began = time.perf_counter()
    config, resolved = recipe.model_config(case.model), resolve_case(case, dist.device.type)
    layout = resolved.layout
    dist.arrange(tp=layout.tp, pp=layout.pp, sp=layout.sp)
    reference = read_reference(root, case.model, case.dtype, steps)
    seed = seed_checkpoint(root, case.model, case.dtype, steps)
    ours, watch = _run(case, config, resolved, dist, reference, seed, steps)
    release(dist.device)
    found = verdict.findings(ours, _theirs(reference), config.n_layer, case.dtype)
    failures = verdict.failures(found)
    return {
        **asdict(case), "passed": not failures, "failures": failures,
        "kinds": [kind for kind, entries in found.items() if any(one.failed for one in entries)],
        "worst": verdict.as_json(found), "losses": ours["losses"], "held_out": ours["held_out"],
        "norms": [ranks[0] for ranks in ours["norms"]],
        "reference": {"losses": reference.losses, "held_out": reference.held_out, "norms": reference.norms,
                      "noise": {"loss": reference.noise["loss"], "norm": reference.noise["norm"]},
                      "zero_by_symmetry": reference.symmetric},
        "batch": asdict(resolved.batch), "parameters": parameter_count(config), **watch,
        "arithmetic": [asdict(part) for part in memory_per_rank(layout, config, case.world)],
        "textbook": textbook(layout, config, resolved.batch),
        "by_parameter": {kind: {one.what: [one.value, one.bound] for one in found[kind]}
                         for kind in ("gradient", "weight")},
        "seconds": time.perf_counter() - began,
    }


def _run(case: Case, config: ModelConfig, resolved: Resolved, dist: Dist, reference: Reference, seed: Path,
         steps: int) -> tuple[verdict.Numbers, dict[str, Any]]:
    fault = find_fault(case.fault) if case.fault else None
    before = live_storages()
    spoil = None if fault is None else fault.model
    engine = make_engine(config, resolved, dist,
                         None if spoil is None else lambda model: spoil(model, dist, resolved.layout))
    ours: verdict.Numbers = {"first": compare(engine, config, reference, "weight", "first", dist)}
    # Every weight is spoilt, so that one which the checkpoint does not bring back is not overlooked.
    for part in engine.training_state().slices():
        part.tensors["weight"].fill_(torch.nan)
    checkpoint.load(seed, engine, dist)
    if fault is not None and fault.engine is not None:
        fault.engine(engine, dist)
    rows = own_rows(dist)
    if fault is not None and fault.rows is not None:
        rows = fault.rows(rows, dist)

    def compare_gradients(seen: Trajectory) -> None:
        ours["gradient"] = compare(engine, config, reference, "exp_avg", "gradient", dist,
                                   scale=1 / (1 - recipe.BETAS[0]) / seen.clip_factor)

    watcher = _Watcher(engine, before)
    seen = train(engine, config, dist, rows, steps, around=watcher.around, span=watcher.span,
                 after_first=compare_gradients)
    ours["weight"] = compare(engine, config, reference, "weight", "weight", dist)
    everyone = all_gather(dist, (seen.losses, seen.norms, watcher.counter.totals(), watcher.memory))
    ours["losses"] = [sum(losses) / len(everyone) for losses in zip(*(one[0] for one in everyone), strict=True)]
    ours["norms"] = list(zip(*(one[1] for one in everyone), strict=True))
    ours["held_out"] = seen.held_out
    return ours, {"collectives": by_ranks([one[2] for one in everyone]), "memory": [one[3] for one in everyone]}


class _Watcher:
    """Looks at one steady step for the most that is in memory, and at the next for its collectives."""

    def __init__(self, engine: Engine, before: dict[int, int]) -> None:
        self.engine, self.before = engine, before
        self.counter = CollectiveCounter()
        self.memory: dict[str, int] = {}
        self._looking = False

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Count the collectives of one step; see `training.train`."""
        self._looking = step == _STEADY
        # Looking at memory reads through tensors, which a dispatch mode would slow down: the step after is counted.
        with self.counter if step == _STEADY + 1 else nullcontext():
            yield

    def span(self, phase: str) -> AbstractContextManager[None]:
        """Look at memory where a phase of the steady step begins."""
        if self._looking and phase in ("backward", "optimizer"):
            # Whole gradients may live until they are reduced, shares of them from then on: the most of each counts.
            # Activations, which live when a backward pass begins, are no engine's: others are those at the end.
            now = live_tensor_memory(self.engine, self.before)
            self.memory = {kind: max(size, self.memory.get(kind, 0)) if kind != "other" else size
                           for kind, size in now.items()}
        return nullcontext()


def _theirs(reference: Reference) -> verdict.Numbers:
    names = [key.removeprefix("weight/") for key in reference.tensors if key.startswith("weight/")]
    return {
        "losses": reference.losses, "held_out": reference.held_out, "norms": reference.norms,
        "noise": reference.noise, "numel": {name: reference.tensors[f"weight/{name}"].numel() for name in names},
        **{kind: {name: reference.tensors[f"{kind}/{name}"].double().norm().item() for name in names}
           for kind in ("gradient", "weight")},
    }


# The communication of a layout as its papers have it, beside what is issued.
_FP32 = 4


def textbook(layout: Layout, model: ModelConfig, batch: Batch) -> dict[str, int]:
    """Bytes of the buffers of one step on the rank with most parameters, by kind, activations in fp32.

    Gradients (Rajbhandari et al. 2020, arXiv:1910.02054): all-reduced whole; in ZeRO stages 1 and 2
    reduce-scattered, and new parameters gathered; in stage 3 (and FSDP) parameters are gathered in both passes of
    each micro-step. Tensor parallel (Shoeybi et al. 2019, arXiv:1909.08053): two all-reduces of the activations a
    layer in each pass, one after the embedding, one before the head. Pipeline (Huang et al. 2019,
    arXiv:1811.06965): the activations sent to the next stage or received, and their gradient. Sequence parallel
    (Jacobs et al. 2023, arXiv:2309.14509): queries, keys, values and the product exchanged all to all in each pass.
    """
    found: Counter[str] = Counter()
    weights = _FP32 * max(held_parameters(layout, model, stage) for stage in range(layout.pp))
    peers = batch.dp_size * layout.sp
    if peers > 1:
        volume: Mapping[str, int] = {"all_reduce": weights}
        for knob in KNOBS:
            if knob.traffic is not None:
                volume = knob.traffic(volume, layout, batch.accumulation, peers)
        found.update(volume)
    layers = -(-model.n_layer // layout.pp)
    tokens = batch.micro_batch * batch.accumulation * (model.block_size // layout.sp)
    activations = _FP32 * tokens * model.n_embd
    if layout.tp > 1:
        found["all_reduce"] += (4 * layers + (2 if layout.pp == 1 else 1)) * activations
    if layout.pp > 1:
        found["send"] += activations
        found["recv"] += activations
    if layout.sp > 1:
        found["all_to_all"] += 2 * layers * _FP32 * tokens * (2 * model.n_embd + 2 * model.kv_width)
    return dict(sorted(found.items()))
