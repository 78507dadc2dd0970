"""The reference of a target: one process, held to a plain loop, with its baseline noise."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import TypedDict

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ezpz_llm.base import UserError
from ezpz_llm.certify import verdict
from ezpz_llm.certify.cases import scaled_down
from ezpz_llm.certify.lead import Job, reference_numbers
from ezpz_llm.certify.one_process import DISAGREES, WITH_ITSELF, state_of
from ezpz_llm.certify.reference import alone, baseline_noise, other_sums
from ezpz_llm.certify.target_file import ACCUMULATION, CLIP_SHARE, SAME, load
from ezpz_llm.certify.target_run import Batches, Seen, fresh_module, train, wrapped
from ezpz_llm.certify.target_statistics import normalises_over_the_batch
from ezpz_llm.dist import Dist
from ezpz_llm.engine.running_statistics import statistics_of
from ezpz_llm.layout import ds_config
from ezpz_llm.layout.layout import read_layout
from ezpz_llm.rundir import write_json

STATISTIC = "statistic/"
"""Begins the name of a running statistic after the last step, among the tensors of a reference."""
_ROUNDING_ALONE = 1e-6
"""Of the norm of all gradients: a smaller one that another order of the sums changes is their rounding."""


class About(TypedDict):
    """What one process found out about a target for all layouts: what gradients are clipped to, the number of
    parameters, whether there is dropout, the samples of each micro batch, and by name the baseline noise of running
    statistics.
    """

    clip: float
    parameters: int
    drops: bool
    batches: dict[int, list[str]]
    statistics: dict[str, float]


def make_target_reference(job: Job, model: str, dtype: str, dist: Dist) -> None:
    """Train one process, hold its first gradients to those of a plain loop, and write tensors and numbers; one rank
    calls it.

    Where norms have statistics of the batch, one process takes the parts that ranks have, one after the other.

    Raises:
        UserError: a parameter gets no gradient, or is a copy of what it is to be tied to; one process disagrees
            with the plain loop or, where its batches are divided, with itself; `wrap` refuses it.
    """
    assert job.target is not None
    target, me = load(job.target), alone(dist)
    path = reference_numbers(job.root, model, dtype, job.steps, dist.world_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    module, drops = fresh_module(target)
    check_ties(module)
    in_parts, size = normalises_over_the_batch(module), max(2, dist.world_size)

    def batches(places: int, order: int = 0) -> Batches:
        """Micro batches in so many parts, all of them."""
        return Batches(target, job.steps, dist.device, range(places), places, order, in_parts)

    _check_parts(batches(1), batches(size))
    whole = batches(dist.world_size if in_parts else 1)
    divided = batches(whole.size, order=1) if in_parts else batches(size)
    plain = _plain_gradients(whole)
    clip = CLIP_SHARE * _norm(plain)
    check_gradients(plain, _plain_gradients(divided))
    seen, tensors = _run(whole, me, dtype, clip)
    if dtype == "fp32":
        _hold_to(plain, tensors)
    others = []
    for order, (places, shuffled) in enumerate(((1, True), (size, True), (size, False)), start=1):
        with other_sums(order) if shuffled else nullcontext():
            others.append(_run(batches(whole.size if in_parts else places, order), me, dtype, clip))
    noise = baseline_noise(None, seen, tensors, others)
    if seen.rounded:  # two losses may agree by chance where neighbouring numbers are far apart
        noise["loss"] = max(noise["loss"], verdict.ROUNDING[dtype] * max(map(abs, seen.losses)))
    about = About(clip=clip, parameters=sum(value.numel() for value in plain.values()), drops=drops,
                  batches=whole.seen,
                  statistics={name: max((other[f"{STATISTIC}{name}"] - tensors[f"{STATISTIC}{name}"]).norm().item()
                                        for _, other in others) for name in statistics_of(module)})
    write_json(path.with_name("about.json"), dict(about))
    save_file(tensors, path.with_name("tensors.safetensors"))
    write_json(path, {"losses": seen.losses, "norms": seen.norms, "held_out": seen.held_out, "noise": noise,
                      "symmetric": {}, "one_process": {}})


def check_ties(module: nn.Module) -> None:
    """Refuse a layer whose weight begins as a copy of an embedding's: two parameters, where one was meant.

    Raises:
        UserError: names the two.
    """
    tables = {name: part.weight for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    for name, part in module.named_modules():
        for table, weight in tables.items():
            if (isinstance(part, nn.Linear) and part.weight is not weight and part.weight.shape == weight.shape
                    and weight.min() != weight.max() and torch.equal(part.weight, weight)):
                raise UserError(f"{name}.weight begins as a copy of {table}.weight and is not tied to it: they go "
                                "apart from the first step on", where="--target",
                                instead=f"{name}.weight = {table}.weight; or initial weights of its own")


def _check_parts(whole: Batches, divided: Batches) -> None:
    """Refuse batches whose parts are together not the whole, in the first step."""
    whole.of_step(0), divided.of_step(0)
    for number, expected in whole.seen.items():
        drawn, wanted = Counter(divided.seen[number]), Counter(expected)
        if odd := sum(((drawn - wanted) + (wanted - drawn)).values()):
            raise UserError(f"{WITH_ITSELF}: the parts of micro batch {number} for {divided.size} ranks have {odd} "
                            "samples more or less often than the whole", where="Target.batch", exit_code=1,
                            instead="for dp_rank of dp_size its share of what dp_rank 0 of 1 gets, equal for all")


def _plain_gradients(batches: Batches) -> dict[str, Tensor]:
    """The gradients of the first step in a plain loop in fp32, by name."""
    module, _ = fresh_module(batches.target)
    module.to(batches.device)
    parts = batches.of_step(0)
    for _, part in parts:
        loss = batches.target.loss(module, part)
        if not isinstance(loss, Tensor) or loss.dim():
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise UserError(f"the loss is a {type(loss).__name__}{shape}", where="Target.loss",
                            instead="the mean loss over the samples of a batch, a tensor without dimensions")
        (loss / len(parts)).backward()
    return {name: torch.zeros_like(parameter).cpu() if parameter.grad is None else parameter.grad.cpu()
            for name, parameter in module.named_parameters()}


def check_gradients(plain: dict[str, Tensor], divided: dict[str, Tensor]) -> None:
    """Refuse one process in which a whole tensor gets no gradient, or whose batches cannot be divided over ranks.

    Args:
        plain, divided: the gradients of the whole micro batches, and of the parts that ranks have of them.

    Raises:
        UserError: names the first parameter of that kind.
    """
    total = _norm(plain)
    for name, gradient in plain.items():
        apart = (divided[name] - gradient).norm().item()
        if not gradient.any() or (apart > SAME * gradient.norm() and gradient.norm() < _ROUNDING_ALONE * total):
            what = "is nothing but rounding" if gradient.any() else "is 0 or there is none"
            raise UserError(f"the gradient of {name} {what} in one process: no layout could be seen to lose it",
                            where="--target", instead="a module without it, or a loss that depends on it")
        if not apart <= SAME * gradient.norm():
            raise UserError(f"{WITH_ITSELF}: the gradient of {name} differs by {apart / gradient.norm():.2g} "
                            "(relative) where micro batches are divided into the parts of ranks", where="--target",
                            instead="a loss that is the mean over samples; parts of equal size; dropout by "
                                    "nn.Dropout; statistics of the batch by torch's BatchNorm, which certify knows",
                            exit_code=1)


def _hold_to(plain: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    for name, gradient in plain.items():
        apart = ((tensors[f"gradient/{name}"] - gradient).norm() / gradient.norm()).item()
        if not apart <= SAME:
            raise UserError(f"{DISAGREES}: the first gradient of {name} differs by {apart:.2g} (relative) from "
                            "that of a plain loop", where="--target", exit_code=1,
                            instead="no certificate of any layout before one process is right")


def _norm(gradients: dict[str, Tensor]) -> float:
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()


def _run(batches: Batches, me: Dist, dtype: str, clip: float) -> tuple[Seen, dict[str, Tensor]]:
    """One process, and the tensors of a reference: see `reference.Reference`."""
    accumulation = ACCUMULATION * len(batches.places)
    file = write_ds_config(me.run_dir.path / "ds_configs", "ddp", dtype, 0, write=True)
    model = wrapped(batches.target, me, file, accumulation, clip)
    found = {f"first/{name}": value for name, value in state_of(model.engine).weights.items()}

    def keep_gradients(step: int, seen: Seen) -> None:
        """Keep those of the first step."""
        if step == 0:
            scale, first = gradient_scale(model.optimizer, clip, seen), state_of(model.engine).first
            found.update({f"gradient/{name}": value * scale for name, value in first.items()})

    seen = train(model, batches, own=False, after=keep_gradients)
    found.update({f"weight/{name}": value for name, value in state_of(model.engine).weights.items()})
    found.update({f"{STATISTIC}{name}": value.float().cpu() for name, value in statistics_of(model.module).items()})
    return seen, found


def gradient_scale(optimizer: torch.optim.Optimizer, clip: float, seen: Seen) -> float:
    """What makes the first step's gradient of the first moment of it, which was clipped."""
    return 1 / (1 - optimizer.param_groups[0]["betas"][0]) / min(1.0, clip / (seen.norms[0] + 1e-6))


def write_ds_config(folder: Path, layout: str, dtype: str, parameters: int, *, write: bool) -> Path:
    """The file of a layout in a precision, with buckets and thresholds for a small model. One rank writes it."""
    path = folder / f"{Path(layout).stem}-{dtype}.json"
    if not write:
        return path
    read = ds_config.load(layout)
    values = {key: value for key, value in read.values.items() if key not in ("bf16", "fp16")}
    if dtype == "bf16":
        values |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
                   "communication_data_type": "fp32"}
    if "zero_optimization" in values:
        stage = read_layout(read).zero.stage
        values["zero_optimization"] = scaled_down(values["zero_optimization"], stage, parameters)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**values, "ezpz_llm": read.ours}))
    return path
