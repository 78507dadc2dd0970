"""Step times of scripts: evaluation, checkpoints and work before training are not part of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from still_clock import StillClock

import ezpz_llm


class Waiting(torch.nn.Linear):
    """Model whose forward pass takes a second."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__(2, 1)
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.wait(1)
        return super().forward(x)


@pytest.fixture
def model(clock: StillClock) -> ezpz_llm.Wrapped:
    """Wrap a model; a step takes one second."""
    module = Waiting(clock)
    return ezpz_llm.wrap(module, torch.optim.AdamW(module.parameters()), "ddp")


def train(model: ezpz_llm.Wrapped) -> torch.Tensor:
    loss = model(torch.ones(1, 2)).square().mean()
    model.backward(loss)
    model.step()
    return loss


def lines(run: ezpz_llm.Run) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, after writing those that wait."""
    run.flush()
    return [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]


def step_times(run: ezpz_llm.Run) -> list[float]:
    return [line["step_time_s"] for line in lines(run)]


def evaluate(model: ezpz_llm.Wrapped, clock: StillClock, batches: int = 3) -> None:
    model.eval()
    for _ in range(batches):
        clock.wait(0.5)  # the data
        with torch.no_grad():
            model(torch.ones(1, 2))
    model.train()


def test_evaluation_and_checkpoints_are_not_step_time(run: ezpz_llm.Run, clock: StillClock,
                                                      model: ezpz_llm.Wrapped):
    """Check steps with 0.5 s for data and 1 s for the model, with other work at each place of the loop."""
    clock.wait(100)  # creates the data loader
    for step in range(1, 13):
        if step == 3:
            with ezpz_llm.phase("evaluation"):
                evaluate(model, clock)
        if step == 4:
            evaluate(model, clock)
        clock.wait(0.5)
        if step == 5:
            with ezpz_llm.phase("data"):
                clock.wait(0.125)
            with ezpz_llm.phase("checkpoints"), ezpz_llm.phase("evaluation"):
                clock.wait(9)
        loss = train(model)
        if step == 6:
            evaluate(model, clock)
        if step == 7:
            with ezpz_llm.phase("checkpoints"), ezpz_llm.phase("data"):
                clock.wait(9)
        if step == 8:
            with ezpz_llm.phase("evaluation"):
                clock.wait(3)
                ezpz_llm.record(step, loss=loss, tokens=3)
                clock.wait(4)
            continue
        if step == 9:
            ezpz_llm.save_checkpoint(model, step)
        ezpz_llm.record(step, loss=loss, tokens=3)
    expected = [1.5] * 12
    expected[0] = 1.0  # begins with the first forward pass
    expected[4] += 0.125
    assert step_times(run) == expected
    assert [line["forward_s"] for line in lines(run)] == [1.0] * 12
    assert lines(run)[4]["data_s"] == 0.125
    assert all(line["tokens_per_second"] * line["step_time_s"] == pytest.approx(3) for line in lines(run))
    ezpz_llm.finish()
    wall = json.loads((run.run_dir / "run.json").read_text())["summary"]["wall"]
    assert wall["training"] == sum(expected)
    assert wall["evaluation"] == 3 * 4.5 + 7
    assert wall["checkpoints"] == 18
    assert wall["set-up"] == 100.5, "the time before the first step"
    assert wall["other"] == 0


def test_times_are_means_over_counted_steps(run: ezpz_llm.Run, clock: StillClock, model: ezpz_llm.Wrapped):
    """Check records of every fifth step, with an evaluation between them, numbered from a million."""
    for step in range(1, 21):
        loss = train(model)
        if step % 3 == 0:
            evaluate(model, clock)
        if step % 5 == 0:
            ezpz_llm.record(1_000_000 + step, loss=loss)
    assert step_times(run) == pytest.approx([1.0] * 4)


@pytest.mark.parametrize(("steps", "first"), [
    ((500, 501, 502), 10.0), ((500, 1000, 1500), 10 / 500), ((503, 510, 520), 10 / 7), ((1, 2, 3), 10.0)])
def test_first_record_of_a_script_that_resumes_on_its_own(run: ezpz_llm.Run, clock: StillClock,
                                                          steps: tuple[int, ...], first: float):
    """Check the time of a step in the first record, which took 10 s for an unknown number of steps."""
    for step in steps:
        clock.wait(10)
        ezpz_llm.record(step, loss=1.0)
    assert step_times(run)[0] == pytest.approx(first)


def test_a_short_last_batch(run: ezpz_llm.Run, clock: StillClock):
    for step in range(1, 9):
        clock.wait(0.25 if step % 4 == 0 else 1)
        ezpz_llm.record(step, loss=1.0, tokens=10 if step % 4 == 0 else 40)
    assert [line["tokens_per_second"] for line in lines(run)] == [40.0] * 8
    ezpz_llm.finish()
    summary = json.loads((run.run_dir / "run.json").read_text())["summary"]
    assert summary["tokens_per_second"] == 40
    assert summary["step_time"]["median"] == 1
    assert summary["wall"]["training"] == 6.5


def test_recording_continues_after_an_earlier_checkpoint(run: ezpz_llm.Run, clock: StillClock,
                                                         model: ezpz_llm.Wrapped):
    """Check that each step has one line after going back, that none is lost, and that loading is not step time."""
    for step in range(1, 8):
        ezpz_llm.record(step, loss=float(step + (train(model) * 0).item()))
    clock.wait(50)
    run.rewind(6)
    clock.wait(50)
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 5, 6]
    train(model)
    ezpz_llm.record(7, loss=70.0)
    run.rewind(2)
    with pytest.raises(ezpz_llm.UserError, match="step 2 is recorded after step 2"):
        ezpz_llm.record(2, loss=0.0)
    for step in (3, 4):
        clock.wait(0.5)
        train(model)
        ezpz_llm.record(step, loss=10.0 * step)
    ezpz_llm.finish()
    written = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in written] == [(1, 1), (2, 2), (3, 30), (4, 40)]
    assert [line["step_time_s"] for line in written] == [1, 1, 1, 1.5]
    record = json.loads((run.run_dir / "run.json").read_text())
    assert (record["config"]["steps"], record["summary"]["steps"], record["summary"]["last_loss"]) == (4, 4, 40)


def test_going_back_to_the_beginning(run: ezpz_llm.Run):
    for step in (1, 2, 3):
        ezpz_llm.record(step, loss=1.0)
    run.rewind(0)
    assert lines(run) == []
    ezpz_llm.record(1, loss=5.0)
    assert [line["loss"] for line in lines(run)] == [5.0]


def test_going_on_from_the_checkpoint_of_another_run(run: ezpz_llm.Run, clock: StillClock):
    ezpz_llm.record(1, loss=1.0)
    run.rewind(500)
    clock.wait(2)
    ezpz_llm.record(501, loss=2.0)
    assert [line["step"] for line in lines(run)] == [1, 501]
    assert step_times(run)[1] == 2
