"""Single-process reference of a target, checked against a plain training loop, and its baseline noise."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor, nn

from ezpz_llm.core.base import UserError, count_noun
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.running_statistics import statistics_of
from ezpz_llm.training.layout import ds_config
from ezpz_llm.training.layout.layout import read_layout
from ezpz_llm.training.library.target import Target
from ezpz_llm.verify.certify import verdict
from ezpz_llm.verify.certify.cases import scaled_down
from ezpz_llm.verify.certify.local_launches import Job, reference_file
from ezpz_llm.verify.certify.one_process import DISAGREES, INCONSISTENT, whole_tensors
from ezpz_llm.verify.certify.records import ReferenceNumbers, TargetProperties
from ezpz_llm.verify.certify.reference import baseline_noise, reordered_sums, single_rank_world
from ezpz_llm.verify.certify.target_file import ACCUMULATION, CLIP_SHARE, SAME, load
from ezpz_llm.verify.certify.target_run import (
    Batches,
    Observations,
    fresh_module,
    make_optimizer,
    train,
    wrap_target,
)
from ezpz_llm.verify.certify.target_statistics import normalizes_over_batch

STATISTIC = "statistic/"
"""Prefix of running statistics (after the last step) in the tensors of a reference."""
_ROUNDING_ALONE = 1e-6
"""Share of the global gradient norm. A smaller gradient that depends on the summation order is only rounding."""


def make_target_reference(job: Job, model: str, dtype: str, dist: Dist) -> None:
    """Train in a single process, compare its first gradients with a plain loop, and write the results.

    Call on one rank. If the module uses batch statistics (BatchNorm), this process computes the ranks' parts of
    each micro-batch one after the other, because each rank normalizes over its own part.

    Raises:
        UserError: a parameter gets no gradient, or starts as an untied copy of an embedding; the ranks' parts do
            not add up to the full micro-batches; the process disagrees with the plain loop or, with split
            micro-batches, with itself; `wrap` rejects the module.
    """
    assert job.target is not None
    target, single = load(job.target), single_rank_world(dist)
    path = reference_file(job.root, model, dtype, job.steps, dist.world_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    module, has_dropout = fresh_module(target)
    _check_ties(module)
    in_parts, size = normalizes_over_batch(module), max(2, dist.world_size)

    def batches(dp_size: int, order: int = 0) -> Batches:
        """Return the batches of a process that computes the parts of all `dp_size` ranks."""
        return Batches(target, job.steps, dist.device, range(dp_size), dp_size, order, in_parts)

    _check_parts(batches(1), batches(size))
    whole = batches(dist.world_size if in_parts else 1)
    divided = batches(whole.size, order=1) if in_parts else batches(size)
    plain = _plain_gradients(whole)
    clip = CLIP_SHARE * _norm(plain)
    check_gradients(plain, _plain_gradients(divided))
    gradient = _find_gradient_state(target, plain, clip)
    whole_run, tensors = _run(whole, single, dtype, clip, *gradient)
    if dtype == "fp32":
        _check_against_plain_loop(plain, tensors)
    repetitions = []
    for order, (dp_size, shuffled) in enumerate(((1, True), (size, True), (size, False)), start=1):
        with reordered_sums(order) if shuffled else contextlib.nullcontext():
            repetitions.append(_run(batches(whole.size if in_parts else dp_size, order), single, dtype, clip,
                                    *gradient))
    noise = baseline_noise(None, whole_run, tensors, repetitions)
    if whole_run.rounded:  # bf16 losses are so coarse that runs may agree by chance
        noise = replace(noise, loss=max(noise.loss, verdict.ROUNDING[dtype] * max(map(abs, whole_run.losses))))
    about = TargetProperties(clip=clip, gradient_state=gradient[0], gradient_factor=gradient[1],
                             parameters=sum(value.numel() for value in plain.values()),
                             drops=has_dropout, batches=whole.seen,
                             statistics={name: max(
                                 (run[f"{STATISTIC}{name}"] - tensors[f"{STATISTIC}{name}"]).norm().item()
                                 for _, run in repetitions) for name in statistics_of(module)})
    write_json(path.with_name("about.json"), as_plain(about))
    save_file(tensors, path.with_name("tensors.safetensors"))
    write_json(path, as_plain(ReferenceNumbers(whole_run.losses, whole_run.norms, whole_run.held_out, [], noise,
                                               symmetric={}, one_process={})))


def _check_ties(module: nn.Module) -> None:
    """Check that no linear weight starts as an untied copy of an embedding's weight.

    Raises:
        UserError: names both parameters.
    """
    tables = {name: part.weight for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    for name, part in module.named_modules():
        for table, weight in tables.items():
            if (isinstance(part, nn.Linear) and part.weight is not weight and part.weight.shape == weight.shape
                    and weight.min() != weight.max() and torch.equal(part.weight, weight)):
                raise UserError(f"{name}.weight starts as a copy of {table}.weight but is not tied to it: they "
                                "diverge from the first step on", where="--target",
                                instead=f"set {name}.weight = {table}.weight, or use different initial weights")


def _check_parts(whole: Batches, divided: Batches) -> None:
    """Check that the ranks' parts of each micro-batch in the first step add up to the full micro-batch."""
    whole.of_step(0), divided.of_step(0)
    for number, expected in whole.seen.items():
        drawn, complete = Counter(divided.seen[number]), Counter(expected)
        if odd := sum(((drawn - complete) + (complete - drawn)).values()):
            raise UserError(f"the parts of micro-batch {number} for {divided.size} ranks have "
                            f"{count_noun(odd, 'extra or missing sample')}, compared with the full micro-batch",
                            where="Target.batch", exit_code=1,
                            instead="split the batch of dp_size 1 into dp_size equal parts and return part dp_rank")


