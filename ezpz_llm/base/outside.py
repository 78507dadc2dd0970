"""THE reader of what comes from outside this process: files that others may write, and what commands print.

Regular files only, with limits on size, depth and digits, so that no file hangs a command or fills its memory; each
fault is one `UserError` with the file. `ezpz_llm.base.schema` turns what was read into dataclasses.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ezpz_llm.base.errors import UserError

MOST_BYTES = 16 << 20
"""A larger file of settings or records is none of ours; whoever expects more says so."""
MOST_LINE_BYTES = 16 << 20
"""Maximum size of one line of a JSON-lines file; the number of lines is not limited."""
MOST_DEPTH = 100
"""Levels of lists and objects in one another. Python itself fails at about a thousand."""
MOST_DIGITS = 4300
"""Maximum digits of an integer, Python's own limit since 3.10.7: parsing takes quadratic time."""
MOST_TOML = 1 << 20
"""Characters."""
MOST_YAML_BYTES = 64 << 10
"""YAML's reader takes a second for 100 KB."""
MOST_YAML_NODES = 100_000
"""Maximum number of YAML nodes, with every alias expanded."""


_LFS = b"version https://git-lfs.github.com/spec/"
_MOST_LFS_BYTES = 1024
"""Maximum size of a Git LFS pointer, a few lines in place of a large file (git-lfs, docs/spec.md)."""


