"""Writing that is never seen half done: replace a file whole, or append whole lines."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ezpz_llm.errors import UserError


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` in one step: a reader sees the old file or the new one, never a part.

    Raises:
        OSError: nothing was changed (a full disk leaves the old file as it was).
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, in one step."""
    write_atomic(path, json.dumps(value, indent=2, default=str) + "\n")


def append_line(path: Path, value: Any) -> None:
    """Append `value` as one line of JSON; see append_lines."""
    append_lines(path, [value])


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append each value as a line of JSON, all in one write, so that lines of several writers do not mix.

    Raises:
        OSError: nothing was appended (a full disk).
    """
    lines = "".join(f"{json.dumps(value, default=str)}\n" for value in values).encode()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
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
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read it: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise UserError(f"this is not JSON ({error})", where=str(path),
                        instead="another run directory, or remove the file") from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line cut short by a crash is left out.

    Raises:
        UserError: another line is damaged.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n") and line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise UserError(f"this is not JSON ({error})", where=f"{path}, line {number}",
                                    instead="remove that line") from error
