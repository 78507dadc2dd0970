"""`ezpz-llm explain --counterfactual` on a run that `launch` made, from one end to the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ezpz_llm.errors import UserError
from ezpz_llm.explain.counterfactual import rerun
from ezpz_llm.rundir import RunDir, read_record

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "100"}
SMALL = ["--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--block-size", "32", "--steps", "3", "--profile",
         "false", "--eval-tokens", "1024", "--sample-tokens", "0", "--save-every", "-1", "--ds-config", "zero1"]


def explain(*words: str, cwd, timeout=170):
    return subprocess.run([sys.executable, "-m", "ezpz_llm.explain", *words], env=ENV, cwd=cwd, timeout=timeout,
                          capture_output=True, text=True, check=False)


def launched(folder):
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", "run", "--", sys.executable,
               "-m", "ezpz_llm.train", *SMALL]
    done = subprocess.run(command, env=ENV, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_the_runs_steps_are_made_again_without_collectives(tmp_path):
    run_dir = launched(tmp_path)
    done = explain("run", "--counterfactual", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [one["rank"] for one in found["counterfactual"]] == [0, 1]
    for one in found["counterfactual"]:
        assert 0 < one["stubbed_s"] < one["real_s"] < 5
        assert one["removed_share"] == pytest.approx(1 - one["stubbed_s"] / one["real_s"])
        assert 0 < one["exposed_share"] < 1
    again = next(run_dir.glob("counterfactual-*"))
    # The run itself is as it was; the other one's layout and model are the run's own.
    assert len(list(RunDir(run_dir).profile.glob("trace-rank*"))) == 0
    assert read_record(RunDir(again))["model"] == read_record(RunDir(run_dir))["model"]
    assert len(list(RunDir(again).profile.glob("trace-rank*.json.gz"))) == 2
    assert not list((again / "checkpoints").glob("step*"))
    text = explain(str(again), cwd=tmp_path).stdout
    for words in ("measured by leaving collectives out", "exposed share by traces", "Checks by other tools",
                  "times our"):
        assert words in text


@pytest.mark.parametrize(("record", "says"), [
    ({"launch": {"typed": ["launch", "a"]}, "environment": {"world_size": 1}}, "nobody to communicate with"),
    ({"launch": {"typed": ["launch", "a"]}, "environment": {"world_size": 2}, "precision": "fp16"},
     "scale their losses"),
    ({"environment": {"world_size": 2}}, "no record of how the run was launched"),
])
def test_what_has_no_counterfactual_is_refused(tmp_path, record, says):
    with pytest.raises(UserError, match=says):
        rerun(tmp_path, record)
    assert not list(tmp_path.iterdir())
