"""Read off the installed DeepSpeed which keys it takes from a ds_config, and of what kind.

Blocks that are pydantic models say it themselves. The others are read key by key: they are given dictionaries that
remember what was looked up in them.
"""

from __future__ import annotations

import json
from enum import Enum
from importlib.metadata import version
from types import UnionType
from typing import Any, Union, get_args, get_origin

from places import ROOT

TABLE = ROOT / "ezpz_llm/layout/deepspeed_keys.json"

ELSEWHERE = {
    # deepspeed.initialize makes a mesh of them before it reads the rest.
    "sequence_parallel_size": "any", "data_parallel_size": "any",
    # Passed on to functions of their own, which are not called unless they are switched on.
    "data_efficiency": "any", "expert_parallel": "any",
    "optimizer": {"type": "any", "params": "any", "legacy_fusion": "any"},
    "scheduler": {"type": "any", "params": "any"},
}
_GIVEN = {"train_batch_size": 1}


def deepspeed_table() -> dict[str, Any]:
    """The version, the keys (a block, or the kind of a value), and by block the other names of keys."""
    from deepspeed.runtime.config import get_pipeline_config

    aliases: dict[str, dict[str, str]] = {}
    keys: dict[str, Any] = {name: "any" for name in _looked_up({}) - removed()}
    for name in sorted(set(keys) - set(ELSEWHERE)):
        inside = _models().get(name)
        if inside is not None:
            keys[name] = _fields(inside, name, aliases)
        elif found := _inside(name):
            keys[name] = {key: "any" for key in sorted(found)}
    keys["timers"] = {"throughput": _fields(_models()["timers.throughput"], "timers.throughput", aliases)}
    keys["checkpoint"]["parallel_write"] = {"pipeline_stage": "any"}
    keys["pipeline"] = dict.fromkeys(sorted(get_pipeline_config({})), "any")
    keys.update(ELSEWHERE)
    return {"deepspeed": version("deepspeed"), "keys": dict(sorted(keys.items())), "aliases": aliases}


def removed() -> set[str]:
    """Keys that DeepSpeed refuses because it no longer does what they asked for."""
    from deepspeed.runtime import config

    return {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS,
            *(f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS)}


def write() -> None:
    TABLE.write_text(json.dumps(deepspeed_table(), indent=1) + "\n")


class _Remembers(dict):
    """A dictionary that notes which keys were asked for."""

    def __init__(self, values: dict[str, Any], seen: set[str]) -> None:
        super().__init__(values)
        self.seen = seen

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __copy__(self) -> _Remembers:
        return self

    def keys(self) -> Any:
        return _Names(self)


class _Names:
    """The keys of a dictionary that remembers; to ask whether one is there is to look it up."""

    def __init__(self, owner: _Remembers) -> None:
        self._owner = owner

    def __contains__(self, key: object) -> bool:
        return key in self._owner

    def __iter__(self) -> Any:
        return iter(list(dict.keys(self._owner)))


def _looked_up(values: dict[str, Any]) -> set[str]:
    from deepspeed.runtime.config import DeepSpeedConfig

    seen: set[str] = set()
    DeepSpeedConfig(_Remembers({**_GIVEN, **values}, seen))
    return seen


def _inside(name: str) -> set[str]:
    """Keys that DeepSpeed looks up in a block; none where it is no block."""
    from deepspeed.runtime.config import DeepSpeedConfig

    seen: set[str] = set()
    try:
        DeepSpeedConfig(_Remembers({**_GIVEN, name: _Remembers({}, seen)}, set()))
    except (AttributeError, AssertionError, TypeError, ValueError):
        return set()
    return seen


def _models() -> dict[str, Any]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "bfloat16": DeepSpeedBF16Config,
            "fp16": DeepSpeedFP16Config, "comms_logger": CommsLoggerConfig, "tensorboard": TensorBoardConfig,
            "wandb": WandbConfig, "csv_monitor": CSVConfig, "comet": CometConfig,
            "hybrid_engine": HybridEngineConfig, "compile": CompileConfig, "tensor_parallel": TPTrainingConfig,
            "weight_quantization": WeightQuantConfig, "timers.throughput": DeepSpeedThroughputTimerConfig}


def _fields(model: Any, place: str, aliases: dict[str, dict[str, str]]) -> dict[str, Any]:
    from pydantic import BaseModel

    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key != name:
            aliases.setdefault(place, {})[name] = key
        inner = [part for part in (get_args(field.annotation) or (field.annotation,))
                 if isinstance(part, type) and issubclass(part, BaseModel)]
        found[key] = _fields(inner[0], f"{place}.{key}", aliases) if inner else _kind(field)
    return found


def _kind(field: Any) -> str:
    """ "int > 0", "number >= 0 <= 1", "bool?" with null allowed; "any" for what is not checked here."""
    union = get_origin(field.annotation) in (Union, UnionType)
    parts = get_args(field.annotation) if union else (field.annotation,)
    plain = [part for part in parts if part is not type(None)]
    names = {int: "int", float: "number", bool: "bool", str: "str"}
    if len(plain) != 1 or plain[0] not in names or issubclass(plain[0], Enum):
        return "any"
    bounds = "".join(f" {sign} {getattr(rule, name):g}" for rule in field.metadata
                     for sign, name in ((">", "gt"), (">=", "ge"), ("<", "lt"), ("<=", "le"))
                     if getattr(rule, name, None) is not None)
    return names[plain[0]] + ("?" if type(None) in parts else "") + bounds
