"""Re-check a certificate: run what it is of once more, here, and say whether it holds (imports no torch)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ezpz_llm.base import UserError, as_type, is_own, read_json
from ezpz_llm.certify.target_file import find_target

_OWN = ("--json", "--run-dir", "--recheck")
"""Options that say where a certificate was written, not what it is of."""


class _Target(TypedDict):
    path: str
    sha256: str


class _Environment(TypedDict, total=False):
    versions: dict[str, str]


class _Result(TypedDict):
    layout: str
    model: str
    dtype: str
    world: int
    losses: list[float]


class _Kept(TypedDict):
    command: str
    date: str
    passed: bool
    environment: _Environment
    results: list[_Result]


class _Certificate(_Kept, total=False):
    target: _Target


@dataclass(frozen=True)
class Certificate:
    """A certificate that was read: its file and content, and the words of the command that it is of."""

    path: Path
    kept: _Certificate
    words: list[str]


def read_certificate(path: Path) -> Certificate:
    """Read a certificate, and find its target.

    Raises:
        UserError: it is no certificate, one that did not pass, or its target is not the file that was certified, or
            another user's.
    """
    found = read_json(path)
    if not isinstance(found, dict) or not found.keys() >= _Kept.__required_keys__:
        raise _no_certificate(path)
    kept: _Certificate = as_type(_Certificate, found, str(path))
    words = _command(kept)
    if not kept["passed"]:
        raise UserError("not everything passed in this certificate: there is nothing that could hold",
                        where=str(path), instead="ezpz-llm certify again")
    if words is None or not kept["results"]:
        raise _no_certificate(path)
    if "target" in kept:
        place = words.index("--target") + 1
        file = find_target(words[place], (Path(), path.parent))
        if not is_own(Path(file.path)):
            raise UserError("another user owns this file, or all can write it, and to re-check is to run it",
                            where=file.path, instead="a copy of your own, once you have read it")
        if file.sha256 != kept["target"]["sha256"]:
            raise UserError(f"{file.path} is not the file that was certified: its hash is {file.sha256[:12]}…, and "
                            f"{kept['target']['sha256'][:12]}… in the certificate", where=str(path),
                            instead="the file of then, beside the certificate or at the path of its command")
        words[place] = f"{file.path}:{file.function}"
    return Certificate(path, kept, words)


def _no_certificate(path: Path) -> UserError:
    return UserError("this is no certificate", where=str(path), instead="a file that certify --json wrote")


def _command(kept: _Certificate) -> list[str] | None:
    """The words after `ezpz-llm certify` of a certificate's command; None where that command writes none."""
    try:
        words = shlex.split(kept["command"])
    except ValueError:
        return None
    found = _without(words[2:], _OWN)
    if words[:2] != ["ezpz-llm", "certify"] or {"-h", "--help"} & set(found) or found[-1:] == ["--target"]:
        return None
    return found if ("target" in kept) == ("--target" in found) else None


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """The words without these options and their values; of the others each has its value as a word of its own."""
    found: list[str] = []
    rest = iter(word for one in words for word in (one.split("=", 1) if one.startswith("--") else [one]))
    for word in rest:
        if word in options:
            next(rest, None)
        else:
            found.append(word)
    return found


def compare(certificate: Certificate, here: dict[str, Any]) -> tuple[bool, str]:
    """Whether everything that was certified passes here too, and what to say.

    Args:
        here: the certificate of this machine, as `report.record` gives it.
    """
    kept = certificate.kept
    passes = {_key(one): one for one in here["results"]}
    lines = []
    for one in kept["results"]:
        ours = passes.get(_key(one))
        if ours is None or not ours["passed"]:
            why = here["refused"]["why"] if here["refused"] else "it did not run here"
            lines.append(f"{' '.join(map(str, _key(one)))}: {(ours['failures'] if ours else [why])[0]}")
    holds = not lines
    differences = [abs(a - b) for one in kept["results"] if _key(one) in passes
                   for a, b in zip(one["losses"], passes[_key(one)].get("losses", []), strict=False)]
    there, now = (_versions(one["environment"]) for one in (kept, here))
    lines.append(f"of {kept['date']}, with {_named(there)}; here {_named(now)}")
    if differences:
        lines.append(f"losses here differ from those of the certificate by at most {max(differences):.2g}")
    lines.append(f"the certificate {'holds' if holds else 'does NOT hold'} on this machine: {certificate.path}")
    return holds, "\n".join(lines)


def _key(one: Mapping[str, Any]) -> tuple[Any, ...]:
    return one["layout"], one["model"], one["dtype"], one["world"]


def _versions(environment: _Environment) -> dict[str, str]:
    return environment.get("versions", {})


def _named(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "deepspeed", "python") if name in versions)
