"""Tests of side files: failed writes are kept, retried and reported, and never end a run."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_ranks import Job, Server, wait_for
from slowness import scaled

from ezpz_llm.core.rundir import RunDir, SideFiles, read_json, read_lines, side_files

RUN = ["--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--block-size", "32", "--ds-config", "ddp",
       "--precision", "fp32", "--global-batch-size", "4", "--micro-batch-size", "2", "--eval-every", "0",
       "--eval-tokens", "128", "--sample-tokens", "0", "--log-every", "2", "--steps", "60"]


@pytest.fixture
def messages() -> list[str]:
    return []


def _until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_failed_writes_are_retried_in_order(tmp_path: Path, messages: list[str]) -> None:
    folder = tmp_path / "run"
    side = SideFiles(messages.append, first_retry_s=0.01)
    for step in range(3):
        side.append(folder / "metrics.jsonl", [{"step": step}])
    side.write_json(folder / "plots" / "x.json", [1])
    assert side.waiting(folder / "metrics.jsonl") == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert len(messages) == 2, "one warning for each file"
    assert "metrics.jsonl cannot be written: No such file or directory" in messages[0]
    folder.mkdir()
    assert _until(lambda: len(messages) == 4)
    assert "metrics.jsonl can be written again" in messages[2] + messages[3]
    side.append(folder / "metrics.jsonl", [{"step": 3}])
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [0, 1, 2, 3]
    assert read_json(folder / "plots" / "x.json") == [1]
    assert side.close() == []


def test_close_reports_lost_content(tmp_path: Path, messages: list[str], monkeypatch) -> None:
    monkeypatch.setattr(side_files, "MAX_WAITING", 5)
    side = SideFiles(messages.append)
    path = tmp_path / "gone" / "metrics.jsonl"
    for step in range(8):
        side.append(path, [{"step": step}])
    side.update_record(RunDir(tmp_path / "gone"), steps=8)
    assert len(side.waiting(path)) == 5, "memory is bounded"
    lost = side.close()
    assert lost == [f"8 lines of {path} could not be written: No such file or directory",
                    f"{tmp_path / 'gone' / 'run.json'} could not be written: No such file or directory"]
    assert side.close() == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EDQUOT, errno.EROFS, errno.EFBIG])
def test_every_file_system_error_is_retried(tmp_path: Path, messages: list[str], monkeypatch,
                                                              number: int) -> None:
    fails = [True]
    real = side_files.append_lines

    def append_lines(path: Path, values: list) -> None:
        if fails:
            raise OSError(number, os.strerror(number), str(path))
        real(path, values)

    monkeypatch.setattr(side_files, "append_lines", append_lines)
    side = SideFiles(messages.append, first_retry_s=0.01)
    side.append(tmp_path / "metrics.jsonl", [{"step": 1}])
    fails.clear()
    assert _until(lambda: len(messages) == 2)
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [{"step": 1}]


def test_steps_do_not_wait_for_a_hanging_write(tmp_path: Path, messages: list[str], monkeypatch) -> None:
    tried = []

    def append_lines(path: Path, values: list) -> None:
        tried.append(path)
        if len(tried) > 1:
            time.sleep(60)  # the retry hangs, as on an unreachable file system
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(side_files, "append_lines", append_lines)
    monkeypatch.setattr(side_files, "_END_WITHIN_S", 0.1)
    side = SideFiles(messages.append, first_retry_s=0.01)
    side.append(tmp_path / "metrics.jsonl", [{"step": 1}])
    assert _until(lambda: len(tried) == 2)
    begin = time.monotonic()
    for step in range(1000):
        side.append(tmp_path / "metrics.jsonl", [{"step": step}])
    lost = side.close()
    assert time.monotonic() - begin < scaled(20)
    assert "1001 lines" in lost[0]


def test_attempt_warns_once(messages: list[str]) -> None:
    side = SideFiles(messages.append)

    def fail() -> None:
        raise RuntimeError("no trace")

    for _ in range(3):
        side.attempt("the trace", fail)
    assert messages == ["warning: the trace could not be written: RuntimeError: no trace; training continues"]
    assert side.close() == ["the trace could not be written: RuntimeError: no trace"]


@contextlib.contextmanager
def _read_only(place: Path) -> Iterator[None]:
    """Mount an empty read-only file system over `place`."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(place)], capture_output=True, text=True,
                          timeout=scaled(120), check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(place), 2)


def _begun(server: Server, run_dir: Path, *words: str) -> Job:
    """Start a run of two ranks, and wait until it has taken some steps."""
    job = server.start(2, [*RUN, *words], run_dir)
    metrics = RunDir(run_dir).metrics
    assert wait_for(lambda: metrics.exists() and '"step": 10,' in metrics.read_text(), job), job.output
    return job


def test_run_continues_without_its_directory(server: Server, tmp_path: Path) -> None:
    job = _begun(server, tmp_path / "run", "--save-every", "-1", "--trace-steps", "3")
    (tmp_path / "run").rename(tmp_path / "away")
    assert job.wait() == [0, 0], job.output
    assert job.output.count("metrics.jsonl cannot be written: No such file or directory") == 1
    assert "lines of " in job.output.rpartition("warning:")[0], "lost content is reported at the end"
    assert "training loss" in job.output, "the summary uses the lines in memory"
    assert "Traceback" not in job.output
    assert "Exception ignored" not in job.output


def test_run_continues_if_files_must_not_grow(server: Server, tmp_path: Path) -> None:
    job = _begun(server, tmp_path / "run", "--save-every", "-1")
    for pid in job.pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))
    assert job.wait() == [0, 0], job.output
    assert "Traceback" not in job.output


def test_failed_checkpoint_ends_all_ranks_with_the_same_code(server: Server, tmp_path: Path) -> None:
    job = _begun(server, tmp_path / "run")
    try:
        with _read_only(tmp_path / "run"):
            assert job.wait() == [1, 1], job.output
    finally:
        job.kill()
    assert "error: the checkpoint of step 60 could not be written: Read-only file system" in job.output
    assert "Traceback" not in job.output
    assert "metrics.jsonl could not be written: Read-only file system" in job.output


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path, messages: list[str], has_reader: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    side = SideFiles(messages.append, first_retry_s=0.01)
    side.append(path, [{"step": 1}])
    assert len(messages) == 1
    assert "metrics.jsonl cannot be written" in messages[0]
    if reader is not None:
        os.close(reader)
    path.unlink()
    assert _until(lambda: path.exists() and path.stat().st_size > 0)
    assert side.close() == []
    assert [line["step"] for line in read_lines(path)] == [1]
