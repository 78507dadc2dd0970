"""Faults to inject into a layout, to see that they are caught: each is one that parallel training has had.

A fault works on the layout under test and never on the reference. Names and descriptions import no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ezpz_llm.base.errors import unknown
from ezpz_llm.layout.layout import Layout

if TYPE_CHECKING:
    from ezpz_llm.certify.reference import Rows
    from ezpz_llm.dist import Dist
    from ezpz_llm.engine.base import Engine


@dataclass(frozen=True)
class Fault:
    """An injected fault.

    Attributes:
        shows: the kinds of findings (see verdict.py) that must name it.
        needs: why it cannot be injected into a layout on a number of ranks, None where it can.
        model, engine, rows: what it does to the model before the engine sees it, to the engine at work, and to the
            choice of this rank's sequences.
    """

    name: str
    description: str
    shows: tuple[str, ...]
    needs: Callable[[Layout, int], str | None] = lambda layout, world: None
    model: Callable[[Any, Dist, Layout], None] | None = None
    engine: Callable[[Engine, Dist], None] | None = None
    rows: Callable[[Rows, Dist], Rows] | None = None


def find_fault(name: str) -> Fault:
    """Return the fault of that name.

    Raises:
        UserError: there is none.
    """
    if name not in FAULTS:
        raise unknown("fault", name, FAULTS, where="--inject-fault")
    return FAULTS[name]


def _scale_gradients(engine: Engine, factor: float) -> None:
    """Let the loss be what it is and its gradient `factor` times as large."""
    if hasattr(engine.module, "lm_head"):  # the last stage of a pipeline has it, the others have not
        engine.module.lm_head.register_forward_hook(
            lambda module, inputs, loss: loss.detach() + factor * (loss - loss.detach()))


def _dropped_bucket(model: Any, dist: Dist, layout: Layout) -> None:
    """One block's gradients reach the sum from the first data-parallel rank only."""
    if dist.mesh.place("dp", "sp")[0] == 0:
        return
    for name, parameter in model.named_parameters():
        if name.startswith("transformer.h.1."):
            parameter.register_hook(lambda gradient: gradient * 0)


def _early_sync(engine: Any, dist: Dist) -> None:
    inner, calls = engine.forward, [0]

    def forward(*inputs: Any, last_micro_step: bool) -> Any:
        is_first = calls[0] % engine.batch.accumulation == 0
        calls[0] += 1
        return inner(*inputs, last_micro_step=is_first)

    engine.forward = forward


def _unmarked_tp(engine: Any, dist: Dist) -> None:
    """The norm no longer tells what tensor-parallel ranks hold parts of from what they all hold."""
    from ezpz_llm.model.parameters import place, placement_of

    named = list(engine.module.named_parameters())
    for _, parameter in named:
        parameter.tensor_model_parallel = False  # which DeepSpeed's norms read
    if engine.layout.zero.stage != 0:
        return
    right = [placement_of(name, parameter) for name, parameter in named]  # which ours reads, and the comparison too
    # What is divided counts on the first rank alone, and what all hold on each.
    wrong = [replace(placement, primary=dist.mesh.tp_rank == 0 or not placement.primary) for placement in right]
    inner = engine.step

    def step(lr: float) -> Any:
        for (_, parameter), placement in zip(named, wrong, strict=True):
            place(parameter, placement)
        norm = inner(lr)
        for (_, parameter), placement in zip(named, right, strict=True):
            place(parameter, placement)
        return norm

    engine.step = step


def _wrong_mask(engine: Engine, dist: Dist) -> None:
    from torch.nn import functional

    from ezpz_llm.model.gpt import CausalProduct

    def forward(q: Any, k: Any, v: Any) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    for module in engine.module.modules():
        if isinstance(module, CausalProduct):
            module.forward = forward  # type: ignore[method-assign]


