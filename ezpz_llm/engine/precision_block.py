"""The blocks "bf16", "fp16" and "torch_autocast" of a ds_config: a precision, and the loss scale (no torch)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ezpz_llm.engine.ds_config import DsConfig
from ezpz_llm.errors import UserError

_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
           "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16"}
_BLOCKS = ("bf16", "bfloat16", "fp16", "torch_autocast")


@dataclass(frozen=True)
class DynamicScale:
    """How fp16's loss scale moves; the defaults are torch.amp.GradScaler's.

    It is halved after an overflow, but for the first `hysteresis` - 1 since it last rose (with `consecutive`: in a
    row), and doubled after `window` steps without one. An overflow under `least` ends the run.
    """

    start: float = 65536.0
    window: int = 2000
    hysteresis: int = 1
    least: float = 1.0
    consecutive: bool = False


@dataclass(frozen=True)
class Precision:
    """`name` is None where the file leaves the choice to the run; `blocks` says whether it speaks of it at all."""

    name: str | None = None
    blocks: bool = False
    scale: DynamicScale = field(default_factory=DynamicScale)
    notes: tuple[str, ...] = ()


def read_precision(values: Mapping[str, Any], autos: Collection[str], config: DsConfig) -> Precision:
    """Read the blocks; `autos` are the dotted keys that are "auto".

    Raises:
        UserError: two precisions are enabled, a dtype is none, the loss scale is static.
    """
    blocks = {name: values[name] for name in _BLOCKS if values.get(name) is not None}
    asked = {name: name.replace("bfloat16", "bf16") for name in ("bf16", "bfloat16", "fp16")
             if blocks.get(name, {}).get("enabled")}
    autocast = blocks.get("torch_autocast", {})
    if autocast.get("enabled"):
        dtype = str(autocast.get("dtype"))
        if dtype not in _DTYPES:
            raise UserError(f"torch_autocast.dtype is {dtype!r}", where=str(config.path), instead='"bfloat16"')
        asked["torch_autocast"] = _DTYPES[dtype]
    if len(set(asked.values())) > 1:
        raise UserError(f"both bf16 and fp16 are enabled ({', '.join(asked)})", where=str(config.path),
                        instead="enable one of them")
    scale = _scale(blocks["fp16"], config) if "fp16" in blocks else DynamicScale()
    notes = _without_effect(blocks, config)
    if asked:
        name = next(iter(asked.values()))
        notes.insert(0, f"{', '.join(asked)} in {config.path.name} selects {name}: the forward pass under "
                        "autocast, parameters, gradients and optimizer in fp32")
        return Precision(name, True, scale, tuple(notes))
    if not blocks:
        return Precision()
    open_ = any(f"{name}.enabled" in autos for name in blocks)
    no_bf16 = any(name in blocks and f"{name}.enabled" not in autos for name in ("bf16", "bfloat16"))
    if open_ and not no_bf16:
        return Precision(None, True, scale, tuple(notes))
    notes.insert(0, f"no precision is enabled in {config.path.name}, which says so: fp32")
    return Precision("fp32", True, scale, tuple(notes))


def _scale(block: Mapping[str, Any], config: DsConfig) -> DynamicScale:
    """DeepSpeed's values for what the block leaves out."""
    static = block.get("loss_scale") or 0
    if static and block.get("enabled") is not False:
        raise UserError(f"fp16.loss_scale is {static:g}; supported here: 0", where=str(config.path),
                        instead="delete the key (fp16 needs a dynamic loss scale, which DeepSpeed writes as 0)")
    power = block.get("initial_scale_power", 16)
    if not 0 <= power < 128:
        raise UserError(f"fp16.initial_scale_power is {power}", where=str(config.path),
                        instead="16: the loss scale then begins at 2^16")
    scale = DynamicScale(2.0 ** power, block.get("loss_scale_window", 1000),
                         block.get("hysteresis", 2), block.get("min_loss_scale", 1),
                         block.get("consecutive_hysteresis", False))
    for name, value in (("loss_scale_window", scale.window), ("hysteresis", scale.hysteresis),
                        ("min_loss_scale", scale.least)):
        if value < 1:
            raise UserError(f"fp16.{name} is {value}", where=str(config.path), instead="1 or more")
    return scale


def _without_effect(blocks: Mapping[str, Mapping[str, Any]], config: DsConfig) -> list[str]:
    """What is said of keys that are about DeepSpeed's own low-precision parameters and gradients."""
    said = {("bf16", "immediate_grad_update", True): "gradients are added in fp32 as they come",
            ("bf16", "check_grad_overflow", False): "a step whose gradients are not finite is skipped nevertheless",
            ("fp16", "auto_cast", True): "inputs are tokens, and autocast casts the rest"}
    notes = [f"{name}.{key} of {config.path.name}: {what}" for (name, key, value), what in said.items()
             for block in (blocks.get(name) or (blocks.get("bfloat16") if name == "bf16" else None) or {},)
             if block.get(key) is value]
    if blocks.get("torch_autocast", {}).get("lower_precision_safe_modules"):
        notes.append(f"torch_autocast.lower_precision_safe_modules of {config.path.name}: autocast covers the "
                     "whole forward pass, and gradients are reduced in fp32")
    return notes
