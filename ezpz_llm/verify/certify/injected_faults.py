"""Faults to inject into a layout, to test that certify detects them. Each has occurred in parallel training.

Faults affect the layout under test, never the reference. Shared faults are in code that the reference uses too.
They are injected into a single process, which is then compared with the step definition. Importing this module
imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ezpz_llm.core.base import unknown_name_error
from ezpz_llm.training.dist.deepspeed_internals import mark_tensor_parallel
from ezpz_llm.training.dist.deepspeed_patches import keep_second_shards
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.verify.certify.recipe import Rows

if TYPE_CHECKING:
    from torch import nn

    from ezpz_llm.training.dist import Dist
    from ezpz_llm.training.engine.base import Engine
    from ezpz_llm.training.layout.resolve import Resolved


@dataclass(frozen=True)
class Fault:
    """An injected fault.

    Attributes:
        shows: kinds of findings that must fail (`verdict.PHASES`); for a shared fault, phases
            (`one_process.PHASES`).
        shared: the fault is in code that every layout and the reference use.
        needs: function that returns why a layout on a number of ranks cannot have the fault, or None if it can.
        needs_masters: the fault requires a recipe with master weights.
        settings, model, engine, rows: functions that inject the fault into the settings of the run, the model
            before the engine wraps it, the engine, and the choice of this rank's sequences.
    """

    name: str
    description: str
    shows: tuple[str, ...]
    needs: Callable[[Layout, int], str | None] = lambda layout, world: None
    settings: Callable[[Resolved], Resolved] | None = None
    model: Callable[[Any, Dist, Layout], None] | None = None
    engine: Callable[[Engine, Dist], None] | None = None
    rows: Callable[[Rows, Dist], Rows] | None = None
    needs_masters: bool = False
    shared: bool = False


def find_fault(name: str) -> Fault:
    """Return the fault with that name.

    Raises:
        UserError: an unknown name.
    """
    if name not in FAULTS:
        raise unknown_name_error("fault", name, FAULTS, where="--inject-fault")
    return FAULTS[name]


def _scale_gradients(engine: Engine, factor: float) -> None:
    """Scale the gradient of the loss by `factor` without changing the loss."""
    if hasattr(engine.module, "lm_head"):  # in a pipeline, only on the last stage
        engine.module.lm_head.register_forward_hook(
            lambda module, inputs, loss: loss.detach() + factor * (loss - loss.detach()))


def _drop_bucket(engine: Engine, dist: Dist) -> None:
    """Set one block's gradients to zero on all data-parallel ranks but the first."""
    if dist.mesh.place("dp", "sp")[0] == 0:
        return
    for name, parameter in engine.module.named_parameters():
        if name.startswith("transformer.h.1."):
            parameter.register_hook(lambda gradient: gradient * 0)


def _sync_early(engine: Any, dist: Dist) -> None:
    inner, calls = engine.backward, [0]

    def backward(loss: Any, is_last: bool) -> None:
        """Run the backward pass, reducing gradients after the first micro-step instead of the last."""
        is_first = calls[0] % engine.batch.accumulation == 0
        calls[0] += 1
        inner(loss, is_first)

    engine.backward = backward


def _unmark_tp(engine: Any, dist: Dist) -> None:
    """Mix up partitioned and replicated tensor-parallel parameters in the gradient norm."""
    from ezpz_llm.training.model.parameters import placement_of, set_placement

    named = list(engine.module.named_parameters())
    for _, parameter in named:
        mark_tensor_parallel(parameter, False)
    if engine.layout.zero.stage != 0:
        return
    # ezpz_llm's gradient norm and the comparison read the placements, so restore them after each step.
    correct = [placement_of(name, parameter) for name, parameter in named]
    # Partitioned parameters count on the first rank only, replicated ones on every rank.
    swapped = [replace(placement, primary=dist.mesh.tp_rank == 0 or not placement.primary) for placement in correct]
    inner = engine.step

    def step(lr: float) -> Any:
        """Make a step with swapped placements, so that the gradient norm is wrong."""
        for (_, parameter), placement in zip(named, swapped, strict=True):
            set_placement(parameter, placement)
        norm = inner(lr)
        for (_, parameter), placement in zip(named, correct, strict=True):
            set_placement(parameter, placement)
        return norm

    engine.step = step


