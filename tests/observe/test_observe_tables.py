"""Tables, causes of explain, and runs of report fit the terminal and use characters that it can show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ezpz_llm.training.observe.tables import table
from ezpz_llm.training.report.command import _results
from ezpz_llm.verify.explain.causes import Cause
from ezpz_llm.verify.explain.command import _causes
from ezpz_llm.verify.explain.diagnosis import Diagnosis

ROWS = [["zero3 over the data-parallel group", "a fairly long explanation of what it is for", "123456789.25"],
        ["ddp", "short", "1.5"]]


@pytest.mark.parametrize("width", [60, 80])
def test_rich_table_fits_the_terminal_without_truncation(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = re.sub(r"\x1b\[[\d;]*m", "", table("Layouts", ("layout", "what for", "MB"), ROWS, rich=True))
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    assert all(word in text for word in ("explanation", "123456789.25"))


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_boxes_are_ascii_in_the_c_locale(locale, monkeypatch):
    monkeypatch.setenv("LC_ALL", locale)
    assert table("Layouts", ("layout", "what for", "MB"), ROWS, rich=True).isascii() == (locale == "C")


@pytest.mark.parametrize("width", [60, 80])
def test_causes_and_advice_are_wrapped(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    cause = Cause("data", "rank 3 on n2 waited for its data in each step, which the others then waited for",
                  12.5, 0.25, (f"launch -n 8 python3 -m ezpz_llm.train {'--with more and more words ' * 3}",))
    diagnosis = Diagnosis(Path("run"), "ddp", 8, {}, None, {}, (cause,), None, {})
    text = _causes(diagnosis)
    assert "which the others then waited for" in " ".join(text.split())
    assert all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize(("width", "is_table"), [(60, False), (80, False), (120, True)])
def test_results_of_runs_fit_the_terminal(width, is_table):
    text = _results([["train-20261124-001200", "200", "410k", "1.6679", "1.6734", "56.5", "36.2k", "18.1k", "-"]],
                    width, False)
    assert all(len(line) <= width for line in text.splitlines())
    assert ("val loss 1.6734" in re.sub(r"\s+", " ", text)) == (not is_table)
    assert "18.1k" in text
