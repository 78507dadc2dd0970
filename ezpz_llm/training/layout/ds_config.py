"""Load a ds_config by name or path and reject keys and values that DeepSpeed rejects (imports no torch)."""

from __future__ import annotations

import functools
import json
import operator
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from ezpz_llm.core.base import (
    UserError,
    data_dir,
    did_you_mean,
    installed,
    read_commented_json,
    read_json,
    unknown_name_error,
    user_path,
)

Keys = Mapping[str, Union[str, "Keys"]]
"""Map from a key to a block, or to the kind of its value: "bool", "int > 0", "number? >= 0 <= 1", "any" (no check).
"""

REMOVED: Mapping[str, str] = {
    "nebula": "Nebula checkpoints", "compression_training": "compression", "amp": "Apex mixed precision",
    "quantize_training": "mixture-of-quantization", "sparse_gradients": "sparse embedding gradients",
    "eigenvalue": "mixture-of-quantization", "sparse_attention": "sparse attention",
    "elasticity": "elastic training", "graph_harvesting": "graph harvesting",
    "curriculum_learning": "the legacy curriculum", "progressive_layer_drop": "progressive layer dropping",
    "zero_optimization.mics_shard_size": "MiCS sharding",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS sharding",
    "zero_optimization.zeropp_loco_param": "LoCo-ZeRO++",
}
"""Keys that older DeepSpeed releases read and 0.19 rejects, with the feature each belonged to."""


@dataclass(frozen=True)
class Table:
    """Keys of DeepSpeed `version`.

    `aliases` maps a block's dotted path to the alternative names of its keys.
    """

    version: str
    keys: Keys
    aliases: Mapping[str, Mapping[str, str]]


@functools.cache
def table() -> Table:
    """Read the table in deepspeed_keys.json."""
    stored = read_json(Path(__file__).with_name("deepspeed_keys.json"))
    return Table(stored["deepspeed"], stored["keys"], stored["aliases"])


def _newer_deepspeed() -> str | None:
    """Return the version of the installed DeepSpeed if it is newer than the table, which may then lack keys."""
    version = installed("deepspeed")
    return version if version and _version_numbers(version) > _version_numbers(table().version) else None


def _version_numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", re.sub(r"[^\d.].*", "", release))))


def convert(value: Any, kind: str) -> Any:
    """Convert a value as DeepSpeed does: 2e8 is an integer, and 1 is true.

    Raises:
        ValueError: DeepSpeed rejects the value. The text describes the valid values.
    """
    name, _, bounds = kind.partition(" ")
    if name == "any" or (value is None and name.endswith("?")):
        return value
    name = name.rstrip("?")
    converted = _CONVERT[name](value)
    if converted is None:
        raise ValueError(_EXPECTED[name])
    for sign, bound in zip(*[iter(bounds.split())] * 2, strict=True):
        if not _COMPARE[sign](converted, float(bound)):
            raise ValueError(f"{_EXPECTED[name]} {sign} {bound}")
    return converted


_WORDS = {"true": True, "t": True, "yes": True, "y": True, "on": True, "1": True,
          "false": False, "f": False, "no": False, "n": False, "off": False, "0": False}
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_EXPECTED = {"bool": "true or false", "int": "a whole number", "number": "a number", "str": "text"}


