"""Re-check a certificate: run its command again on this machine and compare the results (imports no torch)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import UNSET, structs

from ezpz_llm.core.base import UserError, is_own, read_json
from ezpz_llm.core.base.records import as_record
from ezpz_llm.verify.certify.records import CertificateRecord
from ezpz_llm.verify.certify.target_file import find_target

_OUTPUT_OPTIONS = ("--json", "--run-dir", "--recheck")
"""Options about files. They do not affect what is certified, so they are removed from the command."""


_REQUIRED = {field.name for field in structs.fields(CertificateRecord) if field.required}


@dataclass(frozen=True)
class Certificate:
    """Certificate: its file, its content, and the arguments of the command that wrote it."""

    path: Path
    content: CertificateRecord
    arguments: list[str]


def read_certificate(path: Path) -> Certificate:
    """Read a certificate, and check that its target file is unchanged.

    Raises:
        UserError: the file is not a certificate, the certificate did not pass, its target file has changed, or
            other users can write the target file.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not content.keys() >= _REQUIRED:
        raise _not_a_certificate(path)
    certificate = as_record(CertificateRecord, content, str(path))
    arguments = _command(certificate)
    if not certificate.passed:
        raise UserError("not every case of this certificate passed, so it cannot be re-checked",
                        where=str(path), instead="ezpz-llm certify --json FILE.json for a new certificate")
    if arguments is None or not certificate.results:
        raise _not_a_certificate(path)
    if certificate.target is not UNSET:
        place = arguments.index("--target") + 1
        file = find_target(arguments[place], (Path(), path.parent))
        if not is_own(Path(file.path)):
            raise UserError("another user owns this file or can write it, and --recheck would run its code",
                            where=file.path, instead="your own copy of the file, after you have read it")
        if file.sha256 != certificate.target.sha256:
            raise UserError(f"{file.path} is not the file that was certified: its hash is {file.sha256[:12]}…, but "
                            f"the certificate has {certificate.target.sha256[:12]}…", where=str(path),
                            instead="the original file, next to the certificate or at the path in its command")
        arguments[place] = f"{file.path}:{file.function}"
    return Certificate(path, certificate, arguments)


def _not_a_certificate(path: Path) -> UserError:
    return UserError("not a certificate", where=str(path), instead="a file that certify --json wrote")


def _command(certificate: CertificateRecord) -> list[str] | None:
    """Return the arguments of a certificate's command, or None if the command cannot have written a certificate."""
    try:
        argv = shlex.split(certificate.command)
    except ValueError:
        return None
    arguments = _remove_options(argv[2:], _OUTPUT_OPTIONS)
    if argv[:2] != ["ezpz-llm", "certify"] or {"-h", "--help"} & set(arguments) or arguments[-1:] == ["--target"]:
        return None
    return arguments if (certificate.target is not UNSET) == ("--target" in arguments) else None


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


def compare(certificate: Certificate, here: CertificateRecord) -> tuple[bool, str]:
    """Return True if every certified case passes on this machine too, and a message.

    Args:
        here: the new certificate, as returned by `report.record`.
    """
    original = certificate.content
    again = {result.key: result for result in here.results}
    lines = []
    for result in original.results:
        rerun = again.get(result.key)
        if rerun is None or not rerun.passed:
            reason = here.refused.why if here.refused else "it did not run on this machine"
            reasons = [reason] if rerun is None else rerun.failures or ["it failed without a reason"]
            lines.append(f"{' '.join(map(str, result.key))}: {reasons[0]}")
    holds = not lines
    differences = [abs(a - b) for result in original.results if result.key in again
                   for a, b in zip(result.losses, again[result.key].losses, strict=False)
                   if a is not None and b is not None]
    lines.append(f"certificate of {original.date}: {original.environment.versions_text()}; "
                 f"this machine: {here.environment.versions_text()}")
    if differences:
        lines.append(f"losses differ from those in the certificate by at most {max(differences):.2g}")
    lines.append(f"the certificate {'holds' if holds else 'does NOT hold'} on this machine: {certificate.path}")
    return holds, "\n".join(lines)
