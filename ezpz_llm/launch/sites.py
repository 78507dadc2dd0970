"""Sites: what is particular to a machine, as data, one TOML file each in `launchers/sites/`; their keys and values,
and which site this machine is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, counted, data_dir, nearest, parse_toml, read_text, unknown, user_path
from ezpz_llm.launch.schedulers import schedulers, step_launchers
from ezpz_llm.launch.variables import SITE_VARIABLE


@dataclass(frozen=True)
class Limit:
    """What a queue takes: from `nodes[0]` to `nodes[1]` nodes for at most `hours`, and of one user `jobs` at a
    time; None where the site does not say. A queue with several rows takes what any of them does."""

    queue: str
    nodes: tuple[int, int] | None = None
    hours: float | None = None
    jobs: int | None = None


ANY_RUNTIME = ("apptainer", "singularity")
"""Of these the first that is on PATH, where nobody names one."""
OF_SRUN = {"pyxis": "--container-image", "environment": "--environment"}
"""Runtimes that are options of srun: NVIDIA's Pyxis, and the Container Engine of Alps."""
RUNTIMES = (*ANY_RUNTIME, "shifter", "podman-hpc", *OF_SRUN)


@dataclass(frozen=True)
class Container:
    """What ranks run in: an image, by a runtime of `RUNTIMES` (None: of `ANY_RUNTIME`), with more `options` for it.
    A site without an image says how those of --container are entered."""

    image: str | None = None
    runtime: str | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """What job scripts need. `directives` are whole lines ("#PBS -l select={nodes}:system=polaris") in which submit
    replaces {nodes}, {time}, {account}, {queue}, {reservation} and {devices}; a directive of submit's own about the
    same subject gives way to them. `queue` is taken where the user names none, if its `limits` take the job.
    `setup` are shell lines before the run, such as module loads; `container` what ranks run in."""

    directives: tuple[str, ...] = ()
    queue: str | None = None
    setup: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    container: Container = field(default_factory=Container)


@dataclass(frozen=True)
class Site:
    """Facts of a machine; every default means "nothing special".

    Args:
        name: the file's name without `.toml`.
        source: who said that this is the site: an option, a variable, a guess and what it rests on.
        scheduler: "pbs" or "slurm".
        launcher: "mpiexec" or "srun", what `--launcher auto` becomes in a job.
        dialect: of an mpiexec whose version text is not recognised: "pals", or another package's.
        devices_per_host: accelerators that ranks see on a host.
        cores: the cores of each NUMA domain ("0-51", "52-103"), those that ranks may be bound to.
        sockets: how many the domains of `cores` are evenly on.
        threads_per_core: how many CPUs the site's launcher counts for one core.
        reserved_cores: cores that belong to the system ("0,52").
        binding: "list" (each rank's cores spelled out), "depth" (a number of cores a rank), "none", "auto".
        device_domains: for each device the domain it is attached to, by position in `cores`; ranks get cores, or
            under "depth" devices, so that both are in one domain.
        interface: of the network that ranks meet and talk on ("hsn0"; several joined by commas).
        master_suffix: what turns a host's short name into one on that network.
        network: what the communication library should report to have chosen.
        env: variables set for ranks unless the user set them.
        options: more words for a launcher, by its name.
        notes: about the file: keys in it that are no longer read, and those that it leaves out.
        sources: where each key is from, a link.
        unsourced: keys that are left out, since no public source says them.
        stage: how an environment is copied to each host: "sbcast" or "mpi"; "squashfs": mounted there as an image.
        recognise: for some variables, the patterns of the values that they have at this site.
    """

    name: str = "generic"
    source: str = "no site named or recognised"
    description: str = ""
    scheduler: str | None = None
    launcher: str | None = None
    dialect: str | None = None
    devices_per_host: int | None = None
    cores: tuple[str, ...] = ()
    sockets: int = 1
    threads_per_core: int = 1
    reserved_cores: str = ""
    binding: str = "auto"
    device_domains: tuple[int, ...] = ()
    interface: str | None = None
    master_suffix: str | None = None
    network: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    job: Job = field(default_factory=Job)
    stage: str | None = None
    recognise: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    unsourced: tuple[str, ...] = ()


