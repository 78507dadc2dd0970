"""Finding, verifying, publishing and removing checkpoint folders, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from slowness import scaled

from ezpz_llm.checkpoint import main as checkpoint_main
from ezpz_llm.core.base.errors import UserError, run_command
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.checkpoint import Keep, find, prune
from ezpz_llm.training.checkpoint.index import read_index
from ezpz_llm.training.checkpoint.manifest import (
    DamagedCheckpointError,
    complete_checkpoints,
    make_record,
    publish,
    read_manifest,
    start_partial,
    verify,
    write_manifest,
)
from ezpz_llm.training.checkpoint.retention import candidates
from ezpz_llm.training.checkpoint.state import State, read_state
from ezpz_llm.training.model.config import get_model_config


def write(run_dir: RunDir, step: int, content: str = "abc") -> Path:
    partial = start_partial(run_dir.checkpoints, step)
    (partial / "rank-00000.safetensors").write_text(content)
    write_manifest(partial, step, [make_record(partial / "rank-00000.safetensors")])
    return publish(partial, step)


def latest(run_dir: RunDir) -> str:
    return (run_dir.checkpoints / "latest").read_text().strip()


def names(run_dir: RunDir) -> list[str]:
    return [path.name for path in complete_checkpoints(run_dir.checkpoints)]


def test_find_returns_the_latest_of_a_run_or_the_folder_itself(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    first, second = write(run_dir, 5), write(run_dir, 100_000_000)
    assert find(run_dir.path) == find(str(run_dir.checkpoints)) == find(second) == second
    assert find(first) == first
    # A kill between renaming the first checkpoint and writing `latest` leaves a complete checkpoint without it.
    (run_dir.checkpoints / "latest").unlink()
    assert find(run_dir.path) == second


def test_find_reports_missing_and_damaged_checkpoints(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "gpt2-run")
    with pytest.raises(UserError, match="no run directory or checkpoint") as absent:
        find(run_dir.path)
    run_dir.create()
    with pytest.raises(UserError, match="no complete checkpoint") as empty:
        find(run_dir.path)
    with pytest.raises(UserError) as misspelt:
        find(tmp_path / "gtp2-run")
    assert "gpt2-run" in str(misspelt.value.instead)
    folder, other = write(run_dir, 5), write(run_dir, 6)
    (folder / "rank-00000.safetensors").unlink()
    with pytest.raises(UserError, match=r"rank-00000.safetensors is missing") as missing:
        find(folder)
    assert other.name in str(missing.value.instead)
    # Scripts get these errors from `load_checkpoint`, which has no options.
    assert not any("--" in str(caught.value) for caught in (absent, empty, missing))
    (other / "rank-00000.safetensors").write_text("ab")
    with pytest.raises(UserError, match="has 2 bytes, the manifest expects 3"):
        find(run_dir.path)
    (other / "manifest.json").write_text('{"format": 1, "fil')
    with pytest.raises(UserError, match=r"manifest.json cannot be read"):
        find(other)
    (other / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="format 99"):
        find(other)


def test_find_returns_the_newest_intact_checkpoint_of_a_run(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    first, second, third = write(run_dir, 5), write(run_dir, 6), write(run_dir, 7)
    (third / "rank-00000.safetensors").write_text("ab")
    assert find(run_dir.path) == second
    (second / "manifest.json").write_text("{")
    assert find(run_dir.path) == first
    # A damaged checkpoint that is named explicitly is not replaced by another one.
    with pytest.raises(DamagedCheckpointError, match="has 2 bytes, the manifest expects 3"):
        find(third)
    (first / "rank-00000.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match="has 2 bytes, the manifest expects 3") as caught:
        find(run_dir.path)
    # The message lists all three as damaged, and suggests none of them.
    assert "all 3 checkpoints are damaged (step-00000007, step-00000006, step-00000005)" in caught.value.found
    assert not any(folder.name in caught.value.instead for folder in (first, second, third))


@pytest.mark.parametrize("number", [0, 2, None, "1"])
def test_an_index_of_another_format_is_rejected(number: object, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"format": number, "kinds": [], "parameters": {}}))
    with pytest.raises(DamagedCheckpointError, match=rf"index.json has format {number!r}"):
        read_index(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps({"format": 1, "kinds": [], "parameters": {}}))
    assert read_index(tmp_path).parameters == {}


def test_any_changed_byte_of_a_manifest_is_damage_or_harmless(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    older, newer = write(run_dir, 5), write(run_dir, 6)
    manifest = newer / "manifest.json"
    whole = manifest.read_bytes()
    skipped = 0
    for place in range(len(whole)):
        for flip in (0x01, 0x10, 0x80):
            manifest.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1:])
            skipped += find(run_dir.path) == older
    assert skipped > len(whole)


def test_a_deleted_latest_checkpoint_is_skipped(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    kept, deleted, later = write(run_dir, 5), write(run_dir, 6), write(run_dir, 9)
    (run_dir.checkpoints / "latest").write_text(deleted.name + "\n")
    deleted.rename(tmp_path / "elsewhere")
    assert candidates(run_dir.path) == [deleted, kept]
    assert find(run_dir.path) == kept
    # Any other content of `latest` is ignored.
    (run_dir.checkpoints / "latest").write_text("../../etc\n")
    assert candidates(run_dir.path) == [later, kept]


def test_a_kill_between_two_checkpoints_of_one_step_leaves_the_old_one(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    folder = write(run_dir, 3)
    (run_dir.checkpoints / "latest").unlink()
    aside = folder.rename(folder.with_name(".step-00000003.replaced"))
    assert find(run_dir.path) == aside
    new = write(run_dir, 3, "new")
    assert candidates(run_dir.path) == [new]
    assert not aside.exists()


def test_verify_detects_a_changed_byte(tmp_path: Path) -> None:
    folder = write(RunDir(tmp_path), 1, "abcdef")
    verify(folder, read_manifest(folder))
    expected = read_manifest(folder)[0].sha256
    (folder / "rank-00000.safetensors").write_text("abcdeg")
    with pytest.raises(UserError) as error:
        verify(folder, read_manifest(folder))
    assert expected in error.value.found
    assert make_record(folder / "rank-00000.safetensors").sha256 in error.value.found
    assert "rank-00000.safetensors" in error.value.found


def test_prune_keeps_the_last_ones_up_to_the_latest(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in (1, 2, 3, 4):
        write(run_dir, step)
    assert [path.name for path in prune(run_dir, Keep(2))] == ["step-00000001", "step-00000002"]
    assert names(run_dir) == ["step-00000003", "step-00000004"]
    # The run resumes and saves step 3 again: step 3 is the latest, and step 4 is not older.
    write(run_dir, 3)
    assert latest(run_dir) == "step-00000003"
    prune(run_dir, Keep(0))
    assert names(run_dir) == ["step-00000003", "step-00000004"]
    assert find(run_dir.path).name == "step-00000003"


def test_a_checkpoint_that_cannot_be_removed_is_kept_with_a_warning(tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = RunDir(tmp_path)
    stuck, removed, _ = (write(run_dir, step) for step in (1, 2, 3))
    # Left by an interrupted removal, so that the folder cannot be renamed.
    (run_dir.checkpoints / f".{stuck.name}.removed" / "rest").mkdir(parents=True)
    assert prune(run_dir, Keep(1)) == [removed]
    assert f"the old checkpoint {stuck} cannot be removed: Directory not empty" in capsys.readouterr().err
    assert stuck.is_dir()
    assert not removed.exists()


def test_multiples_of_every_are_kept(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in (10, 15, 20, 25, 30, 35):
        write(run_dir, step)
        prune(run_dir, Keep(2, every=20))
    assert names(run_dir) == ["step-00000020", "step-00000030", "step-00000035"]
    assert prune(RunDir(tmp_path / "empty"), Keep(1)) == []


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write(run_dir, 1)
    write(run_dir, 2, "old")
    folder = write(run_dir, 2, "new")
    assert (folder / "rank-00000.safetensors").read_text() == "new"
    assert latest(run_dir) == folder.name
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == [
        "latest", "step-00000001", "step-00000002"]


def test_incomplete_checkpoints_of_killed_runs_are_removed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write(run_dir, 1)
    left = start_partial(run_dir.checkpoints, 2)
    (left / "rank-00000.safetensors").write_text("half")
    assert find(run_dir.path).name == "step-00000001"
    write(run_dir, 3)
    assert not left.exists()


def test_find_imports_no_torch(tmp_path: Path) -> None:
    folder = write(RunDir(tmp_path), 1)
    program = ("import sys; from ezpz_llm.training.checkpoint import find; find(sys.argv[1]); "
               "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", program, str(folder)], timeout=scaled(60)).returncode == 0


MODEL = asdict(get_model_config("tiny-gpt2"))
STATE = {"step": 3, "consumed": 24, "sample_hash": "ab", "seed": 1, "data": "x", "model": MODEL,
         "optimizer_step": 3, "loss_scale": None, "world_size": 2}


def write_state(folder: Path, state: dict[str, object]) -> Path:
    """Write a checkpoint whose index and state are right for their hashes."""
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(state))
    kinds = ["weight", "exp_avg", "exp_avg_sq"]
    (folder / "index.json").write_text(json.dumps({"format": 1, "kinds": kinds, "parameters": {}}))
    write_manifest(folder, 3, [make_record(folder / name) for name in ("state.json", "index.json")])
    return folder


@pytest.mark.parametrize(("changes", "problem"), [
    ({"world_size": ...}, "world_size is missing"),
    ({"optimizer_step": ...}, "optimizer_step is missing"),
    ({"loss_scale": ...}, "loss_scale is missing"),
    ({"loss_scale": {"scale": 2.0}}, "loss_scale.good_steps is missing"),
    ({"step": "3"}, "step is '3', but must be a whole number"),
    ({"model": []}, "model is a list, but must be an object or null"),
    ({"model": ...}, "state.json has no model"),
    ({"model": {"n_layer": 2}}, "does not describe a model that this version supports: n_head is missing"),
    ({"model": {**MODEL, "n_layer": 0}}, "n_layer is 0: it must be an integer of at least 1"),
    ({"model": {**MODEL, "new": 1}}, "this version supports: unknown key 'new'"),
    ({"sample_hash": "xyz"}, "sample_hash is 'xyz'"),
])
def test_verify_reports_an_incomplete_state_in_one_message(
        changes: dict[str, object], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {name: value for name, value in {**STATE, **changes}.items() if value is not ...}
    folder = write_state(tmp_path / "checkpoints" / "step-00000003", state)
    assert run_command(checkpoint_main, ["verify", str(folder)]) == 1
    printed = capsys.readouterr().err
    assert problem in printed
    assert printed.count("error: ") == 1
    assert "Traceback" not in printed


def test_values_of_a_script_do_not_replace_those_of_save(tmp_path: Path) -> None:
    state = State(step=3, user={"epoch": 1, "model": "mine", "world_size": 9}, optimizer_step=3, loss_scale=None,
                  world_size=2)
    folder = write_state(tmp_path / "checkpoints" / "step-00000003", as_plain(state))
    assert read_state(folder) == state
    assert run_command(checkpoint_main, ["verify", str(folder)]) == 0, "a script's checkpoint has no model"
