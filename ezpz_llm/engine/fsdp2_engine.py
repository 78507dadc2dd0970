"""The engine of layout fsdp2: torch's fully_shard, which shards every parameter over all ranks by its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ezpz_llm.base import UserError
from ezpz_llm.dist import Dist
from ezpz_llm.engine.gradients import divided_norm_and_clip
from ezpz_llm.engine.masters import MasterWeights
from ezpz_llm.engine.optimizer_state import Access, EngineState, MakeOptimizer, Slice
from ezpz_llm.engine.precision import LossScale, gradient_dtype, parameter_dtype
from ezpz_llm.engine.sharded_start import fill_rows, first_element
from ezpz_llm.engine.torch_engine import TorchEngine
from ezpz_llm.layout.precision_recipes import RECIPES
from ezpz_llm.layout.resolve import Resolved
from ezpz_llm.model.gpt import Block
from ezpz_llm.model.parameters import whole


class Fsdp2Engine(TorchEngine):
    """Rows of parameters, gradients and moments on every rank; a block's parameters are gathered while it computes.

    The optimizer steps this rank's rows as plain tensors, which share their storage with the model's parameters.
    Rows are fp32, and so master weights; in bf16 and fp16 they are gathered in two bytes, and gradients are reduced
    after each micro-step, so that no rank keeps more than its rows of them. With `shard_within` rows are those of a
    group of neighbours: gathered and reduced there, after which gradients are averaged across groups.

    Raises:
        UserError: this torch's fully_shard is wrong on a CPU, or a parameter is a scalar.
    """

    def __init__(self, model: nn.Module, resolved: Resolved, dist: Dist, groups: list[dict[str, Any]],
                 make: MakeOptimizer) -> None:
        low = RECIPES[resolved.precision].has_masters
        # Rotary angles, which blocks are given in fp32, stay so.
        policy = MixedPrecisionPolicy(param_dtype=parameter_dtype(resolved.precision),
                                      reduce_dtype=gradient_dtype(resolved.gradients.reduced),
                                      cast_forward_inputs=False) if low else MixedPrecisionPolicy()
        self._reduces_each = low
        names = {parameter: name for name, parameter in model.named_parameters()}
        if scalars := [name for name, parameter in model.named_parameters() if not parameter.dim()]:
            raise UserError(f"fully_shard deals rows, and the parameter {scalars[0]} is a scalar",
                            where="layout fsdp2", instead="a parameter of shape (1,), or --ds-config zero3")
        dist.ensure_group()
        rank, size = dist.mesh.place("dp", "sp")
        within = min(resolved.layout.zero.shard_within or size, size)
        self._place, self._copy = (rank % within, within), (rank // within, size // within)
        if within == size:
            self._shard_group = dist.mesh.real_group("dp", "sp")
            mesh = DeviceMesh.from_group(self._shard_group, dist.device.type)
        else:
            across, self._shard_group = dist.mesh.divided(within)
            mesh = DeviceMesh.from_group([across, self._shard_group], dist.device.type,
                                         torch.arange(size).view(-1, within), mesh_dim_names=("across", "within"))
        # Units one by one; what lies outside of them, a tied table among it, is gathered for the whole pass.
        for block in units(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if dist.device.type == "cpu":
            _sum_and_divide(model)
        fill_rows(model, dist.device, *self._place)
        self._divided = dict(model.named_parameters())
        self._rows = {name: parameter.to_local().detach() for name, parameter in self._divided.items()}
        rows = [{**group, "params": [self._rows[names[parameter]] for parameter in group["params"]]}
                for group in groups]
        super().__init__(model, resolved, dist, rows, make)

    def _make_masters(self, model: nn.Module, resolved: Resolved) -> MasterWeights | None:
        return None  # the rows are fp32

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model

    def own_parameters(self) -> Iterable[Tensor]:
        """This rank's rows of each parameter; the module's own are whole ones after a forward pass alone."""
        return self._rows.values()

    def forward(self, *inputs: Any, last_micro_step: bool, **named: Any) -> Any:
        """The loss of a micro batch; gradients are reduced in the last one's backward pass, or in each one's."""
        self.module.set_requires_gradient_sync(last_micro_step or self._reduces_each)
        return self.module(*inputs, **named)

    def _norm_and_clip(self, scale: float) -> Tensor:
        for name, parameter in self._divided.items():
            # A parameter that no loss reached has none; what a run checks of its first step names it.
            self._rows[name].grad = None if parameter.grad is None else parameter.grad.to_local()
            parameter.grad = None
        grads = [rows.grad for rows in self._rows.values() if rows.grad is not None]
        return divided_norm_and_clip(grads, self._shard_group, self._optimizer, self._clip, scale)

    def training_state(self) -> EngineState:
        """Slices of parameters and optimizer state as FSDP2 shards them by rows."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self._divided.items()}
        return FsdpState(self.module, self._rows, shapes, self._optimizer, self._place, self._copy, self._scale)


