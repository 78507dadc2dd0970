"""Reports of runs that finished, resumed, changed their batch, ended early or are still running."""

from __future__ import annotations

import os
import tracemalloc

import pytest
from made_up_runs import make_run

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, write_json
from ezpz_llm.training.report.command import main, report_text
from ezpz_llm.training.report.runs import comparison_sentence, differences, load_runs


def test_results_of_finished_run(tmp_path):
    run, = load_runs([make_run(tmp_path / "a")])
    assert run.state == "finished, step 100 of 100"
    assert run.notes == ()
    assert run.tokens[-1] == 204800
    assert run.hours[-1] == pytest.approx(10 / 3600)
    assert run.validation == (100, pytest.approx(3.1))
    assert run.last_loss == pytest.approx(5.004 - 0.02 * 95.5)
    assert run.median("tokens_per_second_per_device") == pytest.approx(10240)


@pytest.mark.parametrize(("record", "silent_s", "state"), [
    ({}, 5, "running, step 40 of 100 written 5 s ago"),
    ({}, 7500, "no exit recorded; step 40 of 100 was written 2 hours ago"),
    ({"exit": {"code": 137, "cause": "out of memory", "ended": 2000.0}}, 5,
     "failed after step 40 of 100: out of memory (code 137)"),
    ({"exit": {"code": 0, "cause": "all ranks succeeded", "ended": 2000.0}, "steps": 40,
      "stopped": "SIGTERM was received"}, 5, "stopped after step 40 of 100: SIGTERM was received"),
    ({"exit": {"code": 130, "cause": "launch received SIGINT (Ctrl-C) and ended the run", "ended": 2000.0,
               "stopped": {"kind": "signal"}}, "steps": 40, "stopped": "interrupted by Ctrl-C (SIGINT)"}, 5,
     "stopped after step 40 of 100: interrupted by Ctrl-C (SIGINT)"),
    # There is no checkpoint to resume from.
    ({"exit": {"code": 143, "cause": "launch received SIGTERM", "ended": 2000.0, "stopped": {"kind": "signal"}}}, 5,
     "failed after step 40 of 100: launch received SIGTERM (code 143)"),
    # The exit is from an earlier attempt; launch has restarted the run since.
    ({"exit": {"code": 137, "cause": "out of memory", "ended": 900.0}, "steps": 20, "stopped": "SIGTERM"}, 5,
     "running, step 40 of 100 written 5 s ago"),
])
def test_state_of_run(tmp_path, record, silent_s, state):
    folder = make_run(tmp_path / "a", range(1, 41), **record)
    os.utime(folder / "metrics.jsonl", (5000, 5000))
    run, = load_runs([folder], now=5000 + silent_s)
    assert run.state == state


def test_text_report_fits_the_terminal(tmp_path):
    runs = load_runs([make_run(tmp_path / "a", range(1, 41), exit={
        "code": 1, "cause": "rank 3 on a-node-with-a-long-name raised an error of many words " * 3,
        "ended": 2000.0}),
                      make_run(tmp_path / "b", lr=0.002)])
    assert max(map(len, report_text(runs, 80, color=False).splitlines())) <= 80


def test_state_of_interrupted_run_with_checkpoint(tmp_path):
    folder = make_run(tmp_path / "a", range(1, 41), exit={
        "code": 143, "cause": "launch received SIGTERM", "ended": 2000.0, "stopped": {"kind": "signal"}})
    (folder / "checkpoints/latest").write_text("step-00000030\n")
    run, = load_runs([folder])
    assert run.state == "stopped after step 40 of 100: launch received SIGTERM"


