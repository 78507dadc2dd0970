"""Trace files of any size and content are read in bounded memory or rejected with advice."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from ezpz_llm.core.base import untrusted_input
from ezpz_llm.core.base.errors import UserError
from ezpz_llm.verify.explain import trace
from ezpz_llm.verify.explain.events import Event
from ezpz_llm.verify.explain.trace import load_trace, read_trace

EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": 5.5, "dur": 1.25,
         "args": {"External id": 7, "correlation": 3, "Input Dims": [[1, 2]]}}
STEP = {"ph": "X", "cat": "user_annotation", "name": "step 1", "tid": 2, "ts": 1, "dur": 2}


def _write(path: Path, text: str) -> Path:
    with gzip.open(path, "wt") as file:
        file.write(text)
    return path


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("part", [1, 7, 1 << 20])
def test_the_result_does_not_depend_on_the_chunk_size(tmp_path: Path, monkeypatch, indent: int | None,
                                                      part: int) -> None:
    monkeypatch.setattr(untrusted_input, "_PART_LENGTH", part)
    events = [EVENT, {**EVENT, "cat": "kernel"}, {**EVENT, "cat": "cuda_runtime"}, {"ph": "M"},
              {**EVENT, "ts": 6, "dur": 0.5}, {**EVENT, "tid": 3, "name": "aten::add"}]
    whole = {"schemaVersion": 1, "a \\ \" b": [1, {"x": []}], "traceEvents": events,
             "ezpz_llm": {"rank": 0}, "empty": {}}
    loaded = load_trace(_write(tmp_path / "t.json.gz", json.dumps(whole, indent=indent)))
    expected = [Event("aten::mm", 5.5, 1.25, 2, "cpu_op"), Event("aten::mm", 5.5, 1.25, 2, "kernel", 3),
                Event("aten::add", 5.5, 1.25, 3, "cpu_op")]
    assert loaded == {**whole, "traceEvents": expected, "launches": {3: 5.5}}
    assert load_trace(_write(tmp_path / "t.json.gz", "{}")) == {"traceEvents": [], "launches": {}}


def test_a_decompression_bomb_uses_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [')
        for _ in range(20):
            file.write(json.dumps([{"ph": "M", "name": "x" * 20}] * 10_000)[1:-1] + ",")
        file.write(json.dumps(EVENT) + "]}")
    tracemalloc.start()
    assert len(load_trace(path)["traceEvents"]) == 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_an_event_uses_little_memory(tmp_path: Path) -> None:
    """Bounds the memory of large traces; see benchmarks/million_steps.py."""
    events = [{**EVENT, "name": "detach", "ts": 9.5 * i, "tid": 1000} for i in range(20_000)]
    path = _write(tmp_path / "t.json.gz", json.dumps({
        "traceEvents": [{**STEP, "tid": 1000}, *events], "ezpz_llm": {"rank": 0, "device": "cpu"}}))
    tracemalloc.start()
    assert len(read_trace(path).operators) == len(events)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400 * len(events) + 4e6


def test_traces_beyond_the_limits_are_rejected(tmp_path: Path, monkeypatch) -> None:
    path = _write(tmp_path / "t.json.gz", json.dumps({"traceEvents": [{**EVENT, "ts": 9 * i} for i in range(50)]}))
    monkeypatch.setattr(trace, "MAX_EVENTS", 40)
    with pytest.raises(UserError, match="more than 40 events") as error:
        load_trace(path)
    assert "--trace-steps" in error.value.instead
    monkeypatch.setattr(trace, "MAX_CHARACTERS", 100)
    with pytest.raises(UserError, match="larger than"):
        load_trace(path)


@pytest.mark.parametrize("text", [
    "", "[", "[]", "{", '{"traceEvents"', '{"traceEvents": [', '{"traceEvents": [{"ph": "X"', '{"traceEvents": 5}',
    '{"traceEvents": ' + "[" * 5000, '{"a": ' + "1" * 5000 + "}", '{"traceEvents": [nonsense]}', '{"ezpz_llm": {}',
    json.dumps({"traceEvents": [{**EVENT, "ts": "x"}]}), json.dumps({"traceEvents": [{**EVENT, "name": None}]}),
    json.dumps({"traceEvents": [{**EVENT, "tid": []}]}),
    json.dumps({"traceEvents": [{**EVENT, "dur": float("inf")}]}),
    json.dumps({"traceEvents": [STEP], "ezpz_llm": {}}), json.dumps({"traceEvents": [STEP], "ezpz_llm": []}),
    json.dumps({"traceEvents": [STEP], "ezpz_llm": {"rank": 0, "device": "cpu", "collectives": 5}}),
    json.dumps({"traceEvents": [STEP], "ezpz_llm": {"rank": 0, "device": "cpu", "flops": {"ours": 0}}}),
    json.dumps({"traceEvents": [STEP], "ezpz_llm": {"rank": 0, "device": "cpu", "links": [{"sender": 1}]}}),
    json.dumps({"traceEvents": [STEP], "ezpz_llm": {"rank": 0, "device": "cpu"}, "baseTimeNanoseconds": "x"}),
])
def test_invalid_traces_are_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:

    path = _write(tmp_path / "t.json.gz", text)
    with pytest.raises(UserError) as error:
        read_trace(path)
    assert error.value.where.startswith(str(path))
    path.write_bytes(path.read_bytes()[:-9] + b"\0garbage\0")
    with pytest.raises(UserError):
        read_trace(path)
