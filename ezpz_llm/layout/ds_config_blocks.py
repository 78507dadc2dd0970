"""The optimizer, scheduler and precision blocks of a ds_config, as settings of a run (imports no torch).

Every key is used, translated with a note, or refused. What a block leaves out has DeepSpeed's own default.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ezpz_llm.base import UserError, unknown
from ezpz_llm.layout.ds_config import DsConfig, number

ADAM_DEFAULTS: Mapping[str, float] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
"""DeepSpeed's FusedAdam and DeepSpeedCPUAdam."""
TORCH_ADAM_DECAY = 0.01
"""torch.optim.AdamW's decay, which "torch_adam": true selects; its other defaults are the same."""

WARMUP_DEFAULTS: Mapping[str, Any] = {"warmup_steps": 1000, "warmup_type": "log", "warmup_min_lr": 0.0}
"""DeepSpeed's for all of its schedulers that warm up."""
DECAY_LR_PEAK = 0.001
"""WarmupDecayLR's default for warmup_max_lr; WarmupLR's is the optimizer's rate."""
COS_MIN_RATIO = 0.0001

_READ = ("lr", "betas", "eps", "weight_decay")
_FIXED = {"bias_correction": True, "amsgrad": False, "maximize": False, "differentiable": False,
          "fp32_optimizer_states": True}
"""Parameters of which AdamW here has one value."""
_WITHOUT_EFFECT = ("torch_adam", "adam_w_mode", "foreach", "fused", "capturable", "set_grad_none")
"""Parameters that choose among implementations of the same step."""
_SCHEDULERS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type",
                      "last_batch_iteration"),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
                       "last_batch_iteration"),
}
_MOMENTUM_TOO = {"OneCycle": "it also changes the momentum", "LRRangeTest": "its rate rises until training fails"}


@dataclass
class Given:
    """Settings of a run, by the names of TrainConfig.

    `values` are written in the block, `defaults` are DeepSpeed's for what it leaves out. `of_peak` are learning
    rates as shares of the peak. What is "auto" is in none of them: it is the run's to fill.
    """

    values: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    of_peak: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_optimizer(block: Mapping[str, Any] | None, autos: Collection[str], config: DsConfig) -> Given:
    """Read the block "optimizer"; `autos` are the dotted keys that are "auto".

    Raises:
        UserError: it is not AdamW, or has a parameter that AdamW here does not have.
    """
    given = Given()
    if not block:
        return given
    where = f"optimizer in {config.path}"
    kind, params = block.get("type"), _params(block, where)
    if kind is None:
        raise UserError("the optimizer has no type", where=where, instead='"type": "AdamW", or no optimizer block')
    is_adam = str(kind).lower() == "adam"
    if not is_adam and str(kind).lower() != "adamw":
        raise UserError(f"the optimizer is {kind}; supported: AdamW", where=where,
                        instead='"type": "AdamW", or no optimizer block')
    if is_adam and params.get("adam_w_mode") is False:
        raise UserError("the optimizer is Adam with adam_w_mode false, whose decay is part of the gradient; "
                        "supported: AdamW", where=where, instead='"type": "AdamW", or no adam_w_mode')
    for name, value in params.items():
        _check_parameter(name, value, where)
    for name in ("lr", "eps", "weight_decay"):
        if name in params:
            given.values[name] = float(number(params[name], f"optimizer.params.{name}", config))
    if "betas" in params:
        given.values.update(_betas(params["betas"], config))
    defaults = {**ADAM_DEFAULTS, **({"weight_decay": TORCH_ADAM_DECAY} if params.get("torch_adam") is True else {})}
    for name, value in defaults.items():
        key = "betas" if name.startswith("beta") else name
        if name not in given.values and f"optimizer.params.{key}" not in autos:
            given.defaults[name] = value
    silent = [name for name in params if name in _WITHOUT_EFFECT]
    if block.get("legacy_fusion"):
        silent.append("legacy_fusion")
    if silent:
        given.notes.append(f"{', '.join(silent)} of the optimizer in {config.path.name}: the layout and "
                           "--optimizer choose the implementation of AdamW, which computes the same")
    return given


