"""Process groups on GPUs. Calls that need a GPU are recorded, not executed."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import ALONE
from ezpz_llm.training.dist.mesh import Degrees, Mesh
from ezpz_llm.training.dist.setup import Dist
from ezpz_llm.training.trainer import device_copy
from ezpz_llm.verify.check.preflight.measurements import Worker
from ezpz_llm.verify.check.preflight.messages import Request

GPU = torch.device("cuda", 1)
HALF_AN_HOUR = datetime.timedelta(minutes=30)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Settings of each created process group, and None for each destroyed one."""
    created: list[Any] = []
    monkeypatch.setattr(torch.distributed, "init_process_group",
                        lambda backend, **settings: created.append({"backend": backend, **settings}))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda *_: created.append(None))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda *_: created[-1]["backend"] if created else "nccl")
    return created


def request_for(stage: str) -> Request:
    return Request(stage, group=" 0-1", index=0, size=2, store="unused")


def worker(device: torch.device) -> Worker:
    preflight_worker = Worker()
    preflight_worker._device, preflight_worker._store = device, HashStore()
    return preflight_worker


def test_preflight_keeps_a_failed_nccl_group(groups: list[Any]) -> None:
    """The destructor would wait for hanging ranks, and later groups would reuse the group."""
    failed = worker(GPU)
    with pytest.raises((RuntimeError, AssertionError)):  # this machine has no such device
        failed.measure(request_for("reduce node"))
    failed.leave_failed_group(request_for("reduce node"))
    assert [group["backend"] for group in groups] == ["nccl"]
    with pytest.raises(RuntimeError, match="group for reduce node has failed"):
        failed.measure(request_for("reduce all"))
    assert len(groups) == 1


def test_preflight_timeout_allows_for_loading_device_libraries(groups: list[Any]) -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        worker(GPU).measure(request_for("reduce node"))
    assert groups[0]["timeout"] >= datetime.timedelta(seconds=60)
    assert groups[0]["device_id"] == GPU


def test_group_of_a_single_process_gets_its_device(groups: list[Any], tmp_path) -> None:
    """NCCL guesses the device without `device_id`, warns, and waits in the first collective."""
    Dist(ALONE, GPU, None, Mesh(Degrees(1), 0, HALF_AN_HOUR), RunDir(tmp_path), HALF_AN_HOUR).ensure_group()
    assert (groups[0]["backend"], groups[0]["device_id"], groups[0]["world_size"]) == ("nccl", GPU, 1)


class Streams:
    """Fake device module that records calls on streams."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.Stream = lambda device: "copies"
        self.stream = lambda stream: contextlib.nullcontext(self.done.append(f"in {stream}"))
        self.current_stream = lambda device: self
        self.wait_stream = lambda stream: self.done.append(f"wait for {stream}")


class Samples:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def contiguous(self) -> Samples:
        self._streams.done.append("contiguous")
        return self

    def pin_memory(self) -> Samples:
        self._streams.done.append("pinned")
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> Samples:
        self._streams.done.append(f"to {device.type}, {'not ' * non_blocking}waiting")
        return self

    def record_stream(self, stream: Streams) -> None:
        assert stream is self._streams
        self._streams.done.append("kept until the computing stream is done")


@pytest.mark.parametrize(("kind", "pins"), [("cuda", True), ("xpu", True), ("mps", False), ("cpu", False)])
def test_samples_are_copied_from_pinned_memory_if_the_device_supports_it(
        kind: str, pins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy uses a separate stream, and the compute stream waits for it."""
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    device_copy._stream.cache_clear()
    samples: Any = Samples(streams)
    assert device_copy.to_device([samples], torch.device(kind)) == (samples,)
    device_copy._stream.cache_clear()
    moved = f"to {kind}, not waiting"
    assert streams.done == (["in copies", "contiguous", "pinned", moved, "wait for copies",
                             "kept until the computing stream is done"] if pins else [moved])
