"""Engine for layout fsdp2: torch's fully_shard, which shards every parameter by rows over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.torch_internals import initialize_fsdp, tree_leaves
from ezpz_llm.training.engine.gradient_reducer import GradientReducer
from ezpz_llm.training.engine.gradients import sharded_norm_and_clip
from ezpz_llm.training.engine.masters import MasterWeights
from ezpz_llm.training.engine.optimizer_state import (
    Access,
    EngineState,
    Frozen,
    MakeOptimizer,
    Slice,
    groups_of,
    stepped_by,
)
from ezpz_llm.training.engine.precision import LossScale, gradient_dtype, parameter_dtype
from ezpz_llm.training.engine.sharded_start import fill_rows, first_element
from ezpz_llm.training.engine.torch_engine import TorchEngine
from ezpz_llm.training.layout.precision_recipes import RECIPES
from ezpz_llm.training.layout.resolve import Resolved
from ezpz_llm.training.model.gpt import Block
from ezpz_llm.training.model.parameters import Placement, whole_box


class Fsdp2Engine(TorchEngine):
    """Engine with row-sharded parameters, gradients and moments; blocks gather parameters while they compute.

    The optimizer steps this rank's rows as plain tensors, which share their storage with the model's parameters.
    The rows are in fp32, so they are master weights. In bf16 and fp16, they are gathered in two bytes, and
    gradients are reduced after each micro-step, so that no rank stores more of them than its rows. With
    `shard_within`, rows are sharded over a group of neighboring ranks: they are gathered and reduced within the
    group, then gradients are averaged across groups.

    Raises:
        UserError: this torch's fully_shard is incorrect on CPU.
    """

    def __init__(self, model: nn.Module, resolved: Resolved, dist: Dist, groups: list[dict[str, Any]],
                 make: MakeOptimizer) -> None:
        has_masters = RECIPES[resolved.precision].has_masters
        # cast_forward_inputs=False keeps the rotary angles, an input of blocks, in fp32.
        policy = MixedPrecisionPolicy(param_dtype=parameter_dtype(resolved.precision),
                                      reduce_dtype=gradient_dtype(resolved.gradients.reduced),
                                      cast_forward_inputs=False) if has_masters else MixedPrecisionPolicy()
        self._reduces_each = has_masters
        names = {parameter: name for name, parameter in model.named_parameters()}
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
        # Each unit is gathered separately. Parameters outside of units, such as a tied embedding, stay gathered for
        # the whole pass.
        module_names = {module: name for name, module in model.named_modules()}
        for block in units(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
            if not isinstance(block, Block):
                block.register_forward_hook(partial(_check_output, module_names[block]))
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if not DEVICES[dist.device.type].averages:
            _sum_and_divide(model, dist.device.type)
        fill_rows(model, dist.device, *self._place)
        self._sharded = dict(model.named_parameters())
        self._rows = {name: parameter.to_local().detach() for name, parameter in self._sharded.items()}
        rows = [{**group, "params": [self._rows[names[parameter]] for parameter in group["params"]]}
                for group in groups]
        super().__init__(model, resolved, dist, rows, make)
        model.register_forward_hook(self._reshard_after_evaluation)
        initialize_fsdp(model)  # a script may call a unit before the model

    def _reshard_after_evaluation(self, *_: Any) -> None:
        """Free the parameters of a script that a pass without gradients leaves gathered.

        Otherwise, what the script writes to them next, or reads of their gradients, would be lost.
        """
        if self.may_have_unused and not torch.is_grad_enabled():
            _reshard(self.module)

    def _make_masters(self, model: nn.Module, resolved: Resolved) -> MasterWeights | None:
        return None  # the rows are fp32

    def _make_reducer(self, model: nn.Module, resolved: Resolved) -> GradientReducer | None:
        return None

    def own_parameters(self) -> Iterable[Tensor]:
        """Return this rank's rows; `module.parameters()` are gathered after a forward pass without a backward."""
        return self._rows.values()

    def backward(self, loss: Tensor, is_last: bool, retain_graph: bool = False) -> None:
        """Accumulate the micro-batch's gradients; reduce them in the last backward pass, or in each one."""
        self.module.set_requires_gradient_sync(is_last or self._reduces_each or self.may_have_unused)
        super().backward(loss, is_last, retain_graph)
        self._move_gradients()

    def _move_gradients(self) -> None:
        """Add the reduced gradients of the sharded parameters to those of the rows."""
        for name, parameter in self._sharded.items():
            rows = self._rows[name]
            # None for a parameter that the loss does not depend on, which the check of a run's first step reports.
            if parameter.grad is not None:
                reduced, parameter.grad = parameter.grad.to_local(), None
                rows.grad = reduced if rows.grad is None else rows.grad.add_(reduced)

    def show_gradients(self) -> None:
        """Do nothing: `backward` has moved the gradients to the rows."""

    @property
    def hides_gradients(self) -> bool:
        """True: the rows have the gradients."""
        return True

    @property
    def gradient_groups(self) -> tuple[ProcessGroup | None, ...]:
        """The ranks over which rows are sharded."""
        return (self._shard_group,)

    def local_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the gradients of this rank's rows."""
        return ((parameter, gradient) for name, parameter in self._sharded.items()
                if (gradient := self._rows[name].grad) is not None)

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        """Remove the gradients of parameters."""
        forgotten = set(parameters)
        for name, parameter in self._sharded.items():
            if parameter in forgotten:
                self._rows[name].grad = None

    def discard_gradients(self) -> None:
        """Remove all gradients."""
        for name, parameter in self._sharded.items():
            parameter.grad = self._rows[name].grad = None

    def step(self, lr: float | None) -> Tensor:
        """Clip gradients and step the optimizer; return the global norm (0-d), Inf for a skipped fp16 step."""
        norm = super().step(lr)
        for rows in self._rows.values():
            rows.grad = None
        _reshard(self.module)
        return norm

    def _norm_and_clip(self, scale: float) -> Tensor:
        grads = [rows.grad for rows in self._rows.values() if rows.grad is not None]
        return sharded_norm_and_clip(grads, self.device, self._shard_group, self._optimizer, self.clip, scale)

    def training_state(self) -> EngineState:
        """Return slices of parameters and optimizer state, sharded by rows."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self._sharded.items()}
        return _FsdpState(self.module, self._rows, shapes, self._optimizer, self._place, self._copy,
                          self.loss_scale)


def units(model: nn.Module) -> list[nn.Module]:
    """Return the modules to gather as a unit: the blocks of a GPT, or the members of outermost ModuleLists.

    A member that shares a parameter with a module outside of it is not a unit.
    """
    if blocks := [module for module in model.modules() if isinstance(module, Block)]:
        return blocks
    uses = _count_uses(model)
    members: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and isinstance(module, nn.ModuleList):
            for member in module:
                inside.update(member.modules())
                member_uses = _count_uses(member)
                if member_uses and all(uses[parameter] == count for parameter, count in member_uses.items()):
                    members.append(member)
    return members


def _check_output(name: str, block: nn.Module, inputs: Any, output: Any) -> None:
    """Check that fully_shard finds a tensor in the output of unit `name`, where the unit's backward pass starts.

    Raises:
        UserError: it does not, for example because the output is an object of a user's class.
    """
    if not any(isinstance(leaf, Tensor) or is_dataclass(leaf) for leaf in tree_leaves(output)):
        raise UserError(f"{name} returns a {type(output).__name__}, in which fully_shard finds no tensor",
                        where="layout fsdp2",
                        instead="return a tensor, tuple, list, dict or dataclass, or use zero3")


def _count_uses(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _sum_and_divide(model: nn.Module, device_type: str) -> None:
    """Average gradients by a sum and a division, on devices whose backend averages incorrectly.

    If it sums instead, losses with Adam and clipping do not show the bug, but norms do.

    Raises:
        UserError: this torch is too old for the setting. In some such versions, fully_shard fails on CPU.
    """
    for part in model.modules():
        if not isinstance(part, FSDPModule):
            continue
        if not hasattr(part, "set_force_sum_reduction_for_comms"):
            raise UserError(f"fully_shard of torch {torch.__version__} is incorrect on {device_type}: it fails, "
                            "or averages gradients incorrectly", where="layout fsdp2",
                            instead="upgrade torch, or use --ds-config zero3, which shards the same state")
        part.set_force_sum_reduction_for_comms(True)


class _FsdpState(EngineState):
    """State of row-sharded parameters; as with torch.chunk, each rank has equally many rows until none is left.

    Args:
        module: the sharded model.
        rows: this rank's rows, which the optimizer steps, by parameter name.
        shapes: shapes of the whole parameters.
        place: index among the ranks over which rows are sharded, and their number.
        copy: index among the ranks with the same rows, and their number.
        scale: the loss scale of fp16, if any.
    """

    def __init__(self, module: torch.nn.Module, rows: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]],
                 optimizer: torch.optim.Optimizer, place: tuple[int, int], copy: tuple[int, int],
                 scale: LossScale | None) -> None:
        trained = stepped_by(optimizer)
        super().__init__(optimizer, scale, [
            Frozen(Placement(name, shapes[name], (whole_box(shapes[name]),)), part,
                   first_element(shapes[name], *place), *copy)
            for name, part in rows.items() if part not in trained])
        self.module, self.shapes = module, shapes
        self.rows = {name: part for name, part in rows.items() if part in trained}
        self.place, self.copy = place, copy

    def _slices(self, tensors_of: Access) -> Iterator[Slice]:
        groups = {rows: group for group in groups_of(self.optimizer) for rows in group["params"]}
        for name, rows in self.rows.items():
            if not rows.numel():
                continue
            shape = self.shapes[name]
            start = first_element(shape, *self.place)
            with tensors_of(self.optimizer, groups[rows], rows) as tensors:
                yield Slice(name, shape, whole_box(shape), start, start + rows.numel(),
                            {kind: tensor.view(-1) for kind, tensor in tensors.items()}, *self.copy)

    def stepped(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """Yield the rows of each parameter."""
        return ((rows, [name]) for name, rows in self.rows.items())

    def refresh(self) -> None:
        """Reshard the parameters, so that the next forward pass gathers the new weights."""
        _reshard(self.module)


def _reshard(module: nn.Module) -> None:
    """Free the gathered parameters, which a forward pass without a backward pass leaves."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