def test_notes_on_resumed_batch_missing_steps_and_nan(tmp_path):
    folder = make_run(tmp_path / "a", range(11, 21))
    make_run(folder, range(21, 31), tokens=4096, config={"steps": 100, "resume": "runs/first", "log_every": 10})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "loss": null, "step_time_s": 0.1, "tokens_per_second": 40960}\n')
        file.write('{"step": 33, "loss": 4.0, "step_time_s": 0.1, "tokens_per_second": 40960}\n{"step": 34, "lo')
    run, = load_runs([folder])
    assert run.tokens[0] == 11 * 2048, "includes steps before the first line"
    assert run.tokens[-1] == 20 * 2048 + 12 * 4096
    notes = " ".join(run.notes)
    for part in ("begin at step 11 (resumed from runs/first)",
                 "the tokens per step change from 2,048 to 4,096 at step 21", "1 step between",
                 "non-finite at 1 step, first at step 31"):
        assert part in notes
    assert "loss (nats/token)" in report_text([run], 80, color=False)


def test_repeated_steps_count_once(tmp_path):
    folder = make_run(tmp_path / "a", [1, 2, 3, 2, 3, 4])
    run, = load_runs([folder])
    assert run.column("step").tolist() == [1, 2, 3, 4]
    assert run.tokens[-1] == 4 * 2048


def test_several_differing_settings_are_flagged_without_derived_ones(tmp_path):
    """Trap 65: comparing runs that differ in several settings."""
    first, = load_runs([make_run(tmp_path / "a")])
    same, other = load_runs([make_run(tmp_path / "b"), make_run(tmp_path / "c", lr=0.002)])
    assert comparison_sentence(differences([first, same])) == "The runs have the same settings."
    one_setting = differences([first, other])
    assert one_setting == {"lr": ["0.004", "0.002"]}, "min_lr is derived from lr"
    assert comparison_sentence(one_setting) == "The runs differ in one setting: lr."
    third, = load_runs([make_run(tmp_path / "d", lr=0.002, precision="bf16")])
    two_settings = differences([first, third])
    assert set(two_settings) == {"lr", "precision"}
    assert comparison_sentence(two_settings).startswith("warning: the runs differ in 2 settings (lr, precision)")
    assert "warning: the runs differ in 2 settings" in report_text([first, third], 80, color=False)


def test_names_are_short_and_unique_and_duplicates_are_ignored(tmp_path):
    folders = [make_run(tmp_path / parts, range(1, 3)) for parts in ("x/run", "y/run")]
    assert [run.name for run in load_runs([*folders, folders[0]])] == ["x/run", "y/run"]
    assert [run.name for run in load_runs(folders[:1])] == ["run"]


def test_memory_of_many_steps(tmp_path):
    """Reading a million lines must fit into 300 MB: 200 bytes per line, a fifth of a dict."""
    folder = make_run(tmp_path / "a", range(1, 5))
    line = (folder / "metrics.jsonl").read_text().splitlines()[-1]
    count = 20_000
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(line.replace('"step": 4', f'"step": {step}') + "\n" for step in range(1, count + 1))
    tracemalloc.start()
    run, = load_runs([folder])
    report_text([run], 80, color=False)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(run.rows) == count
    assert peak_bytes < 200 * count + 20e6


def test_invalid_run_directories(tmp_path):
    make_run(tmp_path / "runs" / "a", range(1, 3))
    with pytest.raises(UserError, match="not a run directory") as error:
        load_runs([tmp_path / "runs"])
    assert error.value.instead == f"ezpz-llm report {tmp_path / 'runs' / 'a'}"
    damaged = make_run(tmp_path / "b", range(1, 3))
    (damaged / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match="this is not JSON") as error:
        load_runs([damaged])
    assert error.value.where.endswith("metrics.jsonl, line 2, column 1")
    for line, problem in (('{"loss": 2}', "step is missing"), ('{"step": 1.0}', "step is 1.0, not a whole number"),
                          ('{"step": 2, "loss": "x"}', "'x' is not a number")):
        (damaged / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
        with pytest.raises(UserError, match=f"step record 2 is invalid: {problem}"):
            load_runs([damaged])
    RunDir(tmp_path / "empty").create()
    write_json(tmp_path / "empty" / "run.json", {"launch": {"typed": []}})
    with pytest.raises(UserError, match="no step has been written yet"):
        main([str(tmp_path / "empty")])
