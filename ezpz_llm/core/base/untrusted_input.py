"""Parsers for untrusted files, with limits on size, depth, and digits.

Other modules must not parse input themselves. Only regular files are read, since a pipe or device could hang a
command. Each problem raises a `UserError` that names the file. `ezpz_llm.core.base.schema` converts parsed values
to dataclasses.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ezpz_llm.core.base.errors import UserError

MAX_BYTES = 16 << 20
"""Default size limit of a file, in bytes. Pass `most` to read larger files."""
_MAX_LINE_BYTES = 16 << 20
"""Maximum size of one line of a JSON-lines file; the number of lines is not limited."""
_MAX_DEPTH = 100
"""Maximum nesting depth of lists and objects. Python itself fails at about a thousand."""
_MAX_INTEGER_LENGTH = 19
"""Maximum characters of an integer in JSON, those of 64 bits. Longer integers become floats (Inf beyond 1e308), so
that arithmetic with them does not raise OverflowError."""
_MAX_TOML = 1 << 20
"""Maximum length of TOML text, in characters."""
_MAX_YAML_BYTES = 64 << 10
"""Maximum size of a YAML file: PyYAML takes a second for 100 KB."""
_MAX_YAML_NODES = 100_000
"""Maximum number of YAML nodes, with every alias expanded."""


_LFS = b"version https://git-lfs.github.com/spec/"
_MAX_LFS_BYTES = 1024
"""Maximum size of a Git LFS pointer, a few lines in place of a large file (git-lfs, docs/spec.md)."""


class NoFile(UserError):
    """Error for a file that does not exist."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file of any size, to read it in parts.

    Raises:
        NoFile: the file does not exist.
        UserError: the file cannot be read, or is a pipe or a device, which could block or never end.
    """
    return io.BufferedReader(_NonBlockingFile(_open(path), "rb"))


class _NonBlockingFile(io.FileIO):
    """File in non-blocking mode that raises BlockingIOError if no data is ready, as in /proc/kmsg. `io.FileIO`
    returns None there, which callers do not expect."""

    def readinto(self, buffer: Any) -> int:
        if (count := super().readinto(buffer)) is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return count


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        NoFile: the file does not exist.
        UserError: the file cannot be read, is not a regular file, or is larger than `most` bytes.
    """
    handle = _open(path)
    try:
        if os.fstat(handle).st_size > most:
            raise _too_large(path, most)
        # The reported size may be wrong (0 in /proc), and the file may grow while it is read.
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


def read_text(path: Path, most: int = MAX_BYTES, errors: str = "strict") -> str:
    """Return the text of a UTF-8 file, without a byte-order mark. Raises the errors of `read_bytes`, and for
    invalid UTF-8."""
    return _text(read_bytes(path, most), str(path), errors)


def read_json(path: Path, most: int = MAX_BYTES) -> Any:
    """Return the content of a JSON file. Raises the errors of `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, most), str(path), most)


def read_commented_json(path: Path, most: int = 1 << 20) -> Any:
    """Return the content of a JSON file that may have comments and trailing commas. Rejects duplicate keys and
    non-finite numbers. Raises the errors of `read_json`."""
    where = str(path)
    return _parsed(plain_json(_text(read_bytes(path, most), where)), where, _strict_decoder(where),
                   "put names and strings in double quotes and a comma between entries; comments (//, #, /* */) "
                   "and trailing commas are allowed")


def read_json_lines(path: Path, most_line: int = _MAX_LINE_BYTES) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file of any length. Skips a last line that a crash has truncated.

    Raises:
        NoFile: the file does not exist.
        UserError: the file cannot be read, or a line is not a JSON object or exceeds the limits. The message names
            the line number.
    """
    with open_regular(path) as file:
        try:
            for number, line in enumerate(iter(lambda: file.readline(most_line + 1), b""), 1):
                if len(line) > most_line:
                    raise UserError(f"this line is longer than {_size(most_line)}", where=f"{path}, line {number}",
                                    instead=_REMOVE_LINE)
                if not line.endswith(b"\n"):
                    return
                value = parse_plain_json(line)
                if not isinstance(value, dict):
                    if not line.strip():
                        continue
                    where = f"{path}, line {number}"
                    value = _parsed(line, where, _DECODER, _REMOVE_LINE, is_line=True)
                    if not isinstance(value, dict):
                        raise UserError("this line is not a JSON object", where=where, instead=_REMOVE_LINE)
                yield value
        except OSError as error:
            raise _unreadable(path, error) from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the content of TOML text. Errors name its source, `where`. Raises the errors of `parse_json`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    if len(text) > _MAX_TOML:
        raise UserError(f"this is larger than {_size(_MAX_TOML)}", where=where)
    # tomllib takes quadratic time for a key with many dots.
    if any(part.count(".") > _MAX_DEPTH for part in re.split("[=,\n]", text)):
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
    """Return the content of a YAML file. Tags of Python objects are rejected. Raises the errors of `read_json`."""
    import yaml

    where = str(path)
    text = read_text(path, _MAX_YAML_BYTES)
    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            # Checked during parsing because PyYAML takes quadratic time for a deep list.
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise _too_deep(where)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        # Checked before the values are built because merged keys multiply with every alias.
        if node is not None and _expanded_nodes(node, {}) > _MAX_YAML_NODES:
            raise UserError("the aliases expand to too many values", where=where,
                            instead="write the values without aliases")
        value = None if node is None else loader.construct_document(node)
    except UserError:
        raise
    except Exception as error:  # PyYAML also raises KeyError or AttributeError for an invalid !!tag
        raise UserError(f"this is not YAML: {error}", where=where) from error
    return value


