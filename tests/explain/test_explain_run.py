"""`explain` on real runs of two ranks: traces add up, and injected delays are found."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from pages import check_page, figure_text
from places import HELPERS
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.verify.explain.command import main as explain
from ezpz_llm.verify.explain.diagnosis import diagnose
from ezpz_llm.verify.explain.split import split_run
from ezpz_llm.verify.explain.tables import step_bars
from ezpz_llm.verify.explain.trace import read_trace

RANKS = HELPERS / "explain_ranks.py"
LAYOUTS = {
    "ddp": {"all_reduce (dp)"},
    "zero1+gradient-accumulation-steps=2": {"all_reduce (dp)", "all_gather (dp)"},
    "zero2": {"all_reduce (dp)", "all_gather (dp)"},
    "zero3": {"all_gather (dp)", "reduce_scatter (dp)", "all_reduce (dp)"},
    "tp2": {"all_reduce (tp)", "all_gather (tp)"},
    "pp2+gradient-accumulation-steps=4": {"send (pp)", "recv (pp)", "all_reduce (pp)"},
}
SLOW_RANK = "zero1+steps=20@rank:1:0.03"
SLOW_LOADER = "zero1@loader:0.3"
LATE_CHECKPOINT = "zero1+save-every=4@checkpoint:1.5"


def train(folder: Path, *jobs: str) -> Path:
    """Train these jobs on two ranks and return their parent directory."""
    command = [shutil.which("mpiexec") or "mpiexec", "-n", "2", sys.executable, str(RANKS), str(folder), *jobs]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.run(command, env=env, capture_output=True, text=True,
                             timeout=scaled(280), check=False)
    assert process.returncode == 0, (process.stdout + process.stderr)[-6000:]
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train(tmp_path_factory.mktemp("explained"), *LAYOUTS, SLOW_RANK, SLOW_LOADER, LATE_CHECKPOINT)


@pytest.mark.full
@pytest.mark.parametrize("job", LAYOUTS)
def test_a_breakdown_adds_up_and_names_every_collective(runs, job):
    split = split_run(runs / job)
    assert [rank.rank for rank in split.ranks] == [0, 1]
    for rank in split.ranks:
        trace = read_trace(RunDir(runs / job).trace(rank.rank))
        assert rank.steps == 5
        assert min(rank.seconds.values()) >= 0
        assert sum(rank.seconds.values()) == pytest.approx(trace.window[1], rel=1e-6)
        assert sum(rank.per_step().values()) == pytest.approx(rank.step_s, rel=1e-6)
        assert rank.seconds["forward"] > 0
        assert rank.seconds["backward"] > 0
        by_label = {exposed.label: exposed for exposed in rank.exposed if "(alone)" not in exposed.label}
        assert set(by_label) == LAYOUTS[job]
        assert all(exposed.bytes for exposed in by_label.values())
        assert sum(each.seconds for each in rank.exposed) == pytest.approx(rank.seconds["exposed_communication"])
        assert all(0 <= each.waited_s <= each.seconds <= each.in_flight_s + 1e-9 for each in rank.exposed)
        _check_form(RunDir(runs / job).trace(rank.rank))
    _check_notes(job, split.ranks[0])
    # Traced steps are as long as those measured by the trainer.
    seconds = {row["step"]: row["step_time_s"] for row in read_lines(RunDir(runs / job).metrics)}
    traced = read_trace(RunDir(runs / job).trace(0)).steps
    spans = sum(end - start for start, end in traced.values())
    assert spans == pytest.approx(sum(seconds[step] for step in traced), rel=0.02)


def _check_form(path):
    """Check what Perfetto needs: kind, time and thread of events, lengths of spans, both ends of arrows."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {event["ph"] for event in events} <= set("XMisf")
    for event in events:
        assert event.keys() >= {"name", "ph", "ts", "pid", "tid"}
        assert isinstance(event["ts"], float | int)
        assert event["ph"] != "X" or event["dur"] >= 0
    assert Counter(event["id"] for event in events if event["ph"] == "s") == Counter(
        event["id"] for event in events if event["ph"] == "f")


def _check_notes(job, rank):
    """Check that DeepSpeed's logger counts the same collectives, and that the step's memory is recorded."""
    assert rank.notes["transient_bytes"] > 1_000_000
    logged = {name: entry["count"] for name, entry in rank.notes["deepspeed"].items()}
    if job.startswith("zero"):  # in the pipeline, the logger also counts reductions of groups of one rank
        assert sum(logged.values()) == sum(exposed.count for exposed in rank.exposed) / rank.steps
    if job.startswith(("zero1", "zero2")):
        assert rank.notes["flops"]["deepspeed"] == rank.notes["flops"]["ours"]
    if job.startswith("pp"):
        assert logged["send"] == logged["recv"] == 4


