"""Process groups on GPUs, with the calls that need one recorded instead of made."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ezpz_llm.check.measure import Worker
from ezpz_llm.dist.mesh import Degrees, Mesh
from ezpz_llm.dist.setup import Dist
from ezpz_llm.launch.ranks import ALONE
from ezpz_llm.rundir import RunDir
from ezpz_llm.trainer import device_copy

GPU = torch.device("cuda", 1)
HALF_AN_HOUR = datetime.timedelta(minutes=30)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of each process group that is made, and None for each that is destroyed."""
    made: list[Any] = []
    monkeypatch.setattr(torch.distributed, "init_process_group",
                        lambda backend, **settings: made.append({"backend": backend, **settings}))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda *_: made.append(None))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda *_: made[-1]["backend"] if made else "nccl")
    return made


def asked(stage: str) -> dict[str, Any]:
    return {"ask": stage, "group": " 0-1", "index": 0, "size": 2, "store": "unused"}


def worker(device: torch.device) -> Worker:
    made = Worker()
    made._device, made._store = device, HashStore()
    return made


def test_preflight_leaves_a_failed_group_of_nccl_as_it_is(groups: list[Any]) -> None:
    """Its destructor would wait for ranks that hang in it; further groups would take its place."""
    failed = worker(GPU)
    with pytest.raises((RuntimeError, AssertionError)):  # there is no such device here
        failed.answer(asked("reduce node"))
    failed.failed(asked("reduce node"))
    assert [group["backend"] for group in groups] == ["nccl"]
    with pytest.raises(RuntimeError, match="group for reduce node has failed"):
        failed.answer(asked("reduce all"))
    assert len(groups) == 1


def test_preflight_gives_a_device_the_time_to_load_its_libraries(groups: list[Any]) -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        worker(GPU).answer(asked("reduce node"))
    assert groups[0]["timeout"] >= datetime.timedelta(seconds=60)
    assert groups[0]["device_id"] == GPU


def test_a_group_of_one_process_is_told_its_device(groups: list[Any], tmp_path) -> None:
    """Else NCCL guesses, warns, and waits in the first collective."""
    Dist(ALONE, GPU, None, Mesh(Degrees(1), 0, HALF_AN_HOUR), RunDir(tmp_path), HALF_AN_HOUR).ensure_group()
    assert (groups[0]["backend"], groups[0]["device_id"], groups[0]["world_size"]) == ("nccl", GPU, 1)


class Streams:
    """A device's module, which records what its streams are told."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.Stream = lambda device: "copies"
        self.stream = lambda stream: contextlib.nullcontext(self.done.append(f"in {stream}"))
        self.current_stream = lambda device: self
        self.wait_stream = lambda stream: self.done.append(f"wait for {stream}")


class Samples:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

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
def test_samples_go_through_page_locked_memory_where_that_lets_the_copy_overlap(
        kind: str, pins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There in a stream of their own, which what computes afterwards waits for."""
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    device_copy._stream.cache_clear()
    samples: Any = Samples(streams)
    assert device_copy.to_device([samples], torch.device(kind)) == (samples,)
    device_copy._stream.cache_clear()
    moved = f"to {kind}, not waiting"
    assert streams.done == (["in copies", "pinned", moved, "wait for copies",
                             "kept until the computing stream is done"] if pins else [moved])
