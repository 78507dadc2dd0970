"""Tests of the table of bytes on the wire, with synthetic numbers and with the committed table."""

from __future__ import annotations

import json

import pytest

from ezpz_llm.training.observe import traffic as module
from ezpz_llm.training.observe.traffic import (
    NOTHING,
    call_traffic,
    measured,
    reason,
    textbook_bytes,
    traffic_per_step,
)

GOODPUT = {"fast": 1000.0, "slow": 100.0}


def row(kind, size, sent, received, overhead_s, line_bytes):
    seconds = {rate: overhead_s + line_bytes / bandwidth for rate, bandwidth in GOODPUT.items()}
    return {"kind": kind, "ranks": 2, "bytes": size, "sent": sent, "received": received, "seconds": seconds}


SYNTHETIC = [row("all_reduce", 1000, 1100, 1100, 0.5, 1500), row("all_reduce", 10_000, 10_100, 10_100, 1.5, 15_000),
           row("reduce", 1000, 400, 600, 0.0, 30), row("send", 1000, 1010, 1010, 0.1, 1010)]


@pytest.fixture
def synthetic(tmp_path, monkeypatch):
    (tmp_path / "traffic_string.json").write_text(json.dumps({"goodput": GOODPUT, "rows": SYNTHETIC[::-1]}))
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    module._rows.cache_clear()
    yield
    module._rows.cache_clear()


@pytest.mark.parametrize(("size", "sent", "line_bytes", "overhead_s"), [
    (1000, 1100, 1500, 0.5), (10_000, 10_100, 15_000, 1.5), (5500, 5600, 8250, 1.0), (500, 600, 750, 0.4444),
    (20_000, 20_200, 30_000, 3.0)])
def test_volumes_between_below_and_above_the_measured_sizes(synthetic, size, sent, line_bytes, overhead_s):
    traffic = call_traffic("string", "all_reduce", size, 2)
    assert (traffic.sent, traffic.received) == pytest.approx((sent, sent))
    assert traffic.line_bytes == pytest.approx(line_bytes)
    assert traffic.overhead_s == pytest.approx(overhead_s, abs=1e-4)
    assert traffic.seconds(50.0) == pytest.approx(overhead_s + line_bytes / 50, abs=1e-4)
    assert traffic.textbook == size


def test_line_bytes_are_at_least_the_bytes_on_the_wire(synthetic):
    traffic = call_traffic("string", "reduce", 1000, 2)
    assert (traffic.line_bytes, traffic.overhead_s) == (600, 0), "never less than the bytes on the wire"


def test_unmeasured_combinations_return_none(synthetic):
    assert call_traffic("string", "all_reduce", 1000, 3) is None
    assert call_traffic("string", "all_gather", 1000, 2) is None
    assert call_traffic("carrier pigeons", "all_reduce", 1000, 2) is None
    assert call_traffic("string", "reduce", 1000, 2).bytes == 600, "the busier direction"
    assert call_traffic("string", "all_reduce", 1000, 1).bytes == 0


def test_sending_and_receiving_are_two_directions_of_a_link(synthetic):
    send, recv = call_traffic("string", "send", 1000, 8), call_traffic("string", "recv", 1000, 8)
    assert (send.sent, send.received, recv.sent, recv.received) == (1010, 0, 0, 1010), "of two ranks, for any group"
    both = sum(traffic_per_step("string", {kind: {"count": 3, "bytes": 3000} for kind in ("send", "recv")},
                                2).values(),
               NOTHING)
    assert (both.bytes, both.textbook, both.line_bytes) == (3030, 3000, pytest.approx(6060))
    assert both.overhead_s == pytest.approx(0.6)


def test_a_step_is_the_sum_of_its_calls(synthetic):
    issued = {"all_reduce": {"count": 3, "bytes": 3000}, "send": {"count": 1, "bytes": 1000},
              "scalars": {"count": 9, "bytes": 36}, "reduce": {"count": 0, "bytes": 0}}
    traffic = traffic_per_step("string", issued, 2)
    assert traffic.keys() == {"all_reduce", "send"}
    assert (traffic["all_reduce"].sent, traffic["all_reduce"].textbook) == (3300, 3000)
    assert not traffic["all_reduce"].is_textbook
    assert traffic["send"].is_textbook
    with pytest.raises(KeyError, match="all_reduce among 4 ranks over string was not measured"):
        traffic_per_step("string", issued, 4)


@pytest.mark.parametrize(("kind", "ranks", "share"), [
    ("all_reduce", 2, 1), ("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("reduce_scatter", 2, 0.5),
    ("all_to_all", 8, 0.875), ("broadcast", 8, 1), ("reduce", 3, 1), ("send", 2, 1), ("all_reduce", 1, 0)])
def test_textbook_bytes(kind, ranks, share):
    assert textbook_bytes(kind, 800, ranks) == 800 * share


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
LARGE = 8 * 2**20


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_gloo_sends_the_textbook_bytes_or_has_a_documented_reason(ranks):
    for kind in KINDS:
        traffic = call_traffic("gloo", kind, LARGE, ranks)
        assert traffic.is_textbook or reason("gloo", kind), (kind, ranks, traffic)
        assert traffic.bytes > 0.95 * traffic.textbook, "no collective can send less"
    # On CPUs DeepSpeed's stage 3 saves nothing with reduce-scatter.
    assert call_traffic("gloo", "reduce_scatter", LARGE, ranks).sent == pytest.approx(
        call_traffic("gloo", "all_reduce", LARGE, ranks).sent, rel=0.02)


def test_the_table_records_its_source():
    table = measured("gloo")
    assert {"date", "command", "versions", "link", "goodput"} <= table.keys()
    assert {row["ranks"] for row in table["rows"]} == {2, 3, 4, 8}
