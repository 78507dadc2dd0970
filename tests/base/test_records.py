"""Conversion of parsed JSON to records: accepted values, and messages for invalid ones."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from msgspec import Struct
from slowness import scaled

from ezpz_llm.core.base import UserError
from ezpz_llm.core.base.records import Epoch, Ranks, Whole, as_plain, as_record


@dataclass(frozen=True)
class Inner:
    path: Path
    pair: tuple[int, ...] = ()


class Record(Struct, frozen=True):
    ranks: Ranks | None = None
    at: Epoch | None = None
    size: Whole = 0
    inner: Inner | None = None
    counts: dict[str, int] = {}
    lists: dict[str, list[dict[str, int]]] = {}
    names: list[str] = []
    kind: Literal["a", "b"] = "a"
    either: int | str | None = None


WHOLE = Record(ranks=2, at=1.5, size=3, inner=Inner(Path("x/y"), (1, 2)), counts={"a": 1}, names=["n"], kind="b")


def test_a_record_is_read_as_it_was_written():
    assert as_record(Record, json.loads(json.dumps(as_plain(WHOLE))), "run.json") == WHOLE


def test_members_of_another_version_are_ignored():
    assert as_record(Record, {"ranks": 2, "later": [1]}, "run.json") == Record(ranks=2)
    assert as_record(Record, {"ranks": 2, "\ud800": [{"\ud800": 1}]}, "run.json") == Record(ranks=2)


@pytest.mark.parametrize(("value", "message"), [
    (3, "this is 3, but must be an object"),
    ({"ranks": "two"}, "ranks is 'two', but must be a whole number or null"),
    ({"ranks": True}, "ranks is true, but must be a whole number or null"),
    ({"ranks": 0}, "ranks is 0, but must be 1 or more"),
    ({"ranks": 10**9}, "ranks is 1000000000, but must be 2,000,000 or less"),
    ({"at": float("nan")}, "at is nan, but must be 0 or more"),
    ({"size": 10**30}, "size is a number beyond 64 bits, but must be 9,223,372,036,854,775,807 or less"),
    ({"inner": {"path": "x", "pair": [1, "2"]}}, "inner.pair[1] is '2', but must be a whole number"),
    ({"inner": {}}, "inner.path is missing"),
    ({"inner": {"path": 3}}, "inner.path is 3, but must be a string"),
    ({"counts": {"a": None}}, "counts.a is null, but must be a whole number"),
    ({"counts": {"a": 1, "b.c": 2, "d": "x", "e": "y"}}, "counts.d is 'x', but must be a whole number"),
    ({"counts": {3: 1}}, "a key of counts must be a string"),
    ({"lists": {"a": [{}], "b": [{"c": 1}, {"d": 1, "e": "x"}], "f": [{"g": "x"}]}},
     "lists.b[1].e is 'x', but must be a whole number"),
    ({"lists": {"\ud800": [{"a": 1}], "b": [1]}}, "lists.b[0] is 1, but must be an object"),
    ({"size": "\ud800"}, "size is '?', but must be a whole number"),
    ({"names": [1]}, "names[0] is 1, but must be a string"),
    ({"kind": "c"}, "kind is 'c', which this version does not support"),
    ({"either": 1.5}, "either is 1.5, but must be a whole number or a string or null"),
])
def test_a_message_names_the_key_the_value_and_the_type(value, message):
    with pytest.raises(UserError) as error:
        as_record(Record, value, "runs/a/run.json")
    assert (error.value.found, error.value.where) == (message, "runs/a/run.json")


def test_a_message_begins_with_the_key_of_the_value():
    with pytest.raises(UserError, match=r"^config\.ranks is 0, "):
        as_record(Record, {"ranks": 0}, "run.json", "config")


def test_the_rank_shim_and_the_plan_of_launch_do_not_import_msgspec():
    modules = ("ezpz_llm.launcher.on_nodes.shim.__main__, ezpz_llm.launcher.on_nodes.shim.exit_record, "
               "ezpz_llm.launcher.running.command")
    done = subprocess.run([sys.executable, "-c", f"import sys, {modules}; print('msgspec' in sys.modules)"],
                          capture_output=True, text=True, check=True, timeout=scaled(120))
    assert done.stdout.strip() == "False"