class NoFile(UserError):
    """There is no such file."""


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open for reading: what is read part by part, of any length.

    Raises:
        NoFile: there is none.
        UserError: it cannot be read, or is a pipe or a device, which could make its reader wait or have no end.
    """
    return io.BufferedReader(_Ready(_open(path), "rb"))


class _Ready(io.FileIO):
    """A file that is read without waiting. What calls itself regular and has nothing yet (/proc/kmsg) is an error:
    Python's own returns None, which no reader looks for."""

    def readinto(self, buffer: Any) -> int:
        if (count := super().readinto(buffer)) is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return count


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """A file's content.

    Raises:
        NoFile: there is none.
        UserError: it cannot be read, is no regular file, or is larger than `most` bytes.
    """
    handle = _open(path)
    try:
        if os.fstat(handle).st_size > most:
            raise _too_large(path, most)
        # A size may say nothing (/proc), and a file may grow meanwhile.
        parts, left = [], most + 1
        while left and (part := os.read(handle, min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(handle)
    if not left:
        raise _too_large(path, most)
    return b"".join(parts)


def read_text(path: Path, most: int = MOST_BYTES, errors: str = "strict") -> str:
    """A file's text, which is UTF-8; a byte-order mark is left out. Raises as `read_bytes`, and for other text."""
    return _text(read_bytes(path, most), str(path), errors)


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Return the content of a JSON file. Raises as `read_bytes`, and for invalid JSON or exceeded limits."""
    return parse_json(read_bytes(path, most), str(path))


def read_commented_json(path: Path, most: int = 1 << 20) -> Any:
    """Return the content of a JSON file that may have comments and trailing commas. Rejects duplicate keys and
    non-finite numbers. Raises as `read_json`."""
    where = str(path)
    return _parsed(plain_json(_text(read_bytes(path, most), where)), where, _commented(where),
                   "names and text in double quotes, a comma between entries; comments (//, #, /* */) and commas "
                   "before a closing bracket are read over")


def read_json_lines(path: Path, most_line: int = MOST_LINE_BYTES) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file of any length, one at a time; a last line cut short by a crash is left out.

    Raises:
        NoFile: there is none.
        UserError: it cannot be read, or a line is no JSON object or beyond the limits; with its number.
    """
    import orjson  # a quarter of the time of Python's own, for files of a million lines

    with open_regular(path) as file:
        try:
            for number, line in enumerate(iter(lambda: file.readline(most_line + 1), b""), 1):
                if len(line) > most_line:
                    raise UserError(f"this line is longer than {_size(most_line)}", where=f"{path}, line {number}",
                                    instead=_REMOVE_LINE)
                if not line.endswith(b"\n"):
                    return
                try:
                    value = orjson.loads(line)
                    is_plain = isinstance(value, dict) and line.count(b"[") + line.count(b"{") <= MOST_DEPTH
                except ValueError:  # a blank line, NaN, or what is none: told apart below
                    is_plain = False
                if not is_plain:
                    if not line.strip():
                        continue
                    where = f"{path}, line {number}"
                    value = _parsed(line, where, _DECODER, _REMOVE_LINE, is_line=True)
                    if not isinstance(value, dict):
                        raise UserError("this is no JSON object", where=where, instead=_REMOVE_LINE)
                yield value
        except OSError as error:
            raise _unreadable(path, error) from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the content of TOML text. `where` names its source in errors. Raises as `parse_json`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    if len(text) > MOST_TOML:
        raise UserError(f"this is larger than {_size(MOST_TOML)}", where=where)
    # The library takes quadratic time for a key of many dots.
    if any(part.count(".") > MOST_DEPTH for part in re.split("[=,\n]", text)):
        raise _too_deep(where)
    try:
        value = tomllib.loads(text)
    except RecursionError as error:
        raise _too_deep(where) from error
    except ValueError as error:
        raise UserError(f"this is not TOML: {error}", where=where) from error
    _check_depth(value, where)
    return value


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; Python objects are rejected. Raises as `read_json`."""
    import yaml

    where = str(path)
    text = read_text(path, MOST_YAML_BYTES)
    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            # While it is read: the library takes quadratic time for a deep list.
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise _too_deep(where)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        # Before the values are made: merged keys multiply with every alias.
        if node is not None and _written_out(node, {}) > MOST_YAML_NODES:
            raise UserError("its aliases stand for too many values", where=where, instead="write the values out")
        value = None if node is None else loader.construct_document(node)
    except UserError:
        raise
    except Exception as error:  # beside YAMLError, PyYAML lets a KeyError or an AttributeError of a wrong !!tag out
        raise UserError(f"this is not YAML: {error}", where=where) from error
    return value


def parse_json(text: str | bytes, where: str, most: int = MOST_BYTES, *, strict: bool = True) -> Any:
    """Return the content of JSON text. `where` names its source in errors.

    Args:
        strict: False lets text hold control characters, as some programs write it.

    Raises:
        UserError: it is no JSON, or beyond the limits.
    """
    if len(text) > most:
        raise UserError(f"this is larger than {_size(most)}", where=where)
    return _parsed(text, where, _DECODER if strict else _LENIENT, None)


def first_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at `at`, and where it ends: for files that are read part by part.

    Raises:
        ValueError: there is no whole one, or it is beyond the limits.
    """
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if text.count("[", at, end) + text.count("{", at, end) > MOST_DEPTH:
        _check_depth(value, "")
    return value, end


_PART = 1 << 18
_BETWEEN = re.compile(r"[\s,]*")
_KEY = re.compile(r'[\s,{]*("(?:[^"\\]|\\.)*")\s*:\s*|[\s,{]*\}')
_CUT_SHORT = "it ends before its end"


class JsonText:
    """JSON text of any length that is read part by part, of which one value at a time is held.

    Every method raises ValueError where the text is not JSON, or not whole.

    Args:
        read: returns the next characters, as many as asked for; fewer at the end only.
        most: characters of one value.
    """

    def __init__(self, read: Callable[[int], str], most: float = float("inf")) -> None:
        self._read, self._most = read, most
        self._text, self._at = "", 0

    def key(self) -> str | None:
        """The name of the object's next member; None at its end."""
        while (found := _KEY.match(self._text, self._at)) is None or found.end() == len(self._text):
            if not self._more():
                if found is None:
                    raise ValueError(_CUT_SHORT)
                break
        self._at = found.end()
        return None if found[1] is None else first_json(found[1], 0)[0]

    def value(self) -> Any:
        """The next value, which ends before the text does."""
        while True:
            try:
                value, end = first_json(self._text, self._at)
                if end < len(self._text):
                    self._at = end
                    return value
                wrong = ValueError(_CUT_SHORT)
            except ValueError as error:
                wrong = error
            if len(self._text) - self._at > self._most or not self._more():
                raise wrong

    def items(self) -> Iterator[Any]:
        """The values of the list that comes next."""
        if self._next() != "[":
            raise ValueError("it is not a list")
        self._at += 1
        while self._next() != "]":
            yield self.value()
        self._at += 1

    def end(self) -> None:
        """Check that nothing but blanks follows."""
        while not self._text[self._at:].strip():
            if not self._more():
                return
        raise ValueError("more follows it")

    def _next(self) -> str:
        while (found := _BETWEEN.match(self._text, self._at)) is None or found.end() == len(self._text):
            if not self._more():
                raise ValueError(_CUT_SHORT)
        self._at = found.end()
        return self._text[self._at]

    def _more(self) -> bool:
        # As much again as is left, so that a long value is not decoded from its beginning too often.
        left = self._text[self._at:]
        part = self._read(max(_PART, len(left)))
        self._text, self._at = left + part, 0
        return bool(part)


def file_in(folder: Path, name: Any, where: str) -> Path:
    """The file of that name in `folder`: how every name that a file gives is joined to a folder, so that none leads
    out of it.

    Raises:
        UserError: the name, of `where` it was found, is no plain file name.
    """
    if (not isinstance(name, str) or name in ("", ".", "..") or len(os.fsencode(name)) > 255
            or any(character in name for character in "/\\\0")):
        raise UserError(f"{shown(name)} is no name of a file beside this one", where=where,
                        instead="a file name without folders")
    return folder / name


def shown(value: Any, most: int = 80) -> str:
    """A value of a file for a message: short, on one line, without control characters."""
    if isinstance(value, (str, bytes)):
        text = ascii(value[:most + 1])
    elif isinstance(value, (list, dict, tuple)):
        text = "an object" if isinstance(value, dict) else "a list"
    elif isinstance(value, int) and value.bit_length() > 10_000:
        text = "a number of thousands of digits"
    else:
        text = str(value)
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= most else f"{text[:most]}…"


_COMMENT = r"(?://|\#)[^\n]*(?:\n|\Z)|/\*(?:(?!\*/).)*(?:\*/|\Z)"
_TEXT = r'"(?:[^"\\\n]|\\.)*"?'
_BESIDE_JSON = re.compile(rf"{_TEXT}|{_COMMENT}|,(?=(?:\s|{_COMMENT})*[}}\]])", re.DOTALL)
"""Pattern of comments and trailing commas, which JSON does not allow. Strings match first and are kept.
Unterminated ones match up to the end of the file, so that the scan stays linear."""


def plain_json(text: str) -> str:
    """JSON without comments and trailing commas, each character of which stays in its line and column."""
    def _blank(found: re.Match[str]) -> str:
        return found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0])

    return _BESIDE_JSON.sub(_blank, text)


