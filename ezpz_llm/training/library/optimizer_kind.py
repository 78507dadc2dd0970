"""Kind of a script's optimizer, from trial steps on small tensors: its state, and whether it may be sharded."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ezpz_llm.core.base import UserError

_ELEMENTS = 6144
"""Approximate number of elements of a trial tensor. bitsandbytes keeps fp32 state below 4096 elements."""
_STEPS = 3
_WHERE = "ezpz_llm.wrap"
Split = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class OptimizerKind:
    """Result of trial steps.

    Attributes:
        name: class of the optimizer.
        templates: state of a parameter after a step, for each parameter group: tensors as long as the parameter,
            which are reduced to their dtype on the meta device, and single numbers.
        unsupported: name and type of state that checkpoints cannot hold; None if there is none.
    """

    name: str
    templates: tuple[dict[str, Any], ...]
    unsupported: str | None


def try_steps(optimizer: torch.optim.Optimizer) -> OptimizerKind:
    """Make trial steps with a copy of an optimizer.

    Raises:
        UserError: the optimizer needs a closure or sparse gradients, or a step fails.
    """
    name = type(optimizer).__name__
    tensors = _trial_tensors(optimizer)
    trial = _trained(optimizer, tensors, lambda tensor: [tensor])
    templates, unsupported = [], None
    for group in trial.param_groups:
        template: dict[str, Any] = {}
        for parameter in group["params"]:
            for key, value in trial.state.get(parameter, {}).items():
                if is_per_element(value, parameter):
                    template[key] = torch.empty(0, dtype=value.dtype, device="meta")
                elif is_number(value):
                    template[key] = value
                elif value is not None:
                    unsupported = f"{key} ({type(value).__name__})"
        templates.append(template)
    return OptimizerKind(name, tuple(templates), unsupported)


def check_sharding(optimizer: torch.optim.Optimizer, layout: str, keeps_rows: bool) -> None:
    """Check that steps of parts of parameters are the same as steps of whole parameters.

    Args:
        layout: name of the layout, for the message.
        keeps_rows: True if a part has whole rows; False if parts are flat.

    Raises:
        UserError: the optimizer's step of an element depends on other elements of its parameter.
    """
    tensors = _trial_tensors(optimizer)
    split: Split = _rows if keeps_rows else _flat_parts
    whole = [parameter.detach().reshape(-1) for group in _trained(
        optimizer, tensors, lambda tensor: [tensor]).param_groups for parameter in group["params"]]
    try:
        parts = [parameter.detach().reshape(-1) for group in _trained(
            optimizer, tensors, split).param_groups for parameter in group["params"]]
        is_same = torch.allclose(torch.cat(whole), torch.cat(parts), rtol=1e-5, atol=1e-7)
    except UserError:  # it requires matrices
        is_same = False
    if not is_same:
        raise UserError(f"{type(optimizer).__name__} steps whole parameters, but the layout {layout} divides "
                        "parameters over ranks", where=_WHERE,
                        instead="ddp, or an optimizer that steps each element by itself, such as AdamW or SGD")


def is_per_element(value: Any, parameter: Tensor) -> bool:
    """Return True for state in fp32 with one value per element of the parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype == torch.float32 and (
        value.dim() > 0)


def is_number(value: Any) -> bool:
    """Return True for a number, also in a 0-d tensor."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)


def _trial_tensors(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Return for each parameter group a tensor per number of dimensions of its parameters."""
    generator = torch.Generator().manual_seed(1)
    groups = []
    for group in optimizer.param_groups:
        devices = {parameter.dim(): parameter.device for parameter in group["params"]}
        groups.append([torch.randn(_shape(max(dimensions, 1)), generator=generator).to(
            "cpu" if device.type == "meta" else device) for dimensions, device in sorted(devices.items())])
    return groups


def _shape(dimensions: int) -> tuple[int, ...]:
    """Return a shape whose first dimension differs from the others."""
    side = max(2, round((_ELEMENTS / 1.5) ** (1 / dimensions)))
    return (math.ceil(1.5 * side), *[side] * (dimensions - 1))