def parse_json(text: str | bytes, where: str, most: int = MAX_BYTES, *, strict: bool = True) -> Any:
    """Return the content of JSON text. Errors name its source, `where`.

    Args:
        strict: False allows control characters in strings, which some programs write.

    Raises:
        UserError: the text is not valid JSON, or exceeds the limits.
    """
    if len(text) > most:
        raise UserError(f"this is larger than {_size(most)}", where=where)
    return _parsed(text, where, _DECODER if strict else _LENIENT, None)


def parse_plain_json(text: bytes) -> Any:
    """Return the content of common JSON, or None if only `parse_json` can parse or reject it.

    Several times as fast as `parse_json`, for files with millions of lines. Strings in the result have no lone
    surrogates.
    """
    import msgspec

    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):  # blank, NaN, a lone surrogate, or invalid JSON or UTF-8
        return None
    if isinstance(value, dict) and not any(type(member) in _NOT_PLAIN for member in value.values()):
        return value  # without counting brackets in a long text
    is_deep = text.count(b"[") + text.count(b"{") > _MAX_DEPTH
    return None if is_deep or _has_long_integer(value) else value


_NOT_PLAIN = {dict, list, int}


def _has_long_integer(value: Any) -> bool:
    """Return True if a parsed value of limited depth contains an integer beyond 64 bits."""
    if isinstance(value, (dict, list)):
        return any(map(_has_long_integer, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) >> 63 > 0


def first_json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `at`, and its end position. For files that are read in parts.

    Raises:
        ValueError: the value is invalid or incomplete, or exceeds the limits.
    """
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if text.count("[", at, end) + text.count("{", at, end) > _MAX_DEPTH:
        _check_depth(value, "")
    return value, end


_PART_LENGTH = 1 << 18
_SEPARATORS = re.compile(r"[\s,]*")
_KEY = re.compile(r'[\s,{]*("(?:[^"\\]|\\.)*")\s*:\s*|[\s,{]*\}')
_INCOMPLETE = "the JSON text is incomplete"


class JsonText:
    """Incremental parser for JSON text of any length. Only one value at a time is in memory.

    Every method raises ValueError if the text is invalid or incomplete.

    Args:
        read: returns the next characters, as many as requested; fewer only at the end.
        most: maximum number of characters of one value.
    """

    def __init__(self, read: Callable[[int], str], most: float = float("inf")) -> None:
        self._read, self._most = read, most
        self._text, self._at = "", 0

    def key(self) -> str | None:
        """Return the name of the object's next member, or None at the end of the object."""
        while (match := _KEY.match(self._text, self._at)) is None or match.end() == len(self._text):
            if not self._read_more():
                if match is None:
                    raise ValueError(_INCOMPLETE)
                break
        self._at = match.end()
        return None if match[1] is None else first_json(match[1], 0)[0]

    def value(self) -> Any:
        """Return the next value, which must not be the last token of the text."""
        while True:
            try:
                value, end = first_json(self._text, self._at)
                if end < len(self._text):
                    self._at = end
                    return value
                problem = ValueError(_INCOMPLETE)
            except ValueError as error:
                problem = error
            if len(self._text) - self._at > self._most or not self._read_more():
                raise problem

    def items(self) -> Iterator[Any]:
        """Yield the values of the list that begins here."""
        if self._next_character() != "[":
            raise ValueError("not a list")
        self._at += 1
        while self._next_character() != "]":
            yield self.value()
        self._at += 1

    def end(self) -> None:
        """Check that only whitespace follows."""
        while not self._text[self._at:].strip():
            if not self._read_more():
                return
        raise ValueError("more text follows the JSON value")

    def _next_character(self) -> str:
        while (match := _SEPARATORS.match(self._text, self._at)) is None or match.end() == len(self._text):
            if not self._read_more():
                raise ValueError(_INCOMPLETE)
        self._at = match.end()
        return self._text[self._at]

    def _read_more(self) -> bool:
        # Read as much as is left, so that parsing a long value is not restarted too often.
        left = self._text[self._at:]
        part = self._read(max(_PART_LENGTH, len(left)))
        self._text, self._at = left + part, 0
        return bool(part)


def join_file_name(folder: Path, name: Any, where: str) -> Path:
    """Join a folder and an untrusted file name, so that the name cannot refer to a file outside of the folder.

    Args:
        where: source of the name, for the message.

    Raises:
        UserError: the name is not a plain file name.
    """
    if (not isinstance(name, str) or name in ("", ".", "..") or len(os.fsencode(name)) > 255
            or any(character in name for character in "/\\\0")):
        raise UserError(f"{shorten_value(name)} must be a plain file name, without directories", where=where,
                        instead="name a file in the same directory")
    return folder / name


def shorten_value(value: Any, most: int = 80) -> str:
    """Format a value for a message: short, on one line, without control characters."""
    if isinstance(value, (str, bytes)):
        text = ascii(value[:most + 1])
    elif isinstance(value, (list, dict, tuple)):
        text = "an object" if isinstance(value, dict) else "a list"
    elif isinstance(value, int) and value.bit_length() > 10_000:
        text = "a number with thousands of digits"
    else:
        text = str(value)
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= most else f"{text[:most]}…"


_COMMENT = r"(?://|\#)[^\n]*(?:\n|\Z)|/\*(?:(?!\*/).)*(?:\*/|\Z)"
_TEXT = r'"(?:[^"\\\n]|\\.)*"?'
_BESIDE_JSON = re.compile(rf"{_TEXT}|{_COMMENT}|,(?=(?:\s|{_COMMENT})*[}}\]])", re.DOTALL)
"""Pattern of comments and trailing commas, which JSON does not allow. Strings match first and are kept.
An unterminated string matches up to the end of its line, and an unterminated comment up to the end of the file, so
that the scan takes linear time."""


def plain_json(text: str) -> str:
    """Replace comments and trailing commas in JSON by spaces, so that error messages show the right position."""
    def _blank(match: re.Match[str]) -> str:
        return match[0] if match[0][0] == '"' else re.sub(r"[^\n]", " ", match[0])

    return _BESIDE_JSON.sub(_blank, text)


_REMOVE_LINE = "remove that line"
_TOO_DEEP = f"lists and objects are nested more than {_MAX_DEPTH} levels deep"


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_INTEGER_LENGTH else float(digits)


_DECODER, _LENIENT = (json.JSONDecoder(parse_int=_parse_int, strict=strict) for strict in (True, False))


def _strict_decoder(where: str) -> json.JSONDecoder:
    def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise UserError(f"duplicate key {shorten_value(key)}", where=where, instead="keep one of them")
            values[key] = value
        return values

    def _reject_constant(name: str) -> float:
        raise UserError(f"JSON does not allow {name}", where=where, instead="a finite number")

    def _finite(text: str) -> int | float:
        number = _parse_int(text) if text.lstrip("-").isdigit() else float(text)
        if math.isinf(number):
            raise UserError(f"the number {shorten_value(text)} is too large", where=where,
                            instead="a finite number")
        return number

    return json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_reject_constant, parse_int=_finite,
                            parse_float=_finite)


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
        raise UserError(f"unsupported JSON: {error}", where=where, instead=instead) from error
    except RecursionError as error:
        raise _too_deep(where) from error
    if text.count("[") + text.count("{") > _MAX_DEPTH:
        _check_depth(value, where)
    return value


