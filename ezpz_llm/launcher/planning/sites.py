"""Site files: facts about an HPC machine, one TOML file each in `launchers/sites/`, and detection of the site."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from ezpz_llm.core.base import (
    UserError,
    count_noun,
    data_dir,
    nearest_names,
    parse_toml,
    read_text,
    unknown_name_error,
    user_path,
)
from ezpz_llm.launcher.basics.variables import SITE_VARIABLE
from ezpz_llm.launcher.jobs.schedulers import SCHEDULERS, schedulers, step_launchers
from ezpz_llm.launcher.jobs.schedulers.scheduler import Scheduler
from ezpz_llm.launcher.planning.dialects import dialect_of_site
from ezpz_llm.launcher.planning.dialects.srun_container import IMAGE_OPTIONS


class Limit(NamedTuple):
    """Limits of a queue; None for a limit that the site does not document.

    If a queue has several of these, it accepts a job that fits any of them.

    Attributes:
        nodes: smallest and largest number of nodes.
        hours: maximum wall time.
        jobs: maximum number of jobs of one user at a time.
    """

    queue: str
    nodes: tuple[int, int] | None = None
    hours: float | None = None
    jobs: int | None = None


ANY_RUNTIME = ("apptainer", "singularity")
"""Default runtimes; the first one on PATH is used."""
RUNTIMES = (*ANY_RUNTIME, "shifter", "podman-hpc", *IMAGE_OPTIONS)


class Container(NamedTuple):
    """Container of the ranks. Without an image, the runtime and options apply to the image of --container.

    Attributes:
        runtime: one of `RUNTIMES`; None for the first of `ANY_RUNTIME` on PATH.
        options: additional options of the runtime.
    """

    image: str | None = None
    runtime: str | None = None
    options: tuple[str, ...] = ()


class Job(NamedTuple):
    """Contents of job scripts.

    Attributes:
        directives: lines such as "#PBS -l select={nodes}:system=polaris", in which submit replaces {nodes},
            {time}, {account}, {queue}, {reservation} and {devices}. They replace submit's directives for the
            same option.
        queue: default queue, used if its `limits` allow the job.
        setup: shell lines to execute before the run, such as module loads.
    """

    directives: tuple[str, ...] = ()
    queue: str | None = None
    setup: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    container: Container = Container()


class Site(NamedTuple):
    """Facts about a machine; the defaults suit a machine without special requirements.

    Args:
        name: file name without `.toml`.
        source: option or variable that selects the site, or from which launch guessed it.
        scheduler: "pbs", "slurm", "flux", "lsf", or a plug-in scheduler.
        launcher: launcher that `--launcher auto` selects in a job of this scheduler, such as "mpiexec" or "srun".
        dialect: dialect of an mpiexec with an unknown version text: "pals", or a plug-in dialect.
        devices_per_host: number of accelerators that ranks see on a node.
        cores: cores of each NUMA domain ("0-51", "52-103") to which ranks may be bound.
        sockets: number of sockets; each has the same number of the domains in `cores`.
        threads_per_core: number of CPUs per core as the site's launcher counts them.
        reserved_cores: cores that are reserved for the system ("0,52").
        binding: "list" (explicit cores for each rank), "depth" (number of cores per rank), "none", "auto".
        device_domains: domain of each device, as a position in `cores`. A rank gets cores in the domain of its
            device; under "depth", it gets a device in the domain of its cores.
        interface: network interface for rendezvous and communication ("hsn0"; several separated by commas).
        master_suffix: suffix that, appended to the short name of a node, gives its name on that network.
        network: network that the communication library should report.
        env: variables for ranks, unless the user set them.
        options: additional options of launchers, by launcher.
        notes: notes about obsolete and missing keys of the file.
        sources: link to the source of each key.
        unsourced: keys that are missing because no public source has them.
        stage: way to copy an environment to each node: "sbcast", "mpi", or "squashfs" (mounted as an image).
        recognise: variables that identify this site, with patterns of their values.
    """

    name: str = "generic"
    source: str = "no site selected or recognized"
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
    env: Mapping[str, str] = {}
    options: Mapping[str, tuple[str, ...]] = {}
    job: Job = Job()
    stage: str | None = None
    recognise: Mapping[str, tuple[str, ...]] = {}
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = {}
    unsourced: tuple[str, ...] = ()


def read_site(path: Path, source: str) -> Site:
    """Read a site file.

    Raises:
        UserError: the file cannot be read, is not TOML, or has an unknown key or an invalid value; the message
            has the file, the line, the key and the accepted values.
    """
    try:
        text = read_text(path)
        content = parse_toml(text, str(path))
    except UserError as error:
        raise UserError(f"cannot read the site file: {error.found}", where=str(path),
                        instead="--site NAME or --site FILE; launchers/sites/generic.toml has all keys") from error
    notes: tuple[str, ...] = ()
    _check_keys(content, KEYS, path, text, "")
    job = content.pop("job", {})
    _check_keys(job, _JOB_KEYS, path, text, "job.")
    limits = tuple(Limit(**_freeze(limit)) for limit in job.pop("limits", ()))
    container = Container(**_freeze(job.pop("container", {})))
    if missing := content.get("unsourced"):
        notes = (f"site {path.stem} does not set {', '.join(missing)}: there is no public source for"
                  f" {'it' if len(missing) == 1 else 'them'}",)
    job = Job(limits=limits, container=container, **_freeze(job))
    site = Site(name=path.stem, source=source, job=job, notes=notes, **_freeze(content))
    _check_domains(site, path, text)
    return site


def _check_keys(content: Mapping[str, Any], keys: Mapping[str, Key], path: Path, text: str, prefix: str) -> None:
    for name, value in content.items():
        if name not in keys:
            near = nearest_names(name, keys)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(keys)}"
            raise UserError(f"unknown key {prefix}{name} in a site file", where=_location(path, text, name),
                            instead=hint)
        if not keys[name].is_accepted(value):
            raise UserError(f"{prefix}{name} is {value!r}", where=_location(path, text, name),
                            instead=keys[name].accepted)


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _freeze(member) for name, member in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _check_domains(site: Site, path: Path, text: str) -> None:
    if site.sockets > 1 and (not site.cores or len(site.cores) % site.sockets):
        raise UserError(f"sockets is {site.sockets}, with {count_noun(len(site.cores), 'domain')} in cores",
                        where=_location(path, text, "sockets"), instead="a number that divides the domains evenly")
    if not site.device_domains:
        return
    count = site.devices_per_host
    if len(site.device_domains) != count or max(site.device_domains) >= len(site.cores):
        raise UserError(f"device_domains is {list(site.device_domains)}, with devices_per_host {count} and "
                        f"{count_noun(len(site.cores), 'domain')} in cores",
                        where=_location(path, text, "device_domains"),
                        instead="one number for each device, each the position of a domain in cores")


def _location(path: Path, text: str, key: str) -> str:
    pattern = re.compile(rf"""\s*(?:\[\s*)?["']?{re.escape(key)}["']?\s*(?:=|\]|\.)""")
    numbers = (number for number, line in enumerate(text.splitlines(), start=1) if pattern.match(line))
    first = next(numbers, None)
    return f"{path}, line {first}" if first else str(path)


_SITE_VARIABLES = ("NERSC_HOST", "LMOD_SYSTEM_NAME")
"""Variables of a center or a module system that identify a machine, beside those of schedulers.

Hostnames of compute nodes do not identify a machine: nid000001 and x1000c0s0b0n0 exist on many machines.
"""

_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Key(NamedTuple):
    """Validator of a key in a site file; `accepted` describes the valid values."""

    accepted: str
    is_accepted: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_ranges(value: Any) -> bool:
    return isinstance(value, str) and bool(_RANGES.fullmatch(value)) and all(
        int(first) <= int(last) for first, last in re.findall(r"(\d+)-(\d+)", value))


def _list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


def _table_of(is_name: Callable[[str], object], is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_name, value)) and all(map(is_value, value.values()))


def _one_of(*names: str) -> Key:
    return Key(f"one of {', '.join(map(repr, names))}", lambda value: value in names)


def _site_variables(among: Iterable[Scheduler]) -> tuple[str, ...]:
    return (*(name for scheduler in among for name in scheduler.SITE_VARIABLES), *_SITE_VARIABLES)


def _has_launcher(name: Any) -> bool:
    return name in ("mpiexec", *step_launchers())


def _has_dialect(name: Any) -> bool:
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


_TEXT = Key("a string on one line", _is_text)
_COUNT = Key("a whole number, 1 or more", _is_count)
_LINES = Key("a list of lines", _list_of(_is_text))

KEYS: Mapping[str, Key] = {
    "description": _TEXT,
    "scheduler": Key("'pbs', 'slurm', 'flux', 'lsf', or the name of a plug-in scheduler",
                     lambda value: _is_text(value) and value in schedulers()),
    "launcher": Key("'mpiexec', 'srun', or another scheduler's launcher", _has_launcher),
    "dialect": Key("'pals', or the name of a plug-in dialect", _has_dialect),
    "devices_per_host": _COUNT,
    "cores": Key('a list with the cores of each NUMA domain: ["0-51", "52-103"]', _list_of(_is_ranges)),
    "sockets": _COUNT,
    "threads_per_core": _COUNT,
    "reserved_cores": Key('cores: "0,52" or "0-3,64"', lambda value: value == "" or _is_ranges(value)),
    "binding": _one_of("auto", "list", "depth", "none"),
    "device_domains": Key("a list with each device's domain, by position in `cores`: [1, 1, 0, 0]",
                          _list_of(lambda domain: type(domain) is int and domain >= 0)),
    "interface": _TEXT,
    "master_suffix": _TEXT,
    "network": _TEXT,
    "stage": _one_of("sbcast", "mpi", "squashfs"),
    "env": Key('a table of variables with strings: NAME = "value"', _table_of(_VARIABLE.fullmatch, _is_text)),
    "options": Key('a table with a list of words for mpiexec, srun or both: srun = ["--gpu-bind=closest"]',
                   _table_of(_has_launcher, _list_of(_is_text))),
    "sources": Key('a table of links: cores = "https://…"', _table_of(str.isidentifier, _is_text)),
    "unsourced": Key("a list of keys that the file does not set", _list_of(lambda name: name in KEYS)),
    "job": Key("a table with `queue`, `directives`, `setup`, `limits` and `container`",
               lambda value: isinstance(value, dict)),
    "recognise": Key(f"a table with lists of patterns for {', '.join(_site_variables(SCHEDULERS))}",
                     _table_of(lambda name: name in _site_variables(schedulers().values()), _list_of(_is_text))),
}

_JOB_KEYS: Mapping[str, Key] = {
    "queue": _TEXT,
    "directives": _LINES,
    "setup": _LINES,
    "container": Key('a table such as { image = "x.sif", runtime = "apptainer", options = ["--nv"] }; runtimes:'
                     f" {', '.join(RUNTIMES)}", _is_container),
    "limits": Key('tables such as { queue = "debug", nodes = [1, 2], hours = 1, jobs = 1 }, in which only the queue'
                  " is required", lambda value: isinstance(value, list) and all(map(_is_limit, value))),
}


_GENERIC = "generic"


def find_site(wanted: str | None, env: Mapping[str, str]) -> Site:
    """Return the site of --site, else of EZPZ_LLM_SITE, else a guess, else the generic site.

    launch guesses a site if it is the only one with a `recognise` pattern that matches a variable in `env`.

    Args:
        wanted: value of --site: a name or a TOML file.

    Raises:
        UserError: the name is unknown, or the file is invalid.
    """
    if wanted:
        return _load_site(wanted, "--site")
    if name := env.get(SITE_VARIABLE):
        return _load_site(name, SITE_VARIABLE)
    if any(env.get(name) for name in _site_variables(schedulers().values())):
        return _guess_site(env)
    return _load_site(_GENERIC, "no site selected or recognized")


def requests_devices(site: Site) -> bool:
    """Return True if the site's jobs or steps request their devices, so that a job without a request has none."""
    words = (*site.job.directives, *(word for options in site.options.values() for word in options))
    return any("--gpu" in word or "--gres" in word for word in words)


def site_files() -> dict[str, Path]:
    """Return the files of all named sites."""
    return {path.stem: path for path in sorted((data_dir("launchers") / "sites").glob("*.toml"))}


def _load_site(name: str, source: str) -> Site:
    path = user_path(name)
    if path.suffix == ".toml" or "/" in name:
        return read_site(path, source)
    files = site_files()
    if name not in files:
        raise unknown_name_error("site", name, files, where=f"{source} {name}")
    return read_site(files[name], source)


def _guess_site(env: Mapping[str, str]) -> Site:
    sites = [read_site(path, "") for path in site_files().values()]
    guesses = {site.name: (site, variable) for site in sites if (variable := _matching_variable(site, env))}
    if len(guesses) == 1:
        site, variable = next(iter(guesses.values()))
        return site._replace(source=f"guessed from {variable}")
    source = "no site selected or recognized"
    if guesses:
        matches = ", ".join(f"{name} ({variable})" for name, (_, variable) in guesses.items())
        source = f"several sites match: {matches}"
    return _load_site(_GENERIC, source)


def _matching_variable(site: Site, env: Mapping[str, str]) -> str | None:
    for name, patterns in site.recognise.items():
        if any(fnmatchcase(env.get(name, ""), pattern) for pattern in patterns):
            return f"{name}={env[name]}"
    return None
