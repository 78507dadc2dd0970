"""Reading and writing of run.json: values that no version writes are reported, and other members are kept."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ezpz_llm.core.base import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import RunRecord, read_record, update_record
from ezpz_llm.core.rundir.summary_record import Bubble, Spread, Straggler, Summary


@pytest.mark.parametrize(("content", "message"), [
    ([1], "run.json is not a run record"),
    ({"exit": {"stopped": {"kind": "signal", "signal": "x"}}},
     "exit.stopped.signal is 'x', which this version does not support"),
    ({"exit": {"ended": math.inf}}, "exit.ended is inf, but must be 253,402,300,799 or less"),
    ({"launch": {"env": {"A": "1", "B": 2}}}, "launch.env.B is 2, but must be a string"),
    ({"config": {"seed": "\ud800"}}, "config.seed is '?', but must be a whole number or null"),
    ({"model": {"block_size": 0}}, "model.block_size is 0, but must be 1 or more"),
    ({"memory": {"expected": {"parameters": math.nan}}},
     "memory.expected.parameters is nan, but must be 0 or more"),
    ({"summary": {"wall": {"training": -1.0}}}, "summary.wall.training is -1.0, but must be 0 or more"),
])
def test_an_invalid_value_is_reported_with_its_key(tmp_path: Path, content: object, message: str) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.record.write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        read_record(run_dir)
    assert (error.value.found, error.value.where) == (message, str(run_dir.record))


def test_a_run_of_an_earlier_version_is_rejected_with_what_to_do(tmp_path: Path) -> None:
    RunDir(tmp_path).record.write_text(json.dumps({"sources": {"lr": "default"}}))
    with pytest.raises(UserError, match=r"sources\.lr is 'default', but must be an object") as error:
        read_record(RunDir(tmp_path))
    assert "--init-from" in (error.value.instead or "")


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    spread = Spread(0.2, 0.1, 0.3)
    summary = Summary(mfu=0.4, steps=3, step_time=spread, phase_s={"data": spread}, wall={"training": 3.0},
                      straggler=Straggler(1, 0.2, 0.1), bubble=Bubble((0.1, 0.2), 0.15))
    update_record(RunDir(tmp_path), summary=summary)
    assert read_record(RunDir(tmp_path)) == RunRecord(summary=summary)


def test_an_update_keeps_members_of_another_version_and_replaces_invalid_ones(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.record.write_text('{"later": 1, "steps": -1}')
    update_record(run_dir, steps=2)
    assert json.loads(run_dir.record.read_text()) == {"later": 1, "steps": 2}
    with pytest.raises(TypeError, match=r"run\.json has no member step"):
        update_record(run_dir, step=2)
