"""Logs of Hugging Face's Trainer that `trainer_callback` records: step times, tokens, and several trainings."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from still_clock import StillClock

import ezpz_llm

if importlib.util.find_spec("accelerate") is None or importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers or accelerate is not installed", allow_module_level=True)


@pytest.fixture(autouse=True)
def _forget_ranks() -> Iterator[None]:
    """Forget the ranks that accelerate has found in a test."""
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Waiting(torch.nn.Module):
    """Model whose micro-batch takes a second, and whose evaluation batch takes ten."""

    main_input_name = "input_ids"

    def __init__(self, clock: StillClock, losses: dict[int, float] | None = None) -> None:
        super().__init__()
        self.clock, self.losses, self.calls = clock, losses or {}, 0
        self.inner = torch.nn.Linear(4, 1)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += self.training
        self.clock.wait(1 if self.training else 10)
        loss = self.inner(input_ids.float()).square().mean()
        return {"loss": loss * self.losses.get(self.calls, 1.0)}


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples of four tokens; each takes an eighth of a second to read."""

    def __init__(self, clock: StillClock, size: int) -> None:
        self.clock, self.size = clock, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.clock.wait(0.125)
        return {"input_ids": torch.full((4,), index % 7)}


def make_callback(**events: Callable[..., object]) -> Any:
    """Return a callback of the Trainer with methods for some events."""
    from transformers import TrainerCallback

    callback = TrainerCallback()
    for event, action in events.items():
        setattr(callback, event, action)
    return callback


def make_trainer(folder: Path, clock: StillClock, samples: int = 40, model: Waiting | None = None,
                 **options: Any) -> Any:
    """Return a Trainer whose saves take 100 s."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), report_to=[], use_cpu=True, disable_tqdm=True,
        **{"per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no", "max_steps": 8, **options})
    return Trainer(
        model or Waiting(clock), arguments, train_dataset=Data(clock, samples), eval_dataset=Data(clock, 8),
        callbacks=[make_callback(on_save=lambda *_, **__: clock.wait(100))])


def train(trainer: Any, **options: Any) -> None:
    trainer.add_callback(ezpz_llm.trainer_callback())
    trainer.train(**options)


def lines(run: ezpz_llm.Run) -> list[dict[str, Any]]:
    run.flush()
    path = run.run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def samples_of(run: ezpz_llm.Run) -> list[float]:
    return [line["tokens_per_second"] * line["step_time_s"] for line in lines(run)]


def column(run: ezpz_llm.Run, name: str) -> list[Any]:
    return [line.get(name) for line in lines(run)]


STEP_S = 1.5
"""Time of a step: four samples, and the model."""


@pytest.mark.full
@pytest.mark.parametrize("options", [
    {}, {"eval_strategy": "steps", "eval_steps": 3}, {"save_strategy": "steps", "save_steps": 2},
    {"eval_strategy": "steps", "eval_steps": 3, "logging_steps": 4, "logging_first_step": True},
    {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 3},
    {"logging_steps": 3, "save_strategy": "steps", "save_steps": 2}, {"logging_strategy": "epoch", "max_steps": -1},
    {"eval_on_start": True}], ids=str)
def test_evaluation_and_saves_are_not_step_time(run: ezpz_llm.Run, clock: StillClock, tmp_path: Path,
                                                options: dict[str, Any]):
    trainer = make_trainer(tmp_path, clock, **options)
    train(trainer)
    logged = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert column(run, "step") == logged
    times = column(run, "step_time_s")
    # Accelerate reads a batch ahead: before the first step two batches, and before the last of an epoch none.
    assert all(1.0 <= seconds <= 2.0 for seconds in times), times
    assert times[1:-1] == pytest.approx([STEP_S] * len(times[1:-1]), abs=0.5)
    assert samples_of(run) == pytest.approx([4.0] * len(times))



@pytest.mark.full
@pytest.mark.parametrize(("accumulation", "samples"), [(1, [4, 4, 4, 4, 2]), (2, [8, 8, 2]), (3, [12, 6])])
def test_a_short_last_batch(run: ezpz_llm.Run, clock: StillClock, tmp_path: Path, accumulation: int,
                            samples: list[int]):
    """Check the samples of steps in three epochs of five batches, the last of which has two samples."""
    train(make_trainer(tmp_path, clock, samples=18, max_steps=3 * len(samples),
                       gradient_accumulation_steps=accumulation))
    assert samples_of(run) == pytest.approx(3 * samples)


@pytest.mark.full
def test_tokens_that_the_trainer_counts(run: ezpz_llm.Run, clock: StillClock, tmp_path: Path):
    options: Any = {"include_num_input_tokens_seen": "all"}
    train(make_trainer(tmp_path, clock, samples=18, max_steps=5, logging_steps=2, **options))
    assert samples_of(run) == pytest.approx([16, 16])
    train(make_trainer(tmp_path, clock, samples=6, max_steps=4, **options))
    assert samples_of(run)[2:] == pytest.approx([16, 8, 16, 8])


@pytest.mark.full
@pytest.mark.parametrize("logging_steps", [1, 2])
def test_a_resumed_training(run: ezpz_llm.Run, clock: StillClock, tmp_path: Path, logging_steps: int):
    """Check that a new run continues with the Trainer's steps, and that skipping batches is not step time."""
    options: Any = {"samples": 100, "logging_steps": logging_steps, "save_strategy": "steps", "save_steps": 5}
    make_trainer(tmp_path, clock, **options).train()
    clock.wait(1000)
    trainer = make_trainer(tmp_path, clock, **options, max_steps=9)
    train(trainer, resume_from_checkpoint=str(tmp_path / "trainer/checkpoint-5"))
    assert column(run, "step") == ([6, 7, 8, 9] if logging_steps == 1 else [6, 8])
    assert column(run, "step_time_s")[0] == pytest.approx(1.0)  # the batch was read before the step began
    assert column(run, "step_time_s")[1:] == pytest.approx([STEP_S] * (len(lines(run)) - 1))
    assert run.first_step == 5