@pytest.mark.full
@pytest.mark.parametrize(("job", "kind", "parts"), [
    (SLOW_RANK, "slow_rank", ("rank 1", "in forward", "outside of operators")),
    (SLOW_LOADER, "data", ("waiting for data",)),
    (LATE_CHECKPOINT, "checkpoints", ("waits for checkpoints",)),
])
def test_an_injected_delay_is_the_first_cause(runs, job, kind, parts):
    first = diagnose(runs / job).causes[0]
    assert first.kind == kind
    assert all(word in first.what for word in parts)


@pytest.mark.full
def test_measured_memory_agrees_with_the_estimate(runs):
    for job in ("ddp", "zero1+gradient-accumulation-steps=2", "zero3", "tp2"):
        memory = diagnose(runs / job).memory
        for kind in ("parameters", "optimizer"):
            assert memory.measured[kind] == memory.expected[kind], (job, kind)
        # A step also allocates a few tensors that are not activations.
        assert 0.7 < memory.measured["activations"] / memory.expected["activations"] < 2, job
        assert sum(size for size in memory.measured.values() if size) == pytest.approx(memory.peak, rel=1e-6)
    # Only the used part of DeepSpeed's bucket counts: the model's gradients, since the bucket is larger.
    for job in ("zero1+gradient-accumulation-steps=2", "zero2", "zero3"):
        memory = diagnose(runs / job).memory
        assert memory.measured["buffers"] == pytest.approx(memory.expected["buffers"], rel=0.02), job


@pytest.mark.full
def test_the_command_prints_text_and_json(runs):
    env = {**os.environ, "COLUMNS": "80"}
    text = subprocess.run([sys.executable, "-m", "ezpz_llm.explain", str(runs / "zero3")], env=env,
                          timeout=scaled(60), capture_output=True, text=True, check=True).stdout
    for phrase in ("you could save", "try: ", "exposed all_gather (dp)", "Ranks, ms per step", "slowest"):
        assert phrase in text
    record = json.loads(subprocess.run([sys.executable, "-m", "ezpz_llm.explain", str(runs / "zero3"), "--json"],
                                       timeout=scaled(60), capture_output=True, text=True, check=True).stdout)
    assert [rank["rank"] for rank in record["split"]["ranks"]] == [0, 1]
    assert record["causes"] == sorted(record["causes"], key=lambda cause: -cause["seconds"])
    rejected = subprocess.run([sys.executable, "-m", "ezpz_llm.explain", str(runs)],
                              timeout=scaled(60), capture_output=True, text=True, check=False)
    assert rejected.returncode == 2
    assert "instead" in rejected.stderr


@pytest.mark.full
@pytest.mark.parametrize("job", LAYOUTS)
def test_bars_of_a_real_run_add_up_to_its_steps(runs, tmp_path, job):
    assert explain([str(runs / job), "--html", str(tmp_path / "explain.html")]) == 0
    figures = check_page((tmp_path / "explain.html").read_text())
    assert {*LAYOUTS[job]} <= {*figure_text(figures["Time in flight per step, mean over ranks"])}, \
        "every collective has its bar"
    split = split_run(runs / job)
    for (_, parts), rank in zip(step_bars(split)[1:], split.ranks, strict=True):
        assert sum(parts.values()) == pytest.approx(rank.step_s)
        assert min(parts.values()) >= 0


@pytest.mark.full
def test_missing_and_damaged_files_are_reported(runs, tmp_path, capsys):
    whole = runs / "zero3"
    shutil.copytree(whole, tmp_path / "a")
    run_dir = RunDir(tmp_path / "a")
    run_dir.trace(1).unlink()
    assert explain([str(tmp_path / "a")]) == 0
    assert "There is no trace of rank 1: means are over the other ranks" in capsys.readouterr().out
    assert diagnose(tmp_path / "a").as_record()["split"]["untraced"] == [1]
    assert diagnose(whole).as_record()["split"]["untraced"] == []
    (run_dir.profile / "host.json").write_text('{"torch": 1.0, "other": 1.0}')
    for path in (run_dir.layout, run_dir.profile / "host.json", run_dir.metrics):
        content = path.read_text()
        path.write_text("{\n" + content)
        with pytest.raises(UserError, match="this is not JSON") as error:
            diagnose(tmp_path / "a")
        assert error.value.where.startswith(str(path))
        path.write_text(content)
    assert explain([str(tmp_path / "a")]) == 0
    run_dir.layout.unlink()
    with pytest.raises(UserError, match=r"layout\.json is missing"):
        diagnose(tmp_path / "a")
