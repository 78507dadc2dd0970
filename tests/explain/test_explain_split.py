"""Breakdown of a step, on synthetic traces."""

from __future__ import annotations

import gzip
import json

import pytest
from made_up_traces import MadeUp, of_all

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.observe.tables import table_text
from ezpz_llm.training.observe.traffic import call_traffic
from ezpz_llm.verify.explain.events import kind_of
from ezpz_llm.verify.explain.split import CATEGORIES, split_run, split_traces
from ezpz_llm.verify.explain.tables import collectives_table


def split_of(*traces):
    return split_traces([trace.read() for trace in traces])


def milliseconds(rank):
    return {name: round(seconds * 1e3, 6) for name, seconds in rank.seconds.items() if seconds}


def a_step(trace, start=0.0, number=1, forward=10.0, backward=20.0, optimizer=5.0, data=1.0):
    """Add a step with operators in forward and optimizer; return the time at which backward begins."""
    end = start + data + forward + backward + optimizer
    trace.mark(f"step {number}", start, end - start + 1)
    trace.mark("data", start, data)
    trace.mark("forward", start + data, forward)
    trace.op(start + data, forward)
    trace.mark("backward", start + data + forward, backward)
    trace.mark("optimizer", end - optimizer, optimizer)
    trace.op(end - optimizer, optimizer)
    return start + data + forward


def test_communication_is_exposed_only_while_nothing_computes():
    trace = MadeUp(collectives=[of_all("all_reduce", [0, 1]), of_all("all_reduce", [0, 1])])
    backward = a_step(trace)
    trace.op(backward, 6)
    trace.collective("allreduce_", "all_reduce", backward + 6, 7)  # hidden for 5 of its 7 ms
    trace.op(backward + 6.5, 5)
    trace.collective("allreduce_", "all_reduce", backward + 15, 5)
    split = split_of(trace)
    rank = split.ranks[0]
    # Nothing computes at the end of the first collective, so 1 ms is added for the wake-up of the waiting thread.
    assert milliseconds(rank) == {"data": 1, "forward": 10, "backward": 12, "exposed_communication": 8,
                                  "optimizer": 5, "idle": 1}
    assert sum(rank.seconds.values()) == pytest.approx(0.037)
    assert [(exposed.label, exposed.count) for exposed in rank.exposed] == [("all_reduce (dp)", 2)]
    assert rank.exposed[0].seconds == pytest.approx(0.008)
    assert rank.exposed[0].in_flight_s == pytest.approx(0.013)
    assert rank.exposed[0].bytes == 2_000_000
    assert rank.median_s("exposed_communication") == pytest.approx(0.008)
    # Of backward's 20 ms, operators take 6 + 5, collectives are in flight for 13, and 5 overlap.
    assert rank.cpu_s == pytest.approx(0.020 - 0.019)
    assert split.per_step() == pytest.approx({"compute": 0.022, "exposed_communication": 0.008, "data": 0.001,
                                              "optimizer": 0.005, "other": 0.001})


def test_time_with_several_collectives_in_flight_counts_once():
    trace = MadeUp(collectives=[of_all("all_gather", [0, 1]), of_all("_reduce_scatter_base_", [0, 1])])
    backward = a_step(trace)
    trace.collective("_allgather_base_", "all_gather", backward, 10)
    trace.collective("_reduce_scatter_base_", "all_reduce", backward + 4, 12)  # gloo implements it so
    trace.op(backward + 16, 4)
    rank = split_of(trace).ranks[0]
    assert {exposed.label: round(exposed.seconds * 1e3, 6) for exposed in rank.exposed} == {
        "all_gather (dp)": 10, "reduce_scatter (dp)": 6}
    assert milliseconds(rank)["exposed_communication"] == 16


def test_short_gaps_between_operators_count_as_computation_unless_they_contain_a_collective():
    trace = MadeUp()
    backward = a_step(trace)
    trace.collective("allreduce_", "all_reduce", backward, 20)
    for i in range(50):
        trace.op(backward + 0.1 + 0.1 * i, 0.06)  # 40 us apart
    trace.op(backward + 12.0, 4)
    rank = split_of(trace).ranks[0]
    assert milliseconds(rank)["exposed_communication"] == pytest.approx(20 - 4.96 - 4)
    assert rank.exposed[0].label == "all_reduce"  # the group is unknown without counted collectives
    assert rank.exposed[0].bytes is None


def test_autograd_nodes_and_other_threads_do_not_hide_communication():
    trace = MadeUp()
    backward = a_step(trace)
    trace.op(backward, 20, name="autograd::engine::evaluate_function: SumBackward")
    trace.op(backward, 20, name="SumBackward")
    trace.collective("allreduce_", "all_reduce", backward + 1, 18)
    trace.op(backward + 2, 3, name="aten::copy_", thread=20)
    trace.op(backward + 19, 1)
    assert milliseconds(split_of(trace).ranks[0])["exposed_communication"] == 18


