"""The command under which tests write the committed results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ezpz_llm.base.package_data import data_dir


def test_tests_see_that_they_are_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(data_dir("benchmarks"))
    from record import RECORDS, Recording

    plugins = pytest.PytestPluginManager()
    plugins.register(Recording())
    assert plugins.has_plugin("recording")  # what the fixture asks for
    root = Path(data_dir("benchmarks")).parent
    assert all((root / words[-1]).is_file() for words in RECORDS.values())
    sys.modules.pop("record")
