"""Re-check a certificate: run its command again on this machine and compare the results (imports no torch)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ezpz_llm.base import UserError, as_type, is_own, read_json
from ezpz_llm.certify.target_file import find_target

_OUTPUT_OPTIONS = ("--json", "--run-dir", "--recheck")
"""Options about files. They do not affect what is certified, so they are removed from the command."""


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


class _RequiredMembers(TypedDict):
    command: str
    date: str
    passed: bool
    environment: _Environment
    results: list[_Result]


class _Certificate(_RequiredMembers, total=False):
    target: _Target


@dataclass(frozen=True)
class Certificate:
    """Certificate: its file, its content, and the arguments of the command that wrote it."""

    path: Path
    content: _Certificate
    arguments: list[str]


def read_certificate(path: Path) -> Certificate:
    """Read a certificate, and check that its target file is unchanged.

    Raises:
        UserError: the file is not a certificate, the certificate did not pass, its target file has changed, or
            other users can write the target file.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not content.keys() >= _RequiredMembers.__required_keys__:
        raise _not_a_certificate(path)
    certificate: _Certificate = as_type(_Certificate, content, str(path))
    arguments = _command(certificate)
    if not certificate["passed"]:
        raise UserError("not every case of this certificate passed, so it cannot be re-checked",
                        where=str(path), instead="ezpz-llm certify --json FILE.json for a new certificate")
    if arguments is None or not certificate["results"]:
        raise _not_a_certificate(path)
    if "target" in certificate:
        place = arguments.index("--target") + 1
        file = find_target(arguments[place], (Path(), path.parent))
        if not is_own(Path(file.path)):
            raise UserError("another user owns this file or can write it, and --recheck would run its code",
                            where=file.path, instead="your own copy of the file, after you have read it")
        if file.sha256 != certificate["target"]["sha256"]:
            raise UserError(f"{file.path} is not the file that was certified: its hash is {file.sha256[:12]}…, but "
                            f"the certificate has {certificate['target']['sha256'][:12]}…", where=str(path),
                            instead="the original file, next to the certificate or at the path in its command")
        arguments[place] = f"{file.path}:{file.function}"
    return Certificate(path, certificate, arguments)


def _not_a_certificate(path: Path) -> UserError:
    return UserError("not a certificate", where=str(path), instead="a file that certify --json wrote")


def _command(certificate: _Certificate) -> list[str] | None:
    """Return the arguments of a certificate's command, or None if the command cannot have written a certificate."""
    try:
        argv = shlex.split(certificate["command"])
    except ValueError:
        return None
    arguments = _remove_options(argv[2:], _OUTPUT_OPTIONS)
    if argv[:2] != ["ezpz-llm", "certify"] or {"-h", "--help"} & set(arguments) or arguments[-1:] == ["--target"]:
        return None
    return arguments if ("target" in certificate) == ("--target" in arguments) else None


def _remove_options(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Remove options and their values from a command line, and split `--option=value` into two words."""
    result: list[str] = []
    parts = iter(part for argument in arguments
                 for part in (argument.split("=", 1) if argument.startswith("--") else [argument]))
    for part in parts:
        if part in options:
            next(parts, None)
        else:
            result.append(part)
    return result


def compare(certificate: Certificate, here: dict[str, Any]) -> tuple[bool, str]:
    """Return True if every certified case passes on this machine too, and a message.

    Args:
        here: the new certificate, as returned by `report.record`.
    """
    original = certificate.content
    again = {_key(result): result for result in here["results"]}
    lines = []
    for result in original["results"]:
        rerun = again.get(_key(result))
        if rerun is None or not rerun["passed"]:
            reason = here["refused"]["why"] if here["refused"] else "it did not run on this machine"
            lines.append(f"{' '.join(map(str, _key(result)))}: {(rerun['failures'] if rerun else [reason])[0]}")
    holds = not lines
    differences = [abs(a - b) for result in original["results"] if _key(result) in again
                   for a, b in zip(result["losses"], again[_key(result)].get("losses", []), strict=False)]
    first, second = (_versions(record["environment"]) for record in (original, here))
    lines.append(f"certificate of {original['date']}: {_versions_text(first)}; "
                 f"this machine: {_versions_text(second)}")
    if differences:
        lines.append(f"losses differ from those in the certificate by at most {max(differences):.2g}")
    lines.append(f"the certificate {'holds' if holds else 'does NOT hold'} on this machine: {certificate.path}")
    return holds, "\n".join(lines)


def _key(result: Mapping[str, Any]) -> tuple[Any, ...]:
    return result["layout"], result["model"], result["dtype"], result["world"]


def _versions(environment: _Environment) -> dict[str, str]:
    return environment.get("versions", {})


def _versions_text(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "deepspeed", "python") if name in versions)
