"""Faults to inject into a layout, to see that they are caught: each is one that parallel training has had.

A fault works on the layout under test and never on the reference; one that is shared works on one process, which is
then held to the definition of the step. Names and descriptions import no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ezpz_llm.base import unknown
from ezpz_llm.layout.layout import Layout

if TYPE_CHECKING:
    from ezpz_llm.certify.reference import Rows
    from ezpz_llm.dist import Dist
    from ezpz_llm.engine.base import Engine
    from ezpz_llm.layout.resolve import Resolved


@dataclass(frozen=True)
class Fault:
    """An injected fault.

    Attributes:
        shows: the kinds of findings (see verdict.py) that must name it; of a shared one, the phases
            (one_process.py).
        shared: whether it is in what every layout uses, and so in the reference too.
        needs: why it cannot be injected into a layout on a number of ranks, None where it can.
        of_masters: whether it is one of master weights, which recipes with fp32 parameters do not have.
        settings, model, engine, rows: what it does to the settings of the run, to the model before the engine sees
            it, to the engine at work, and to the choice of this rank's sequences.
    """

    name: str
    description: str
    shows: tuple[str, ...]
    needs: Callable[[Layout, int], str | None] = lambda layout, world: None
    settings: Callable[[Resolved], Resolved] | None = None
    model: Callable[[Any, Dist, Layout], None] | None = None
    engine: Callable[[Engine, Dist], None] | None = None
    rows: Callable[[Rows, Dist], Rows] | None = None
    of_masters: bool = False
    shared: bool = False


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


def _dropped_bucket(engine: Engine, dist: Dist) -> None:
    """One block's gradients reach the sum from the first data-parallel rank only."""
    if dist.mesh.place("dp", "sp")[0] == 0:
        return
    for name, parameter in engine.module.named_parameters():
        if name.startswith("transformer.h.1."):
            parameter.register_hook(lambda gradient: gradient * 0)


def _early_sync(engine: Any, dist: Dist) -> None:
    inner, calls = engine.forward, [0]

    def forward(*inputs: Any, last_micro_step: bool) -> Any:
        """The forward pass with gradients reduced after the first micro-step instead of the last."""
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
        """A step during which tensor-parallel parameters are marked as whole: the norm counts them wrongly."""
        for (_, parameter), placement in zip(named, wrong, strict=True):
            place(parameter, placement)
        norm = inner(lr)
        for (_, parameter), placement in zip(named, right, strict=True):
            place(parameter, placement)
        return norm

    engine.step = step


def _stale_masters(engine: Any, dist: Dist) -> None:
    """Parameters get each step's update, and the master weights, from which the next step goes on, do not."""
    inner = engine.train_step

    def train_step(*step: Any) -> Any:
        """A step after which every part of the weights has its values from before it."""
        before = [part.tensors["weight"].clone() for part in engine.training_state().slices()]
        told = inner(*step)
        for part, old in zip(engine.training_state().slices(), before, strict=True):
            part.tensors["weight"].copy_(old)
        return told

    engine.train_step = train_step


def _stale_second_copy(engine: Any, dist: Dist) -> None:
    """hpZ's second copy of the parameters outlives the optimizer's step."""
    engine._engine.optimizer.invalidate_secondary_tensor = lambda: None


def _drifting_copy(engine: Any, dist: Dist) -> None:
    """The last rank's copies of what others hold too move by a millionth in every step, or by the least that their
    format can show: of the weights that are stepped, or else of the parameters that it computes with.
    """
    import torch

    from ezpz_llm.certify.copies import whole_parameters

    inner = engine.train_step

    def train_step(*step: Any) -> Any:
        """A step after which the last rank's copies have moved."""
        told = inner(*step)
        if dist.rank == dist.world_size - 1:
            held = [part.tensors["weight"] for part in engine.training_state().slices()
                    if part.replicas > 1 or not part.primary]
            for tensor in held or [part.tensors["parameter"] for part in whole_parameters(engine)]:
                tensor.mul_(1 + max(1e-6, torch.finfo(tensor.dtype).eps))
        return told

    engine.train_step = train_step


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
        """A rank's rows of a batch; the last data-parallel rank gets the first one's."""
        size = dist.mesh.dp_size
        return np.split(batch, size)[0 if dist.mesh.dp_rank == size - 1 else dist.mesh.dp_rank]
    return duplicated