def read_site(path: Path, source: str) -> Site:
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
    _check(content, KEYS, path, text, "")
    job = content.pop("job", {})
    _check(job, JOB_KEYS, path, text, "job.")
    limits = tuple(Limit(**_frozen(limit)) for limit in job.pop("limits", ()))
    container = Container(**_frozen(job.pop("container", {})))
    if missing := content.get("unsourced"):
        notes += (f"site {path.stem} leaves out {', '.join(missing)}: no public source was found for"
                  f" {'it' if len(missing) == 1 else 'them'}",)
    job = Job(limits=limits, container=container, **_frozen(job))
    site = Site(name=path.stem, source=source, job=job, notes=notes, **_frozen(content))
    _check_domains(site, path, text)
    return site


def _check(content: Mapping[str, Any], keys: Mapping[str, Key], path: Path, text: str, prefix: str) -> None:
    for name, value in content.items():
        if name not in keys:
            near = nearest(name, keys)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(keys)}"
            raise UserError(f"unknown key {prefix}{name} in a site file", where=_place(path, text, name),
                            instead=hint)
        if not keys[name].is_accepted(value):
            raise UserError(f"{prefix}{name} is {value!r}", where=_place(path, text, name),
                            instead=keys[name].accepted)


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _frozen(one) for name, one in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _check_domains(site: Site, path: Path, text: str) -> None:
    if site.sockets > 1 and (not site.cores or len(site.cores) % site.sockets):
        raise UserError(f"sockets is {site.sockets}, with {counted(len(site.cores), 'domain')} in cores",
                        where=_place(path, text, "sockets"), instead="a number that divides the domains evenly")
    if not site.device_domains:
        return
    count = site.devices_per_host
    if len(site.device_domains) != count or max(site.device_domains) >= len(site.cores):
        raise UserError(f"device_domains is {list(site.device_domains)}, with devices_per_host {count} and "
                        f"{counted(len(site.cores), 'domain')} in cores",
                        where=_place(path, text, "device_domains"),
                        instead="one number for each device, each the position of a domain in cores")


def _place(path: Path, text: str, key: str) -> str:
    pattern = re.compile(rf"""\s*(?:\[\s*)?["']?{re.escape(key)}["']?\s*(?:=|\]|\.)""")
    found = (number for number, line in enumerate(text.splitlines(), start=1) if pattern.match(line))
    line = next(found, None)
    return f"{path}, line {line}" if line else str(path)


# What a site file may hold: each key, a field of `Site`, and its accepted values.
HINTS = ("PBS_O_HOST", "PBS_JOBID", "SLURM_CLUSTER_NAME", "NERSC_HOST", "LMOD_SYSTEM_NAME")
"""Variables of a scheduler or a module system that tell machines apart. Names of compute nodes do not: many
machines call theirs nid000001 or x1000c0s0b0n0."""

_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Key:
    """A key of a site file: `accepted` says in words which values `is_accepted` is true of."""

    accepted: str
    is_accepted: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_ranges(value: Any) -> bool:
    return isinstance(value, str) and bool(_RANGES.fullmatch(value)) and all(
        int(first) <= int(last) for first, last in re.findall(r"(\d+)-(\d+)", value))


def _list_of(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_one, value))


def _table_of(is_name: Callable[[str], object], is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_name, value)) and all(map(is_one, value.values()))


def _one_of(*names: str) -> Key:
    return Key(f"one of {', '.join(map(repr, names))}", lambda value: value in names)


def _has_launcher(name: Any) -> bool:
    return name in ("mpiexec", *step_launchers())


def _has_dialect(name: Any) -> bool:
    from ezpz_llm.launch.dialects import dialect_of_site  # its room reads sites

    return _is_text(name) and dialect_of_site(name) is not None