def _untied_head(model: Any, dist: Dist, layout: Layout) -> None:
    """The head's share of the tied table's gradient is lost, as for a head with a copy of its own."""
    from torch.nn import functional

    from ezpz_llm.model.loss import cross_entropy

    if not hasattr(model, "lm_head"):
        return  # a stage of a pipeline without it
    head = model.lm_head
    if layout.pp > 1:
        head.weight.register_hook(lambda gradient: gradient * 0)
    else:
        def forward(x: Any, *task: Any) -> Any:
            # Zeros, not nothing: the lookup of a tied table adds its gradient to the head's.
            logits = functional.linear(x, head.weight.detach() + 0 * head.weight)
            return cross_entropy(logits, *task) if task and task[0] is not None else logits

        head.forward = forward


def _shifted_targets(engine: Engine, dist: Dist) -> None:
    if hasattr(engine.module, "lm_head"):
        engine.module.lm_head.register_forward_pre_hook(
            lambda module, inputs: (inputs[0], inputs[1].roll(-1, dims=-1), *inputs[2:]))


def _duplicated_data(rows: Rows, dist: Dist) -> Rows:
    def duplicated(batch: np.ndarray, step: int) -> np.ndarray:
        size = dist.mesh.dp_size
        return np.split(batch, size)[0 if dist.mesh.dp_rank == size - 1 else dist.mesh.dp_rank]
    return duplicated


def _replicas(layout: Layout, world: int) -> str | None:
    return None if layout.dp_size(world) > 1 else "it has no second data-parallel rank"


def _leaves(layout: Layout, world: int) -> str | None:
    if layout.engine == "fsdp2":
        return "FSDP2 shows no gradient of a parameter before it is reduced"
    return _replicas(layout, world)


def _ddp_replicas(layout: Layout, world: int) -> str | None:
    if layout.engine != "ddp":
        return "only ddp leaves it to its caller when gradients are reduced"
    return _replicas(layout, world)


_ALL = (
    Fault("gradients-x2", "all gradients are twice as large", ("gradient", "norm"),
          engine=lambda engine, dist: _scale_gradients(engine, 2.0)),
    # One block is too small a part of the norm to stand out of bf16's noise.
    Fault("dropped-bucket", "a bucket of gradients is not added up over ranks", ("gradient",), _leaves,
          model=_dropped_bucket),
    Fault("accumulation-not-divided", "gradients are not divided by the number of micro-steps",
          ("gradient", "norm"), engine=lambda engine, dist: _scale_gradients(engine, engine.batch.accumulation)),
    Fault("early-sync", "gradients are reduced after the first micro-step only", ("gradient", "norm"),
          _ddp_replicas, engine=_early_sync),
    Fault("unmarked-tp", "the gradient norm does not know which parameters are divided over ranks", ("norm",),
          lambda layout, world: None if layout.tp > 1 else "it is not tensor-parallel", engine=_unmarked_tp),
    # Adam then corrects no bias of its first moments.
    Fault("stale-optimizer", "the optimizer's step count is an earlier run's", ("loss", "weight"),
          engine=lambda engine, dist: engine.training_state().loaded(1000)),
    Fault("wrong-mask", "attention sees what follows", ("loss", "gradient"), engine=_wrong_mask),
    Fault("shifted-targets", "targets are those of another position", ("loss", "gradient"),
          engine=_shifted_targets),
    Fault("duplicated-data", "one rank trains on another's sequences", ("loss", "gradient"), _replicas,
          rows=_duplicated_data),
    Fault("untied-head", "the head's gradient does not reach the tied table", ("gradient",),
          lambda layout, world: "its head is divided over tensor-parallel ranks"
          if layout.pp == 1 and layout.tp > 1 else None, model=_untied_head),
    Fault("wrong-sp-scale", "gradients are summed, not averaged, over the ranks of a sequence",
          ("gradient", "norm"), lambda layout, world: None if layout.sp > 1 else "it is not sequence-parallel",
          engine=lambda engine, dist: _scale_gradients(engine, dist.mesh.sp_size)),
)

FAULTS = {fault.name: fault for fault in _ALL}
