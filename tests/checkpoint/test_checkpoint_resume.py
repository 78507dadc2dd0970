"""Saving and loading in real runs (checkpoint_ranks.py): one and two ranks, every layout, failures, kills."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from places import HELPERS
from slowness import scaled

from ezpz_llm.training.checkpoint import find
from ezpz_llm.training.checkpoint.manifest import complete_checkpoints, read_manifest, verify
from ezpz_llm.training.layout.ops import is_built

PROGRAM = HELPERS / "checkpoint_ranks.py"
LAYOUTS = ["ddp", "zero0", "zero1", "zero2", "zero3", "zero3_in_pieces"]


def environment() -> dict[str, str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port)}


def run(ranks: int, programs: str, folder: Path, *layouts: str) -> dict[str, Any]:
    """Run programs of checkpoint_ranks.py and return their results by name."""
    words = [sys.executable, str(PROGRAM), programs, str(folder), *layouts]
    alone = {name: value for name, value in environment().items() if not name.startswith("MASTER_")}
    launcher = ["mpiexec", "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run([*launcher, *words], env=environment() if ranks > 1 else alone, timeout=scaled(400),
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in programs.split(",")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Save with two ranks, load and save with one process, and load both in two new processes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    # By default all parameters of the small model would persist on every rank, in one sub-group.
    pieces = folder / "zero3_in_pieces.json"
    pieces.write_text(json.dumps({"zero_optimization": {
        "stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 3000}}))
    extra = ["zero3_offload_optimizer"] if is_built("cpu_adam") else []
    programs = "same_layout,cross_layout,failures,background,background_failure,fall_back"
    outcomes = run(2, programs, folder, str(pieces), *extra)
    outcomes |= run(1, "other_world,train_alone", folder)
    return outcomes | run(2, "new_process", folder)


def close(ours: list[float], theirs: list[float]) -> bool:
    return ours == pytest.approx(theirs, abs=1e-5, rel=0)


@pytest.mark.full
@pytest.mark.parametrize("layout", [*LAYOUTS, "zero3_offload_optimizer"])
def test_a_resumed_run_equals_an_unbroken_one_to_the_last_digit(results: dict[str, Any], layout: str) -> None:
    if layout not in results["same_layout"]:
        pytest.skip("DeepSpeed's cpu_adam op is not built (ezpz-llm doctor --build-ops)")
    losses = results["same_layout"][layout]
    assert losses["resumed"] == losses["straight"]
    assert len(set(losses["straight"])) == 20
    assert losses["straight"][-1] < losses["straight"][0]


@pytest.mark.full
def test_a_new_process_resumes_bitwise(results: dict[str, Any]) -> None:
    assert results["new_process"]["zero2"] == results["same_layout"]["zero2"]["straight"][10:]


@pytest.mark.full
def test_load_returns_the_saved_state(results: dict[str, Any]) -> None:
    state = results["same_layout"]["zero1"]["state"]
    assert (state["step"], state["consumed"], state["optimizer_step"]) == (10, 80, 10)
    assert (state["world_size"], state["layout"], state["rng_restored"]) == (2, "zero1", True)
    assert state["versions"]["torch"]


@pytest.mark.full
def test_another_layout_goes_on_with_the_same_losses(results: dict[str, Any]) -> None:
    pairs = results["cross_layout"]["pairs"]
    assert len(pairs) == 6
    for pair, (expected, losses) in pairs.items():
        assert close(losses, expected), pair


@pytest.mark.full
def test_another_number_of_ranks_resumes_with_the_same_losses(results: dict[str, Any]) -> None:
    for layout, resumed in results["other_world"].items():
        assert close(resumed["losses"], results["cross_layout"]["expected"][layout]), layout
        assert not resumed["rng_restored"]
    assert close(results["new_process"]["alone in zero3"], results["train_alone"]["losses"])


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_is_reported_on_all(results: dict[str, Any], rank: int) -> None:
    first, second = results["failures"][f"full disk on rank {rank}"]
    assert first == second
    assert "the checkpoint of step 2 could not be written" in first
    assert "step-00000001 is intact" in first
    assert f"rank {rank}" in first
    assert results["failures"]["left after a full disk"] == ["latest", "step-00000001"]


@pytest.mark.full
@pytest.mark.parametrize(("failure", "message"), [
    ("another model", "transformer.wte.weight is [64, 24] in the checkpoint, [64, 48] in the model"),
    ("flipped byte", "rank-00001.safetensors has sha256"),
    ("missing file", "index.json is missing"),
])
def test_a_checkpoint_that_does_not_fit_is_rejected_on_all_ranks(results: dict[str, Any], failure: str,
                                                                 message: str) -> None:
    first, second = results["failures"][failure]
    assert first == second
    assert message in first
    assert results["failures"]["unchanged by failed loads"]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "zero0", "zero1", "zero2", "zero3"])
def test_a_background_save_writes_the_state_of_its_step(results: dict[str, Any],
                                                       layout: str) -> None:
    saves = results["background"]
    for step in (2, 4):
        resumed, straight = saves[f"{layout} from {step}"]
        assert resumed == straight, step
    assert saves[layout]["folders"] == ["step-00000002", "step-00000004"]
    assert saves[layout]["left"] == ["latest", "step-00000002", "step-00000004"]
    assert saves[layout]["saved twice"]


@pytest.mark.full
def test_a_background_save_does_not_wait_for_the_disk(results: dict[str, Any]) -> None:
    assert any(any(results["background"][layout]["busy"]) for layout in ("ddp", "zero1"))


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_in_the_background_is_reported_at_a_step_boundary(results: dict[str, Any], rank: int) -> None:
    failures = results["background_failure"]
    first, second = failures[f"full disk on rank {rank}"]
    assert first == second
    assert "the checkpoint of step 1 could not be written" in first
    assert "step-00000000 is intact" in first
    assert f"rank {rank}" in first
    assert failures["left"] == ["latest", "step-00000000"]
    assert failures["then"] == "step-00000001"


@pytest.mark.full
def test_all_ranks_skip_a_damaged_checkpoint(results: dict[str, Any]) -> None:
    loads = results["fall_back"]
    assert (loads["newest"]["folder"], loads["newest"]["state"]) == ("step-00000002", 2)
    assert loads["newest"]["error"] == ["no error"] * 2
    assert len(loads["newest"]["passed over"]) == 1
    assert "rank-00001.safetensors has sha256" in loads["newest"]["passed over"][0]
    assert loads["newest"]["losses"][1:] == loads["expected"]
    assert loads["newest"]["accepted"] == ["step-00000002 2"]
    assert loads["two"]["folder"] == "step-00000001"
    assert len(loads["two"]["passed over"]) == 2
    assert loads["two"]["losses"][2:] == loads["expected"]
    first, second = loads["all"]["error"]
    assert first == second
    assert "rank-00001.safetensors has sha256" in first


def test_a_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """Kill a process during a save, twice: `latest` names an intact checkpoint, and the next run cleans up."""
    checkpoints = tmp_path / "checkpoints"
    killed_while_writing = 0
    for wait in (0.0, random.Random(0).uniform(0, 0.05)):
        env = {name: value for name, value in environment().items() if not name.startswith("MASTER_")}
        process = subprocess.Popen([sys.executable, str(PROGRAM), "save_for_ever", str(tmp_path)], env=env,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            before = latest(checkpoints)
            wait_for(lambda before=before: latest(checkpoints) != before, process)
            wait_for(lambda: any(checkpoints.glob(".step-*.partial/rank-*")), process)
            time.sleep(wait)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=scaled(60))
        killed_while_writing += any(checkpoints.glob(".step-*.partial"))
        folder = find(tmp_path)
        assert folder.name == latest(checkpoints)
        verify(folder, read_manifest(folder))
        assert 1 <= len(complete_checkpoints(checkpoints)) <= 3
    assert killed_while_writing
    assert len(list(checkpoints.glob(".step-*.partial"))) <= 1


def latest(checkpoints: Path) -> str | None:
    pointer = checkpoints / "latest"
    return pointer.read_text().strip() if pointer.exists() else None


def wait_for(condition: Any, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + scaled(60)
    while not condition():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.0005)
