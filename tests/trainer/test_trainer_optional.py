"""Diverging runs, and runs whose optional work fails: no checkpoint is lost, and the exit code is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slowness import scaled

from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.checkpoint.manifest import complete_checkpoints
from ezpz_llm.training.evaluate import hellaswag
from ezpz_llm.training.observe.profile import PythonProfile
from ezpz_llm.training.trainer import run_result, step_end
from ezpz_llm.training.trainer.callbacks import text_samples
from ezpz_llm.training.trainer.callbacks.memory_watch import MemoryWatch
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import run

SMALL = ["--n-layer", "1", "--n-head", "2", "--n-kv-head", "2", "--n-embd", "32", "--block-size", "32",
         "--eval-tokens", "64", "--sample-tokens", "4", "--precision", "fp32", "--device", "cpu",
         "--micro-batch-size", "2", "--ds-config", "ddp"]
DIVERGING = ["--steps", "6", "--warmup-steps", "0", "--grad-clip", "0", "--lr", "1e3", "--save-every", "3"]


def checkpoints(run_dir: Path) -> list[str]:
    return [folder.name for folder in complete_checkpoints(RunDir(run_dir).checkpoints)]


def test_a_diverging_run_saves_and_ends_without_a_traceback(tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[list[str]] = []
    inner = step_end.after_step

    def after_step(session: Any) -> None:
        inner(session)
        seen.append(checkpoints(tmp_path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ezpz_llm.training.trainer.loop.after_step", after_step)
        code = run(parse([*SMALL, *DIVERGING, "--profile", "false", "--save-async", "false",
                          "--run-dir", str(tmp_path)]))
    shown = capsys.readouterr()
    assert code == 1
    assert "warning: the sample after step 6 failed: the logits are not finite; the run continues\n" in shown.err
    assert "the run failed after step 6 of 6" in shown.err
    assert "instead: --lr below 1000, --grad-clip 1 or --on-bad-steps rollback\n" in shown.err
    assert "training loss" in shown.out, "the summary"
    # With synchronous saves, each is complete at the end of its step.
    assert seen == [[], [], ["step-00000003"], ["step-00000003"], ["step-00000003"],
                    ["step-00000003", "step-00000006"]]
    assert [line["step"] for line in read_lines(RunDir(tmp_path).metrics)] == [1, 2, 3, 4, 5, 6]


def test_failing_optional_work_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}) + "\n")
    for owner, name in ((hellaswag, "score"), (text_samples, "sample"), (step_end, "validation_loss"),
                        (run_result, "plot_run"), (run_result, "write_own_page"), (PythonProfile, "before_step"),
                        (MemoryWatch, "result")):
        monkeypatch.setattr(owner, name, fail)
    code = run(parse([*SMALL, "--steps", "4", "--tokenizer", "bytes", "--hellaswag", str(items),
                      "--hellaswag-every", "2", "--run-dir", str(tmp_path / "run")]))
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
    for what in ("the validation after step 4", "HellaSwag after step 2", "HellaSwag after step 4",
                 "the sample after step 4", "plotting", "the Python profile", "the memory report"):
        warning = f"warning: {what} failed: RuntimeError: out of memory; the run continues\n"
        assert shown.err.count(warning) == 1, what
    assert "training loss" in shown.out, "the summary"
    assert checkpoints(tmp_path / "run") == ["step-00000004"]
    record = read_record(RunDir(tmp_path / "run"))
    assert (record.steps, record.memory, record.summary.steps) == (4, None, 4)


def test_a_run_without_matplotlib_has_no_page_and_says_what_to_install(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(parse([*SMALL, "--steps", "4", "--tokenizer", "bytes", "--run-dir", str(tmp_path / "run")])) == 0
    shown = capsys.readouterr().out
    note = "note: report.html requires matplotlib, which is not installed: pip install 'ezpz_llm[figures]'\n"
    assert shown.count(note) == 1
    assert shown.count("report.html") == 1, "the list of files does not name it"
    assert not RunDir(tmp_path / "run").report.exists()


def test_a_checkpoint_is_complete_before_work_that_may_take_minutes(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the run in HellaSwag or a sample: the checkpoint of that step exists."""
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}) + "\n")

    def end(*args: Any, **options: Any) -> Any:
        raise SystemExit(9)

    for owner, name in ((hellaswag, "score"), (text_samples, "sample")):
        options = parse([*SMALL, "--steps", "4", "--profile", "false", "--tokenizer", "bytes", "--hellaswag",
                         str(items), "--run-dir", str(tmp_path / name)])
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, end)
            with pytest.raises(SystemExit):
                run(options)
        assert checkpoints(tmp_path / name) == ["step-00000004"]
        assert [line["step"] for line in read_lines(RunDir(tmp_path / name).metrics)] == [1, 2, 3, 4]


@pytest.mark.full
def test_two_ranks_that_diverge_end_together(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", str(tmp_path / "run"),
               sys.executable, "-m", "ezpz_llm.train", *SMALL, *DIVERGING]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(200), check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("the sample after step 6 failed: the logits are not finite") == 1
    assert checkpoints(tmp_path / "run") == ["step-00000003", "step-00000006"]