def _flat_parts(tensor: Tensor) -> list[Tensor]:
    flat = tensor.reshape(-1)
    third = len(flat) // 3 + 5  # not a multiple of the block of an optimizer
    return [flat[:third], flat[third:2 * third], flat[2 * third:]]


def _rows(tensor: Tensor) -> list[Tensor]:
    return list(tensor.chunk(3))


def _trained(optimizer: torch.optim.Optimizer, tensors: list[list[Tensor]], split: Split) -> torch.optim.Optimizer:
    """Return a copy of the optimizer after steps on copies of the tensors' parts."""
    trial = _copy_of(optimizer)
    for group, members in zip(trial.param_groups, tensors, strict=True):
        group["params"] = [part.clone().requires_grad_() for tensor in members for part in split(tensor)]
    states = initial_states(optimizer)
    for original, group in zip(optimizer.param_groups, trial.param_groups, strict=True):
        if (state := states.get(original["params"][0])) is not None:
            for parameter in group["params"]:
                trial.state[parameter] = initial_state_for(parameter, state)
    generator = torch.Generator().manual_seed(2)
    with torch.random.fork_rng(devices=[]):
        for _ in range(_STEPS):
            gradients = [torch.randn(tensor.shape, generator=generator)
                         for members in tensors for tensor in members]
            parts = [part for gradient in gradients for part in split(gradient)]
            parameters = [parameter for group in trial.param_groups for parameter in group["params"]]
            for parameter, gradient in zip(parameters, parts, strict=True):
                parameter.grad = gradient.to(parameter.device)
            _step(trial)
    return trial


def _copy_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy without parameters and state."""
    stripped = {id(parameter): None for group in optimizer.param_groups for parameter in group["params"]}
    try:
        copies = {**stripped, id(optimizer.state): type(optimizer.state)(dict)}
        trial = copy.deepcopy(optimizer, copies)
        for name in vars(optimizer).keys() - vars(trial).keys():  # which the state of torch's class omits
            setattr(trial, name, copy.deepcopy(vars(optimizer)[name], copies))
    except Exception as error:
        raise UserError(f"{type(optimizer).__name__} cannot be copied for a trial step: {error}", where=_WHERE,
                        instead="an optimizer that copy.deepcopy can copy") from error
    vars(trial).pop("step", None)  # a scheduler's wrapper, which would step the original
    return trial


def _step(trial: torch.optim.Optimizer) -> None:
    name = type(trial).__name__
    try:
        type(trial).step(trial)
    except TypeError as error:
        if "closure" not in str(error):
            raise UserError(f"a trial step of {name} failed: {error}", where=_WHERE,
                            instead="an optimizer such as AdamW or SGD") from error
        raise UserError(f"{name}.step needs a closure that computes the loss again, which model.step() does not "
                        "have", where=_WHERE, instead="an optimizer such as AdamW or SGD") from error
    except Exception as error:
        raise UserError(f"a trial step of {name} failed: {error}", where=_WHERE,
                        instead="an optimizer such as AdamW or SGD") from error


def initial_states(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Return the state that an optimizer such as Adagrad creates with its parameters, by parameter.

    State with a value per element is returned as its single value, in a 1-D tensor.

    Raises:
        UserError: the value differs between the elements of a parameter.
    """
    states: dict[Tensor, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        states[parameter] = {}
        for key, value in state.items():
            if not is_per_element(value, parameter):
                states[parameter][key] = value
                continue
            flat = value.view(-1)
            if bool((flat != flat[:1]).any()):
                raise UserError(f"the initial state {key} differs between the elements of a parameter",
                                where=_WHERE, instead="an optimizer that creates its state in the first step")
            states[parameter][key] = flat[:1].clone()
    return states


def initial_state_for(tensor: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state from `initial_states` for a tensor that replaces the parameter."""
    moved: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            moved[key] = value.to(tensor.device).expand(tensor.numel()).clone().view(tensor.shape)
        else:
            moved[key] = value.clone() if isinstance(value, Tensor) else value
    return moved
