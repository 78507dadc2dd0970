"""Read a ds_config: find it by name or path, parse it, refuse what nobody would read (imports no torch)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.engine.deepspeed_keys import DEEPSPEED_KEYS, OUR_KEYS, REMOVED, Keys
from ezpz_llm.errors import UserError, unknown
from ezpz_llm.resources import data_dir

OUR_BLOCK = "ezpz_llm"


@dataclass(frozen=True)
class DsConfig:
    """A parsed file: DeepSpeed's own keys, and the block that is ours."""

    name: str
    path: Path
    values: dict[str, Any]
    ours: dict[str, Any]


def names() -> list[str]:
    """The layouts that come with the package."""
    return sorted(path.stem for path in data_dir("ds_configs").glob("*.json"))


def load(name_or_path: str) -> DsConfig:
    """Read the ds_config of that name, or at that path.

    Raises:
        UserError: no such name or file, JSON that does not parse (with line and column), a key that occurs twice or
            that DeepSpeed does not know (with the nearest one that it does).
    """
    path = data_dir("ds_configs") / f"{name_or_path}.json"
    if name_or_path not in names():
        path = Path(name_or_path).expanduser()
        if not path.is_file():
            if path.suffix == ".json" or len(path.parts) > 1:
                raise UserError(f"there is no file {path}", where="--ds-config",
                                instead=f"a path to a JSON file, or one of: {', '.join(names())}")
            raise unknown("ds_config", name_or_path, names(), where="--ds-config")
    values = _parse(path)
    ours = values.pop(OUR_BLOCK, {})
    _check_keys(values, DEEPSPEED_KEYS, path, "")
    _check_block(ours, OUR_KEYS, path, OUR_BLOCK)
    return DsConfig(path.stem, path, values, ours)


def _parse(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(), object_pairs_hook=lambda pairs: _unique(pairs, path))
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg}", where=f"{path}, line {error.lineno}, column {error.colno}",
                        instead="JSON has no comments and no comma before a closing bracket") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from None
    if not isinstance(values, dict):
        raise UserError("a ds_config is a JSON object", where=str(path),
                        instead='{"zero_optimization": {"stage": 1}}')
    return values


def _unique(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise UserError(f"the key {key!r} occurs twice in one block", where=str(path),
                            instead="keep one of them")
        values[key] = value
    return values


def _check_keys(values: Mapping[str, Any], known: Keys, path: Path, prefix: str) -> None:
    for key, value in values.items():
        place = prefix + key
        if place in REMOVED:
            raise UserError(f"DeepSpeed 0.19 has removed {REMOVED[place]}", where=f"{place} in {path}",
                            instead="delete the key")
        if key not in known:
            everywhere = [*known, *(() if prefix else (OUR_BLOCK,))]
            raise unknown("key", key, everywhere, where=f"{prefix.rstrip('.') or 'top level'} in {path}")
        if known[key] is not None:
            _check_block(value, known[key], path, place)


def _check_block(value: Any, known: Keys, path: Path, place: str) -> None:
    if not isinstance(value, dict):
        raise UserError(f"{place} is {json.dumps(value)}, not a block", where=str(path),
                        instead=f'"{place}": {{…}}')
    _check_keys(value, known, path, place + ".")