def _is_limit(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {"queue", "nodes", "hours", "jobs"}:
        return False
    nodes, hours = value.get("nodes", [1, 1]), value.get("hours", 1)
    return (_is_text(value.get("queue")) and _list_of(_is_count)(nodes) and len(nodes) == 2 and nodes[0] <= nodes[1]
            and type(hours) in (int, float) and hours > 0 and _is_count(value.get("jobs", 1)))


def _is_container(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {"image", "runtime", "options"}:
        return False
    return (_is_text(value.get("image", "")) and value.get("runtime", RUNTIMES[0]) in RUNTIMES
            and _list_of(_is_text)(value.get("options", [])))


_TEXT = Key("a text on one line", _is_text)
_COUNT = Key("a whole number, 1 or more", _is_count)
_LINES = Key("a list of lines", _list_of(_is_text))

KEYS: Mapping[str, Key] = {
    "description": _TEXT,
    "scheduler": Key("one of 'pbs', 'slurm', 'flux', 'lsf', or another scheduler",
                     lambda value: _is_text(value) and value in schedulers()),
    "launcher": Key("one of 'mpiexec', 'srun', or a scheduler's own", _has_launcher),
    "dialect": Key("'pals', or the name of another package's dialect", _has_dialect),
    "devices_per_host": _COUNT,
    "cores": Key('a list with the cores of each NUMA domain: ["0-51", "52-103"]', _list_of(_is_ranges)),
    "sockets": _COUNT,
    "threads_per_core": _COUNT,
    "reserved_cores": Key('cores: "0,52" or "0-3,64"', lambda value: value == "" or _is_ranges(value)),
    "binding": _one_of("auto", "list", "depth", "none"),
    "device_domains": Key("a list with each device's domain, by position in `cores`: [1, 1, 0, 0]",
                          _list_of(lambda one: type(one) is int and one >= 0)),
    "interface": _TEXT,
    "master_suffix": _TEXT,
    "network": _TEXT,
    "stage": _one_of("sbcast", "mpi", "squashfs"),
    "env": Key('a table of variables with texts: NAME = "value"', _table_of(_VARIABLE.fullmatch, _is_text)),
    "options": Key('a table with a list of words for mpiexec, srun or both: srun = ["--gpu-bind=closest"]',
                   _table_of(_has_launcher, _list_of(_is_text))),
    "sources": Key('a table of links: cores = "https://…"', _table_of(str.isidentifier, _is_text)),
    "unsourced": Key("a list of keys that are left out", _list_of(lambda name: name in KEYS)),
    "job": Key("a table with `queue`, `directives`, `setup`, `limits` and `container`",
               lambda value: isinstance(value, dict)),
    "recognise": Key(f"a table with lists of patterns for {', '.join(HINTS)}",
                     _table_of(HINTS.__contains__, _list_of(_is_text))),
}

_NO_LONGER_READ = {"device_order": "the order of devices follows from device_domains, which this file should have"}

JOB_KEYS: Mapping[str, Key] = {
    "queue": _TEXT,
    "directives": _LINES,
    "setup": _LINES,
    "container": Key('a table such as { image = "x.sif", runtime = "apptainer", options = ["--nv"] }; runtimes:'
                     f" {', '.join(RUNTIMES)}", _is_container),
    "limits": Key('tables such as { queue = "debug", nodes = [1, 2], hours = 1, jobs = 1 }, of which only the queue'
                  " has to be there", lambda value: isinstance(value, list) and all(map(_is_limit, value))),
}


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
        return read_site(path, source)
    files = site_files()
    if name not in files:
        raise unknown("site", name, files, where=f"{source} {name}")
    return read_site(files[name], source)


def _guessed(env: Mapping[str, str]) -> Site:
    sites = [read_site(path, "") for path in site_files().values()]
    guesses = {site.name: (site, why) for site in sites if (why := _why(site, env))}
    if len(guesses) == 1:
        site, why = next(iter(guesses.values()))
        return replace(site, source=f"guessed from {why}")
    source = "no site named or recognised"
    if guesses:
        source = "no guess: " + ", ".join(f"{why} is {name}'s" for name, (_, why) in guesses.items())
    return _named(_GENERIC, source)


def _why(site: Site, env: Mapping[str, str]) -> str | None:
    for name, patterns in site.recognise.items():
        if any(fnmatchcase(env.get(name, ""), pattern) for pattern in patterns):
            return f"{name}={env[name]}"
    return None