def _plain_gradients(batches: Batches) -> dict[str, Tensor]:
    """Compute the gradients of the first step in a plain fp32 loop, by parameter name."""
    module, _ = fresh_module(batches.target)
    module.to(batches.device)
    parts = batches.of_step(0)
    for _, part in parts:
        loss = batches.target.loss(module, part)
        if not isinstance(loss, Tensor) or loss.dim():
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise UserError(f"the loss has type {type(loss).__name__}{shape}", where="Target.loss",
                            instead="return the mean loss over the samples of the batch, as a scalar tensor")
        (loss / len(parts)).backward()
    return {name: torch.zeros_like(parameter).cpu() if parameter.grad is None else parameter.grad.cpu()
            for name, parameter in module.named_parameters()}


def check_gradients(plain: dict[str, Tensor], divided: dict[str, Tensor]) -> None:
    """Check that every parameter gets a gradient, and that splitting the batches over ranks does not change it.

    Args:
        plain, divided: gradients of the full micro-batches, and of their parts for the ranks.

    Raises:
        UserError: names the first parameter that fails.
    """
    total = _norm(plain)
    for name, gradient in plain.items():
        difference = (divided[name] - gradient).norm().item()
        is_order_dependent = difference > SAME * gradient.norm()
        if not gradient.any() or (is_order_dependent and gradient.norm() < _ROUNDING_ALONE * total):
            state = "is only rounding noise" if gradient.any() else "is 0 or missing"
            raise UserError(f"the gradient of {name} {state} in one process, so certify would not notice if a "
                            "layout lost it", where="--target",
                            instead="a module without this parameter, or a loss that depends on it")
        if not difference <= SAME * gradient.norm():
            raise UserError(f"{INCONSISTENT}: the gradient of {name} changes by {difference / gradient.norm():.2g} "
                            "(relative) when micro-batches are split over ranks", where="--target",
                            instead="a loss that is the mean over samples, parts of equal size, nn.Dropout for "
                                    "dropout, and torch's BatchNorm for batch statistics",
                            exit_code=1)