def units(model: nn.Module) -> list[nn.Module]:
    """What is gathered at once: the blocks of our model, else the members of the outermost ModuleLists.

    No member is a unit where one of its parameters lies outside of it, too.
    """
    if blocks := [module for module in model.modules() if isinstance(module, Block)]:
        return blocks
    holders = _counted(model)
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and isinstance(module, nn.ModuleList):
            for member in module:
                inside.update(member.modules())
                own = _counted(member)
                if own and all(holders[parameter] == count for parameter, count in own.items()):
                    found.append(member)
    return found


def _counted(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _sum_and_divide(model: nn.Module) -> None:
    """Average gradients without gloo's own average, which in some versions of torch is a sum.

    See github.com/pytorch/pytorch/issues/162338. Adam and clipping hide it: the losses stay right, norms do not.

    Raises:
        UserError: this torch is too old to be told. Some such versions do not get as far as the sum.
    """
    for part in model.modules():
        if not isinstance(part, FSDPModule):
            continue
        if not hasattr(part, "set_force_sum_reduction_for_comms"):
            raise UserError(f"fully_shard of torch {torch.__version__} is wrong on a CPU: it fails, or sums "
                            "gradients that it should average", where="layout fsdp2",
                            instead="a newer torch, or --ds-config zero3, which divides as much")
        part.set_force_sum_reduction_for_comms(True)


class FsdpState(EngineState):
    """Rows of every parameter, as torch.chunk deals them: equally many to each rank, until none is left.

    Args:
        module: the divided model.
        rows: by the parameter's name, what this rank holds and the optimizer steps.
        shapes: of the whole parameters.
        place: number among the ranks that the rows are divided over, and how many these are.
        copy: the same among the ranks that have the same rows.
        scale: the loss scale of fp16, if there is one.
    """

    def __init__(self, module: torch.nn.Module, rows: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]],
                 optimizer: torch.optim.Optimizer, place: tuple[int, int], copy: tuple[int, int],
                 scale: LossScale | None) -> None:
        super().__init__(optimizer, scale)
        self.module, self.rows, self.shapes = module, rows, shapes
        self.place, self.copy = place, copy

    def _slices(self, tensors_of: Access) -> Iterator[Slice]:
        groups = {rows: group for group in self.optimizer.param_groups for rows in group["params"]}
        for name, rows in self.rows.items():
            if not rows.numel():
                continue
            shape = self.shapes[name]
            start = first_element(shape, *self.place)
            with tensors_of(self.optimizer, groups[rows], rows) as tensors:
                yield Slice(name, shape, whole(shape), start, start + rows.numel(),
                            {kind: tensor.view(-1) for kind, tensor in tensors.items()}, *self.copy)

    def loaded(self, optimizer_step: int) -> None:
        """Shard the parameters again, so that the next forward pass gathers the loaded values."""
        super().loaded(optimizer_step)
        # A forward pass without a backward one leaves parameters gathered, with the values from before.
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
