"""Conversion of the arguments of `record`: numbers of Python, NumPy and torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ezpz_llm.core.base import MAX_STEPS, UserError, shorten_value
from ezpz_llm.core.base.schema import MAX_INTEGER
from ezpz_llm.training.observe.history import ON_EACH_LINE

_WHERE = "ezpz_llm.record"


def as_step(value: Any) -> int:
    """Return a step as an integer. Waits for a tensor on a device.

    Raises:
        UserError: it is not an integer from 1 to MAX_STEPS.
    """
    number = _on_cpu(_as_single(value, "step"))
    if not isinstance(number, int) or not 1 <= number <= MAX_STEPS:
        raise UserError(f"step is {shorten_value(number)}", where=_WHERE,
                        instead=f"a whole number from 1 to {MAX_STEPS:,}")
    return number


def as_tokens(value: Any) -> float | None:
    """Return a number of tokens, 0 or more, or None. Waits for a tensor on a device.

    Raises:
        UserError: it is not such a number.
    """
    if value is None:
        return None
    number = _on_cpu(_as_single(value, "tokens"))
    if not 0 <= number <= MAX_INTEGER:
        raise UserError(f"tokens is {shorten_value(number)}", where=_WHERE,
                        instead="the number of tokens of this rank in the step")
    return number


def as_scalar(value: Any, name: str, device: torch.device) -> Tensor:
    """Return a number as a 0-d fp32 tensor on the device, without waiting for it.

    Raises:
        UserError: the value is not a number.
    """
    number = _as_single(value, name)
    if isinstance(number, Tensor):
        return number.float().to(device, non_blocking=True)
    return torch.tensor(number, dtype=torch.float32, device=device)


def as_figures(figures: Mapping[str, Any]) -> dict[str, float | Tensor | None]:
    """Return additional values of a line. Tensors become 0-d and stay on their device; booleans become 0 or 1.

    Raises:
        UserError: a value is not a number or None, or its name is a key of every line.
    """
    for name in figures:
        if name in ("step", *ON_EACH_LINE):
            raise UserError(f"{name} is a key of every line of metrics.jsonl", where=_WHERE,
                            instead=f"another name, such as my_{name}")
    return {name: as_figure(_without_bool(value), name) for name, value in figures.items()}


def _without_bool(value: Any) -> Any:
    if getattr(value, "dtype", None) == torch.bool:
        return value.long()
    return int(value) if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool") else value


def as_figure(value: Any, name: str) -> float | Tensor | None:
    """Return a number as in `as_figures`, or None."""
    return None if value is None else _as_single(value, name)


def _as_single(value: Any, name: str) -> float | Tensor:
    """Return a number of Python, or a 0-d tensor."""
    if isinstance(value, Tensor):
        return _as_single_tensor(value, name)
    number = value.item() if getattr(value, "size", None) == 1 and hasattr(value, "item") else value  # NumPy
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise _error(value, name)
    if isinstance(number, int) and abs(number) > MAX_INTEGER:
        raise UserError(f"{name} is a number beyond 64 bits", where=_WHERE, instead=f"float({name})")
    return number


def _as_single_tensor(value: Tensor, name: str) -> Tensor:
    full_tensor = getattr(value, "full_tensor", None)  # of a DTensor, such as FSDP2's gradient norm
    tensor = value.detach() if full_tensor is None else full_tensor().detach()
    is_number = not (tensor.is_complex() or tensor.is_quantized or tensor.is_meta or tensor.dtype == torch.bool)
    if tensor.numel() != 1 or tensor.layout != torch.strided or not is_number:
        raise _error(value, name)
    return tensor.reshape(())


def _on_cpu(value: float | Tensor) -> float:
    return value.item() if isinstance(value, Tensor) else value


def _error(value: Any, name: str) -> UserError:
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) != 1:
        return UserError(f"{name} has the shape {tuple(shape)}, but must be a number", where=_WHERE,
                         instead=f"a number, such as {name}.mean()")
    kind = "None" if value is None else f"{shorten_value(value)} ({type(value).__name__})"
    return UserError(f"{name} is {kind}, but must be a number", where=_WHERE,
                     instead="a number, or a tensor or array with one element")
