"""Which keys DeepSpeed takes from a ds_config, and values of which kind (imports no torch).

The table is read off DeepSpeed's own configuration classes: `pytest tests/test_ds_config.py --write-deepspeed-keys`
writes deepspeed_keys.json, and the test compares it with the installed DeepSpeed. DeepSpeed accepts most unknown
keys in silence, and finds most wrong values only once every rank has started.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from ezpz_llm.base.outside import read_json

Keys = Mapping[str, Union[str, "Keys"]]
"""Key to a block, or to the kind of its value: "bool", "int > 0", "number? >= 0 <= 1"; "any" is not checked."""

OUR_KEYS: Keys = dict.fromkeys(("engine", "tp", "pp", "sp", "partition", "tiled"), "any")
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
    read = read_json(Path(__file__).with_suffix(".json"))
    return Table(read["deepspeed"], read["keys"], read["aliases"])


def newer_deepspeed() -> str | None:
    """The installed DeepSpeed's version where it is newer than the table, whose keys it may have added to."""
    # Imported here: few files have a key that the table has not, and it takes as long as the rest of the check.
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        return None
    return installed if _numbers(installed) > _numbers(table().version) else None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.match(r"\d+(?:\.\d+)*", release)[0].split(".")))


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
