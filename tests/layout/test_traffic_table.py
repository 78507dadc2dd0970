"""Lookups in a table of bytes on the wire, with made-up numbers; and what the committed one must say."""

from __future__ import annotations

import json

import pytest

from ezpz_llm.observe import traffic as module
from ezpz_llm.observe.traffic import NOTHING, call_traffic, measured, reason, step_traffic, textbook_bytes

GOODPUT = {"fast": 1000.0, "slow": 100.0}


def row(kind, size, sent, received, overhead_s, line_bytes):
    seconds = {rate: overhead_s + line_bytes / bandwidth for rate, bandwidth in GOODPUT.items()}
    return {"kind": kind, "ranks": 2, "bytes": size, "sent": sent, "received": received, "seconds": seconds}


MADE_UP = [row("all_reduce", 1000, 1100, 1100, 0.5, 1500), row("all_reduce", 10_000, 10_100, 10_100, 1.5, 15_000),
           row("reduce", 1000, 400, 600, 0.0, 30), row("send", 1000, 1010, 1010, 0.1, 1010)]


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    (tmp_path / "traffic_string.json").write_text(json.dumps({"goodput": GOODPUT, "rows": MADE_UP[::-1]}))
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    module._rows.cache_clear()
    yield
    module._rows.cache_clear()


@pytest.mark.parametrize(("size", "sent", "line_bytes", "overhead_s"), [
    (1000, 1100, 1500, 0.5), (10_000, 10_100, 15_000, 1.5), (5500, 5600, 8250, 1.0), (500, 600, 750, 0.4444),
    (20_000, 20_200, 30_000, 3.0)])
def test_volumes_between_below_and_above_the_measured_sizes(made_up, size, sent, line_bytes, overhead_s):
    found = call_traffic("string", "all_reduce", size, 2)
    assert (found.sent, found.received) == pytest.approx((sent, sent))
    assert found.line_bytes == pytest.approx(line_bytes)
    assert found.overhead_s == pytest.approx(overhead_s, abs=1e-4)
    assert found.seconds(50.0) == pytest.approx(overhead_s + line_bytes / 50, abs=1e-4)
    assert found.textbook == size


def test_a_burst_says_nothing_of_the_bytes(made_up):
    found = call_traffic("string", "reduce", 1000, 2)
    assert (found.line_bytes, found.overhead_s) == (600, 0), "never less than what went over the link"


def test_what_was_not_measured_is_not_guessed(made_up):
    assert call_traffic("string", "all_reduce", 1000, 3) is None
    assert call_traffic("string", "all_gather", 1000, 2) is None
    assert call_traffic("carrier pigeons", "all_reduce", 1000, 2) is None
    assert call_traffic("string", "reduce", 1000, 2).bytes == 600, "the busier direction"
    assert call_traffic("string", "all_reduce", 1000, 1).bytes == 0


def test_sending_and_receiving_are_two_directions_of_a_link(made_up):
    send, recv = call_traffic("string", "send", 1000, 8), call_traffic("string", "recv", 1000, 8)
    assert (send.sent, send.received, recv.sent, recv.received) == (1010, 0, 0, 1010), "of two, whatever the group"
    both = sum(step_traffic("string", {kind: {"count": 3, "bytes": 3000} for kind in ("send", "recv")}, 2).values(),
               NOTHING)
    assert (both.bytes, both.textbook, both.line_bytes) == (3030, 3000, pytest.approx(6060))
    assert both.overhead_s == pytest.approx(0.6)


def test_a_step_is_the_sum_of_its_calls(made_up):
    issued = {"all_reduce": {"count": 3, "bytes": 3000}, "send": {"count": 1, "bytes": 1000},
              "scalars": {"count": 9, "bytes": 36}, "reduce": {"count": 0, "bytes": 0}}
    found = step_traffic("string", issued, 2)
    assert found.keys() == {"all_reduce", "send"}
    assert (found["all_reduce"].sent, found["all_reduce"].textbook) == (3300, 3000)
    assert not found["all_reduce"].is_textbook
    assert found["send"].is_textbook
    with pytest.raises(KeyError, match="all_reduce among 4 ranks over string was not measured"):
        step_traffic("string", issued, 4)


@pytest.mark.parametrize(("kind", "ranks", "share"), [
    ("all_reduce", 2, 1), ("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("reduce_scatter", 2, 0.5),
    ("all_to_all", 8, 0.875), ("broadcast", 8, 1), ("reduce", 3, 1), ("send", 2, 1), ("all_reduce", 1, 0)])
def test_the_textbook(kind, ranks, share):
    assert textbook_bytes(kind, 800, ranks) == 800 * share


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
LARGE = 8 * 2**20


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_gloo_sends_what_the_textbook_says_or_the_reason_is_known(ranks):
    for kind in KINDS:
        found = call_traffic("gloo", kind, LARGE, ranks)
        assert found.is_textbook or reason("gloo", kind), (kind, ranks, found)
        assert found.bytes > 0.95 * found.textbook, "nobody sends less than must be sent"
    # What DeepSpeed's stage 3 pays on CPUs for asking for less.
    assert call_traffic("gloo", "reduce_scatter", LARGE, ranks).sent == pytest.approx(
        call_traffic("gloo", "all_reduce", LARGE, ranks).sent, rel=0.02)


def test_the_table_says_where_it_comes_from():
    table = measured("gloo")
    assert {"date", "command", "versions", "link", "goodput"} <= table.keys()
    assert {row["ranks"] for row in table["rows"]} == {2, 3, 4, 8}