def test_trainings_in_one_process(run: ezpz_llm.Run, clock: StillClock, tmp_path: Path,
                                  capfd: pytest.CaptureFixture[str]):
    """Check trainings with the same callback, two callbacks, the same one twice, and another Trainer."""
    trainer = make_trainer(tmp_path, clock, max_steps=3, eval_strategy="steps", eval_steps=2)
    train(trainer)
    trainer.train()
    clock.wait(1000)
    train(trainer)
    recorder = ezpz_llm.trainer_callback()
    other = make_trainer(tmp_path, clock, samples=10, max_steps=3, gradient_accumulation_steps=2)
    for _ in range(2):
        other.add_callback(recorder)
    other.train()
    assert column(run, "step") == list(range(1, 13))
    assert all(seconds <= 2.0 for seconds in column(run, "step_time_s")[:9])
    assert samples_of(run) == pytest.approx([4.0] * 9 + [8, 2, 8])
    errors = capfd.readouterr().err
    assert "warning: the Trainer" not in errors
    notes = [line for line in errors.splitlines() if line.startswith("note")]
    assert notes[0] == "note: step 1 of this training is recorded as step 4, after the steps of an earlier training"
    assert len(notes) == 3  # one from each recorder
    ezpz_llm.finish()
    assert json.loads((run.run_dir / "run.json").read_text())["summary"]["steps"] == 12


@pytest.mark.full
def test_a_training_that_begins_again_with_smaller_batches(run: ezpz_llm.Run, clock: StillClock, tmp_path: Path):
    """Check auto_find_batch_size, where the third step of batches of four raises an error."""
    class Large(Waiting):
        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.calls == 2 and len(input_ids) == 4:
                self.calls = 0
                raise RuntimeError("CUDA out of memory.")
            return super().forward(input_ids)

    train(make_trainer(tmp_path, clock, model=Large(clock), max_steps=4, auto_find_batch_size=True))
    assert column(run, "step") == [1, 2, 3, 4, 5, 6]
    assert samples_of(run)[2:] == pytest.approx([samples_of(run)[2]] * 4)
    assert samples_of(run)[2] < 4


