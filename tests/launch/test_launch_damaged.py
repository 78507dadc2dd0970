"""Files in a run directory that are damaged or of a wrong type are skipped and do not end a run."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from ezpz_llm.core.rundir.files import RunDir
from ezpz_llm.launcher.basics.messages import (
    RUNNING,
    NodeReport,
    RankReport,
    SignalOrder,
    StacksOrder,
    StopOrder,
    read_orders,
    read_reports,
    read_stop_order,
    write_report,
)
from ezpz_llm.launcher.on_nodes.run_facts import Failure, read_failures

HOSTILE = ["{", "", "3", "null", "[]", "{}", '{"run_id": "me"}', "[" * 50_000, "1" * 5000, '{"run_id": ["me"]}']


@pytest.fixture
def run_dir(tmp_path):
    found = RunDir(tmp_path / "run")
    found.create()
    found.control.mkdir(exist_ok=True)
    return found


def changed(whole: dict) -> list[str]:
    """Yield the object with each member missing, and with each member of every wrong type."""
    texts = [json.dumps({name: value for name, value in whole.items() if name != left}) for left in whole]
    others = ([[]], {"a": 1}, 10**25, "\x1b[31m", True)
    texts += [json.dumps({**whole, name: value}) for name in whole for value in others
              if type(value) is not type(whole[name])]
    return [*texts, *HOSTILE]


def test_invalid_orders_are_skipped(run_dir):
    good = [(StopOrder("me", 5.0, "n1"), "stop"), (StacksOrder("me", "t", (0, 1)), "stacks-a"),
            (SignalOrder("me", "t", 15), "signal-a")]
    for order, name in good:
        for text in changed(asdict(order)):
            (run_dir.control / name).write_text(text)
            read_stop_order(run_dir, "me")
            read_orders(StacksOrder, run_dir, "me"), read_orders(SignalOrder, run_dir, "me")
    for order, name in good:
        (run_dir.control / name).write_text(json.dumps(asdict(order)))
    (run_dir.control / "stacks-b").write_text("[" * 50_000)
    (run_dir.control / "signal-b").write_text('{"run_id": "me", "token": "t", "number": 4000}')
    assert read_stop_order(run_dir, "me") == good[0][0]
    assert read_orders(StacksOrder, run_dir, "me") == [good[1][0]]
    assert read_orders(SignalOrder, run_dir, "me") == [good[2][0]]
    assert read_stop_order(run_dir, "other") is None


def test_invalid_records_do_not_affect_others(run_dir):
    whole = Failure(1, "n1", 7, 3, None, 100.0, 1.0, ("a",), ("b",), launch="me")
    (run_dir.errors / "rank0001.json").write_text(json.dumps(asdict(whole)))
    for text in changed(asdict(whole)):
        (run_dir.errors / "rank0000.json").write_text(text)
        assert whole in read_failures(run_dir, "me")
    (run_dir.errors / "rank0000.json").write_text(json.dumps({**asdict(whole), "ended": 1e300}))
    assert read_failures(run_dir, "me") == [whole]


def test_invalid_reports_do_not_affect_others(run_dir):
    whole = NodeReport("me", "n1", 2, RUNNING, 1.0, {2: RankReport(7, "step", 3)})
    run_dir.node_report(0).parent.mkdir(exist_ok=True)
    write_report(run_dir, whole)
    first = run_dir.node_report(0)
    for text in [*changed(asdict(whole)), json.dumps({**asdict(whole), "ranks": {"x": {}}})]:
        first.write_text(text)
        assert whole in read_reports(run_dir, "me")
