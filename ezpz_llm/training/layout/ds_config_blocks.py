"""Run settings from the optimizer, scheduler and precision blocks of a ds_config (imports no torch).

Every key is used, translated with a note, or rejected. Missing keys have DeepSpeed's defaults.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ezpz_llm.core.base import UserError, unknown_name_error
from ezpz_llm.training.layout.ds_config import DsConfig, number

ADAM_DEFAULTS: Mapping[str, float] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
"""Defaults of DeepSpeed's FusedAdam and DeepSpeedCPUAdam."""
TORCH_ADAM_DECAY = 0.01
"""Weight decay of torch.optim.AdamW, which "torch_adam": true selects; its other defaults are the same."""

WARMUP_DEFAULTS: Mapping[str, Any] = {"warmup_steps": 1000, "warmup_type": "log", "warmup_min_lr": 0.0}
"""Defaults of all DeepSpeed schedulers with a warmup."""
DECAY_LR_PEAK = 0.001
"""Default of warmup_max_lr in WarmupDecayLR; in WarmupLR it is the optimizer's learning rate."""
COS_MIN_RATIO = 0.0001

_TRANSLATED = ("lr", "betas", "eps", "weight_decay")
_FIXED = {"bias_correction": True, "amsgrad": False, "maximize": False, "differentiable": False,
          "fp32_optimizer_states": True}
"""Parameters of which ezpz_llm's AdamW supports only this value."""
_WITHOUT_EFFECT = ("torch_adam", "adam_w_mode", "foreach", "fused", "capturable", "set_grad_none")
"""Parameters that select an implementation of the same step."""
_SCHEDULERS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type",
                      "last_batch_iteration"),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
                       "last_batch_iteration"),
}
_UNSUPPORTED = {"OneCycle": "it also changes the momentum",
                "LRRangeTest": "it raises the learning rate until training fails"}


@dataclass
class BlockSettings:
    """Settings of a run that the block "optimizer" or "scheduler" sets, by the names of TrainConfig.

    `values` are set in the block, `defaults` are DeepSpeed's defaults for missing keys, `of_peak` are learning
    rates as fractions of the peak. Keys with the value "auto" are omitted; the run sets them.
    """

    values: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    of_peak: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_optimizer(block: Mapping[str, Any] | None, autos: Collection[str], config: DsConfig) -> BlockSettings:
    """Read the block "optimizer"; `autos` are the dotted keys that are "auto".

    Raises:
        UserError: an optimizer other than AdamW, or an invalid or unsupported parameter.
    """
    result = BlockSettings()
    if not block:
        return result
    where = f"optimizer in {config.path}"
    kind, params = block.get("type"), _read_params(block, where)
    if kind is None:
        raise UserError("the optimizer has no type", where=where,
                        instead='use "type": "AdamW", or delete the block')
    is_adam = str(kind).lower() == "adam"
    if not is_adam and str(kind).lower() != "adamw":
        raise UserError(f"the optimizer is {kind}; supported: AdamW", where=where,
                        instead='use "type": "AdamW", or delete the block')
    if is_adam and params.get("adam_w_mode") is False:
        raise UserError("the optimizer is Adam with adam_w_mode false, which adds weight decay to the "
                        "gradient; supported: AdamW", where=where,
                        instead='use "type": "AdamW", or delete adam_w_mode')
    for name, value in params.items():
        _check_parameter(name, value, where)
    for name in ("lr", "eps", "weight_decay"):
        if name in params:
            result.values[name] = float(number(params[name], f"optimizer.params.{name}", config))
    if "betas" in params:
        result.values.update(_read_betas(params["betas"], config))
    defaults = {**ADAM_DEFAULTS, **({"weight_decay": TORCH_ADAM_DECAY} if params.get("torch_adam") is True else {})}
    for name, value in defaults.items():
        key = "betas" if name.startswith("beta") else name
        if name not in result.values and f"optimizer.params.{key}" not in autos:
            result.defaults[name] = value
    without_effect = [name for name in params if name in _WITHOUT_EFFECT]
    if block.get("legacy_fusion"):
        without_effect.append("legacy_fusion")
    if without_effect:
        result.notes.append(f"{', '.join(without_effect)} of the optimizer in {config.path.name}: ignored, because "
                            "the layout and --optimizer choose the implementation of AdamW")
    return result