def _undo_master_updates(engine: Any, dist: Dist) -> None:
    """Undo each step's update in the master weights, from which the next step starts, but not in the parameters."""
    inner = engine.train_step

    def train_step(*step: Any) -> Any:
        """Make a step and restore the master weights from before it."""
        weights = [part.tensors["weight"].clone() for part in engine.training_state().slices()]
        outcome = inner(*step)
        for part, saved in zip(engine.training_state().slices(), weights, strict=True):
            part.tensors["weight"].copy_(saved)
        return outcome

    engine.train_step = train_step


def _keep_second_copy(engine: Any, dist: Dist) -> None:
    """Keep hpZ's secondary copy of the parameters valid after the optimizer step."""
    keep_second_shards(engine.zero)


def _let_copy_drift(engine: Any, dist: Dist) -> None:
    """Change the last rank's replicas in every step, by 1e-6 or the epsilon of their dtype if that is larger.

    Affects replicated master weights, or else the replicated parameters that the rank computes with.
    """
    import torch

    from ezpz_llm.verify.certify.copies import whole_parameters

    inner = engine.train_step

    def train_step(*step: Any) -> Any:
        """Make a step and change the last rank's replicas."""
        outcome = inner(*step)
        if dist.rank == dist.world_size - 1:
            replicas = [part.tensors["weight"] for part in engine.training_state().slices()
                        if part.replicas > 1 or not part.primary]
            for tensor in replicas or [part.tensors["parameter"] for part in whole_parameters(engine)]:
                tensor.mul_(1 + max(1e-6, torch.finfo(tensor.dtype).eps))
        return outcome

    engine.train_step = train_step


