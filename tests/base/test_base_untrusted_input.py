"""Parsers for untrusted input: hostile input must raise a UserError, without hanging or filling memory."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from ezpz_llm.core.base import system_queries, untrusted_input
from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.schema import Range, as_dataclass, as_type
from ezpz_llm.core.rundir.files import hash_file
from ezpz_llm.verify.explain.trace import load_trace

DEEP = 100_000


def _toml(path: Path) -> None:
    untrusted_input.parse_toml(untrusted_input.read_text(path), str(path))


@pytest.fixture
def file(tmp_path):
    def write(content: str | bytes) -> Path:
        path = tmp_path / "file"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_valid_files_are_parsed(file):
    assert untrusted_input.read_json(file('\ufeff{"a": [1, 2.5, "é", null, NaN]}'))["a"][:4] == [1, 2.5, "é", None]
    assert untrusted_input.parse_toml('a = 1\n[b]\nc = ["x"]\n', "a file") == {"a": 1, "b": {"c": ["x"]}}
    assert untrusted_input.read_yaml(file("a: 1\nb: &x [1, 2]\nc: *x\nd: 1e-3\n")) == {"a": 1, "b": [1, 2],
                                                                                       "c": [1, 2],
                                                                                "d": "1e-3"}
    assert untrusted_input.read_yaml(file("")) is None
    text = '{"a": "// no comment", /* one */ "b": [1, 2,], # two\n // three\n}'
    assert untrusted_input.read_commented_json(file(text)) == {"a": "// no comment", "b": [1, 2]}
    assert untrusted_input.parse_json(b"[1]", "a command") == [1]
    assert untrusted_input.first_json('[{"a": 1} , 2]', 1) == ({"a": 1}, 9)


@pytest.mark.parametrize("text", [
    '{"a": "\\ud83d\\ude00 é", "b": 1e3, "c": 1234567890123456789, "a": "last"} \r', "[[1.5, null], true]",
    '{"a": ' + 98 * "[" + 98 * "]" + "}"])
def test_common_json_is_parsed_as_by_the_json_module(text):
    assert untrusted_input.parse_plain_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize("text", [
    b"", b" \n", b'{"a": NaN}', b'{"a": "\\ud800"}', b'{"a": "\xff"}', b'{"\xff": 1}', b'{"a": 1} x',
    b'{"a": "\t"}', b'{"a": ' + 101 * b"[" + 101 * b"]" + b"}", 101 * b"[" + 101 * b"]", 100_000 * b"[",
    b'{"a": ' + 5000 * b"9" + b"}", b'{"a": [1, {"b": -' + 20 * b"9" + b"}]}", b'\xef\xbb\xbf{"a": 1}'])
def test_other_json_is_left_to_parse_json(text):
    assert untrusted_input.parse_plain_json(text) is None


def test_json_lines_truncated_by_a_crash(file):
    assert list(untrusted_input.read_json_lines(file('{"a": 1}\n\n{"a": 2}\n{"a": 3'))) == [{"a": 1}, {"a": 2}]
    with pytest.raises(UserError, match="not JSON") as raised:
        list(untrusted_input.read_json_lines(file('{"a": 1}\n{"a"\n{"a": 3}\n')))
    assert "line 2" in raised.value.where
    with pytest.raises(UserError, match="not a JSON object"):
        list(untrusted_input.read_json_lines(file("3\n")))
    with pytest.raises(UserError, match="longer than"):
        list(untrusted_input.read_json_lines(file('{"a": "' + "x" * 5000 + '"}\n'), most_line=4096))


@pytest.mark.parametrize("reader",
                         [untrusted_input.read_bytes, untrusted_input.read_text, untrusted_input.read_json,
                          untrusted_input.read_yaml, untrusted_input.read_commented_json,
                          lambda path: list(untrusted_input.read_json_lines(path)), hash_file, load_trace])
def test_only_regular_files_are_read(reader, tmp_path):
    with pytest.raises(untrusted_input.NoFile):
        reader(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(UserError, match="not a regular file"):
            reader(path)
    with pytest.raises(UserError, match="cannot read"):
        reader(Path("a\0b"))


def test_log_that_is_not_a_regular_file_reads_as_empty(tmp_path):
    """A malicious run directory must not hang `why` or exhaust its memory."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "growing").write_text("a" * 100)
    for last in (None, 10):
        assert [system_queries.system_text(tmp_path / name, last) for name in ("pipe", "zeros", "gone",
                                                                                ".")] == [""] * 4
    assert system_queries.system_text(tmp_path / "growing", 10) == "a" * 10
    assert "VmRSS" in system_queries.system_text("/proc/self/status")


def test_file_size_is_limited(file):
    with pytest.raises(UserError, match="larger than 1 KiB"):
        untrusted_input.read_bytes(file(b"x" * 1025), 1024)
    assert len(untrusted_input.read_bytes(file(b"x" * 1024), 1024)) == 1024
    with pytest.raises(UserError, match="larger than"):
        untrusted_input.read_bytes(Path("/proc/self/environ"), 1)  # its size reads as 0
    large = file(b'["' + b"x" * untrusted_input.MAX_BYTES + b'"]')
    assert len(untrusted_input.read_json(large, 2 * untrusted_input.MAX_BYTES)[0]) == untrusted_input.MAX_BYTES
    with pytest.raises(UserError, match="larger than 16 MiB"):
        untrusted_input.read_json(large)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True))
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True))


