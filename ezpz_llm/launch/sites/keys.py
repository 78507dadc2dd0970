"""What a site file may hold: each key, its accepted values, and how they become a field of `Site`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HINTS = ("PBS_O_HOST", "PBS_JOBID", "SLURM_CLUSTER_NAME", "NERSC_HOST", "LMOD_SYSTEM_NAME")
"""Variables of a scheduler or a module system that tell machines apart. Names of compute nodes do not: many
machines call theirs nid000001 or x1000c0s0b0n0."""

_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Key:
    """`accepted` says in words what `convert` takes; it raises ValueError for anything else."""

    accepted: str
    convert: Callable[[Any], Any]


def _need(is_right: bool) -> None:
    if not is_right:
        raise ValueError


def _text(value: Any) -> str:
    _need(isinstance(value, str) and value.isprintable())
    return value


def _count(value: Any) -> int:
    _need(type(value) is int and value > 0)
    return value


def _texts(value: Any) -> tuple[str, ...]:
    _need(isinstance(value, list))
    return tuple(map(_text, value))


def _ranges(value: Any) -> str:
    _need(value == "" or bool(_RANGES.fullmatch(_text(value))))
    for first, last in re.findall(r"(\d+)-(\d+)", value):
        _need(int(first) <= int(last))
    return value


def _domains(value: Any) -> tuple[str, ...]:
    _need(isinstance(value, list) and "" not in value)
    return tuple(map(_ranges, value))


def _numbers(value: Any) -> tuple[int, ...]:
    _need(isinstance(value, list) and all(type(number) is int and number >= 0 for number in value))
    return tuple(value)


def _variables(value: Any) -> dict[str, str]:
    _need(isinstance(value, dict) and all(map(_VARIABLE.fullmatch, value)))
    return {name: _text(text) for name, text in value.items()}


def _words(value: Any) -> dict[str, tuple[str, ...]]:
    _need(isinstance(value, dict) and value.keys() <= {"mpiexec", "srun"})
    return {launcher: _texts(words) for launcher, words in value.items()}


def _patterns(value: Any) -> dict[str, tuple[str, ...]]:
    _need(isinstance(value, dict) and value.keys() <= set(HINTS))
    return {name: _texts(texts) for name, texts in value.items()}


def _one_of(*names: str) -> Key:
    def convert(value: Any) -> str:
        _need(value in names)
        return value

    return Key(f"one of {', '.join(map(repr, names))}", convert)


_TEXT = Key("a text on one line", _text)
_COUNT = Key("a whole number, 1 or more", _count)
_LINES = Key("a list of lines", _texts)

KEYS: Mapping[str, Key] = {
    "description": _TEXT,
    "scheduler": _one_of("pbs", "slurm"),
    "launcher": _one_of("mpiexec", "srun"),
    "dialect": _one_of("pals"),
    "devices_per_host": _COUNT,
    "cores": Key('a list with the cores of each NUMA domain: ["0-51", "52-103"]', _domains),
    "sockets": _COUNT,
    "threads_per_core": _COUNT,
    "reserved_cores": Key('cores: "0,52" or "0-3,64"', _ranges),
    "binding": _one_of("auto", "list", "depth", "none"),
    "device_order": _one_of("local rank", "reversed"),
    "device_domains": Key("a list with each device's domain, by position in `cores`: [1, 1, 0, 0]", _numbers),
    "interface": _TEXT,
    "master_suffix": _TEXT,
    "network": _TEXT,
    "stage": _one_of("sbcast", "mpi"),
    "env": Key('a table of variables with texts: NAME = "value"', _variables),
    "options": Key('a table with a list of words for mpiexec, srun or both: srun = ["--gpu-bind=closest"]', _words),
    "job": Key("a table with `queue`, `directives` and `setup`", dict),
    "recognise": Key(f"a table with lists of patterns for {', '.join(HINTS)}", _patterns),
}

JOB_KEYS: Mapping[str, Key] = {"queue": _TEXT, "directives": _LINES, "setup": _LINES}
