"""Writing that is never seen half done: whole files, whole lines; and sweeping what killed runs left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ezpz_llm.base import outside
from ezpz_llm.base.errors import UserError
from ezpz_llm.base.schema import as_type
from ezpz_llm.rundir.paths import RunDir
from ezpz_llm.rundir.schemas import Record, Resolved
from ezpz_llm.rundir.secrets import without_secrets

_MODE = 0o644
"""Of a new file, but for what the umask takes away: nobody else writes our records."""


def write_atomic(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Replace `path` by `content` in one step: a reader sees the old file or the new one, never a part.

    Raises:
        OSError: nothing was changed (a full disk leaves the old file as it was).
    """
    content = content.encode() if isinstance(content, str) else content
    parts = [content] if isinstance(content, bytes) else content
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        with open(temporary, "xb", opener=ours) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def ours(path: str, flags: int) -> int:
    """An `opener` of `open` for a file that nobody else may write; a link is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW, _MODE)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, in one step."""
    write_atomic(path, json_text(value))


def json_text(value: Any) -> str:
    """`value` as indented JSON."""
    return json.dumps(value, indent=2, default=str) + "\n"


def append_line(path: Path, value: Any) -> None:
    """Append `value` as one line of JSON; see append_lines."""
    append_lines(path, [value])


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append each value as a line of JSON, all in one write, so that lines of several writers do not mix.

    Raises:
        OSError: nothing was appended (a full disk).
    """
    lines = "".join(f"{json.dumps(value, default=str)}\n" for value in values).encode()
    handle = ours(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        written = os.write(handle, lines)
        if written < len(lines):
            # The next line must not be joined to a part of these.
            os.ftruncate(handle, os.fstat(handle).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where there is none.

    Raises:
        UserError: it is damaged, or cannot be read.
    """
    try:
        return outside.read_json(path)
    except outside.NoFile:
        return None


def read_layout(path: Path) -> dict[str, Any] | None:
    """What layout.json holds; None where there is none. Raises as `read_json`, and for wrong types."""
    stored = read_json(path)
    return None if stored is None else as_type(Resolved, stored, str(path))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, none where there is no file; a last line cut short by a crash is left out.

    Raises:
        UserError: another line is damaged.
    """
    try:
        yield from outside.read_json_lines(path)
    except outside.NoFile:
        return


# What killed runs leave half written in a run directory. Only its owner may sweep it: nobody else writes there.
_HALF = (".step-*.partial", ".step-*.removed")


def sweep_checkpoints(checkpoints: Path) -> None:
    """Remove checkpoints that were never completed, or not removed to their end."""
    for pattern in _HALF:
        for left in checkpoints.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


# `run.json`: what ran, with what, where, and what came out. Secrets are redacted on the way in.
_LOCK_TRIES = 100
_OTHER = "another run directory, or remove the file"


def read_record(run_dir: RunDir) -> dict[str, Any]:
    """The record as it stands; empty where there is none yet.

    Raises:
        UserError: it cannot be read, or is not what we write there.
    """
    try:
        record = outside.read_json(run_dir.record)
    except outside.NoFile:
        return {}
    except UserError as error:
        raise UserError(error.found, where=error.where, instead=_OTHER) from error
    if not isinstance(record, dict):
        raise UserError("run.json is not a run's record", where=str(run_dir.record), instead=_OTHER)
    return as_type(Record, record, str(run_dir.record))


def update_record(run_dir: RunDir, **members: Any) -> None:
    """Set top-level members of run.json. `launch` writes before and after, rank 0 between; `submit` may still be
    writing when its job begins."""
    with _alone(run_dir):
        write_json(run_dir.record, {**read_record(run_dir), **without_secrets(members, os.environ)})


@contextlib.contextmanager
def _alone(run_dir: RunDir) -> Iterator[None]:
    """Keep other writers out meanwhile, where the file system has locks, and for a second at most."""
    folder = os.open(run_dir.path, os.O_RDONLY)
    try:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(1 / _LOCK_TRIES)
            except OSError:
                break
        yield
    finally:
        os.close(folder)