# Faults of code that all layouts share, which a comparison of layouts cannot see.
def _half_of_the_micro_batches(engine: Any, dist: Dist) -> None:
    inner = engine.train_step

    def train_step(micro_batches: Any, lr: float, span: Any) -> Any:
        """A step that takes the first half of its micro batches twice, and the others never."""
        kept = list(micro_batches)
        half = kept[:len(kept) // 2]
        return inner([*half, *half], lr, span)

    engine.train_step = train_step


def _last_loss(engine: Any, dist: Dist) -> None:
    forward, train_step = engine.forward, engine.train_step
    last: list[Any] = []

    def watched(*inputs: Any, last_micro_step: bool) -> Any:
        """The forward pass; its loss is kept."""
        loss = forward(*inputs, last_micro_step=last_micro_step)
        last[:] = [loss.detach()]
        return loss

    def told(*step: Any) -> Any:
        """A step that tells the last micro-step's loss instead of the mean over all."""
        _, norm = train_step(*step)
        return last[0], norm

    engine.forward, engine.train_step = watched, told


def _mask_beyond(engine: Engine, dist: Dist) -> None:
    """Queries from position 64 on see what follows."""
    import torch
    from torch.nn import functional

    from ezpz_llm.model.gpt import CausalProduct

    def forward(q: Any, k: Any, v: Any) -> Any:
        """Causal attention whose rows from 64 on see every token, later ones too."""
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        seen[64:] = True
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])

    for module in engine.module.modules():
        if isinstance(module, CausalProduct):
            module.forward = forward  # type: ignore[method-assign]


def _before_each_step(change: Callable[[Any, Any], None]) -> Callable[[Engine, Dist], None]:
    """Let `change` have the engine and its optimizer before each of the optimizer's steps."""
    def inject(engine: Engine, dist: Dist) -> None:
        engine.training_state().optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs: change(engine, optimizer))
    return inject


