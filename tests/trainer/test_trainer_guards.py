"""Bad steps: all ranks skip them, stop, or roll back at the same step."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from places import HELPERS
from poisoned_train import poisoned
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.records import as_plain, as_record
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record, update_record
from ezpz_llm.training.checkpoint.manifest import complete_checkpoints, read_json
from ezpz_llm.training.checkpoint.retention import find
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.report.runs import load_runs
from ezpz_llm.training.trainer.config import TrainConfig
from ezpz_llm.training.trainer.early_end import Agreed, EarlyEnd
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import plan_run
from ezpz_llm.training.trainer.run import run
from ezpz_llm.training.trainer.spike_detector import MIN_STEPS, SpikeDetector, SpikeState

SCRIPT = HELPERS / "poisoned_train.py"
SMALL = ["--n-layer", "1", "--n-head", "2", "--n-kv-head", "2", "--n-embd", "32", "--block-size", "32",
         "--eval-tokens", "64", "--sample-tokens", "0", "--profile", "false", "--precision", "fp32",
         "--device", "cpu", "--micro-batch-size", "2"]


@dataclass(frozen=True)
class Done:
    """Exit code and output of a run."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return self.out + self.err


def job(run_dir: Path, *options: str, poison: str = "0:0", ranks: int = 1) -> Done:
    """Run training in subprocesses."""
    command = [shutil.which("mpiexec") or "mpiexec", "-n", str(ranks), sys.executable, str(SCRIPT), *SMALL,
               *options, "--run-dir", str(run_dir)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "POISON": poison}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(300), check=False)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def alone(monkeypatch, capsys):
    """Return a function that trains with one rank and layout ddp in this process."""
    forward = GPT.forward

    def train(run_dir: Path, *options: str, poison: tuple[int, int] = (0, 0), add: float = 0.0) -> Done:
        monkeypatch.setattr(GPT, "forward", poisoned(forward, *poison, add=add))
        capsys.readouterr()
        code = run(parse([*SMALL, "--ds-config", "ddp", *options, "--run-dir", str(run_dir)]))
        return Done(code, *capsys.readouterr())

    return train


def lines_of(run_dir: Path) -> list[dict]:
    return list(read_lines(RunDir(run_dir).metrics))


def look(guard: SpikeDetector, step: int, loss: float | None = 3.0, norm: float | None = 1.0) -> dict:
    line = {"step": step, "loss": loss, "grad_norm": norm}
    guard.observe(line)
    return line


def test_a_gradient_norm_far_above_the_median_is_skipped_once_there_is_a_median():
    guard = SpikeDetector(TrainConfig(log_every=10, spike_norm=10.0))
    assert "skipped" not in look(guard, 1, norm=1e6)
    for step in range(2, MIN_STEPS + 8):
        look(guard, step)
        assert guard.limit == math.inf
    look(guard, MIN_STEPS + 8)
    assert guard.limit == 10.0
    assert "skipped" not in look(guard, MIN_STEPS + 9, norm=9.9)
    assert guard.streak == 0
    assert look(guard, MIN_STEPS + 10, norm=10.1)["skipped"]
    assert (guard.streak, guard.skipped, guard.first_bad) == (1, 1, MIN_STEPS + 10)


def test_every_skip_is_reported_with_its_norm_and_requires_spike_norm():
    asked, unasked = (SpikeDetector(TrainConfig(log_every=1, **more)) for more in ({"spike_norm": 10.0}, {}))
    for step in range(1, MIN_STEPS + 1):
        look(asked, step, norm=0.6)
        look(unasked, step, norm=0.6)
    assert look(asked, MIN_STEPS + 1, norm=8.6)["skipped"]
    assert asked.unreported == [f"step {MIN_STEPS + 1} was skipped and changed nothing: its gradient norm is 8.6, "
                                "above the limit of 6 (--spike-norm)"]
    assert "skipped" not in look(unasked, MIN_STEPS + 1, norm=8.6), "published runs take such steps"
    assert unasked.unreported == []
    unasked.restore(asked.state())
    assert unasked.limit == math.inf


def test_the_limit_is_a_float32():
    guard = SpikeDetector(TrainConfig(log_every=1, spike_norm=3.3))
    for step in range(1, MIN_STEPS + 1):
        look(guard, step, norm=0.7)
    assert guard.limit == torch.tensor(3.3 * 0.7, dtype=torch.float32).item()


def test_without_factors_only_nan_and_inf_are_bad():
    guard = SpikeDetector(TrainConfig(log_every=1, spike_norm=0, spike_loss=0, bad_steps=2))
    for step in range(1, 100):
        look(guard, step)
    look(guard, 100, loss=50.0, norm=1e9)
    assert (guard.limit, guard.streak) == (math.inf, 0)
    assert "skipped" not in look(guard, 101, loss=None)
    assert (guard.streak, guard.should_stop, guard.last_loss_non_finite) == (1, False, True)
    assert look(guard, 102, norm=None)["skipped"]
    assert (guard.should_stop, guard.last_loss_non_finite) == (True, False)
    look(guard, 103)
    assert not guard.should_stop