_REMOVE_LINE = "remove that line"
_TOO_DEEP = f"lists and objects lie more than {MOST_DEPTH} levels deep in one another"


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


# A function of ours for every number costs time: only where Python has no limit of its own, or it is switched off.
_HAS_LIMIT = 0 < getattr(sys, "get_int_max_str_digits", int)() <= MOST_DIGITS
_DECODER, _LENIENT = (json.JSONDecoder(parse_int=None if _HAS_LIMIT else _whole, strict=strict)
                      for strict in (True, False))


def _commented(where: str) -> json.JSONDecoder:
    def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise UserError(f"the key {shown(key)} occurs twice in one block", where=where,
                                instead="keep one of them")
            values[key] = value
        return values

    def _no_number(name: str) -> float:
        raise UserError(f"{name} is no value of JSON", where=where, instead="a number")

    return json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number, parse_int=_whole)


def _parsed(text: str | bytes, where: str, decoder: json.JSONDecoder, instead: str | None,
            is_line: bool = False) -> Any:
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = decoder.decode(text)
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error
    except json.JSONDecodeError as error:
        place = f", column {error.colno}" if is_line else f", line {error.lineno}, column {error.colno}"
        raise UserError(f"this is not JSON: {error.msg}", where=f"{where}{place}", instead=instead) from error
    except ValueError as error:
        raise UserError(f"this is not JSON that is read here: {error}", where=where, instead=instead) from error
    except RecursionError as error:
        raise _too_deep(where) from error
    if text.count("[") + text.count("{") > MOST_DEPTH:
        _check_depth(value, where)
    return value


def _check_depth(value: Any, where: str) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [member for one in level if isinstance(one, (dict, list))
                 for member in (one.values() if isinstance(one, dict) else one) if isinstance(member, (dict, list))]
        if not level:
            return
    raise _too_deep(where)


