"""Extract from the installed DeepSpeed the keys that it reads from a ds_config, and their types.

Blocks that are pydantic models declare their keys. For the others, DeepSpeed gets a dictionary that records which
keys are looked up.
"""

from __future__ import annotations

import json
from enum import Enum
from importlib.metadata import version
from types import UnionType
from typing import Any, Union, get_args, get_origin

from places import ROOT

TABLE = ROOT / "ezpz_llm/training/layout/deepspeed_keys.json"

ELSEWHERE = {
    # deepspeed.initialize makes a mesh from these before it reads the rest.
    "sequence_parallel_size": "any", "data_parallel_size": "any",
    # Read by separate functions, which DeepSpeed calls only if the feature is enabled.
    "data_efficiency": "any", "expert_parallel": "any",
    "optimizer": {"type": "any", "params": "any", "legacy_fusion": "any"},
    "scheduler": {"type": "any", "params": "any"},
}
_GIVEN = {"train_batch_size": 1}


def deepspeed_table() -> dict[str, Any]:
    """Return the version, the keys (a block, or the type of a value), and the aliases of keys in each block."""
    from deepspeed.runtime.config import get_pipeline_config

    aliases: dict[str, dict[str, str]] = {}
    keys: dict[str, Any] = {name: "any" for name in _looked_up({}) - removed()}
    for name in sorted(set(keys) - set(ELSEWHERE)):
        inside = _models().get(name)
        if inside is not None:
            keys[name] = _fields(inside, name, aliases)
        elif block_keys := _inside(name):
            keys[name] = {key: "any" for key in sorted(block_keys)}
    keys["timers"] = {"throughput": _fields(_models()["timers.throughput"], "timers.throughput", aliases)}
    keys["checkpoint"]["parallel_write"] = {"pipeline_stage": "any"}
    keys["pipeline"] = dict.fromkeys(sorted(get_pipeline_config({})), "any")
    keys.update(ELSEWHERE)
    return {"deepspeed": version("deepspeed"), "keys": dict(sorted(keys.items())), "aliases": aliases}


def removed() -> set[str]:
    """Return the keys that DeepSpeed rejects because their feature was removed."""
    from deepspeed.runtime import config

    return {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS,
            *(f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS)}


def write() -> None:
    TABLE.write_text(json.dumps(deepspeed_table(), indent=1) + "\n")


class _Remembers(dict):
    """A dictionary that records which keys were looked up."""

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
    """Key view of a recording dictionary; a membership test is recorded as a lookup."""

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
    """Return the keys that DeepSpeed looks up in a block; empty if `name` is not a block."""
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

    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key != name:
            aliases.setdefault(place, {})[name] = key
        inner = [part for part in (get_args(field.annotation) or (field.annotation,))
                 if isinstance(part, type) and issubclass(part, BaseModel)]
        fields[key] = _fields(inner[0], f"{place}.{key}", aliases) if inner else _kind(field)
    return fields


def _kind(field: Any) -> str:
    """Return a field's type, such as "int > 0", "number >= 0 <= 1", "bool?" (null allowed), "any" (not checked)."""
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
