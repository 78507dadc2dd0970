"""Full disks and damaged checkpoints in real runs: one clear message, and no data lost."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_ranks import Server, wait_for
from slowness import scaled

from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.checkpoint import find, reader
from ezpz_llm.training.checkpoint.manifest import (
    DamagedCheckpointError,
    complete_checkpoints,
    make_record,
    read_manifest,
    verify,
    write_manifest,
)

RUN = ["--lr", "0.004", "--n-layer", "2", "--n-head", "2", "--n-embd", "128", "--block-size", "32",
       "--ds-config", "zero2", "--precision", "fp32", "--global-batch-size", "8", "--micro-batch-size", "2",
       "--eval-every", "0", "--eval-tokens", "512", "--sample-tokens", "0", "--profile", "false"]
SIZE_MB = 11
"""Space for two checkpoints of 5 MB, but not for a third; a run keeps one, and needs space for two."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of SIZE_MB megabytes."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "none", str(place)],
                          capture_output=True, text=True, timeout=scaled(120), check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield place
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(place), 2)


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(RunDir(run_dir).metrics)}


def fill(place: Path) -> Path:
    """Fill all remaining space with one file."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2
    return ballast


@pytest.mark.full
def test_a_full_disk_costs_only_a_checkpoint(server: Server, small_disk: Path,
                                            tmp_path: Path) -> None:
    """Fill the disk during the run and free it later: one warning, all metrics, an intact checkpoint at the end."""
    words = [*RUN, "--steps", "400", "--save-every", "20", "--keep-last", "1", "--log-every", "5"]
    run_dir = small_disk / "run"
    job = server.start(2, words, run_dir)
    assert wait_for(lambda: (run_dir / "checkpoints" / "latest").exists(), job), job.output
    ballast = fill(small_disk)
    try:
        assert wait_for(lambda: "the next checkpoint will be attempted" in job.output, job), job.output
        folder = find(run_dir)
        verify(folder, read_manifest(folder))
    finally:
        ballast.unlink()
    assert job.wait() == [0, 0], job.output
    text = job.output
    assert "could not be written: No space left on device" in text
    assert f"{folder.name} is intact" in text
    assert "Traceback" not in text
    assert list(losses(run_dir)) == list(range(1, 401))
    newest = find(run_dir)
    assert newest.name == "step-00000400"
    verify(newest, read_manifest(newest))
    assert [path.name for path in complete_checkpoints(run_dir / "checkpoints")] == [newest.name]


@pytest.mark.full
def test_a_full_disk_at_the_end_is_an_error(server: Server, small_disk: Path) -> None:
    words = [*RUN, "--steps", "60", "--save-every", "20", "--keep-last", "2", "--log-every", "5"]
    job = server.start(2, words, small_disk / "run")
    assert job.wait() == [1, 1], job.output
    error = "error: the checkpoint of step 60 could not be written: No space left on device"
    assert job.output.count(error) == 2, "every rank prints the error"
    assert "train it further" not in job.output
    assert "free disk space there" in job.output
    assert "Traceback" not in job.output
    run_dir = small_disk / "run"
    assert find(run_dir).name == "step-00000040"
    assert len(losses(run_dir)) == 60
    assert read_record(RunDir(run_dir)).steps == 60


def test_a_run_resumes_before_a_damaged_checkpoint(server: Server, tmp_path: Path) -> None:
    words = [*RUN, "--save-every", "4", "--log-every", "3", "--dropout", "0.1"]
    run_dir = tmp_path / "run"
    server.run(2, [*words, "--steps", "10", "--warmup-steps", "2", "--decay-steps", "16"], run_dir)
    before = losses(run_dir)
    assert [path.name for path in complete_checkpoints(run_dir / "checkpoints")] == ["step-00000008",
                                                                                     "step-00000010"]
    victim = run_dir / "checkpoints" / "step-00000010" / "rank-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    job = server.run(2, [*words, "--steps", "16", "--warmup-steps", "2", "--decay-steps", "16", "--resume",
                         str(run_dir)], run_dir)
    assert job.output.count("the checkpoint is damaged: rank-00001.safetensors has sha256") == 1
    assert "the run resumes from step-00000008 instead" in job.output
    after = losses(run_dir)
    assert list(after) == list(range(1, 17))
    assert {step: after[step] for step in before} == before
    for folder in complete_checkpoints(run_dir / "checkpoints"):
        verify(folder, read_manifest(folder))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_one_of_any_number_of_ranks_verifies_each_file(ranks: int, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.json" for name in "abc"]
    for file in files:
        file.write_text("{}")
    write_manifest(tmp_path, 1, [make_record(file) for file in files])
    for damaged in files:
        damaged.write_text("[]")
        finders = []
        for rank in range(ranks):
            try:
                reader._verify_share(tmp_path, SimpleNamespace(rank=rank, world_size=ranks))
            except DamagedCheckpointError:
                finders.append(rank)
        assert len(finders) == 1
        damaged.write_text("{}")


PICKLED = """
import json, os, pathlib, pickle, sys
from types import SimpleNamespace
import torch
from ezpz_llm.training.dist.degrees import Degrees
from ezpz_llm.training.checkpoint import load
from ezpz_llm.training.checkpoint.manifest import make_record, write_manifest
from ezpz_llm.training.engine.optimizer_state import TorchState

class Bad:
    def __reduce__(self):
        return (os.mkdir, (sys.argv[1] + "/mark",))

folder = pathlib.Path(sys.argv[1]) / "step-00000001"
folder.mkdir()
shard = "rank-00000.safetensors"
(folder / shard).write_bytes(pickle.dumps(Bad()))
state = {"step": 1, "world_size": 1, "optimizer_step": 1, "loss_scale": None}
(folder / "state.json").write_text(json.dumps(state))
piece = {"box": [[0, 4]], "start": 0, "stop": 4, "file": shard, "key": "weight"}
index = {"format": 1, "kinds": ["weight", "exp_avg", "exp_avg_sq"],
         "parameters": {"weight": {"shape": [4], "pieces": [piece]}}}
(folder / "index.json").write_text(json.dumps(index))
write_manifest(folder, 1, [make_record(folder / name) for name in (shard, "state.json", "index.json")])
model = torch.nn.Module()
model.weight = torch.nn.Parameter(torch.zeros(4))
state = TorchState(model, torch.optim.AdamW(model.parameters()), 0, 1, None)
engine = SimpleNamespace(module=model, training_state=lambda: state, device=torch.device("cpu"))
load(folder, engine, SimpleNamespace(rank=0, world_size=1, is_main=True, mesh=SimpleNamespace(degrees=Degrees(1))))
"""


@pytest.mark.full
def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    """Reject a pickle that would create a folder, although the manifest lists it with its right hash."""
    done = subprocess.run([sys.executable, "-c", PICKLED, str(tmp_path)], capture_output=True, text=True,
                          timeout=scaled(120), check=False)
    assert done.returncode == 1
    assert "rank-00000.safetensors is not a safetensors file" in done.stderr
    assert not (tmp_path / "mark").exists()