def _check_against_plain_loop(plain: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    for name, gradient in plain.items():
        difference = ((tensors[f"gradient/{name}"] - gradient).norm() / gradient.norm()).item()
        if not difference <= SAME:
            raise UserError(f"{DISAGREES}: the first gradient of {name} differs by {difference:.2g} (relative) "
                            "from a plain loop", where="--target", exit_code=1,
                            instead="fix this first: every layout is compared with the single process")


def _norm(gradients: dict[str, Tensor]) -> float:
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()


def _run(batches: Batches, single: Dist, dtype: str, clip: float, gradient_state: str,
         gradient_factor: float) -> tuple[Observations, dict[str, Tensor]]:
    """Train in a single process; return its observations and the tensors of `reference.Reference`."""
    accumulation = ACCUMULATION * len(batches.dp_ranks)
    file = scaled_ds_config(single.run_dir.path / "ds_configs", "ddp", dtype, 0, write=True)
    model = wrap_target(batches.target, single, file, accumulation, clip)
    tensors = {f"first/{name}": value for name, value in whole_tensors(model.engine, "weight").items()}

    def keep_gradients(step: int, trajectory: Observations) -> None:
        """Record the gradients of the first step."""
        if step == 0:
            scale = 1 / gradient_factor / clip_factor(clip, trajectory)
            tensors.update({f"gradient/{name}": value * scale
                            for name, value in whole_tensors(model.engine, gradient_state).items()})

    trajectory = train(model, batches, use_own_step=False, after=keep_gradients)
    tensors.update({f"weight/{name}": value for name, value in whole_tensors(model.engine, "weight").items()})
    tensors.update({f"{STATISTIC}{name}": value.float().cpu()
                    for name, value in statistics_of(model.module).items()})
    return trajectory, tensors


def clip_factor(clip: float, seen: Observations) -> float:
    """Return the factor by which clipping has scaled the gradients of the first step."""
    return min(1.0, clip / (seen.norms[0] + 1e-6))


def _find_gradient_state(target: Target, gradients: dict[str, Tensor], clip: float) -> tuple[str, float]:
    """Find the optimizer state that is the gradient times a factor after the first step.

    For Adam, this is the first moment, and the factor is 1 - beta_1.

    Args:
        gradients: the first gradient of each parameter.

    Returns:
        Name of the state and factor.

    Raises:
        UserError: the optimizer has no such state for all parameters.
    """
    module, _ = fresh_module(target)
    optimizer = make_optimizer(target, module, clip)
    for name, parameter in module.named_parameters():
        parameter.grad = gradients[name].to(parameter)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:  # LBFGS requires one, and has no momentum
        optimizer.step()
    # `wrap` rejects an optimizer that lacks a parameter.
    pairs = [(gradients[name], optimizer.state[parameter]) for name, parameter in module.named_parameters()
             if parameter in optimizer.state]
    for kind in pairs[0][1] if pairs else ():
        if (factor := _factor([(gradient, state.get(kind)) for gradient, state in pairs])) is not None:
            return kind, factor
    raise UserError(f"certify cannot read the first gradient from the state of {type(optimizer).__name__}",
                    where="Target.optimizer",
                    instead="an optimizer with momentum, such as AdamW or SGD(…, momentum=0.9), without a weight "
                            "decay that it adds to the gradients")


def _factor(pairs: Sequence[tuple[Tensor, Any]]) -> float | None:
    """Return the factor between each gradient and its state, or None if it is not the same for all."""
    gradient, first = pairs[0]
    if not all(isinstance(state, Tensor) and state.shape == gradient.shape and state.any()
               for gradient, state in pairs):
        return None
    factor = ((first * gradient).sum() / gradient.square().sum()).item()
    is_equal = all((state - factor * gradient).norm() <= SAME * state.norm() for gradient, state in pairs)
    return factor if is_equal else None


def scaled_ds_config(folder: Path, layout: str, dtype: str, parameters: int, *, write: bool) -> Path:
    """Return the path of `layout`'s ds_config in a precision, scaled down to a small model. Write it if `write`."""
    path = folder / f"{Path(layout).stem}-{dtype}.json"
    if not write:
        return path
    config = ds_config.load(layout)
    values = {key: value for key, value in config.values.items() if key not in ("bf16", "fp16")}
    if dtype == "bf16":
        values |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
                   "communication_data_type": "fp32"}
    if "zero_optimization" in values:
        stage = read_layout(config).zero.stage
        values["zero_optimization"] = scaled_down(values["zero_optimization"], stage, parameters)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**values, "ezpz_llm": config.ours}))
    return path
