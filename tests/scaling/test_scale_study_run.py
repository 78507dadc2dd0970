"""A study as a user runs it: killed, taken up again, with a point that fails, and with its report."""

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

from ezpz_llm.rundir import RunDir, read_lines
from ezpz_llm.scaling.study import SPLIT, Repeat, points_file, read_repeats, read_study

# Where the file is, ranks of a world of two end with code 7.
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
    """Send the signal while the run of that directory is training; the study's exit code."""
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
    """A study that was told to end, then killed, went on with failing ranks, and then without: its folder, the
    repeats with the failures, and what the last two calls said."""
    cwd = tmp_path_factory.mktemp("study")
    folder, fails = cwd / "s", cwd / "fails"
    alone = folder / "points/weak-ddp-r1"
    fails.touch()
    words = (*WORDS, "--", "launch", "--wrap", FAILING.format(fails), *TRAIN, "--steps", "100",
             "--trace-steps", "3")
    assert _end_while_it_trains(start(cwd, *words), alone / "run-0", signal.SIGTERM) == 143
    assert [(one.point, one.repeat) for one in read_repeats(folder)] == [("weak-ddp-r2", 0)]
    assert left_over(alone / "run-0") == {}
    assert _end_while_it_trains(start(cwd, *words), alone / "run-1", signal.SIGKILL) == -signal.SIGKILL
    code, went_on = scale(cwd, *words)
    assert code == 1, went_on
    kept, before = read_repeats(folder), _times(folder, "*-r1/run-*")
    fails.unlink()
    # From elsewhere, by its folder alone.
    code, ended = scale(folder, "--study", str(folder), "--retry-failed")
    assert code == 0, ended
    assert _times(folder, "*-r1/run-*") == before
    return folder, kept, went_on, ended


@pytest.mark.full
def test_a_study_that_was_ended_goes_on_without_repeating_a_run(study) -> None:
    folder, kept, _, _ = study
    lines = [(line["point"], line["repeat"], line["error"] is None) for line in read_lines(points_file(folder))]
    assert sorted(lines) == [(f"weak-ddp-r{ranks}", number, well) for ranks in (1, 2) for number in (0, 1)
                             for well in ((True,) if ranks == 1 else (False, True))]
    assert {one.point for one in kept if one.error} == {"weak-ddp-r2"}
    # What was told to end was put aside; what only lost its study came to its end, and counts.
    assert (folder / "points/weak-ddp-r1/run-0.attempt-1").exists()
    assert not (folder / "points/weak-ddp-r1/run-1.attempt-1").exists()
    assert all(left_over(path.parent) == {} for path in folder.glob("points/*/run-*/run.json"))


@pytest.mark.full
def test_a_failed_point_is_kept_with_why_and_the_rest_goes_on(study) -> None:
    _, kept, went_on, _ = study
    failures = [one for one in kept if one.error]
    assert len(failures) == 2
    assert len(kept) == 4
    for one in failures:
        assert "code 7" in one.error
        assert (one.tokens_per_second, one.step_times_s, one.split) == (None, (), None)
        assert f"failed: weak-ddp-r2 run {one.repeat}: " in went_on
    assert went_on.count("ezpz-llm why ") == 2


@pytest.mark.full
def test_a_repeat_is_what_its_run_directory_says(study) -> None:
    folder, _, _, ended = study
    for one in read_repeats(folder):
        run = record(folder / one.run_dir)
        rows = {row["step"]: row for row in read_lines(RunDir(folder / one.run_dir).metrics)}
        assert (run["launch"]["world_size"], len(rows)) == (one.ranks, 100)
        assert (one.global_batch, one.micro_batch, one.accumulation) == (4 * one.ranks, 4, 1)
        # Steps 7 to 9 are traced, the last is left out.
        assert list(one.step_times_s) == [rows[step]["step_time_s"] for step in range(12, 100)]
        median = sorted(one.step_times_s)[43:45]
        assert one.tokens_per_second == pytest.approx(one.step_tokens / (sum(median) / 2))
        assert one.step_tokens == 4 * one.ranks * 32
        assert tuple(one.split) == SPLIT
        assert all(seconds >= 0 for seconds in one.split.values())
        assert (one.split["exposed_communication"] > 0) == (one.ranks == 2)
        assert 50e6 < one.peak_host_bytes < 4e9
        assert (one.peak_device_bytes, one.mfu) == (None, None)
        assert one.slowest_rank in range(one.ranks)
        assert one.slowest_host == run["launch"]["hosts"][0]
        assert one.last_loss < one.first_loss
        assert run["environment"]["threads"] == 1
    assert "Weak scaling, ddp" in ended
    assert (folder / "report.html").exists()


@pytest.mark.full
def test_a_script_of_ones_own_is_studied(tmp_path: Path) -> None:
    """The ten lines of the library's page: 4 samples of a rank in each of 50 steps."""
    page = (ROOT / "docs/use/library.md").read_text()
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])  # type: ignore[index]
    words = ("--ranks", "1,2", "--repeats", "1", "--study", "s", "--", sys.executable, "mine.py")
    code, said = scale(tmp_path, *words)
    assert code == 0, said
    found = read_repeats(tmp_path / "s")
    assert sorted((one.point, one.step_tokens) for one in found) == [("weak-mine-r1", 4), ("weak-mine-r2", 8)]
    for one in found:
        rows = [row["step_time_s"] for row in read_lines(RunDir(tmp_path / "s" / one.run_dir).metrics)]
        assert list(one.step_times_s) == rows[-1 - len(one.step_times_s):-1]
        assert one.last_loss < one.first_loss
    assert "Weak scaling, mine" in said
    assert (tmp_path / "s/report.html").exists()


@pytest.mark.full
def test_another_study_in_the_same_folder_is_refused(study) -> None:
    folder, _, _, _ = study
    code, said = scale(folder.parent, *WORDS, "--", *TRAIN, "--steps", "101")
    assert (code, "the folder holds another study" in said) == (2, True)
    assert read_study(folder).repeats == 2
    code, said = scale(folder.parent, "--study", str(folder), "--point", "weak-ddp-r3")
    assert (code, "weak-ddp-r1, weak-ddp-r2" in said) == (2, True)
    code, said = scale(folder.parent, "--study", str(folder))
    assert (code, "of which 0 are to be made" in said) == (0, True)