def test_marks_between_steps_include_their_communication():
    trace = MadeUp()
    a_step(trace, number=7)
    trace.mark("logging", 38, 2)
    trace.collective("allreduce_", "all_reduce", 38.5, 1)
    trace.mark("checkpoints", 42, 20)
    a_step(trace, start=65, number=8)
    trace.mark("evaluation", 103, 7)
    rank = split_of(trace).ranks[0]
    assert rank.steps == 2
    assert milliseconds(rank) == {"data": 2, "forward": 20, "backward": 40, "optimizer": 10, "idle": 2,
                                  "logging": 2, "checkpoints": 20, "evaluation": 7, "other": 1 + 2 + 3 + 1}
    assert set(rank.seconds) == set(CATEGORIES)
    assert rank.step_s == pytest.approx(0.037)


def test_ranks_wait_for_the_last_caller_regardless_of_clock_offsets():
    slow, quick = (MadeUp(rank, [of_all("all_reduce", [0, 1])], offset_ms=1e6 * rank, host=f"node{rank}")
                   for rank in (0, 1))
    at = a_step(slow, forward=30, backward=20)
    slow.op(at, 17)
    slow.collective("allreduce_", "all_reduce", at + 17, 3)
    at = a_step(quick, forward=10, backward=40)
    quick.op(at, 17)
    quick.collective("allreduce_", "all_reduce", at + 17, 23)
    split = split_of(quick, slow)
    assert [rank.rank for rank in split.ranks] == [0, 1]
    assert split.ranks[1].waited_for == pytest.approx({0: 0.020})
    assert split.ranks[1].exposed[0].waited_s == pytest.approx(0.020)
    assert split.ranks[0].waited_for == {}
    assert split.straggler.rank == 0
    assert split.straggler.own_s - split.ranks[1].own_s == pytest.approx(0.020)


def half(rank, kind, axes="pp"):
    """Return the entry of a send or receive between two ranks."""
    return {"kind": kind, "axes": axes, "ranks": [0, 1], "bytes": 100, "peer": 1 - rank}


def test_a_receiver_waits_for_the_send_and_then_for_the_data():
    first = MadeUp(0, [half(0, "send"), half(0, "recv")])
    at = a_step(first)
    first.collective("send", "send", at, 2)
    first.collective("recv_", "recv", at + 2, 15)
    first.op(at + 17, 3)
    last = MadeUp(1, [half(1, "recv"), half(1, "send")])
    at = a_step(last)
    last.collective("recv_", "recv", at - 0.5, 4)
    last.op(at + 4, 8)
    last.collective("send", "send", at + 12, 1)
    split = split_of(first, last)
    # The transfer took 5 of the 15 ms, although the send returned after 1 ms.
    assert split.ranks[0].waited_for == pytest.approx({1: 0.010})
    # The receive began 0.5 ms early, but an operator of forward was still running.
    assert split.ranks[1].waited_for.get(0, 0.0) == pytest.approx(0.0)
    exposed = {each.label: each for each in split.ranks[0].exposed}
    assert set(exposed) == {"send (pp)", "recv (pp)"}
    assert exposed["recv (pp)"].seconds - exposed["recv (pp)"].waited_s == pytest.approx(0.005)


@pytest.mark.parametrize(("ahead_ms", "host"), [(0, "node0"), (40_000, "node1")])
def test_clocks_of_a_pipeline_on_two_nodes_are_aligned_by_all_reduces(ahead_ms, host):
    """Receives cannot align clocks, because the send returns 12 ms before the data arrives."""
    calls = ("all_reduce", "all_reduce", "all_reduce")
    first = MadeUp(0, [half(0, "send"), *(of_all(kind, [0, 1]) for kind in calls)], host="node0")
    last = MadeUp(1, [half(1, "recv"), *(of_all(kind, [0, 1]) for kind in calls)], host=host, offset_ms=ahead_ms)
    for trace, lead_ms in ((first, 5), (last, 0)):
        at = a_step(trace, data=lead_ms, forward=1, backward=40)  # rank 1 receives 5 ms before the send
        if trace is first:
            trace.collective("send", "send", at, 1)
        else:
            trace.collective("recv_", "recv", at, 17)
            trace.op(at + 17, 0.5)
            at += 5
        for i, skew in enumerate((0.0, 3.0, 0.3)):  # difference between the ends; smallest for the shortest
            trace.collective("allreduce_", "all_reduce", at + 13 + 6 * i, (1 + i) + (skew if trace is last else 0))
    rank = split_of(first, last).ranks[1]
    received = next(exposed for exposed in rank.exposed if exposed.label == "recv (pp)")
    assert received.waited_s == pytest.approx(0.005)
    assert received.seconds == pytest.approx(0.017)


