"""Parameters and buffers of a user's model before training: checks, fp32, and rank 0's values on all ranks."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.torch_internals import has_step_hooks
from ezpz_llm.training.layout.layout import Layout

_WHERE = "ezpz_llm.wrap"


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer has all parameters of the model that are not frozen, no others, and no state.

    Raises:
        UserError: the parameters differ, a group has only frozen parameters, or the optimizer has state.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or not has_step_hooks(optimizer):
        raise UserError(f"{type(optimizer).__name__} is not an initialized torch.optim.Optimizer", where=_WHERE,
                        instead="a class that calls torch.optim.Optimizer.__init__ with its groups")
    if inner := [name for name, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]:
        name = type(optimizer).__name__
        raise UserError(f"{name}.{inner[0]} is another optimizer, whose state checkpoints would not have",
                        where=_WHERE, instead=f"wrap with that optimizer, and what {name} adds in model.gathered() "
                                              "after model.step()")
    optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in optimized:
            raise UserError(f"the optimizer does not have the parameter {name}, which would never change",
                            where=_WHERE, instead="one optimizer of model.parameters(), with a group for each kind")
    if optimized - set(model.parameters()):
        raise UserError("the optimizer has parameters that do not belong to the model", where=_WHERE,
                        instead="a model and an optimizer for each call of wrap, with parameters of lists in "
                                "nn.ParameterList")
    for number, group in enumerate(optimizer.param_groups):
        if not any(parameter.requires_grad for parameter in group["params"]):
            raise UserError(f"all parameters of the optimizer's group {number} are frozen", where=_WHERE,
                            instead="an optimizer without this group; no wrap of a model that is not trained")
    if any(state.get("step", 1) for state in optimizer.state.values()):  # Adagrad's is 0 before the first step
        raise UserError("the optimizer has already taken a step", where=_WHERE,
                        instead="call wrap before the first step, and load_checkpoint to restore state")


def check_parameters(model: nn.Module, layout: Layout, ranks: int) -> None:
    """Check that the layout supports each parameter and its gradient.

    Raises:
        UserError: the model has compiled modules, or the layout does not support a parameter.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(f"{name or 'the model'} has sparse gradients, which layouts do not support",
                            where=_WHERE, instead="sparse=False")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None and (
                layout.shard_stage() == 3 or ranks > 1):
            raise UserError(f"{name or 'the model'} limits its norms in each forward pass, to other values on each "
                            "rank", where=_WHERE,
                            instead="max_norm=None, and a limit in model.gathered() after model.step()")
    for name, parameter in model.named_parameters():
        if "_orig_mod" in name.split("."):
            raise UserError(f"torch.compile(module) has renamed the parameter {name.replace('_orig_mod.', '')}, "
                            "so checkpoints would not fit the plain model", where=_WHERE,
                            instead="module.compile(), which compiles in place")
        if parameter.is_complex():
            raise UserError(f"the parameter {name} is complex", where=_WHERE,
                            instead="two real parameters, and torch.complex in forward")
        if not parameter.is_floating_point():
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UserError(f"the parameter {name} has the dtype {dtype}, but layouts convert parameters to "
                            "floating point", where=_WHERE, instead="a buffer (register_buffer)")
        if layout.engine != "ddp" and not parameter.dim():
            raise UserError(f"the parameter {name} is a scalar, which the layout {layout.name} does not support",
                            where=_WHERE, instead="reshape it to (1,), or use ddp")
        if layout.shard_stage() == 3 and not parameter.numel():
            raise UserError(f"the parameter {name} has no elements, which the layout {layout.name} does not "
                            "support", where=_WHERE, instead="a buffer, or zero2")


def convert_parameters(model: nn.Module) -> None:
    """Make parameters contiguous and fp32, as engines and checkpoints expect; layouts set the precision themselves.

    Convolutions still compute in the memory format of their inputs.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.float().contiguous()


def broadcast_values(model: nn.Module, dist: Dist) -> None:
    """Broadcast the parameters and buffers of rank 0. Collective."""
    if dist.world_size == 1:
        return
    for tensor in chain((parameter.detach() for parameter in model.parameters()), model.buffers()):
        _broadcast(tensor, dist)


def _broadcast(tensor: Tensor, dist: Dist) -> None:
    # As bytes: backends do not support every dtype, such as int16. A lazy conjugate or negative has other bytes.
    values = tensor.to(dist.device).resolve_conj().resolve_neg().contiguous()
    torch.distributed.broadcast(values.view(-1).view(torch.uint8), src=0)
    if values is tensor:
        return
    if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        tensor.data = values.to(tensor.device)  # expanded: its elements share memory, so they cannot be written
    else:
        tensor.copy_(values)
