"""Read a ds_config: find it by name or path, parse it, refuse what nobody would read (imports no torch)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base.outside import read_commented_json
from ezpz_llm.engine.deepspeed_keys import OUR_KEYS, REMOVED, Keys, convert, newer_deepspeed, table
from ezpz_llm.errors import UserError, unknown
from ezpz_llm.resources import data_dir, user_path

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
    values = _parse(path)
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


def _parse(path: Path) -> dict[str, Any]:
    values = read_commented_json(path)
    if not isinstance(values, dict):
        raise UserError("a ds_config is a JSON object", where=str(path),
                        instead='{"zero_optimization": {"stage": 1}}')
    return values


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
        elif isinstance(known[key], str):
            found[key] = _value(value, known[key], path, place)
        elif value is not None:  # null is no block, as if the key were not there
            found[key] = _block(value, known[key], path, place, warnings)
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
