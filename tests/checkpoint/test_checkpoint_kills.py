"""kill -9 of a rank at random moments of real runs: only the steps since the last save are lost."""

from __future__ import annotations

import datetime
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import Job, Server, wait_for
from places import ROOT

from ezpz_llm.core.rundir import RunDir, read_lines, write_json
from ezpz_llm.training.checkpoint import find
from ezpz_llm.training.checkpoint.manifest import (
    STATE,
    complete_checkpoints,
    latest_checkpoint,
    read_json,
    read_manifest,
    step_of,
    verify,
)

RESULT = ROOT / "benchmarks" / "results" / "kills.json"
MOMENTS = ("training", "saving", "evaluating", "at any time", "publishing")
RUN = ["--n-layer", "2", "--n-head", "2", "--n-embd", "192", "--block-size", "32", "--dropout", "0.1",
       "--ds-config", "zero2", "--precision", "fp32", "--global-batch-size", "8", "--micro-batch-size", "2",
       "--save-every", "4", "--eval-every", "6", "--eval-tokens", "2048", "--log-every", "7",
       "--sample-tokens", "0", "--profile", "false"]


def come_to(moment: str, job: Job, run_dir: RunDir, victim: int, dice: random.Random) -> None:
    """Wait for a random moment of that kind, after up to two saves of this process, or for the end of the run."""
    if moment == "at any time":
        time.sleep(dice.uniform(0, 4))
        return
    conditions = {
        "training": lambda: job.phase(victim).startswith("training"),
        "evaluating": lambda: job.phase(victim).startswith("evaluating"),
        "saving": lambda: any(run_dir.checkpoints.glob(".step-*.partial/rank-*")),
        "publishing": lambda: any(run_dir.checkpoints.glob(".step-*.partial/index.json")),
    }
    for _ in range(dice.randint(0 if complete_checkpoints(run_dir.checkpoints) else 1, 2)):
        before = latest_checkpoint(run_dir.checkpoints)
        if not wait_for(lambda before=before: latest_checkpoint(run_dir.checkpoints) != before, job):
            return
    if wait_for(conditions[moment], job):
        time.sleep(dice.uniform(0, 0.005 if moment in ("saving", "publishing") else 0.1))


def kill_once(server: Server, words: list[str], run_dir: RunDir, moment: str,
              dice: random.Random) -> dict[str, Any]:
    """Start or resume a run, kill one rank and then the other, and check that an intact checkpoint is left."""
    saved = complete_checkpoints(run_dir.checkpoints)
    if saved:
        words = [*words, "--resume", str(run_dir.path)]
    elif run_dir.metrics.exists():
        run_dir.metrics.unlink()
    job = server.start(2, words, run_dir.path)
    victim = dice.randrange(2)
    come_to(moment, job, run_dir, victim, dice)
    before = latest_checkpoint(run_dir.checkpoints)
    os.kill(job.pids[victim], signal.SIGKILL)  # not reaped yet, so the PID cannot be reused
    time.sleep(dice.uniform(0, 0.3))
    job.kill()
    codes = job.wait()
    partial = any(run_dir.checkpoints.glob(".step-*.partial"))
    if before is not None:
        folder = find(run_dir.path)
        verify(folder, read_manifest(folder))
        assert step_of(folder) >= step_of(before)
        assert latest_checkpoint(run_dir.checkpoints) == folder
    done = -9 not in codes
    assert done or codes[victim] == -9, job.output
    return {"moment": moment, "rank": victim, "resumed": bool(saved), "was_writing": partial, "had_ended": done,
            "left": step_of(find(run_dir.path)) if complete_checkpoints(run_dir.checkpoints) else None}


def survive(server: Server, folder: Path, kills: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """Kill a run `kills` times, let it end, and compare it with an undisturbed run."""
    words = [*RUN, "--steps", str(steps)]
    server.run(2, words, folder / "whole")
    expected = list(read_lines(RunDir(folder / "whole").metrics))
    dice, lives, round_ = random.Random(seed), [], 0
    while len(lives) < kills:
        run_dir = RunDir(folder / f"killed{round_}").create()
        ended = False
        while len(lives) < kills and not ended:
            life = kill_once(server, words, run_dir, MOMENTS[len(lives) % len(MOMENTS)], dice)
            if not life["had_ended"]:
                lives.append(life)
            ended = life["had_ended"] or life["left"] == steps
        if not ended:
            resumes = ["--resume", str(run_dir.path)] if complete_checkpoints(run_dir.checkpoints) else []
            if not resumes:
                run_dir.metrics.unlink(missing_ok=True)
            job = server.run(2, [*words, *resumes], run_dir.path)
            if resumes:
                assert "resuming after step" in job.output
        lines = list(read_lines(run_dir.metrics))
        for name in ("step", "loss", "grad_norm", "lr"):
            assert [line[name] for line in lines] == [line[name] for line in expected], name
        assert [line.get("val_loss") for line in lines] == [line.get("val_loss") for line in expected]
        ends = [read_json(find(path) / STATE) for path in (run_dir.path, folder / "whole")]
        assert ends[0]["sample_hash"] == ends[1]["sample_hash"]
        round_ += 1
    return lives


@pytest.mark.full
def test_five_kills(server: Server, tmp_path: Path) -> None:
    lives = survive(server, tmp_path, kills=5, steps=160, seed=5)
    assert any(life["resumed"] for life in lives)
    assert any(life["was_writing"] for life in lives)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills(server: Server, tmp_path: Path, recording: bool) -> None:
    """Run by `python3 benchmarks/record.py kills`: 19 minutes on two busy cores."""
    lives = survive(server, tmp_path, kills=50, steps=300, seed=50)
    assert sum(life["was_writing"] for life in lives) >= 10
    if recording:
        write_json(RESULT, {
            "command": "python3 benchmarks/record.py kills",
            "date": datetime.date.today().isoformat(), "layout": "zero2 on 2 ranks, fp32, CPU, dropout 0.1",
            "kills": len(lives), "while_writing_a_checkpoint": sum(life["was_writing"] for life in lives),
            "by_moment": {moment: sum(life["moment"] == moment for life in lives) for moment in MOMENTS},
            "outcome": "every life left a whole checkpoint, never older than the last completed one; losses, "
                       "gradient norms, validation losses and the hash of the samples equal the undisturbed run's "
                       "to the last digit",
            "lives": json.loads(json.dumps(lives)),
        })
