"""Reading a site file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base.outside import parse_toml, read_text
from ezpz_llm.errors import UserError, nearest
from ezpz_llm.launch.sites.keys import JOB_KEYS, KEYS, Key
from ezpz_llm.launch.sites.site import Job, Site


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
    fields = _converted(content, KEYS, path, text, "")
    recognised = fields.pop("recognise", {})
    job = _converted(fields.pop("job", {}), JOB_KEYS, path, text, "job.")
    site = Site(name=path.stem, source=source, job=Job(**job), **fields)
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
