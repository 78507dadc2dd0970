"""The command that makes tests write the committed results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ezpz_llm.core.base.package_data import data_dir


def test_the_recording_fixture_detects_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(data_dir("benchmarks"))
    from record import RECORDS, Recording

    plugins = pytest.PytestPluginManager()
    plugins.register(Recording())
    assert plugins.has_plugin("recording")  # checked by the fixture `recording`
    root = Path(data_dir("benchmarks")).parent
    assert all((root / words[-1]).is_file() for words in RECORDS.values())
    sys.modules.pop("record")