def _check_depth(value: Any, where: str) -> None:
    containers = {dict, list}
    level = [value] if type(value) in containers else []
    for _ in range(_MAX_DEPTH + 1):
        # Comparing types takes half the time of isinstance, of which a tokenizer.json needs 500,000.
        level = [member for outer in level for member in (outer.values() if type(outer) is dict else outer)
                 if type(member) in containers]
        if not level:
            return
    raise _too_deep(where)


def _expanded_nodes(node: Any, known: dict[int, int]) -> int:
    """Return the number of nodes with every alias expanded; more than the limit if a node contains itself."""
    if id(node) not in known:
        known[id(node)] = _MAX_YAML_NODES + 1
        members = node.value if isinstance(node.value, list) else ()
        known[id(node)] = 1 + sum(_expanded_nodes(part, known) for member in members
                                  for part in (member if isinstance(member, tuple) else (member,)))
    return known[id(node)]


def _open(path: Path) -> int:
    """Return a descriptor of a regular file. O_NONBLOCK: opening a FIFO would wait for a writer."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoFile("No such file or directory", where=str(path)) from error
    except (OSError, ValueError) as error:  # ValueError if the path contains a NUL
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
    raise UserError(f"this is {kind}, not a regular file", where=str(path), instead="a regular file")


def _is_lfs_pointer(handle: int, size: int) -> bool:
    try:
        return len(_LFS) < size <= _MAX_LFS_BYTES and os.pread(handle, len(_LFS), 0) == _LFS
    except OSError:  # the caller will report a file that cannot be read
        return False


def _text(data: bytes, where: str, errors: str = "strict") -> str:
    try:
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error


def _not_utf8(where: str, error: UnicodeDecodeError) -> UserError:
    return UserError(f"this is not UTF-8 text: {error.reason} at byte {error.start}", where=where)


def _unreadable(path: Path, error: OSError | ValueError) -> UserError:
    return UserError(f"cannot read this file: {getattr(error, 'strerror', None) or error}", where=str(path))


def _too_large(path: Path, most: int) -> UserError:
    return UserError(f"this file is larger than {_size(most)}, the limit for files of this kind", where=str(path))


def _too_deep(where: str) -> UserError:
    return UserError(_TOO_DEEP, where=where)


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
