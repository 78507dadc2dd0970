"""Manifest of a staged environment, and replacement of the environment's old paths in its copy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Manifest:
    """Manifest of an archive: the copies' names by source folder, and the files that mention these folders."""

    roots: dict[str, str]
    rewrite: tuple[str, ...]


def path_replacer(roots: dict[str, str], to: Path) -> Callable[[str], str]:
    """Return a function that replaces the paths of all roots in a text by those of their copies."""
    # Longest first, because one environment may be inside another.
    paths = sorted(roots, key=len, reverse=True)
    mention = re.compile("(?<![\\w.-])(" + "|".join(map(re.escape, paths)) + ")(?![\\w.-])")
    return lambda text: mention.sub(lambda match: str(to / roots[match[1]]), text)


def rewrite(path: Path, replace_paths: Callable[[str], str]) -> None:
    """Replace the old paths in a file."""
    old = path.read_text(errors="surrogateescape")
    if (new := replace_paths(old)) != old:
        path.chmod(path.stat().st_mode | 0o200)
        path.write_text(new, errors="surrogateescape")
