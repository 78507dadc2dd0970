"""Site files: keys, values, and which site this machine is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ezpz_llm.base.errors import UserError, nearest, unknown
from ezpz_llm.base.outside import parse_toml, read_text
from ezpz_llm.base.package_data import data_dir, user_path
from ezpz_llm.launch.schedulers import schedulers, step_launchers
from ezpz_llm.launch.sites.site import Job, Site
from ezpz_llm.launch.variables import SITE_VARIABLE


@dataclass(frozen=True)
class SiteFile:
    """`recognised` holds, for some variables, the patterns of the values that they have at this site."""

    site: Site
    recognised: Mapping[str, tuple[str, ...]]


def read_site(path: Path, source: str) -> SiteFile:
    """The site that a file describes.

    Raises:
        UserError: it cannot be read, is no TOML, or holds a key or a value that no site has: with the file, the
            line, the key and what is accepted.
    """
    try:
        text = read_text(path)
        content = parse_toml(text, str(path))
    except UserError as error:
        raise UserError(f"cannot read the site file: {error.found}", where=str(path),
                        instead="--site NAME or a file; launchers/sites/generic.toml has all keys") from error
    notes = tuple(f"{_place(path, text, key)}: {key} is no longer read: {why}"
                  for key, why in _NO_LONGER_READ.items() if content.pop(key, None) is not None)
    fields = _converted(content, KEYS, path, text, "")
    recognised = fields.pop("recognise", {})
    job = _converted(fields.pop("job", {}), JOB_KEYS, path, text, "job.")
    site = Site(name=path.stem, source=source, job=Job(**job), notes=notes, **fields)
    _check_domains(site, path, text)
    return SiteFile(site, recognised)


def _converted(content: Mapping[str, Any], keys: Mapping[str, Key], path: Path, text: str,
               prefix: str) -> dict[str, Any]:
    fields = {}
    for name, value in content.items():
        if name not in keys:
            near = nearest(name, keys)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(keys)}"
            raise UserError(f"unknown key {prefix}{name} in a site file", where=_place(path, text, name),
                            instead=hint)
        try:
            fields[name] = keys[name].convert(value)
        except (ValueError, TypeError) as error:
            raise UserError(f"{prefix}{name} is {value!r}", where=_place(path, text, name),
                            instead=keys[name].accepted) from error
    return fields


def _check_domains(site: Site, path: Path, text: str) -> None:
    if site.sockets > 1 and (not site.cores or len(site.cores) % site.sockets):
        raise UserError(f"sockets is {site.sockets}, with {len(site.cores)} domain(s) in cores",
                        where=_place(path, text, "sockets"), instead="a number that divides the domains evenly")
    if not site.device_domains:
        return
    count = site.devices_per_host
    if len(site.device_domains) != count or max(site.device_domains) >= len(site.cores):
        raise UserError(f"device_domains is {list(site.device_domains)}, with devices_per_host {count} and "
                        f"{len(site.cores)} domain(s) in cores", where=_place(path, text, "device_domains"),
                        instead="one number for each device, each the position of a domain in cores")


def _place(path: Path, text: str, key: str) -> str:
    pattern = re.compile(rf"""\s*(?:\[\s*)?["']?{re.escape(key)}["']?\s*(?:=|\]|\.)""")
    found = (number for number, line in enumerate(text.splitlines(), start=1) if pattern.match(line))
    line = next(found, None)
    return f"{path}, line {line}" if line else str(path)


# What a site file may hold: each key, its accepted values, and how they become a field of `Site`.
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
    _need(isinstance(value, dict) and value.keys() <= {"mpiexec", *step_launchers()})
    return {launcher: _texts(words) for launcher, words in value.items()}


def _patterns(value: Any) -> dict[str, tuple[str, ...]]:
    _need(isinstance(value, dict) and value.keys() <= set(HINTS))
    return {name: _texts(texts) for name, texts in value.items()}


def _one_of(*names: str) -> Key:
    def convert(value: Any) -> str:
        _need(value in names)
        return value

    return Key(f"one of {', '.join(map(repr, names))}", convert)


def _scheduler(value: Any) -> str:
    _need(value in schedulers())
    return value


def _launcher(value: Any) -> str:
    _need(value in ("mpiexec", *step_launchers()))
    return value


_TEXT = Key("a text on one line", _text)
_COUNT = Key("a whole number, 1 or more", _count)
_LINES = Key("a list of lines", _texts)

KEYS: Mapping[str, Key] = {
    "description": _TEXT,
    "scheduler": Key("one of 'pbs', 'slurm', or a scheduler of another package's", _scheduler),
    "launcher": Key("one of 'mpiexec', 'srun', or a scheduler's own", _launcher),
    "dialect": _one_of("pals"),
    "devices_per_host": _COUNT,
    "cores": Key('a list with the cores of each NUMA domain: ["0-51", "52-103"]', _domains),
    "sockets": _COUNT,
    "threads_per_core": _COUNT,
    "reserved_cores": Key('cores: "0,52" or "0-3,64"', _ranges),
    "binding": _one_of("auto", "list", "depth", "none"),
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

_NO_LONGER_READ = {"device_order": "the order of devices follows from device_domains, which this file should have"}

JOB_KEYS: Mapping[str, Key] = {"queue": _TEXT, "directives": _LINES, "setup": _LINES}


# Which site is this?
_GENERIC = "generic"


def find_site(wanted: str | None, env: Mapping[str, str]) -> Site:
    """The site that `wanted` names (--site: a name, or a TOML file), else EZPZ_LLM_SITE in `env`; else the one
    whose file recognises a variable of `env`, which `source` calls a guess; else the generic one.

    Raises:
        UserError: an unknown name (the nearest are offered) or a broken file.
    """
    if wanted:
        return _named(wanted, "--site")
    if name := env.get(SITE_VARIABLE):
        return _named(name, SITE_VARIABLE)
    if any(env.get(hint) for hint in HINTS):
        return _guessed(env)
    return _named(_GENERIC, "no site named or recognised")


def site_files() -> dict[str, Path]:
    """The files of the sites known by name."""
    return {path.stem: path for path in sorted((data_dir("launchers") / "sites").glob("*.toml"))}


def _named(name: str, source: str) -> Site:
    path = user_path(name)
    if path.suffix == ".toml" or "/" in name:
        return read_site(path, source).site
    files = site_files()
    if name not in files:
        raise unknown("site", name, files, where=f"{source} {name}")
    return read_site(files[name], source).site


def _guessed(env: Mapping[str, str]) -> Site:
    files = [read_site(path, "") for path in site_files().values()]
    guesses = {file.site.name: (file.site, why) for file in files if (why := _why(file, env))}
    if len(guesses) == 1:
        site, why = next(iter(guesses.values()))
        return replace(site, source=f"guessed from {why}")
    source = "no site named or recognised"
    if guesses:
        source = "no guess: " + ", ".join(f"{why} is {name}'s" for name, (_, why) in guesses.items())
    return _named(_GENERIC, source)


def _why(file: SiteFile, env: Mapping[str, str]) -> str | None:
    for name, patterns in file.recognised.items():
        if any(fnmatchcase(env.get(name, ""), pattern) for pattern in patterns):
            return f"{name}={env[name]}"
    return None