def _remove_mask(engine: Engine, dist: Dist) -> None:
    from torch.nn import functional

    from ezpz_llm.training.model.gpt import CausalProduct

    def forward(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    for module in engine.module.modules():
        if isinstance(module, CausalProduct):
            module.forward = forward  # type: ignore[method-assign]


def _untie_head(model: Any, dist: Dist, layout: Layout) -> None:
    """Drop the head's contribution to the gradient of the tied table, as for an untied head."""
    from torch.nn import functional

    from ezpz_llm.training.model.loss import cross_entropy

    if not hasattr(model, "lm_head"):
        return  # a pipeline stage without the head
    head = model.lm_head
    if layout.pp > 1:
        head.weight.register_hook(lambda gradient: gradient * 0)
    else:
        def forward(x: Any, *task: Any) -> Any:
            # A gradient of zeros, not None: the lookup of a tied table adds to the head's gradient.
            logits = functional.linear(x, head.weight.detach() + 0 * head.weight)
            return cross_entropy(logits, *task) if task and task[0] is not None else logits

        head.forward = forward


def _shift_targets(engine: Engine, dist: Dist) -> None:
    def shift(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # Without targets, the head computes logits.
        return tuple(value.roll(-1, dims=-1) if index == 1 and value is not None else value
                     for index, value in enumerate(inputs))

    if hasattr(engine.module, "lm_head"):
        engine.module.lm_head.register_forward_pre_hook(shift)


def _duplicate_data(rows: Rows, dist: Dist) -> Rows:
    def duplicated(batch: np.ndarray, step: int) -> np.ndarray:
        """Return a rank's rows of a batch; the last data-parallel rank gets the first rank's.""" 
        size = dist.mesh.dp_size
        return np.split(batch, size)[0 if dist.mesh.dp_rank == size - 1 else dist.mesh.dp_rank]
    return duplicated


def _repeat_half_of_micro_batches(engine: Any, dist: Dist) -> None:
    inner = engine.train_step

    def train_step(micro_batches: Any, lr: float, span: Any) -> Any:
        """Make a step that uses the first half of the micro-batches twice, and not the second half."""
        batches = list(micro_batches)
        half = batches[:len(batches) // 2]
        return inner([*half, *half], lr, span)

    engine.train_step = train_step


def _report_last_loss(engine: Any, dist: Dist) -> None:
    backward, train_step = engine.backward, engine.train_step
    last: list[Any] = []

    def watched(loss: Any, is_last: bool) -> None:
        """Run the backward pass and record its loss."""
        last[:] = [loss.detach()]
        backward(loss, is_last)

    def last_loss_step(*step: Any) -> Any:
        """Make a step that returns the loss of the last micro-step instead of the mean."""
        _, norm = train_step(*step)
        return last[0], norm

    engine.backward, engine.train_step = watched, last_loss_step


def _unmask_beyond_64(engine: Engine, dist: Dist) -> None:
    """Let queries from position 64 on attend to later tokens."""
    import torch
    from torch.nn import functional

    from ezpz_llm.training.model.gpt import CausalProduct

    def forward(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        """Compute causal attention, with all tokens visible to rows from 64 on."""
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        mask[64:] = True
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    for module in engine.module.modules():
        if isinstance(module, CausalProduct):
            module.forward = forward  # type: ignore[method-assign]


def _change_before_step(change: Callable[[Any, Any], None]) -> Callable[[Engine, Dist], None]:
    """Return a function that injects `change`, which is called before each optimizer step."""
    def inject(engine: Engine, dist: Dist) -> None:
        engine.training_state().optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs: change(engine, optimizer))
    return inject


def _change_groups(first: int = 0, **values: Callable[[Any], Any]) -> Callable[[Engine, Dist], None]:
    """Return a function that injects changed hyperparameters into the optimizer's groups, from group `first` on."""
    def change(engine: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups[first:]:
            group.update({key: new(group[key]) for key, new in values.items()})
    return _change_before_step(change)


def _scale_up_to_clip(engine: Any, optimizer: Any) -> None:
    factor = engine.clip / engine.step_skip.norm.item()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(max(1.0, factor))


def _count_ignored(engine: Any, dist: Dist) -> None:
    """Divide the summed loss by all targets, including the ignored ones."""
    engine.module.lm_head.register_forward_hook(
        lambda module, inputs, loss: loss * (inputs[1] >= 0).float().mean())


def _shorten_evaluation(engine: Any, dist: Dist) -> None:
    inner = engine.loss_sum

    def loss_sum(tokens: Any, targets: Any) -> Any:
        """Return the summed loss of a batch without the last target of each sequence."""
        shorter = targets.clone()
        shorter[:, -1] = -100
        return inner(tokens, shorter)

    engine.loss_sum = loss_sum


def _reason_unless_single_process(layout: Layout, world: int) -> str | None:
    if layout.engine == "ddp" and world == 1:
        return None
    return "the fault is in code that all layouts share, so it is injected into ddp on 1 rank only"


def _reason_without_replicas(layout: Layout, world: int) -> str | None:
    return None if layout.dp_size(world) > 1 else "the layout has no second data-parallel rank"


def _reason_without_copies(layout: Layout, world: int) -> str | None:
    has_whole = layout.engine != "fsdp2" and layout.zero.stage != 3
    if layout.tp > 1 or (has_whole and world > layout.pp):
        return None
    return "nothing is replicated on several ranks"


def _reason_without_leaf_gradients(layout: Layout, world: int) -> str | None:
    if layout.engine == "fsdp2":
        return "FSDP2 does not expose gradients before they are reduced"
    return _reason_without_replicas(layout, world)


def _reason_without_ddp_replicas(layout: Layout, world: int) -> str | None:
    if layout.engine != "ddp":
        return "only ddp lets the caller decide when gradients are reduced"
    return _reason_without_replicas(layout, world)


_FAULTS = (
    Fault("gradients-x2", "all gradients are twice as large", ("gradient", "norm"),
          engine=lambda engine, dist: _scale_gradients(engine, 2.0)),
    # The norm is not listed: one block contributes too little to exceed bf16 noise.
    Fault("dropped-bucket", "a bucket of gradients is not reduced over ranks", ("gradient",),
          _reason_without_leaf_gradients, engine=_drop_bucket),
    Fault("accumulation-not-divided", "gradients are not divided by the number of micro-steps",
          ("gradient", "norm"), engine=lambda engine, dist: _scale_gradients(engine, engine.batch.accumulation)),
    Fault("early-sync", "gradients are reduced after the first micro-step only", ("gradient", "norm"),
          _reason_without_ddp_replicas, engine=_sync_early),
    Fault("unmarked-tp", "the gradient norm mixes up partitioned and replicated parameters", ("norm",),
          lambda layout, world: None if layout.tp > 1 else "the layout is not tensor-parallel",
          engine=_unmark_tp),
    # Adam then skips the bias correction of its first steps.
    Fault("stale-optimizer", "the optimizer's step count is from an earlier run", ("loss", "weight"),
          engine=lambda engine, dist: engine.training_state().loaded(1000)),
    Fault("stale-masters", "the master weights are not updated", ("weight",),
          lambda layout, world: "FSDP2's parameters are the master weights" if layout.engine == "fsdp2" else None,
          engine=_undo_master_updates, needs_masters=True),
    Fault("bf16-reduction", "gradients are reduced in bf16 instead of fp32", ("format",),
          lambda layout, world: None if layout.dp_size(world) * layout.sp > 1
          else "there is no second rank to reduce gradients with",
          settings=lambda run: replace(run, gradients=replace(run.gradients, reduced="bf16")), needs_masters=True),
    Fault("bf16-accumulation", "gradients are accumulated in bf16 instead of fp32", ("format",),
          lambda layout, world: None if layout.zero.stage and layout.pp == 1 and not layout.zero.offload_optimizer
          else "its engine always accumulates in fp32",
          settings=lambda run: replace(run, gradients=replace(run.gradients, accumulated="bf16")),
          needs_masters=True),
    Fault("stale-second-copy", "parameters are gathered from an earlier step", ("loss", "weight"),
          lambda layout, world: None if layout.zero.hpz_partition_size > 1
          else "the layout has no second copy of the parameters (zero_hpz_partition_size)",
          engine=_keep_second_copy),
    Fault("drifting-copy", "replicas on the last rank drift by 1e-6 a step, in bf16 by one epsilon",
          ("copy",), _reason_without_copies, engine=_let_copy_drift),
    Fault("wrong-mask", "attention sees later tokens", ("loss", "gradient"), engine=_remove_mask),
    Fault("shifted-targets", "targets are shifted by one position", ("loss", "gradient"),
          engine=_shift_targets),
    Fault("duplicated-data", "one rank trains on the sequences of another", ("loss", "gradient"),
          _reason_without_replicas, rows=_duplicate_data),
    Fault("untied-head", "the head's gradient does not reach the tied table", ("gradient",),
          lambda layout, world: "its head is partitioned over tensor-parallel ranks"
          if layout.pp == 1 and layout.tp > 1 else None, model=_untie_head),
    Fault("wrong-sp-scale", "gradients are summed, not averaged, over sequence-parallel ranks",
          ("gradient", "norm"),
          lambda layout, world: None if layout.sp > 1 else "the layout is not sequence-parallel",
          engine=lambda engine, dist: _scale_gradients(engine, dist.mesh.sp_size)),
    *(Fault(name, description, shows, _reason_unless_single_process, engine=engine, shared=True)
      for name, description, shows, engine in (
          ("half-the-micro-batches", "half of a step's micro-batches are skipped", ("forward", "backward"),
           _repeat_half_of_micro_batches),
          ("rate-of-one-group", "the learning rate reaches the first group only", ("optimizer",),
           _change_groups(1, lr=lambda lr: 2e-3)),
          ("decay-on-norms", "weight decay is applied to norms and biases", ("optimizer",),
           _change_groups(1, weight_decay=lambda none: 0.1)),
          ("clip-scales-up", "clipping scales small gradients up to the clip", ("reduction",),
           _change_before_step(_scale_up_to_clip)),
          ("mask-beyond-64", "attention sees later tokens, from position 64 on", ("forward", "backward"),
           _unmask_beyond_64),
          ("last-loss", "the loss is that of the last micro-step", ("forward",), _report_last_loss),
          ("beta2", "beta2 is 0.99 instead of 0.95", ("optimizer",),
           _change_groups(betas=lambda betas: (betas[0], 0.99))),
          ("eps-x10", "Adam's epsilon is ten times as large", ("optimizer",),
           _change_groups(eps=lambda eps: 10 * eps)),
          ("rate-1-percent-off", "the learning rate is 1 % too large", ("optimizer",),
           _change_groups(lr=lambda lr: lr * 1.01)),
          ("ignored-counted", "the mean loss counts ignored targets", ("forward", "reduction"),
           _count_ignored),
          ("evaluation-cut-short", "an evaluation omits the last target of a sequence", ("evaluation",),
           _shorten_evaluation),
      )),
)

FAULTS = {fault.name: fault for fault in _FAULTS}
