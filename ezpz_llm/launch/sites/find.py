"""Which site is this?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from ezpz_llm.errors import unknown
from ezpz_llm.launch.sites.file import SiteFile, read_site
from ezpz_llm.launch.sites.keys import HINTS
from ezpz_llm.launch.sites.site import Site
from ezpz_llm.launch.variables import SITE_VARIABLE
from ezpz_llm.resources import data_dir, user_path

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