def test_consecutive_all_gathers_wait_for_the_link_and_not_for_the_late_rank():
    """Rank 0 has the data of rank 1 when it calls; rank 1 gets that of rank 0 8 ms later, in both gathers."""
    collectives = [of_all("all_gather", [0, 1]) for _ in range(2)]
    late, early = MadeUp(0, collectives), MadeUp(1, collectives)
    at = a_step(late)
    late.collective("_allgather_base_", "all_gather", at + 4, 1)
    late.collective("_allgather_base_", "all_gather", at + 5, 9)
    at = a_step(early)
    early.collective("_allgather_base_", "all_gather", at, 12)
    early.collective("_allgather_base_", "all_gather", at + 12, 8)
    split = split_of(late, early)
    # Rank 1 waits for rank 0 only in the 4 ms before its first call. Rank 0 never waits, since rank 1 is receiving.
    assert split.ranks[1].waited_for == pytest.approx({0: 0.004})
    assert split.ranks[0].waited_for == pytest.approx({})


def test_bytes_on_the_wire_are_shown_for_groups_across_nodes():
    def shown(hosts):
        call = of_all("all_reduce", [0, 1], 2**23)
        traces = [MadeUp(rank, [call], host=host) for rank, host in enumerate(hosts)]
        for trace in traces:
            trace.collective("allreduce_", "all_reduce", a_step(trace), 5)
        return table_text(collectives_table(split_of(*traces)))

    text = shown(("a", "b"))
    assert "on the wire" in text
    row = next(line for line in text.splitlines() if "all_reduce (dp)" in line).split()
    on_the_wire = call_traffic("gloo", "all_reduce", 2**23, 2).bytes / 1e6
    assert float(row[row.index("8.389") + 1]) == pytest.approx(on_the_wire, rel=1e-3)
    assert "on the wire" not in shown(("a", "a"))


def test_on_a_device_the_breakdown_is_by_kernels_and_not_by_cpu_phases():
    trace = MadeUp(device="cuda")
    a_step(trace, data=2, forward=2, backward=3, optimizer=20)  # the CPU is ahead and waits at the end
    trace.events = [event for event in trace.events if event["cat"] == "user_annotation"]
    trace.kernel(3, 8, launched=2.5)          # forward
    trace.kernel(11, 10, launched=4.5)        # backward
    trace.kernel(15, 9, launched=5, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
                 **{"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float",
                    "Process Group Ranks": "[0, 1]"})
    trace.kernel(24, 3, launched=8)           # optimizer
    rank = split_of(trace).ranks[0]
    assert milliseconds(rank) == {"data": 2, "forward": 8, "backward": 10, "exposed_communication": 3,
                                  "optimizer": 3, "idle": 2}
    assert [(exposed.label, exposed.bytes) for exposed in rank.exposed] == [("all_reduce", 4000)]


def test_a_step_with_other_collectives_than_the_counted_step_keeps_what_its_trace_says():
    trace = MadeUp(collectives=[of_all("all_reduce", [0, 1]), of_all("all_reduce", [0, 1])])
    trace.collective("allreduce_", "all_reduce", a_step(trace), 5)
    assert split_of(trace).ranks[0].exposed[0].label == "all_reduce"


@pytest.mark.parametrize(("name", "kind"), [
    ("allreduce_", "all_reduce"), ("_allgather_base_", "all_gather"), ("_reduce_scatter_base_", "reduce_scatter"),
    ("reduce_scatter_tensor_coalesced_", "reduce_scatter"), ("reduce_", "reduce"), ("recv_any_source_", "recv"),
    ("alltoall_base_", "all_to_all"), ("AllReduce_Sum_f32", "all_reduce"), ("SendRecv", "send/recv"),
    ("ReduceScatter_Sum", "reduce_scatter"), ("something_new", "something_new"),
])
def test_kinds_have_uniform_names(name, kind):
    assert kind_of(name) == kind


def test_unreadable_traces_are_reported(tmp_path):
    run_dir = RunDir(tmp_path).create()
    with pytest.raises(UserError, match="no traces"):
        split_run(tmp_path)
    run_dir.trace(0).write_bytes(b"\x1f\x8b no gzip")
    with pytest.raises(UserError, match="cannot read the trace"):
        split_run(tmp_path)
    with gzip.open(run_dir.trace(0), "wt") as file:
        json.dump({"traceEvents": []}, file)
    with pytest.raises(UserError, match="no marked steps"):
        split_run(tmp_path)
    trace = MadeUp()
    a_step(trace)
    with gzip.open(run_dir.trace(0), "wt") as file:
        json.dump(trace.whole(), file)
    assert len(split_run(tmp_path).ranks) == 1