@pytest.mark.parametrize(("reader", "content"), [
    *((untrusted_input.read_json, content) for content in (
        "[" * DEEP, "[" * 500 + "]" * 500, '{"a":' * DEEP, b"\xff", "", "{a}")),
    *((untrusted_input.read_commented_json, content) for content in (
        "[" * DEEP, '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e999}', "1" * 5000,
        "/*" * DEEP, '"\\' * DEEP, "," * DEEP + "/**/" * DEEP)),
    *((_toml, content) for content in (
        "a = " + "[" * 900 + "]" * 900, "a." * 100_000 + "a = 1", "a = " + "1" * 5000, "a = 1\na = 2")),
    *((untrusted_input.read_yaml, content) for content in (
        "[" * 20_000, BOMB, MERGES, "&a [*a]", "!!int ''", "!!bool x", "!!timestamp x", "{[]: 1}", "a: 2020-99-99",
        "!!python/object/apply:os.system [id]", "a: " + "1:" * 2000 + "1.5")),
])
def test_hostile_content_raises_a_user_error(reader, content, file):
    with pytest.raises(UserError) as raised:
        reader(file(content))
    assert str(raised.value.where).startswith(str(file(""))), raised.value.where


@pytest.mark.parametrize(("digits", "value"), [
    ("9" * 19, 10**19 - 1), ("9" * 25, 1e25), ("9" * 5000, math.inf), ("-" + "9" * 5000, -math.inf)])
def test_integers_beyond_64_bits_become_floats(file, digits, value):
    """Arithmetic with a longer integer raises OverflowError, and parsing it takes quadratic time."""
    path = file(f'{{"a": [{digits}]}}\n')
    for content in (untrusted_input.read_json(path), *untrusted_input.read_json_lines(path)):
        [number] = content["a"]
        assert (number, type(number)) == (value, type(value))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\0", "a\\b", "x" * 300, 3, None,
                                  ["a"]])
def test_name_outside_of_the_folder_is_rejected(name, tmp_path):
    with pytest.raises(UserError, match="must be a plain file name"):
        untrusted_input.join_file_name(tmp_path, name, "an index")


def test_plain_name_is_joined(tmp_path):
    assert untrusted_input.join_file_name(tmp_path, "..model.safetensors",
                                          "an index") == tmp_path / "..model.safetensors"


@dataclass(frozen=True)
class Inner:
    name: str
    weight: float = 1.0


@dataclass(frozen=True)
class Outer:
    count: Annotated[int, Range(0, 10)]
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    by_rank: dict[int, float] = None
    kind: Literal["a", "b"] = "a"
    either: int | str = 0


def test_object_is_converted_to_a_dataclass():
    value = {"count": 3, "inner": {"name": "x"}, "many": [{"name": "y", "weight": 2}], "by_rank": {"7": 1},
             "kind": "b", "either": "z"}
    assert as_dataclass(Outer, value, "file") == Outer(3, Inner("x"), (Inner("y", 2.0),), {7: 1.0}, "b", "z")
    assert as_type(dict[str, list[int]], {"a": [1]}, "file") == {"a": [1]}


@pytest.mark.parametrize(("value", "found"), [
    ([], "this is a list, but must be an object"),
    ({}, "count is missing"),
    ({"count": True}, "count is true, but must be a whole number"),
    ({"count": 1.5}, "count is 1.5, but must be a whole number"),
    ({"count": 11}, "count is 11, but must be 0 to 10"),
    ({"count": 10**5000}, "count is a number beyond 64 bits"),
    ({"count": 1, "cuont": 2}, "unknown key 'cuont'"),
    ({"count": 1, "inner": {"name": None}}, "inner.name is null, but must be a string"),
    ({"count": 1, "inner": {"name": "x", "weight": 10**400}}, "inner.weight is a number beyond 64 bits"),
    ({"count": 1, "many": {}}, "many is an object, but must be a list"),
    ({"count": 1, "many": [{"name": "x"}, {"name": "\x1b[31m"}, 3]}, "many[2] is 3"),
    ({"count": 1, "by_rank": {"x": 1}}, "by_rank.x is 'x', but must be a whole number as the key"),
    ({"count": 1, "kind": "c"}, "kind is 'c', but must be 'a' or 'b'"),
    ({"count": 1, "either": []}, "either is a list, but must be a whole number or a string"),
    ({"count": "\x1b[31m" * 100}, "count is '\\x1b[31m"),
])
def test_wrong_type_is_reported_with_its_key(value, found):
    with pytest.raises(UserError) as raised:
        as_dataclass(Outer, value, "file")
    assert raised.value.found.startswith(found)
    assert raised.value.where == "file"
    assert "\x1b" not in raised.value.found
    assert len(raised.value.found) < 200