def test_losses_far_above_the_median_are_bad_but_not_skipped():
    guard = SpikeDetector(TrainConfig(log_every=1, spike_loss=1.0, bad_steps=3))
    for step in range(1, MIN_STEPS + 1):
        look(guard, step)
    for step in range(MIN_STEPS + 1, MIN_STEPS + 4):
        assert "skipped" not in look(guard, step, loss=4.1)
    assert guard.should_stop
    assert f"from step {MIN_STEPS + 1} on" in guard.reason()


VALUES = st.one_of(st.none(), st.floats(0.1, 100.0))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(VALUES, VALUES), min_size=60, max_size=200), st.integers(1, 59))
def test_a_restored_detector_continues_exactly(steps, cut):
    config = TrainConfig(log_every=7, spike_norm=2.0, spike_loss=1.0)
    whole, part = SpikeDetector(config), SpikeDetector(config)
    for number, (loss, norm) in enumerate(steps, 1):
        if number == cut:
            state = as_record(SpikeState, json.loads(json.dumps(as_plain(part.state()))), "state.json", "guard")
            part = SpikeDetector(config)
            part.restore(state)
        assert look(whole, number, loss, norm) == look(part, number, loss, norm)
        assert (whole.limit, whole.streak, whole.first_bad) == (part.limit, part.streak, part.first_bad)


def test_rollback_requires_checkpoints_during_the_run():
    with pytest.raises(UserError, match="there is no checkpoint to roll back to"):
        plan_run(parse(["--on-bad-steps", "rollback", "--save-every", "0"]), 1)
    plan_run(parse(["--on-bad-steps", "rollback"]), 1)


def test_a_few_bad_steps_are_skipped_and_the_run_continues(alone, tmp_path):
    done = alone(tmp_path / "run", "--steps", "12", "--log-every", "4", "--save-every", "0", poison=(5, 6))
    assert done.code == 0, str(done)
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines if line.get("skipped")] == [5, 6]
    assert [line["loss"] is None for line in lines] == [step in (5, 6) for step in range(1, 13)]
    assert lines[-1]["loss"] < lines[3]["loss"]
    warnings = [f"warning: step {step} was skipped and changed nothing: its gradient norm is NaN or Inf\n"
                for step in (5, 6)]
    assert [line for line in done.out.splitlines(keepends=True) if "skipped and" in line] == warnings
    assert "skipped steps   2 (no parameter update)\n" in done.out
    assert read_record(RunDir(tmp_path / "run")).summary.skipped_steps == 2
    [run_] = load_runs([tmp_path / "run"])
    assert "2 steps were skipped and changed nothing, first step 5" in run_.notes
    assert complete_checkpoints(RunDir(tmp_path / "run").checkpoints)[-1].name == "step-00000012"


@pytest.mark.full
def test_too_many_bad_steps_stop_the_run_and_leave_the_last_good_checkpoint(tmp_path):
    done = job(tmp_path / "run", "--steps", "30", "--log-every", "4", "--save-every", "3", "--bad-steps", "5",
               "--ds-config", "zero2", poison="8:99", ranks=2)
    assert done.code == 1, str(done)
    assert done.err.count("5 bad steps in a row, from step 8 on") == 2, "every rank prints the error"
    assert "Traceback" not in done.err
    assert "--resume" not in done.out.split("run directory")[-1]
    record = read_record(RunDir(tmp_path / "run"))
    assert record.steps == 12
    folders = complete_checkpoints(RunDir(tmp_path / "run").checkpoints)
    assert [folder.name for folder in folders] == ["step-00000003", "step-00000006"]


def test_a_run_that_ends_with_nan_fails_even_if_too_short_to_be_stopped(alone, tmp_path):
    done = alone(tmp_path / "run", "--steps", "4", "--save-every", "-1", poison=(3, 99))
    assert done.code == 1
    assert "from step 3 on" in done.err
    assert "train it further" not in done.out
    assert "--grad-clip 1" not in done.err, "it is the default"


@pytest.mark.full
def test_ranks_roll_back_together_and_continue_with_other_samples(tmp_path):
    """Compare with a run without injected fault and the lost steps added: all samples, once and in order."""
    options = ["--ds-config", "zero3", "--log-every", "2", "--save-every", "4", "--bad-steps", "3"]
    done = job(tmp_path / "run", *options, "--on-bad-steps", "rollback", "--steps", "14", poison="7:10:0", ranks=2)
    assert done.code == 0, str(done)
    assert "rolled back from step 10 to the checkpoint of step 4" in done.err
    lines, record = lines_of(tmp_path / "run"), read_record(RunDir(tmp_path / "run"))
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert all(line["loss"] is not None and "skipped" not in line for line in lines)
    assert lines[-1]["loss"] < lines[3]["loss"]
    assert [(entry.from_step, entry.to_step, entry.samples_passed_over)
            for entry in record.rollbacks] == [
        (10, 4, 24)]
    calm = job(tmp_path / "calm", *options, "--steps", "20", ranks=2)
    assert calm.code == 0, str(calm)
    assert (record.samples_consumed, record.sample_hash) == (
        80, read_record(RunDir(tmp_path / "calm")).sample_hash)


