"""System errors of file operations are printed as one message without a traceback."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_runs import clean_env
from slowness import scaled

from ezpz_llm import why
from ezpz_llm.core.base import run_command
from ezpz_llm.core.base.private_folders import make_private
from ezpz_llm.core.rundir import private_opener
from ezpz_llm.training.hf.source import find_source
from ezpz_llm.training.report import command as report
from ezpz_llm.training.trainer.options import parse

_LONG = "x" * 6000


@pytest.mark.parametrize("main", [why.main, report.main, lambda words: find_source(words[0], "--init-from")],
                         ids=["why", "report", "--init-from"])
def test_name_too_long(main: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, [_LONG]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: File name too long\n")
    assert len(printed) < 400


def test_a_link_in_place_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "other")

    def main(_: object) -> None:
        private_opener(str(tmp_path / "metrics.jsonl"), os.O_WRONLY | os.O_CREAT)

    assert run_command(main, []) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: Too many levels of symbolic links\n")
    assert "a file instead of a symbolic link" in printed
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(tmp_path: Path, closed: str) -> None:
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "-", sys.executable, "-m", "ezpz_llm.launch", "-n", "1",
                           "--run-dir", "r", "echo", "ready"], cwd=tmp_path, env=clean_env(), timeout=scaled(60),
                          stderr=subprocess.PIPE, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    assert "ready" in (tmp_path / "r/logs/rank0000.log").read_text()


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    words = 'ulimit -f 0; exec "$0" -m ezpz_llm.launch -n 1 --run-dir r true'
    done = subprocess.run(["bash", "-c", words, sys.executable], cwd=tmp_path, env=clean_env(), timeout=scaled(60),
                          capture_output=True, text=True, check=False)
    assert (done.returncode, "ulimit -f unlimited" in done.stderr) == (2, True), done.stderr


def test_too_few_descriptors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def main(_: object) -> None:
        handles = []
        try:
            while True:
                handles.append((tmp_path / "file").open("w"))
        finally:
            for handle in handles:
                handle.close()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        assert run_command(main, []) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert capsys.readouterr().err.startswith("error: Too many open files\n")


def test_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_private(tmp_path / "private")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with folder, pytest.raises(OSError, match="File too large") as raised:
            folder.write("report", b"x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename == str(tmp_path / "private/report")


@pytest.mark.parametrize("words", [["--lr", "9" * 400], [f"--lr={'9' * 400}"]])
def test_number_too_large(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda argv: parse(argv) and None, words) == 2
    assert "the number is too large\n  where:   --lr\n" in capsys.readouterr().err