def _bool(value: Any) -> bool | None:
    if isinstance(value, str):
        return _WORDS.get(value.lower())
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def _int(value: Any) -> int | None:
    try:
        number = int(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None
    return None if isinstance(value, float) and number != value else number


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except ValueError:
        return None


_CONVERT = {"bool": _bool, "int": _int, "number": _number,
            "str": lambda value: value if isinstance(value, str) else None}


OUR_BLOCK = "ezpz_llm"


@dataclass(frozen=True)
class DsConfig:
    """A parsed ds_config.

    `values` are DeepSpeed's own keys, `ours` is the block "ezpz_llm", `warnings` name keys that the installed
    DeepSpeed may not know.
    """

    name: str
    path: Path
    values: dict[str, Any]
    ours: dict[str, Any]
    warnings: tuple[str, ...] = ()


def names() -> list[str]:
    """Return the names of the shipped layouts."""
    return sorted(path.stem for path in data_dir("ds_configs").glob("*.json"))


def load(name_or_path: str) -> DsConfig:
    """Load a shipped ds_config by name, or a file by path.

    Raises:
        UserError: an unknown name, a missing file, invalid JSON (with line and column), a duplicate key, a key that
            DeepSpeed does not know (with the nearest valid one), a value that DeepSpeed rejects.
    """
    path = data_dir("ds_configs") / f"{name_or_path}.json"
    if name_or_path not in names():
        path = user_path(name_or_path)
        if not os.path.isfile(path):  # also False for text that is too long for a path
            if path.suffix == ".json" or len(path.parts) > 1:
                kinds = f"a path to a JSON file, or one of: {', '.join(names())}"
                raise UserError(f"{path} does not exist", where="--ds-config", instead=did_you_mean(path, kinds))
            raise unknown_name_error("ds_config", name_or_path, names(), where="--ds-config", or_path=True)
    values = read_commented_json(path)
    if not isinstance(values, dict):
        raise UserError("a ds_config must be a JSON object", where=str(path),
                        instead='{"zero_optimization": {"stage": 1}}')
    block = _require_block(values.pop(OUR_BLOCK, {}), path, OUR_BLOCK)
    warnings: list[str] = []
    values = _validate_keys(values, table().keys, path, "", warnings)
    return DsConfig(path.stem, path, values, block, tuple(warnings))


def check_our_keys(config: DsConfig, keys: Iterable[str]) -> None:
    """Reject keys of the block "ezpz_llm" other than `keys`.

    Raises:
        UserError: a key is unknown.
    """
    _validate_keys(config.ours, dict.fromkeys(keys, "any"), config.path, f"{OUR_BLOCK}.", [])


def number(value: Any, key: str, config: DsConfig, whole: bool = False) -> Any:
    """Return `value` if it is a number (with `whole`, an integer).

    Raises:
        UserError: `value` is not a number, or not an integer.
    """
    if whole and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise UserError(f"{key} is {json.dumps(value)}, not a {'whole ' if whole else ''}number",
                        where=str(config.path))
    return value


def _validate_keys(values: Mapping[str, Any], keys: Keys, path: Path, prefix: str,
                   warnings: list[str]) -> dict[str, Any]:
    """Return a block with aliases replaced by DeepSpeed's primary keys and values converted as DeepSpeed does."""
    aliases = table().aliases.get(prefix.rstrip("."), {})
    checked: dict[str, Any] = {}
    for spelling, value in values.items():
        key = aliases.get(spelling, spelling)
        dotted_key = prefix + key
        if key in checked:
            names = sorted(name for name in values if aliases.get(name, name) == key)
            raise UserError(f"{' and '.join(names)} are two names for the same setting",
                            where=f"{dotted_key} in {path}", instead="keep one of them")
        if dotted_key in REMOVED:
            raise UserError(f"DeepSpeed 0.19 has removed {REMOVED[dotted_key]}", where=f"{dotted_key} in {path}",
                            instead="delete the key")
        if key not in keys:
            _reject_or_warn_unknown(key, keys, path, prefix, warnings)
            checked[key] = value
        elif isinstance(kind := keys[key], str):
            checked[key] = _convert_value(value, kind, path, dotted_key)
        elif value is not None:  # DeepSpeed treats null as a missing block
            checked[key] = _validate_keys(_require_block(value, path, dotted_key), kind, path, f"{dotted_key}.",
                                          warnings)
    return checked


def _reject_or_warn_unknown(key: str, keys: Keys, path: Path, prefix: str, warnings: list[str]) -> None:
    """Raise the error for an unknown key, or warn if the installed DeepSpeed is newer than the table."""
    valid = [*keys, *(() if prefix else (OUR_BLOCK,))]
    error = unknown_name_error("key", key, valid, where=f"{prefix.rstrip('.') or 'top level'} in {path}")
    newer = _newer_deepspeed()
    if newer is None or prefix.startswith(OUR_BLOCK):
        raise error
    warnings.append(f"{prefix}{key} of {path.name} is unknown to DeepSpeed {table().version}; passing it to the "
                    f"installed {newer} unchanged ({error.instead})")


def _convert_value(value: Any, kind: str, path: Path, dotted_key: str) -> Any:
    if value == "auto":
        return value
    try:
        return convert(value, kind)
    except ValueError as error:
        raise UserError(f"{dotted_key} is {json.dumps(value)}; DeepSpeed requires {error}",
                        where=str(path)) from None


def _require_block(value: Any, path: Path, dotted_key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{dotted_key} is {json.dumps(value)}, not a block", where=str(path),
                        instead='"zero_optimization": {"stage": 1}' if dotted_key == "zero_optimization" else
                        f'"{dotted_key}": {{…}}')
    return value
