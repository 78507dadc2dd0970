"""Summary of a run: shares that add up, medians without outliers, and warnings."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest
from hypothesis import given, strategies as st

from ezpz_llm.core.rundir import RunDir, append_line
from ezpz_llm.core.rundir.records import read_record, update_record
from ezpz_llm.core.rundir.summary_record import Straggler
from ezpz_llm.training.observe import StepWork, breakdown_tables, final_text, summarize
from ezpz_llm.training.observe.tables import percentages

WORK = StepWork(micro_batch=4, accumulation=1, dp_size=2, world_size=2, block_size=256)
WALL = {"setup": 8.0, "training steps": 133.0, "evaluation": 6.5, "checkpoints": 1.5, "sampling": 1.0, "other": 2.0}


def make_run(tmp_path, steps=100, falling=True):
    run_dir = RunDir(tmp_path / "run").create()
    for step in range(1, steps + 1):
        seconds = 5.0 if step in (1, steps) else 0.1 + 0.0001 * step
        phases = {"data_s": 0.001, "forward_s": 0.3 * seconds, "backward_s": 0.5 * seconds,
                  "optimizer_s": 0.1 * seconds}
        append_line(run_dir.metrics, {
            "step": step, "loss": 5 - step / 50 if falling else 5.0, "lr": 1e-3, "grad_norm": 1.0,
            "step_time_s": seconds, **phases, "other_s": seconds - sum(phases.values()),
            **({"val_loss": 2.0, "val_tokens": 65536} if step == steps else {})})
    return run_dir


def test_tables_add_up_and_exclude_outliers(tmp_path):
    run_dir = make_run(tmp_path)
    summary = summarize(run_dir, WORK, WALL, straggler=Straggler(1, 0.0312, 0.03))
    assert summary.timed_steps == 89, "the first ten steps and the last step are excluded"
    assert summary.step_time.median == pytest.approx(0.1055)
    assert sum(summary.phase_share.values()) == pytest.approx(1, abs=1e-9)
    assert summary.tokens_per_second == pytest.approx(2048 / 0.1055)

    text = breakdown_tables(summary, world_size=2)
    steps, wall = text.split("Wall-time breakdown")
    for part, names in ((steps, ("data", "forward", "backward", "optimizer", "other")), (wall, WALL)):
        shares = {name: float(re.search(rf"^  {name} .* ([\d.]+) %$", part, re.MULTILINE)[1]) for name in names}
        assert sum(shares.values()) == pytest.approx(100, abs=1e-9)
    assert "do not separate" in text
    assert "Slowest: rank 1, 31.2 ms per step in data and forward" in text
    assert "separate" not in breakdown_tables(summary, world_size=1)
    for drawn in (text, breakdown_tables(summary, world_size=2, rich=True)):
        assert all(len(re.sub(r"\x1b\[[\d;]*m", "", line)) <= 100 for line in drawn.splitlines())

    update_record(run_dir, summary=summary)
    assert read_record(run_dir).summary == summary
    json.dumps(asdict(summary), allow_nan=False)


def test_final_text_has_losses_rates_and_files(tmp_path):
    run_dir = make_run(tmp_path)
    summary = summarize(run_dir, WORK, WALL, unigram_entropy=3.2)
    text = final_text(summary, run_dir, run_dir.profile / "host.html")
    assert "4.9800 at first" in text
    assert "2.0000 (step 100); token frequencies alone give 3.2000" in text
    assert "19.4k, 9.71k per device" in text
    assert re.search(r"step breakdown +50% backward, 30% forward, 10% optimizer, 9% other", text)
    assert re.search(r"run time +2:32: 88% training steps, 5% setup, 4% evaluation, 1% other", text)
    assert len(text.splitlines()) <= 12
    assert str(run_dir.path) in text
    assert "host.html" in text
    assert "warning" not in text
    assert "MFU" not in text


def test_warnings_about_evaluation_and_loss(tmp_path):
    run_dir = make_run(tmp_path, falling=False)
    summary = summarize(run_dir, WORK, {**WALL, "evaluation": 60.0})
    text = final_text(summary, run_dir)
    assert "warning: evaluation took 29% of the wall time" in text
    assert "warning: the loss did not decrease" in text
    assert all(len(line) <= 100 for line in text.splitlines() if line.startswith("warning"))


def test_resumed_process_summarizes_only_its_steps(tmp_path):
    run_dir = make_run(tmp_path)
    assert summarize(run_dir, WORK, WALL, first_step=97).timed_steps == 3
    assert summarize(run_dir, WORK, WALL, first_step=100) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(lambda parts: sum(parts) > 0))
def test_printed_percentages_add_up_to_100(parts):
    printed = [float(text.removesuffix(" %")) for text in percentages(parts)]
    assert sum(printed) == pytest.approx(100, abs=1e-6)
    for shown, part in zip(printed, parts, strict=True):
        assert abs(shown - 100 * part / sum(parts)) <= 0.1 + 1e-6
