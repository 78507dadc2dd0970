"""Timeline of a step: the phases add up, and a step does not wait for its own device work."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from ezpz_llm.training.observe import PHASES, StepTimeline

NAMES = {*PHASES, "other"}


def test_phases_of_accumulated_steps_add_up():
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
    assert fastest.step_time_s < 0.5, "the pause between steps is included"


def test_interrupted_step_does_not_affect_the_next_one():
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


class Device:
    """Fake device with a work queue. The CPU (`host`) and the queue each have a clock in seconds."""

    def __init__(self) -> None:
        self.host = self.queue = 0.0

    def enqueue(self, seconds: float) -> None:
        """Enqueue work, which takes the CPU a millisecond."""
        self.host += 0.001
        self.queue = max(self.queue, self.host) + seconds

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    """Event of the fake device."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = max(self.device.queue, self.device.host)

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.mark.parametrize("waits", [False, True])
def test_cpu_is_one_step_ahead_of_the_device_unless_it_waits(monkeypatch, waits):
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=device.event))
    timeline = StepTimeline(torch.device("cuda"), waits)
    ends = [0.0]
    for _ in range(5):
        timeline.begin_step()
        with timeline.span("forward"):
            device.enqueue(0.010)
        with timeline.span("optimizer"):
            device.enqueue(0.005)
        timeline.end_step()
        # The device still works on this step: end_step has waited only for the previous one.
        assert device.host == pytest.approx(device.queue if waits else max(ends[-1], 0.002))
        ends.append(device.queue)
    timeline.wait()
    assert device.host == device.queue
    for step in timeline.drain()[1:]:
        forward = 0.011 if waits else 0.010  # includes the millisecond in which the device is idle
        assert (step.phases["forward"], step.phases["optimizer"]) == pytest.approx((forward, 0.005))
        assert step.step_time_s == pytest.approx(forward + 0.005)


def test_work_that_is_left_out_is_not_device_time(monkeypatch):
    """Check evaluation in and after a pause, with kernels that the device executes later."""
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=device.event))
    timeline = StepTimeline(torch.device("cuda"))
    timeline.leave_out()  # before the first step
    timeline.begin_step()
    with timeline.span("forward"):
        device.enqueue(0.010)
        timeline.leave_out()  # inside a span
    with timeline.pause(), timeline.pause():
        device.enqueue(5)
    with timeline.span("backward"):
        device.enqueue(0.020)
    device.enqueue(7)
    timeline.leave_out()
    device.enqueue(0.040)
    with timeline.pause():
        device.enqueue(9)
        timeline.end_step(2)
        timeline.begin_step()
        device.enqueue(9)
    device.enqueue(0.080)
    timeline.end_step()
    first, second = timeline.drain()
    assert first.step_time_s == pytest.approx(0.070 / 2, abs=0.002)
    assert (first.phases["forward"], first.phases["backward"]) == pytest.approx((0.005, 0.010), abs=0.002)
    assert second.step_time_s == pytest.approx(0.080, abs=0.002)


@pytest.mark.gpu
def test_device_time_is_execution_time_not_enqueue_time():
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
