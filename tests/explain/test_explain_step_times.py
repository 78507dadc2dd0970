"""Causes found in step times without traces: synthetic histories with one problem each, and a run directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from made_up_runs import make_run
from slowness import scaled

from ezpz_llm.core.rundir import RunDir, append_line
from ezpz_llm.core.rundir.records import Device, Environment, Load, RunRecord
from ezpz_llm.training.layout.batch import Batch
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.observe.history import make_history
from ezpz_llm.training.observe.machine_load import MachineLoad, load_now, recorded_load
from ezpz_llm.verify.explain.diagnosis import _low_share_advice, diagnose
from ezpz_llm.verify.explain.step_times import StepTimes, step_time_causes, step_times
from ezpz_llm.verify.explain.trainer_run import Settings, TrainerRun

STEPS = 200


def rows(times: np.ndarray, data_s: np.ndarray | float = 0.001):
    """Return lines of metrics.jsonl for steps with these times."""
    data = np.broadcast_to(data_s, times.shape)
    return [{"step": step, "loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "step_time_s": float(seconds),
             "data_s": float(waits), "forward_s": float(0.3 * (seconds - waits)),
             "backward_s": float(0.6 * (seconds - waits)), "optimizer_s": float(0.1 * (seconds - waits)),
             "other_s": 0.0}
            for step, (seconds, waits) in enumerate(zip(times, data, strict=True), 1)]


def causes(times: np.ndarray, data_s: np.ndarray | float = 0.001):
    """Return the causes by kind."""
    history = make_history(rows(times, data_s), "x")
    return {cause.kind: cause for cause in step_time_causes(history, float(times.sum()))}


def even() -> np.ndarray:
    return 0.1 + 0.002 * np.sin(np.arange(STEPS))


def test_steps_of_equal_length_have_no_cause():
    by_kind = causes(even())
    assert all(cause.share < 0.002 for cause in by_kind.values()), by_kind


def test_a_shared_machine_shows_in_the_spread():
    by_kind = causes(np.where(np.arange(STEPS) % 2, 0.1, 0.2))
    assert list(by_kind) == ["unsteady"]
    assert by_kind["unsteady"].share == pytest.approx(1 / 3, abs=0.02)
    assert "by a factor of 2 (100 to 200 ms), mostly in backward" in by_kind["unsteady"].what


def test_steps_that_vary_in_data_loading_name_that_phase():
    data = np.where(np.arange(STEPS) % 2, 0.001, 0.101)
    by_kind = causes(0.1 + data, data)
    assert "mostly in data" in by_kind["unsteady"].what
    assert "file system" in by_kind["unsteady"].advice[0]


def test_drift_is_not_counted_twice():
    by_kind = causes(np.linspace(0.1, 0.2, STEPS))
    assert by_kind["drift"].seconds + by_kind["unsteady"].seconds < 0.06 * STEPS
    assert "steps become slower: 11" in by_kind["drift"].what


def test_pauses_and_first_steps_are_separate_causes():
    times = even()
    times[100] = times[150] = 2.0
    times[0] = 5.0
    by_kind = causes(times)
    assert {"pauses", "first_steps"} <= set(by_kind)
    assert by_kind["pauses"].seconds == pytest.approx(3.8, abs=0.02)
    assert by_kind["first_steps"].seconds == pytest.approx(4.9, abs=0.02)


def test_few_steps_have_no_causes():
    assert causes(np.array([1.0, 0.1, 0.3, 0.1, 0.3])) == {}
    assert step_times(make_history(rows(np.array([np.nan])), "x"), None) is None


def trainer_run(**config):
    return TrainerRun(get_model_config("gpt2-124m"), Layout("ddp", "ddp"), Batch(8, 4, 1, 2), 2,
                      Settings(**config), "fp32", Device())


def test_a_traced_run_gets_no_advice_to_trace():
    run = trainer_run()
    assert _low_share_advice(run, is_traced=False)[-1].startswith("--trace-steps")
    advice = tuple(_low_share_advice(run, is_traced=True))
    assert StepTimes(0.1, 0.1, 0.1, peak_share=0.07, advice=advice).sentence().endswith(
        "a larger --micro-batch-size, or --compile true.")


def test_advice_for_a_low_share_excludes_options_in_use():
    assert "--compile" not in " ".join(_low_share_advice(trainer_run(compile=True), is_traced=False))
    assert _low_share_advice(None, is_traced=False) == []
    assert StepTimes(0.1, 0.1, 0.1, peak_share=0.07).sentence().endswith("Most of a step is not spent in matmuls.")


def test_a_share_above_100_percent_is_not_printed():
    sentence = StepTimes(0.1, 0.1, 0.1, peak_share=4.06).sentence()
    assert "unreliable (the machine was busy)" in sentence
    assert "406" not in sentence


def test_a_single_rank_and_a_script_get_no_advice_to_trace():
    history = make_history(rows(np.where(np.arange(STEPS) % 2, 0.1, 0.2)), "x")
    alone, = step_time_causes(history, 30.0, ranks=1)
    assert alone.what.endswith("the machine is shared")
    script, = step_time_causes(history, 30.0, can_trace=False)
    for cause in (alone, script):
        assert not any("--trace-steps" in line for line in cause.advice)


def test_a_short_run_on_a_busy_machine_names_the_load_first(tmp_path):
    """Eight steps of 172 to 475 ms at a load average of 5 on two CPUs: evaluation is not the first cause."""
    times = np.array([0.3, 0.172, 0.45, 0.2, 0.475, 0.19, 0.4, 0.3])
    wall = {"set-up": 5.0, "training": float(times.sum()), "evaluation": 0.5}
    folder = make_run(tmp_path / "run", range(0), planned=8, summary={"wall": wall}, load_at_end={"average": 5.5,
                                                                                                  "cpus": 2})
    record = json.loads((folder / "run.json").read_text())
    record["environment"]["load"] = {"average": 4.5, "cpus": 2}
    (folder / "run.json").write_text(json.dumps(record))
    for line in rows(times):
        append_line(RunDir(folder).metrics, line)
    diagnosis = diagnose(folder)
    assert diagnosis.opening[0].startswith("The machine was busy: load average 5.0 on 2 CPUs.")
    assert [cause.kind for cause in diagnosis.shown_causes][:1] == ["unsteady"]
    evaluation = next(cause for cause in diagnosis.causes if cause.kind == "evaluation")
    assert not any("above 0" in line or "below 0" in line or "--eval-every" in line for line in evaluation.advice)


def test_a_run_alone_on_its_cpus_is_not_busy():
    assert recorded_load(RunRecord(environment=Environment(load=Load(average=2.4, cpus=2)))) == MachineLoad(2.4, 2)
    assert not MachineLoad(2.4, 2).is_busy
    assert recorded_load(RunRecord(environment=Environment())) is None
    assert load_now().cpus == os.cpu_count()


def test_the_largest_cause_is_printed_first(tmp_path):
    """Step times that vary by a factor of two, at 7 % of the peak, come before evaluation at 3 %."""
    times = np.where(np.arange(STEPS) % 2, 0.164, 0.382)
    run_dir = RunDir(tmp_path / "run").create()
    for line in rows(times):
        append_line(run_dir.metrics, line)
    wall = {"set-up": 5.0, "training": float(times.sum()), "evaluation": 0.03 * float(times.sum())}
    run_dir.record.write_text(json.dumps({
        "config": {}, "environment": {"world_size": 2}, "summary": {"wall": wall, "ceiling_share": 0.069}}))
    process = subprocess.run([sys.executable, "-m", "ezpz_llm.explain", str(run_dir.path)], capture_output=True,
                             text=True, timeout=scaled(60), check=False)
    assert process.returncode == 0, process.stderr
    text = " ".join(process.stdout.split())
    assert "164 to 382 ms for the middle 80 %. Steps reach 6.9% of the measured matmul peak." in text
    places = [text.index(phrase) for phrase in ("6.9%", "1. ", "steps vary by a factor of 2.3", "evaluation")]
    assert places == sorted(places)


@pytest.mark.parametrize(("summary", "steps"), [
    ({"first_step": 80, "steps": 100, "wall": {"training": 2.0, "set-up": 1.0}}, 20),
    ({"first_step": 0, "steps": 80, "wall": {"training": 8.0, "set-up": 1.0}}, 100)])
def test_a_resumed_run_is_explained_by_the_steps_of_the_attempt_with_the_wall_time(tmp_path, summary, steps):
    """Lost time of all attempts divided by the wall time of one made shares of more than 100 %."""
    run_dir = make_run(tmp_path / "run", exit={"code": 0, "ended": 2000.0, "cause": ""}, summary=summary)
    path = RunDir(run_dir).metrics
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[:80]:
        line["step_time_s"] *= 1 + line["step"] % 3
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    diagnosis = diagnose(run_dir)
    trained_s = sum(line["step_time_s"] for line in lines[-steps:])
    assert diagnosis.wall == (summary["wall"] if steps == 20 else {})
    assert sum(cause.seconds for cause in diagnosis.causes) < trained_s
    assert sum(cause.share for cause in diagnosis.causes if cause.kind != "set-up") < 1
    assert ("unsteady" in {cause.kind for cause in diagnosis.causes}) == (steps == 100)


def test_collectives_over_tcp_beside_a_faster_network_are_named(tmp_path):
    network = {"library": "NCCL", "network": "Socket", "interface": "eth0", "unused": ["mlx5_0 (200 Gb/sec)"]}
    folder = make_run(tmp_path / "run", environment={"world_size": 2, "network": network})
    assert diagnose(folder).opening[0].startswith(
        "NCCL fell back to TCP on eth0, which is many times slower than the node's mlx5_0 (200 Gb/sec); load the ")
    assert "TCP" not in diagnose(make_run(tmp_path / "clean")).opening[0]
