"""Read a ds_config by name or path, refusing keys and values that DeepSpeed does not take (imports no torch)."""

from __future__ import annotations

import functools
import json
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from ezpz_llm.base import UserError, data_dir, installed, read_commented_json, read_json, unknown, user_path

# Which keys DeepSpeed takes from a ds_config, and values of which kind.
Keys = Mapping[str, Union[str, "Keys"]]
"""Key to a block, or to the kind of its value: "bool", "int > 0", "number? >= 0 <= 1"; "any" is not checked."""

OUR_KEYS: Keys = dict.fromkeys(("engine", "tp", "pp", "sp", "partition", "tiled", "shard_within"),
                               "any")
"""The block "ezpz_llm", for what DeepSpeed has no key for."""

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
"""Keys that older releases read and this one refuses, with what they were for."""


@dataclass(frozen=True)
class Table:
    """`keys` of DeepSpeed `version`; `aliases` are a block's other names of its keys, by the block's place."""

    version: str
    keys: Keys
    aliases: Mapping[str, Mapping[str, str]]


@functools.cache
def table() -> Table:
    """The table that comes with the package."""
    read = read_json(Path(__file__).with_name("deepspeed_keys.json"))
    return Table(read["deepspeed"], read["keys"], read["aliases"])


def newer_deepspeed() -> str | None:
    """The installed DeepSpeed's version where it is newer than the table, whose keys it may have added to."""
    found = installed("deepspeed")
    return found if found and _numbers(found) > _numbers(table().version) else None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", re.sub(r"[^\d.].*", "", release))))


def convert(value: Any, kind: str) -> Any:
    """The value as DeepSpeed takes it: 2e8 is an integer to it, and 1 is true.

    Raises:
        ValueError: DeepSpeed refuses the value; the text says what it takes.
    """
    name, _, bounds = kind.partition(" ")
    if name == "any" or (value is None and name.endswith("?")):
        return value
    name = name.rstrip("?")
    taken = _CONVERT[name](value)
    if taken is None:
        raise ValueError(_TAKES[name])
    for sign, bound in zip(*[iter(bounds.split())] * 2, strict=True):
        if not _HOLDS[sign](taken, float(bound)):
            raise ValueError(f"{_TAKES[name]} {sign} {bound}")
    return taken


_WORDS = {"true": True, "t": True, "yes": True, "y": True, "on": True, "1": True,
          "false": False, "f": False, "no": False, "n": False, "off": False, "0": False}
_HOLDS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_TAKES = {"bool": "true or false", "int": "a whole number", "number": "a number", "str": "text"}


def _bool(value: Any) -> bool | None:
    if isinstance(value, str):
        return _WORDS.get(value.lower())
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def _int(value: Any) -> int | None:
    try:
        taken = int(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None
    return None if isinstance(value, float) and taken != value else taken


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
    """A parsed file: DeepSpeed's own keys, and the block that is ours; `warnings` are keys it may not know."""

    name: str
    path: Path
    values: dict[str, Any]
    ours: dict[str, Any]
    warnings: tuple[str, ...] = ()


def names() -> list[str]:
    """The layouts that come with the package."""
    return sorted(path.stem for path in data_dir("ds_configs").glob("*.json"))


def load(name_or_path: str) -> DsConfig:
    """Read the ds_config of that name, or at that path.

    Raises:
        UserError: no such name or file, JSON that does not parse (with line and column), a key that occurs twice or
            that DeepSpeed does not know (with the nearest one that it does), a value that it refuses.
    """
    path = data_dir("ds_configs") / f"{name_or_path}.json"
    if name_or_path not in names():
        path = user_path(name_or_path)
        if not os.path.isfile(path):  # also False for what is too long for a path
            if path.suffix == ".json" or len(path.parts) > 1:
                raise UserError(f"there is no file {path}", where="--ds-config",
                                instead=f"a path to a JSON file, or one of: {', '.join(names())}")
            raise unknown("ds_config", name_or_path, names(), where="--ds-config")
    values = read_commented_json(path)
    if not isinstance(values, dict):
        raise UserError("a ds_config is a JSON object", where=str(path),
                        instead='{"zero_optimization": {"stage": 1}}')
    ours = values.pop(OUR_BLOCK, {})
    warnings: list[str] = []
    values = _checked(values, table().keys, path, "", warnings)
    _block(ours, OUR_KEYS, path, OUR_BLOCK, warnings)
    return DsConfig(path.stem, path, values, ours, tuple(warnings))


def number(value: Any, key: str, config: DsConfig, whole: bool = False) -> Any:
    """A number of a ds_config.

    Raises:
        UserError: it is none, or not a whole one.
    """
    if whole and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise UserError(f"{key} is {json.dumps(value)}, not a {'whole ' if whole else ''}number",
                        where=str(config.path))
    return value


def _checked(values: Mapping[str, Any], known: Keys, path: Path, prefix: str,
             warnings: list[str]) -> dict[str, Any]:
    """The block under DeepSpeed's first names of its keys, with values as DeepSpeed takes them."""
    aliases = table().aliases.get(prefix.rstrip("."), {})
    found: dict[str, Any] = {}
    for written, value in values.items():
        key = aliases.get(written, written)
        place = prefix + key
        if key in found:
            names = sorted(name for name in values if aliases.get(name, name) == key)
            raise UserError(f"{' and '.join(names)} are two names of one setting", where=f"{place} in {path}",
                            instead="keep one of them")
        if place in REMOVED:
            raise UserError(f"DeepSpeed 0.19 has removed {REMOVED[place]}", where=f"{place} in {path}",
                            instead="delete the key")
        if key not in known:
            _unknown_key(key, known, path, prefix, warnings)
            found[key] = value
        elif isinstance(kind := known[key], str):
            found[key] = _value(value, kind, path, place)
        elif value is not None:  # null is no block, as if the key were not there
            found[key] = _block(value, kind, path, place, warnings)
    return found


def _unknown_key(key: str, known: Keys, path: Path, prefix: str, warnings: list[str]) -> None:
    """Raise the error for a key that DeepSpeed does not read; warn where a newer DeepSpeed may."""
    everywhere = [*known, *(() if prefix else (OUR_BLOCK,))]
    error = unknown("key", key, everywhere, where=f"{prefix.rstrip('.') or 'top level'} in {path}")
    newer = newer_deepspeed()
    if newer is None or prefix.startswith(OUR_BLOCK):
        raise error
    warnings.append(f"{prefix}{key} of {path.name} is not known to DeepSpeed {table().version}; {newer} is "
                    f"installed, and gets it as it is ({error.instead})")


def _value(value: Any, kind: str, path: Path, place: str) -> Any:
    if value == "auto":
        return value
    try:
        return convert(value, kind)
    except ValueError as error:
        raise UserError(f"{place} is {json.dumps(value)}; DeepSpeed takes {error}", where=str(path)) from None


def _block(value: Any, known: Keys, path: Path, place: str, warnings: list[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{place} is {json.dumps(value)}, not a block", where=str(path),
                        instead='"zero_optimization": {"stage": 1}' if place == "zero_optimization" else
                        f'"{place}": {{…}}')
    return _checked(value, known, path, place + ".", warnings)