def _in_groups(first: int = 0, **values: Callable[[Any], Any]) -> Callable[[Engine, Dist], None]:
    """Change numbers of the optimizer's groups from number `first` on."""
    def change(engine: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups[first:]:
            group.update({key: new(group[key]) for key, new in values.items()})
    return _before_each_step(change)


def _clip_scales_up(engine: Any, optimizer: Any) -> None:
    factor = engine._clip / engine.step_skip.norm.item()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(max(1.0, factor))


def _count_ignored(engine: Any, dist: Dist) -> None:
    """The mean is over all targets, those that are ignored adding nothing to the sum."""
    engine.module.lm_head.register_forward_hook(
        lambda module, inputs, loss: loss * (inputs[1] >= 0).float().mean())


def _evaluate_less(engine: Any, dist: Dist) -> None:
    inner = engine.loss_sum

    def loss_sum(tokens: Any, targets: Any) -> Any:
        """The summed loss of a batch without the last target of each sequence."""
        shorter = targets.clone()
        shorter[:, -1] = -100
        return inner(tokens, shorter)

    engine.loss_sum = loss_sum


def _one_process(layout: Layout, world: int) -> str | None:
    return None if layout.engine == "ddp" and world == 1 else "all layouts share it: ddp on 1 rank has it"


def _replicas(layout: Layout, world: int) -> str | None:
    return None if layout.dp_size(world) > 1 else "it has no second data-parallel rank"


def _copies(layout: Layout, world: int) -> str | None:
    has_whole = layout.engine != "fsdp2" and layout.zero.stage != 3
    if layout.tp > 1 or (has_whole and world > layout.pp):
        return None
    return "no rank has a copy of what another one holds"


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
          engine=_dropped_bucket),
    Fault("accumulation-not-divided", "gradients are not divided by the number of micro-steps",
          ("gradient", "norm"), engine=lambda engine, dist: _scale_gradients(engine, engine.batch.accumulation)),
    Fault("early-sync", "gradients are reduced after the first micro-step only", ("gradient", "norm"),
          _ddp_replicas, engine=_early_sync),
    Fault("unmarked-tp", "the gradient norm does not know which parameters are divided over ranks", ("norm",),
          lambda layout, world: None if layout.tp > 1 else "it is not tensor-parallel", engine=_unmarked_tp),
    # Adam then corrects no bias of its first moments.
    Fault("stale-optimizer", "the optimizer's step count is an earlier run's", ("loss", "weight"),
          engine=lambda engine, dist: engine.training_state().loaded(1000)),
    Fault("stale-masters", "the master weights are not updated", ("weight",),
          lambda layout, world: "its parameters are the master weights" if layout.engine == "fsdp2" else None,
          engine=_stale_masters, of_masters=True),
    Fault("bf16-reduction", "gradients travel in bf16, not in fp32", ("format",),
          lambda layout, world: None if layout.dp_size(world) * layout.sp > 1
          else "no other rank has its parameters",
          settings=lambda run: replace(run, gradients=replace(run.gradients, reduced="bf16")), of_masters=True),
    Fault("bf16-accumulation", "gradients are added in bf16, not in fp32", ("format",),
          lambda layout, world: None if layout.zero.stage and layout.pp == 1 and not layout.zero.offload_optimizer
          else "its engine adds them in fp32 alone",
          settings=lambda run: replace(run, gradients=replace(run.gradients, accumulated="bf16")), of_masters=True),
    Fault("stale-second-copy", "passes gather the parameters of an earlier step", ("loss", "weight"),
          lambda layout, world: None if layout.zero.hpz_partition_size > 1
          else "it has no second copy of the parameters (zero_hpz_partition_size)", engine=_stale_second_copy),
    Fault("drifting-copy", "copies of parameters on the last rank drift by 1e-6 a step, in bf16 by one place",
          ("copy",), _copies, engine=_drifting_copy),
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
    *(Fault(name, description, shows, _one_process, engine=engine, shared=True)
      for name, description, shows, engine in (
          ("half-the-micro-batches", "half of a step's micro batches are dropped", ("forward", "backward"),
           _half_of_the_micro_batches),
          ("rate-of-one-group", "the learning rate reaches the first group only", ("optimizer",),
           _in_groups(1, lr=lambda lr: 2e-3)),
          ("decay-on-norms", "norms and biases decay", ("optimizer",),
           _in_groups(1, weight_decay=lambda none: 0.1)),
          ("clip-scales-up", "clipping scales small gradients up to its norm", ("reduction",),
           _before_each_step(_clip_scales_up)),
          ("mask-beyond-64", "attention sees what follows, from position 64 on", ("forward", "backward"),
           _mask_beyond),
          ("last-loss", "the loss is that of the last micro-step", ("forward",), _last_loss),
          ("beta2", "the second moments' beta is 0.99, not 0.95", ("optimizer",),
           _in_groups(betas=lambda betas: (betas[0], 0.99))),
          ("eps-x10", "Adam's epsilon is ten times as large", ("optimizer",), _in_groups(eps=lambda eps: 10 * eps)),
          ("rate-1-percent-off", "the learning rate is 1 % too large", ("optimizer",),
           _in_groups(lr=lambda lr: lr * 1.01)),
          ("ignored-counted", "targets that are ignored count in the mean", ("forward", "reduction"),
           _count_ignored),
          ("evaluation-cut-short", "an evaluation leaves out the last target of a sequence", ("evaluation",),
           _evaluate_less),
      )),
)

FAULTS = {fault.name: fault for fault in _ALL}