def _read_params(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    params = block.get("params") or {}
    if not isinstance(params, dict):
        raise UserError(f"params is {json.dumps(params)}, not a block", where=where, instead='"params": {…}')
    return params


def _check_parameter(name: str, value: Any, where: str) -> None:
    if name == "max_grad_norm":
        raise UserError("DeepSpeed's optimizers reject max_grad_norm", where=where,
                        instead='"gradient_clipping" at the top level')
    if name in _FIXED and value != _FIXED[name]:
        raise UserError(f"{name} is {json.dumps(value)}; supported: {json.dumps(_FIXED[name])}", where=where,
                        instead=f"delete the key to use {json.dumps(_FIXED[name])}")
    supported = (*_TRANSLATED, *_FIXED, *_WITHOUT_EFFECT)
    if name not in supported:
        raise unknown_name_error("parameter", name, supported, where=where)


def _read_betas(value: Any, config: DsConfig) -> dict[str, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise UserError(f"optimizer.params.betas is {json.dumps(value)}", where=str(config.path),
                        instead="[0.9, 0.95]")
    return {name: float(number(beta, "optimizer.params.betas", config))
            for name, beta in zip(("beta1", "beta2"), value, strict=True)}


def read_scheduler(block: Mapping[str, Any] | None, autos: Collection[str], config: DsConfig) -> BlockSettings:
    """Read the block "scheduler".

    Raises:
        UserError: an unsupported type or parameter, or a number that DeepSpeed rejects.
    """
    result = BlockSettings()
    if not block:
        return result
    where = f"scheduler in {config.path}"
    kind, params = block.get("type"), _read_params(block, where)
    if kind is None:
        raise UserError("the scheduler has no type", where=where, instead=f'"type": {_join_quoted(_SCHEDULERS)}')
    if kind not in _SCHEDULERS:
        reason = f" ({_UNSUPPORTED[kind]})" if kind in _UNSUPPORTED else ""
        raise UserError(f"the scheduler is {kind}{reason}; supported: {', '.join(_SCHEDULERS)}", where=where,
                        instead=f'"type": {_join_quoted(_SCHEDULERS)}, or delete the block and pass --schedule')
    supported = _SCHEDULERS[kind]
    for name in params:
        if name not in supported:
            raise unknown_name_error("parameter", name, supported, where=where)
    if params.get("last_batch_iteration", -1) != -1:
        raise UserError(f"last_batch_iteration is {json.dumps(params['last_batch_iteration'])}", where=where,
                        instead="delete the key: a resumed run continues the schedule at its step")
    result.values["schedule"] = kind
    _read_schedule(result, params, autos, config, kind)
    return result


_STEPS = {"warmup_num_steps": "warmup_steps", "total_num_steps": "decay_steps"}
_RATES = {"warmup_min_lr": "warmup_min_lr", "warmup_max_lr": "lr"}
_RATIOS = {"warmup_min_ratio": ("warmup_min_lr", 0.0), "cos_min_ratio": ("min_lr", COS_MIN_RATIO)}


def _read_schedule(settings: BlockSettings, params: Mapping[str, Any], autos: Collection[str], config: DsConfig,
                   kind: str) -> None:
    for key in _SCHEDULERS[kind]:
        place = f"scheduler.params.{key}"
        if key in _STEPS and key in params:
            steps = number(params[key], place, config, whole=True)
            if steps < 1:
                raise UserError(f"{place} is {steps}", where=str(config.path), instead="1 or more")
            settings.values[_STEPS[key]] = steps
        elif key in _RATES and params.get(key) is not None:
            settings.values[_RATES[key]] = float(number(params[key], place, config))
        elif key in _RATIOS and place not in autos:
            name, default = _RATIOS[key]
            if key not in params:
                settings.notes.append(f"{place} is missing in {config.path.name}: using DeepSpeed's default, "
                                      f"{default:g}")
            settings.of_peak[name] = float(number(params.get(key, default), place, config))
        elif key == "warmup_type" and key in params:
            if params[key] not in ("log", "linear"):
                raise UserError(f"{place} is {json.dumps(params[key])}", where=str(config.path),
                                instead='"log" or "linear"')
            settings.values[key] = params[key]
        elif key == "total_num_steps" and place not in autos:
            raise UserError(f"{kind} requires total_num_steps", where=str(config.path),
                            instead='"total_num_steps": "auto" for all steps of the run, or a number of steps')
    missing = {"warmup_steps": "warmup_num_steps", "warmup_type": "warmup_type", "warmup_min_lr": "warmup_min_lr"}
    for name, key in missing.items():
        if key in _SCHEDULERS[kind] and name not in settings.values and f"scheduler.params.{key}" not in autos:
            settings.defaults[name] = WARMUP_DEFAULTS[name]
    if kind == "WarmupDecayLR" and "lr" not in settings.values and "scheduler.params.warmup_max_lr" not in autos:
        settings.defaults["lr"] = DECAY_LR_PEAK


def _join_quoted(names: Collection[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


_DTYPES = {**dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
           **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16")}
_BLOCKS = ("bf16", "bfloat16", "fp16", "torch_autocast")


@dataclass(frozen=True)
class DynamicScale:
    """Settings of fp16's dynamic loss scale; the defaults are the same as torch.amp.GradScaler's.

    An overflow halves the scale, except for the first `hysteresis` - 1 overflows since the scale last doubled
    (with `consecutive`: the first in a row). `window` steps without overflow double it. An overflow below `least`
    ends the run.
    """

    start: float = 65536.0
    window: int = 2000
    hysteresis: int = 1
    least: float = 1.0
    consecutive: bool = False


@dataclass(frozen=True)
class Precision:
    """Precision set by a ds_config.

    `name` is None if the run chooses the precision. `has_blocks` is True if the file has a precision block.
    """

    name: str | None = None
    has_blocks: bool = False
    scale: DynamicScale = field(default_factory=DynamicScale)
    notes: tuple[str, ...] = ()


def read_precision(values: Mapping[str, Any], autos: Collection[str], config: DsConfig) -> Precision:
    """Read the precision blocks; `autos` are the dotted keys that are "auto".

    Raises:
        UserError: two precisions are enabled, a dtype is unknown, or the loss scale is static or invalid.
    """
    blocks = {name: values[name] for name in _BLOCKS if values.get(name) is not None}
    enabled = {name: _DTYPES[name] for name in ("bf16", "bfloat16", "fp16")
             if blocks.get(name, {}).get("enabled")}
    autocast = blocks.get("torch_autocast", {})
    if autocast.get("enabled"):
        dtype = str(autocast.get("dtype"))
        if dtype not in _DTYPES:
            raise UserError(f"torch_autocast.dtype is {dtype!r}", where=str(config.path), instead='"bfloat16"')
        enabled["torch_autocast"] = f"{_DTYPES[dtype]}_autocast"
    if len(set(enabled.values())) > 1:
        raise UserError(f"several precisions are enabled ({', '.join(enabled)})", where=str(config.path),
                        instead="enable one of them")
    scale = _read_loss_scale(blocks["fp16"], config) if "fp16" in blocks else DynamicScale()
    notes = _no_effect_notes(blocks, config)
    if enabled:
        return Precision(next(iter(enabled.values())), True, scale, tuple(notes))
    if not blocks:
        return Precision()
    has_auto = any(f"{name}.enabled" in autos for name in blocks)
    is_bf16_off = any(name in blocks and f"{name}.enabled" not in autos for name in ("bf16", "bfloat16"))
    if has_auto and not is_bf16_off:
        return Precision(None, True, scale, tuple(notes))
    notes.insert(0, f"no precision is enabled in {config.path.name}: using fp32")
    return Precision("fp32", True, scale, tuple(notes))


def _read_loss_scale(block: Mapping[str, Any], config: DsConfig) -> DynamicScale:
    """Read the loss scale settings, with DeepSpeed's defaults for missing keys."""
    static = block.get("loss_scale") or 0
    if static and block.get("enabled") is not False:
        raise UserError(f"fp16.loss_scale is {static:g}; supported: 0", where=str(config.path),
                        instead="delete the key (fp16 requires a dynamic loss scale, DeepSpeed's value 0)")
    power = block.get("initial_scale_power", 16)
    if not 0 <= power < 128:
        raise UserError(f"fp16.initial_scale_power is {power}", where=str(config.path),
                        instead="16, for an initial loss scale of 2^16")
    scale = DynamicScale(2.0 ** power, block.get("loss_scale_window", 1000),
                         block.get("hysteresis", 2), block.get("min_loss_scale", 1),
                         block.get("consecutive_hysteresis", False))
    for name, value in (("loss_scale_window", scale.window), ("hysteresis", scale.hysteresis),
                        ("min_loss_scale", scale.least)):
        if value < 1:
            raise UserError(f"fp16.{name} is {value}", where=str(config.path), instead="1 or more")
    return scale


def _no_effect_notes(blocks: Mapping[str, Mapping[str, Any]], config: DsConfig) -> list[str]:
    """Return notes on keys of the precision blocks that have no effect."""
    reasons = {("bf16", "immediate_grad_update", True): "gradients are always accumulated immediately",
               ("bf16", "check_grad_overflow", False): "a step with non-finite gradients is still skipped",
               ("fp16", "auto_cast", True): "inputs are tokens, and autocast casts the activations"}
    notes = [f"{name}.{key} of {config.path.name}: {reason}" for (name, key, value), reason in reasons.items()
             for block in (blocks.get(name) or (blocks.get("bfloat16") if name == "bf16" else None) or {},)
             if block.get(key) is value]
    if blocks.get("torch_autocast", {}).get("lower_precision_safe_modules"):
        notes.append(f"torch_autocast.lower_precision_safe_modules of {config.path.name}: autocast covers the "
                     "whole forward pass, and gradients are reduced in fp32")
    return notes
