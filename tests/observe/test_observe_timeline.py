"""Where a step's time went: the phases add up, and the step never waits for the device."""

from __future__ import annotations

import time

import pytest
import torch

from ezpz_llm.observe import PHASES, StepTimeline

NAMES = {*PHASES, "other"}


def test_phases_of_accumulated_steps_add_up_and_land_in_the_right_place():
    timeline = StepTimeline(torch.device("cpu"))
    for _ in range(3):
        timeline.begin_step()
        for _ in range(2):
            with timeline.span("data"):
                time.sleep(0.004)
            with timeline.span("backward"):
                time.sleep(0.010)
        time.sleep(0.006)
        timeline.end_step()
        time.sleep(0.5)  # a validation between steps

    steps = timeline.drain()

    assert len(steps) == 3
    assert timeline.drain() == []
    for step in steps:
        assert set(step.phases) == NAMES
        assert abs(sum(step.phases.values()) - step.step_time_s) < 1e-9
        assert step.phases["data"] >= 0.008
        assert step.phases["backward"] >= 0.020
        assert step.phases["other"] >= 0.006
        assert step.phases["forward"] == step.phases["optimizer"] == 0
    fastest = min(steps, key=lambda step: step.step_time_s)
    assert fastest.step_time_s < 0.5, "the pause between steps was counted"


def test_a_step_cut_short_leaves_nothing_in_the_next():
    timeline = StepTimeline(torch.device("cpu"))
    timeline.begin_step()
    with pytest.raises(OSError, match="vanished"), timeline.span("data"):
        raise OSError("the shard vanished")
    timeline.begin_step()
    with timeline.span("forward"):
        pass
    timeline.end_step()
    (step,) = timeline.drain()
    assert step.phases["data"] == 0


def test_misuse_is_an_error():
    timeline = StepTimeline(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="outside a step"), timeline.span("data"):
        pass
    with pytest.raises(RuntimeError, match="without begin_step"):
        timeline.end_step()
    timeline.begin_step()
    with pytest.raises(ValueError, match="unknown phase 'foward'"), timeline.span("foward"):
        pass
    with timeline.span("forward"), pytest.raises(RuntimeError, match="inside 'forward'"), timeline.span("data"):
        pass


@pytest.mark.gpu
def test_device_time_is_the_work_and_not_its_enqueueing():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    timeline = StepTimeline(device)
    a = torch.randn(8192, 8192, device=device)
    for _ in range(4):
        timeline.begin_step()
        enqueued = time.perf_counter()
        with timeline.span("forward"):
            for _ in range(20):
                a @ a
        enqueued = time.perf_counter() - enqueued
        timeline.end_step()
    for step in timeline.drain()[1:]:
        assert abs(sum(step.phases.values()) - step.step_time_s) < 1e-9
        assert step.phases["forward"] > 3 * enqueued
        assert 0 <= step.phases["other"] < 0.2 * step.step_time_s