def at_step_2(event: str, action: Callable[[], object]) -> Any:
    """Return a callback that acts at an event of step 2, if it has not yet."""
    actions = [action]

    def act(arguments: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and actions:
            actions.pop()()

    return make_callback(**{event: act})


@pytest.mark.full
@pytest.mark.parametrize(("action", "steps", "message"), [
    ("finish", [1, 2], "finish() was called before the end of the training"),
    ("log", [1, 2, 3, 4, 5, 6, 7, 8], "there is no step since the last log"),
    ("text", [1, 2, 3, 4, 5, 6, 7, 8], "there is no step since the last log"),
    ("record", [1, 2, 100, 101, 102, 103, 104, 105, 106], ""),
    ("nothing", [1, 2, 3, 4, 5, 6, 7, 8], "")])
def test_a_recorder_does_not_end_a_training(run: ezpz_llm.Run, clock: StillClock, tmp_path: Path, action: str,
                                            steps: list[int], message: str, capfd: pytest.CaptureFixture[str]):
    trainer = make_trainer(tmp_path, clock)
    actions = {"finish": ezpz_llm.finish, "log": lambda: trainer.log({"loss": 1.0}), "nothing": lambda: None,
               "text": lambda: trainer.log({"loss": "small", "learning_rate": "large"}),
               "record": lambda: ezpz_llm.record(100, loss=1.0)}
    trainer.add_callback(at_step_2("on_step_begin", actions[action]))
    train(trainer)
    assert trainer.state.global_step == 8
    assert column(run, "step") == steps
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: the Trainer")]
    assert len(warnings) == bool(message)
    assert message in "".join(warnings)
    if action == "finish":
        torch.distributed.destroy_process_group()  # the Trainer has used it until the end


@pytest.mark.full
def test_a_loss_that_is_not_a_number(run: ezpz_llm.Run, clock: StillClock, tmp_path: Path,
                                     capfd: pytest.CaptureFixture[str]):
    """Check logs whose loss is text, and losses that are NaN."""
    trainer = make_trainer(tmp_path, clock, model=Waiting(clock, {4: math.nan}), logging_nan_inf_filter=False)
    log = trainer.log
    trainer.log = lambda logs, *rest: log({**logs, **({"loss": "1.5"} if trainer.state.global_step == 2 else {})},
                                          *rest)
    train(trainer)
    assert column(run, "step") == [1, 3, 4, 5, 6, 7, 8]
    assert all(map(math.isfinite, column(run, "loss")[:2]))
    assert column(run, "loss")[2] is None
    assert "loss is '1.5' (str), but must be a number" in capfd.readouterr().err
    assert column(run, "step_time_s")[1] == pytest.approx(STEP_S)


@pytest.mark.full
def test_a_training_inside_a_training(run: ezpz_llm.Run, clock: StillClock, tmp_path: Path):
    inner = make_trainer(tmp_path / "inner", clock, max_steps=3)
    inner.add_callback(ezpz_llm.trainer_callback())
    outer = make_trainer(tmp_path, clock, max_steps=5)
    outer.add_callback(at_step_2("on_step_begin", inner.train))
    train(outer)
    assert column(run, "step") == list(range(1, 9))


@pytest.mark.full
def test_a_callback_that_is_added_during_training(run: ezpz_llm.Run, clock: StillClock, tmp_path: Path):
    trainer = make_trainer(tmp_path, clock, max_steps=6)
    trainer.add_callback(at_step_2("on_step_end", lambda: trainer.add_callback(ezpz_llm.trainer_callback())))
    trainer.train()
    assert column(run, "step") == [3, 4, 5, 6]


@pytest.mark.full
def test_an_evaluation_by_another_callback(run: ezpz_llm.Run, clock: StillClock, tmp_path: Path):
    """Check that the step in which a callback evaluates has its usual time. The Trainer then omits its log."""
    trainer = make_trainer(tmp_path, clock, max_steps=6)
    trainer.add_callback(at_step_2("on_step_end", trainer.evaluate))
    train(trainer)
    assert column(run, "step") == [1, 3, 4, 5, 6]
    assert column(run, "step_time_s")[1:] == pytest.approx([STEP_S] * 4)


@pytest.mark.full
def test_metrics_of_another_run(run: ezpz_llm.Run, clock: StillClock, tmp_path: Path,
                                capfd: pytest.CaptureFixture[str]):
    (run.run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    trainer = make_trainer(tmp_path, clock)
    train(trainer)
    assert trainer.state.global_step == 8
    assert "the run directory already holds 1 steps of another run" in capfd.readouterr().err