def _params(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    params = block.get("params") or {}
    if not isinstance(params, dict):
        raise UserError(f"params is {json.dumps(params)}, not a block", where=where, instead='"params": {…}')
    return params


def _check_parameter(name: str, value: Any, where: str) -> None:
    if name == "max_grad_norm":
        raise UserError("max_grad_norm is no parameter of DeepSpeed's optimizers, which refuse it", where=where,
                        instead='"gradient_clipping" at the top level')
    if name in _FIXED and value != _FIXED[name]:
        raise UserError(f"{name} is {json.dumps(value)}; AdamW here has {json.dumps(_FIXED[name])}", where=where,
                        instead=f"delete the key, if {json.dumps(_FIXED[name])} will do")
    known = (*_READ, *_FIXED, *_WITHOUT_EFFECT)
    if name not in known:
        raise unknown("parameter", name, known, where=where)


def _betas(value: Any, config: DsConfig) -> dict[str, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise UserError(f"optimizer.params.betas is {json.dumps(value)}", where=str(config.path),
                        instead="[0.9, 0.95]")
    return {name: float(number(beta, "optimizer.params.betas", config))
            for name, beta in zip(("beta1", "beta2"), value, strict=True)}


def read_scheduler(block: Mapping[str, Any] | None, autos: Collection[str], config: DsConfig) -> Given:
    """Read the block "scheduler".

    Raises:
        UserError: a type or parameter that is not spoken here, a number that DeepSpeed refuses.
    """
    given = Given()
    if not block:
        return given
    where = f"scheduler in {config.path}"
    kind, params = block.get("type"), _params(block, where)
    if kind is None:
        raise UserError("the scheduler has no type", where=where, instead=f'"type": {_or(_SCHEDULERS)}')
    if kind not in _SCHEDULERS:
        why = f" ({_MOMENTUM_TOO[kind]})" if kind in _MOMENTUM_TOO else ""
        raise UserError(f"the scheduler is {kind}{why}; supported: {', '.join(_SCHEDULERS)}", where=where,
                        instead=f'"type": {_or(_SCHEDULERS)}, or no scheduler block and --schedule')
    known = _SCHEDULERS[kind]
    for name in params:
        if name not in known:
            raise unknown("parameter", name, known, where=where)
    if params.get("last_batch_iteration", -1) != -1:
        raise UserError(f"last_batch_iteration is {json.dumps(params['last_batch_iteration'])}", where=where,
                        instead="delete the key: a resumed run continues the schedule at its step")
    given.values["schedule"] = kind
    _take(given, params, autos, config, kind)
    return given


_STEPS = {"warmup_num_steps": "warmup_steps", "total_num_steps": "decay_steps"}
_RATES = {"warmup_min_lr": "warmup_min_lr", "warmup_max_lr": "lr"}
_RATIOS = {"warmup_min_ratio": ("warmup_min_lr", 0.0), "cos_min_ratio": ("min_lr", COS_MIN_RATIO)}


def _take(given: Given, params: Mapping[str, Any], autos: Collection[str], config: DsConfig, kind: str) -> None:
    for key in _SCHEDULERS[kind]:
        place = f"scheduler.params.{key}"
        if key in _STEPS and key in params:
            steps = number(params[key], place, config, whole=True)
            if steps < 1:
                raise UserError(f"{place} is {steps}", where=str(config.path), instead="1 or more")
            given.values[_STEPS[key]] = steps
        elif key in _RATES and params.get(key) is not None:
            given.values[_RATES[key]] = float(number(params[key], place, config))
        elif key in _RATIOS and place not in autos:
            name, default = _RATIOS[key]
            if key not in params:
                given.notes.append(f"{place} is not in {config.path.name}: DeepSpeed's default, {default:g}")
            given.of_peak[name] = float(number(params.get(key, default), place, config))
        elif key == "warmup_type" and key in params:
            if params[key] not in ("log", "linear"):
                raise UserError(f"{place} is {json.dumps(params[key])}", where=str(config.path),
                                instead='"log" or "linear"')
            given.values[key] = params[key]
        elif key == "total_num_steps" and place not in autos:
            raise UserError(f"{kind} has no total_num_steps, which DeepSpeed requires", where=str(config.path),
                            instead='"total_num_steps": "auto" for all steps of the run, or their number')
    left_out = {"warmup_steps": "warmup_num_steps", "warmup_type": "warmup_type", "warmup_min_lr": "warmup_min_lr"}
    for name, key in left_out.items():
        if key in _SCHEDULERS[kind] and name not in given.values and f"scheduler.params.{key}" not in autos:
            given.defaults[name] = WARMUP_DEFAULTS[name]
    if kind == "WarmupDecayLR" and "lr" not in given.values and "scheduler.params.warmup_max_lr" not in autos:
        given.defaults["lr"] = DECAY_LR_PEAK


def _or(names: Collection[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


# The blocks "bf16", "fp16" and "torch_autocast" of a ds_config: a precision, and the loss scale.
_DTYPES = {**dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
           **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16")}
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
    asked = {name: _DTYPES[name] for name in ("bf16", "bfloat16", "fp16")
             if blocks.get(name, {}).get("enabled")}
    autocast = blocks.get("torch_autocast", {})
    if autocast.get("enabled"):
        dtype = str(autocast.get("dtype"))
        if dtype not in _DTYPES:
            raise UserError(f"torch_autocast.dtype is {dtype!r}", where=str(config.path), instead='"bfloat16"')
        asked["torch_autocast"] = f"{_DTYPES[dtype]}_autocast"
    if len(set(asked.values())) > 1:
        raise UserError(f"several precisions are enabled ({', '.join(asked)})", where=str(config.path),
                        instead="enable one of them")
    scale = _scale(blocks["fp16"], config) if "fp16" in blocks else DynamicScale()
    notes = _without_effect(blocks, config)
    if asked:
        return Precision(next(iter(asked.values())), True, scale, tuple(notes))
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
    said = {("bf16", "immediate_grad_update", True): "gradients are added as they come",
            ("bf16", "check_grad_overflow", False): "a step whose gradients are not finite is skipped nevertheless",
            ("fp16", "auto_cast", True): "inputs are tokens, and autocast casts the rest"}
    notes = [f"{name}.{key} of {config.path.name}: {what}" for (name, key, value), what in said.items()
             for block in (blocks.get(name) or (blocks.get("bfloat16") if name == "bf16" else None) or {},)
             if block.get(key) is value]
    if blocks.get("torch_autocast", {}).get("lower_precision_safe_modules"):
        notes.append(f"torch_autocast.lower_precision_safe_modules of {config.path.name}: autocast covers the "
                     "whole forward pass, and gradients are reduced in fp32")
    return notes
