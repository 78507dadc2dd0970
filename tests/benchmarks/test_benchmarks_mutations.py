"""The table of mutations: every row still applies to the code, and names an existing check that can detect it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from places import ROOT

from ezpz_llm.training.layout import ds_config


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import mutation_table

    return mutation_table


def test_every_fault_can_be_planted(table) -> None:
    counts = {fault.name: (ROOT / fault.file).read_text().count(fault.right) for fault in table.FAULTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    for fault in table.FAULTS:
        assert fault.right != fault.wrong
        ast.parse((ROOT / fault.file).read_text().replace(fault.right, fault.wrong), fault.name)


def test_there_are_enough_of_every_class(table) -> None:
    from mutation_table.row import LAYOUTS, SHARED

    kinds = Counter(fault.kind for fault in table.FAULTS)
    assert set(kinds) == {*SHARED, *LAYOUTS}
    assert len({fault.name for fault in table.FAULTS}) == kinds.total() >= 100


def test_the_check_of_every_fault_exists(table) -> None:
    from mutation_table.row import Cell

    for sees in {fault.sees for fault in table.FAULTS}:
        if isinstance(sees, Cell):
            assert sees.layout in ds_config.names()
        else:
            file, _, name = sees.partition("::")
            assert f"def {name.partition('[')[0]}" in Path(ROOT / file).read_text(), sees
