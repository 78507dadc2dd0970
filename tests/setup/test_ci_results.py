"""Parsing of test results by .ci/run: failed and skipped tests, and totals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from places import ROOT
from slowness import scaled

_TESTS = """
import os
import pytest

@pytest.mark.parametrize("text", ["a", "b c", "é/["])
def test_passes(text): pass

def test_fails_once():
    if not os.path.exists("ran"):
        open("ran", "w").close()
        raise AssertionError

def test_ends_its_worker():
    if not os.path.exists("ended"):
        open("ended", "w").close()
        os._exit(1)

@pytest.mark.skip
def test_is_skipped(): pass
"""


def _pytest(folder: Path, junit: str, *words: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={junit}", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=scaled(60), check=False).returncode


def _results(folder: Path, *words: str) -> list[str]:
    return subprocess.run([sys.executable, ROOT / ".ci/results.py", *words], cwd=folder, capture_output=True,
                          text=True, timeout=scaled(30), check=True).stdout.splitlines()


def test_failed_tests_are_retried_and_count_with_their_last_result(tmp_path: Path) -> None:
    (tmp_path / "tests/part").mkdir(parents=True)
    (tmp_path / "tests/part/test_planted.py").write_text(_TESTS)
    (tmp_path / "tests/test_missing.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    assert _pytest(tmp_path, "first.xml", "-n", "2", "--dist", "worksteal") == 1
    assert _results(tmp_path, "count", "first.xml") == ["3 passed, 2 failed, 2 skipped"]
    assert _results(tmp_path, "skipped", "first.xml") == ["tests/test_missing.py",
                                                          "tests/part/test_planted.py::test_is_skipped"]
    failed = _results(tmp_path, "failed", "first.xml")
    assert set(failed) == {"tests/part/test_planted.py::test_fails_once",
                           "tests/part/test_planted.py::test_ends_its_worker"}
    (tmp_path / "failed").write_text("\n".join(failed))
    assert _pytest(tmp_path, "again.xml", "@failed", "-n", "1", "--dist", "load") == 0
    assert _results(tmp_path, "count", "first.xml", "again.xml", "absent.xml") == ["5 passed, 0 failed, 2 skipped"]