@pytest.mark.full
def test_a_spike_of_only_the_loss_causes_a_rollback(alone, tmp_path):
    """A shifted loss has the same gradients, so only the loss shows the spike."""
    done = alone(tmp_path / "run", "--log-every", "5", "--save-every", "10", "--bad-steps", "5", "--on-bad-steps",
                 "rollback", "--steps", "60", poison=(48, 55), add=3.0)
    assert done.code == 0, str(done)
    assert "rolled back from step 55 to the checkpoint of step 40" in done.err
    assert max(line["loss"] for line in lines_of(tmp_path / "run")[40:]) < 5


@pytest.mark.full
def test_a_spike_that_lasts_to_the_end_causes_a_rollback(alone, tmp_path):
    done = alone(tmp_path / "run", "--log-every", "5", "--save-every", "10", "--bad-steps", "5", "--on-bad-steps",
                 "rollback", "--steps", "60", poison=(56, 60), add=3.0)
    assert done.code == 0, str(done)
    assert "rolled back from step 60 to the checkpoint of step 50" in done.err
    assert [line["step"] for line in lines_of(tmp_path / "run")] == list(range(1, 61))
    assert find(tmp_path / "run").name == "step-00000060"


@pytest.mark.full
def test_a_checkpoint_of_an_early_end_during_bad_steps_is_not_rolled_back_to(alone, tmp_path, monkeypatch):
    options = ["--log-every", "5", "--save-every", "10", "--bad-steps", "10", "--on-bad-steps", "rollback",
               "--steps", "60"]
    agree = EarlyEnd.agree
    monkeypatch.setattr(EarlyEnd, "agree", lambda self, step, busy=False: (
        Agreed("a test", busy) if step == 55 else agree(self, step, busy)))
    done = alone(tmp_path / "run", *options, poison=(48, 99), add=3.0)
    assert "stopped after step 55" in done.out, str(done)
    assert read_json(find(tmp_path / "run") / "state.json")["guard"]["streak"] > 0
    monkeypatch.setattr(EarlyEnd, "agree", agree)
    done = alone(tmp_path / "run", *options, "--resume", str(tmp_path / "run"), poison=(1, 6), add=3.0)
    assert done.code == 0, str(done)
    assert "to the checkpoint of step 40" in done.err


def test_a_start_up_is_reported_once_and_excludes_an_earlier_launch(alone, tmp_path):
    options = ["--log-every", "1", "--save-every", "4", "--bad-steps", "2", "--on-bad-steps", "rollback"]
    assert alone(tmp_path / "run", *options, "--steps", "4").code == 0
    update_record(RunDir(tmp_path / "run"), launch={"started": 1.0})
    done = alone(tmp_path / "run", *options, "--steps", "9", "--resume", str(tmp_path / "run"), "--verbose",
                 poison=(2, 3))
    assert done.code == 0, str(done)
    assert "rolled back from step 7 to the checkpoint of step 4" in done.err
    assert done.out.count("start-up ") == 1
    startup = read_record(RunDir(tmp_path / "run")).startup
    assert "launching" not in startup.seconds


def test_rollbacks_that_do_not_help_end_the_run(alone, tmp_path):
    done = alone(tmp_path / "run", "--log-every", "1", "--save-every", "4", "--bad-steps", "2", "--on-bad-steps",
                 "rollback", "--steps", "20", poison=(6, 999))
    assert done.code == 1
    assert "rolling back to step 4 did not help 3 times" in done.err
    assert done.err.count("rolled back from step") == 3


@pytest.mark.full
def test_a_resumed_run_has_the_limit_of_the_run_it_resumes(alone, tmp_path):
    """Require bitwise equal losses, although the resumed run flushes at other steps."""
    options = ["--log-every", "10", "--save-every", "3", "--keep-last", "30", "--spike-norm", "1.02",
               "--steps", "80"]
    done = alone(tmp_path / "whole", *options)
    assert done.code == 0, str(done)
    whole = [(line["loss"], line.get("skipped")) for line in lines_of(tmp_path / "whole")]
    # Skipped steps are not saved, and which steps are skipped depends on the corpus, so on the version of Python.
    # Resume where one of the next three steps, which end with a flush, is skipped by the saved limit, which changes
    # at multiples of ten.
    folders = (tmp_path / "whole" / "checkpoints").glob("step-*")
    saved = [int(folder.name.removeprefix("step-")) for folder in folders]
    step = min(step for step in saved
               if any(skipped for _, skipped in whole[step:min(step + 3, -(-step // 10) * 10)]))
    done = alone(tmp_path / "resumed", *options, "--resume",
                 str(tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"))
    assert done.code == 0, str(done)
    assert [(line["loss"], line.get("skipped")) for line in lines_of(tmp_path / "resumed")] == whole[step:]


def test_a_good_step_resets_the_streak():
    guard = SpikeDetector(replace(TrainConfig(), bad_steps=2, log_every=1))
    for step, norm in enumerate((None, 1.0, None, 1.0, None), 1):
        look(guard, step, norm=norm)
        assert not guard.should_stop
