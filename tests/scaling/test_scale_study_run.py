"""Studies as a user runs them: interrupted, killed, continued, with a failing point, and with a report."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest
from launch_runs import left_over, record
from places import ROOT
from scale_runs import TRAIN, scale, start
from slowness import scaled

from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.verify.scaling.study import SPLIT, Repeat, points_file, read_repeats, read_study

# While the file exists, ranks of runs with two ranks exit with code 7.
FAILING = """sh -c '[ "$EZPZ_LLM_WORLD_SIZE" = 2 ] && [ -e {} ] && exit 7; exec "$0" "$@"'"""
# The seed's order: ranks 2, 1, 1, 2.
WORDS = ("--ranks", "1,2", "--repeats", "2", "--seed", "1", "--ds-config", "ddp", "--study", "s")


def _until(condition, running, timeout: float = 150) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _end_while_it_trains(running, run_dir: Path, number: int) -> int:
    """Send a signal to the study while a run is training, and return the study's exit code."""
    try:
        _until((run_dir / "metrics.jsonl").exists, running)
        running.send_signal(number)
        running.communicate(timeout=scaled(90))
    finally:
        if running.poll() is None:
            running.kill()
    return running.returncode


def _times(folder: Path, pattern: str) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob(f"points/{pattern}/metrics.jsonl")}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> tuple[Path, list[Repeat], str, str]:
    """Study that was interrupted, then killed, then continued with and without failing ranks.

    Returns its folder, the repeats including failures, and the output of the last two calls.
    """
    cwd = tmp_path_factory.mktemp("study")
    folder, fails = cwd / "s", cwd / "fails"
    alone = folder / "points/weak-ddp-r1"
    fails.touch()
    command = (*WORDS, "--", "launch", "--wrap", FAILING.format(fails), *TRAIN, "--steps", "100",
               "--trace-steps", "3")
    assert _end_while_it_trains(start(cwd, *command), alone / "run-0", signal.SIGTERM) == 143
    assert [(repeat.point, repeat.repeat) for repeat in read_repeats(folder)] == [("weak-ddp-r2", 0)]
    assert left_over(alone / "run-0") == {}
    assert _end_while_it_trains(start(cwd, *command), alone / "run-1", signal.SIGKILL) == -signal.SIGKILL
    code, failing = scale(cwd, *command)
    assert code == 1, failing
    repeats, earlier_times = read_repeats(folder), _times(folder, "*-r1/run-*")
    fails.unlink()
    # From another directory, with only --study.
    code, retried = scale(folder, "--study", str(folder), "--retry-failed")
    assert code == 0, retried
    assert _times(folder, "*-r1/run-*") == earlier_times
    return folder, repeats, failing, retried


@pytest.mark.full
def test_continued_study_does_not_repeat_finished_runs(study) -> None:
    folder, repeats, _, _ = study
    lines = [(line["point"], line["repeat"], line["error"] is None) for line in read_lines(points_file(folder))]
    assert sorted(lines) == [(f"weak-ddp-r{ranks}", number, well) for ranks in (1, 2) for number in (0, 1)
                             for well in ((True,) if ranks == 1 else (False, True))]
    assert {repeat.point for repeat in repeats if repeat.error} == {"weak-ddp-r2"}
    # The interrupted run was renamed. The run that outlived its killed study finished and is used.
    assert (folder / "points/weak-ddp-r1/run-0.attempt-1").exists()
    assert not (folder / "points/weak-ddp-r1/run-1.attempt-1").exists()
    assert all(left_over(path.parent) == {} for path in folder.glob("points/*/run-*/run.json"))


@pytest.mark.full
def test_study_continues_after_failed_runs(study) -> None:
    _, repeats, output, _ = study
    failures = [repeat for repeat in repeats if repeat.error]
    assert len(failures) == 2
    assert len(repeats) == 4
    for repeat in failures:
        assert "code 7" in repeat.error
        assert (repeat.tokens_per_second, repeat.step_times_s, repeat.split) == (None, (), None)
        assert f"failed: weak-ddp-r2 run {repeat.repeat}: " in output
    assert output.count("ezpz-llm why ") == 2


@pytest.mark.full
def test_repeat_matches_its_run_directory(study) -> None:
    folder, _, _, output = study
    for repeat in read_repeats(folder):
        run = record(folder / repeat.run_dir)
        rows = {row["step"]: row for row in read_lines(RunDir(folder / repeat.run_dir).metrics)}
        assert (run["launch"]["world_size"], len(rows)) == (repeat.ranks, 100)
        assert (repeat.global_batch, repeat.micro_batch, repeat.accumulation) == (4 * repeat.ranks, 4, 1)
        # Steps 7 to 9 are traced, and the last step is excluded.
        assert list(repeat.step_times_s) == [rows[step]["step_time_s"] for step in range(12, 100)]
        median = sorted(repeat.step_times_s)[43:45]
        assert repeat.tokens_per_second == pytest.approx(repeat.step_tokens / (sum(median) / 2))
        assert repeat.step_tokens == 4 * repeat.ranks * 32
        assert tuple(repeat.split) == SPLIT
        assert all(seconds >= 0 for seconds in repeat.split.values())
        assert (repeat.split["exposed_communication"] > 0) == (repeat.ranks == 2)
        assert 50e6 < repeat.peak_host_bytes < 4e9
        assert (repeat.peak_device_bytes, repeat.mfu) == (None, None)
        assert repeat.slowest_rank in range(repeat.ranks)
        assert repeat.slowest_host == run["launch"]["hosts"][0]
        assert repeat.last_loss < repeat.first_loss
        assert run["environment"]["threads"] == 1
    assert "Weak scaling, ddp" in output
    assert (folder / "report.html").exists()


@pytest.mark.full
def test_study_of_user_script(tmp_path: Path) -> None:
    """Run the example of docs/use/library.md: 4 samples per rank in each of 50 steps."""
    page = (ROOT / "docs/use/library.md").read_text()
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])  # type: ignore[index]
    options = ("--ranks", "1,2", "--repeats", "1", "--study", "s", "--", sys.executable, "mine.py")
    code, output = scale(tmp_path, *options)
    assert code == 0, output
    repeats = read_repeats(tmp_path / "s")
    assert sorted((run.point, run.step_tokens) for run in repeats) == [("weak-mine-r1", 4), ("weak-mine-r2", 8)]
    for run in repeats:
        rows = [row["step_time_s"] for row in read_lines(RunDir(tmp_path / "s" / run.run_dir).metrics)]
        assert list(run.step_times_s) == rows[-1 - len(run.step_times_s):-1]
        assert run.last_loss < run.first_loss
    assert "Weak scaling, mine" in output
    assert (tmp_path / "s/report.html").exists()


@pytest.mark.full
def test_different_study_in_the_same_folder_is_rejected(study) -> None:
    folder, _, _, _ = study
    code, output = scale(folder.parent, *WORDS, "--", *TRAIN, "--steps", "101")
    assert (code, "the folder contains a different study" in output) == (2, True)
    assert read_study(folder).repeats == 2
    code, output = scale(folder.parent, "--study", str(folder), "--point", "weak-ddp-r3")
    assert (code, "weak-ddp-r1, weak-ddp-r2" in output) == (2, True)
    code, output = scale(folder.parent, "--study", str(folder))
    assert (code, "2 points x 2, 0 left to run" in output) == (0, True)
