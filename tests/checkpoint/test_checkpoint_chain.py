"""Chain of checkpoints: a run that continues from an earlier checkpoint abandons the later ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from slowness import scaled

from ezpz_llm.checkpoint import main as checkpoint_main
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.checkpoint import Keep, find, prune
from ezpz_llm.training.checkpoint.manifest import complete_checkpoints, step_of
from ezpz_llm.training.checkpoint.retention import candidates
from ezpz_llm.training.checkpoint.state import Point, read_state
from ezpz_llm.training.trainer import loop
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import run

SMALL = ["--n-layer", "1", "--n-head", "2", "--n-kv-head", "2", "--n-embd", "32", "--block-size", "32",
         "--eval-tokens", "64", "--sample-tokens", "0", "--profile", "false", "--precision", "fp32",
         "--micro-batch-size", "2", "--ds-config", "ddp", "--device", "cpu", "--save-async", "false",
         "--keep-last", "9"]


class Died(Exception):
    """Injected end of a run."""


def train(*words: object) -> int:
    return run(parse([*SMALL, *map(str, words)]))


def steps(folders: list[Path]) -> list[int]:
    return [step_of(folder) for folder in folders]


def latest(run_dir: Path) -> str:
    return (run_dir / "checkpoints/latest").read_text().strip()


def folder(run_dir: Path, step: int) -> Path:
    return run_dir / f"checkpoints/step-{step:08d}"


def damage(checkpoint: Path) -> None:
    (checkpoint / "rank-00000.safetensors").write_bytes(b"")


def test_fallback_and_pruning_follow_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    """Steps 6 and 8 were trained before the run went back to step 4, and are no part of what it continued."""
    run_dir = tmp_path / "run"
    assert train("--steps", 8, "--save-every", 2, "--run-dir", run_dir) == 0
    assert [point.step for point in read_state(folder(run_dir, 8)).continues] == [6]

    def die(*_: object) -> None:
        raise Died

    monkeypatch.setattr(loop, "train_step", die)
    with pytest.raises(Died):
        train("--resume", folder(run_dir, 4), "--run-dir", run_dir, "--steps", 9, "--save-every", 5)
    monkeypatch.undo()
    assert latest(run_dir) == "step-00000004"  # where --resume auto continues
    assert train("--resume", "auto", "--run-dir", run_dir, "--steps", 9, "--save-every", 5) == 0
    assert steps(complete_checkpoints(run_dir / "checkpoints")) == [2, 4, 5, 6, 8, 9]
    assert steps(candidates(run_dir)) == [9, 5, 4, 2]
    assert read_state(folder(run_dir, 9)).continues == [Point(1, 4), Point(2, 5)]
    assert checkpoint_main(["inspect", str(run_dir)]) == 0
    assert "\ncontinues       branch 1, step 4; branch 2, step 5\n" in capsys.readouterr().out
    damage(folder(run_dir, 9))
    assert find(run_dir) == folder(run_dir, 5)
    capsys.readouterr()
    assert train("--resume", "auto", "--run-dir", run_dir, "--steps", 10, "--save-every", 7) == 0
    assert "resuming after step 5" in capsys.readouterr().out
    assert steps(candidates(run_dir)) == [10, 7, 5, 4, 2]
    # A damaged state hides the chain, but not which checkpoint was saved before it.
    whole = (folder(run_dir, 10) / "state.json").read_text()
    (folder(run_dir, 10) / "state.json").write_text("{")
    assert find(run_dir) == folder(run_dir, 7)
    assert steps(candidates(run_dir)) == [10, 7, 5, 4, 2]
    (folder(run_dir, 10) / "state.json").write_text(whole)
    # Abandoned ones do not count as the last three.
    prune(RunDir(run_dir), Keep(last=3))
    assert steps(complete_checkpoints(run_dir / "checkpoints")) == [5, 6, 7, 8, 9, 10]
    prune(RunDir(run_dir), Keep(last=1, every=2))
    assert steps(complete_checkpoints(run_dir / "checkpoints")) == [10]
    assert read_state(folder(run_dir, 10)).continues == [Point(1, 4), Point(2, 5), Point(3, 7)]


@pytest.mark.full
def test_a_run_from_another_runs_checkpoint_begins_a_chain(tmp_path: Path) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    assert train("--steps", 4, "--save-every", 2, "--run-dir", other) == 0
    assert train("--resume", folder(other, 2), "--steps", 6, "--save-every", 5, "--run-dir", run_dir) == 0
    assert read_state(folder(run_dir, 5)).continues == []
    assert steps(candidates(run_dir)) == [6, 5]
    assert latest(other) == "step-00000004"


def test_a_rollback_abandons_later_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of step 4 is damaged, so the rollback goes to step 2."""
    run_dir = tmp_path / "run"
    assert train("--steps", 6, "--save-every", 2, "--run-dir", run_dir) == 0
    damage(folder(run_dir, 6))
    seen: list[str] = []
    original = loop.train_step

    def step(session: object, number: int) -> None:
        if not seen:
            damage(folder(run_dir, 4))
            from ezpz_llm.training.trainer.rollback import _roll_back

            _roll_back(session, run_dir, "injected")
            seen.append(latest(run_dir))
            raise Died
        original(session, number)

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(Died):
        train("--resume", run_dir, "--run-dir", run_dir, "--steps", 8)
    assert seen == ["step-00000002"]


SCRIPT = """
import sys, torch, ezpz_llm
run = ezpz_llm.setup(run_dir=sys.argv[1], device="cpu")
model = torch.nn.Linear(2, 2)
model = ezpz_llm.wrap(model, torch.optim.AdamW(model.parameters()), "ddp")
for step in (10, 20, 30):
    ezpz_llm.save_checkpoint(model, step)
ezpz_llm.load_checkpoint(model, sys.argv[1] + "/checkpoints/step-00000010")
print((run.run_dir / "checkpoints/latest").read_text())
ezpz_llm.save_checkpoint(model, 25)
"""


@pytest.mark.full
def test_a_script_that_goes_back_abandons_later_checkpoints(tmp_path: Path) -> None:
    """In the same process: load_checkpoint begins a branch."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True,
                          timeout=scaled(100), check=False)
    assert done.returncode == 0, done.stderr
    assert "step-00000010\n" in done.stdout
    assert steps(candidates(tmp_path)) == [25, 10]