def _written_out(node: Any, known: dict[int, int]) -> int:
    """Return the number of nodes with every alias expanded; infinite if a node contains itself."""
    if id(node) not in known:
        known[id(node)] = MOST_YAML_NODES + 1
        members = node.value if isinstance(node.value, list) else ()
        known[id(node)] = 1 + sum(_written_out(one, known) for member in members
                                  for one in (member if isinstance(member, tuple) else (member,)))
    return known[id(node)]


def _open(path: Path) -> int:
    """A descriptor of a regular file. Without waiting: opening a FIFO would, for a writer."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoFile("No such file or directory", where=str(path)) from error
    except (OSError, ValueError) as error:  # a ValueError where the path holds a NUL
        raise _unreadable(path, error) from error
    facts = os.fstat(handle)
    mode = facts.st_mode
    if stat.S_ISREG(mode):
        if not _is_lfs_pointer(handle, facts.st_size):
            return handle
        os.close(handle)
        raise UserError("this is a Git LFS pointer: run git lfs pull", where=str(path),
                        instead="git lfs pull in the repository, or a copy of the file itself")
    os.close(handle)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
    raise UserError(f"this is {kind}, not a regular file", where=str(path), instead="a file with that content")


def _is_lfs_pointer(handle: int, size: int) -> bool:
    try:
        return len(_LFS) < size <= _MOST_LFS_BYTES and os.pread(handle, len(_LFS), 0) == _LFS
    except OSError:  # a file that cannot be read is for its reader to report
        return False


def _text(data: bytes, where: str, errors: str = "strict") -> str:
    try:
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error


def _not_utf8(where: str, error: UnicodeDecodeError) -> UserError:
    return UserError(f"this is not text in UTF-8: {error.reason} at byte {error.start}", where=where)


def _unreadable(path: Path, error: OSError | ValueError) -> UserError:
    return UserError(f"cannot read it: {getattr(error, 'strerror', None) or error}", where=str(path))


def _too_large(path: Path, most: int) -> UserError:
    return UserError(f"this file is larger than {_size(most)}, the most that is read of it", where=str(path))


def _too_deep(where: str) -> UserError:
    return UserError(_TOO_DEEP, where=where)


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


# What the system and other programs say, which may be gone at any time: never an error.
def system_text(path: str | Path, last: int | None = None, most: int = MOST_BYTES, errors: str = "replace") -> str:
    """The text of a file such as those of /proc and /sys, or a log: its `last` bytes, or `most` of its bytes; empty
    where it cannot be read, or is no regular file."""
    try:
        with open_regular(Path(path)) as file:
            if last is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - last))
                most = last
            return file.read(most).decode(errors=errors)
    except (OSError, UserError):
        return ""


def system_link(path: str | Path) -> str:
    """Return the target of a link such as those in /proc; empty if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def command_line(pid: int) -> str:
    """The words of a process, joined by blanks; empty for one that has ended."""
    return system_text(f"/proc/{pid}/cmdline").rstrip("\0").replace("\0", " ")


_BETWEEN_TRIES_S = 0.3


@dataclass(frozen=True)
class Answer:
    """Output of a command, or (`text` is None) the reason why there is none."""

    text: str | None
    complaint: str = ""


def ask_command(words: Sequence[str], env: Mapping[str, str], limit_s: float, tries: int = 1) -> Answer:
    """The output of a command, which may take `limit_s` each time; servers under load often answer the second time.

    Only a program on the PATH of `env` is run.
    """
    # Imported here: most processes that read files ask no command.
    import shutil
    import subprocess

    program = shutil.which(words[0], path=env.get("PATH", ""))
    if program is None:
        return Answer(None, f"{words[0]} is not on PATH")
    complaint = ""
    for attempt in range(tries):
        time.sleep(_BETWEEN_TRIES_S if attempt else 0)
        try:
            done = subprocess.run([program, *words[1:]], env=dict(env), stdin=subprocess.DEVNULL,
                                  capture_output=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            complaint = f"no answer within {limit_s:g} s"
            continue
        except OSError as error:
            complaint = str(error)
            continue
        if done.returncode == 0 and done.stdout.strip():
            return Answer(done.stdout.decode(errors="replace"))
        said = done.stderr.decode(errors="replace").strip().splitlines()
        complaint = f"code {done.returncode}" + (f", {said[-1]!r}" if said else ", and nothing said")
    return Answer(None, f"`{shlex.join(words)}` failed: {complaint}")
