"""Ranking of causes, on synthetic runs with a known main cause."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from made_up_traces import MadeUp, of_all

from ezpz_llm.core.rundir.records import Device
from ezpz_llm.training.layout.batch import Batch
from ezpz_llm.training.layout.layout import Layout, ZeroOptions
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.observe.plots import bars_plot
from ezpz_llm.verify.explain.causes import rank_causes
from ezpz_llm.verify.explain.split import slow_link, split_traces
from ezpz_llm.verify.explain.trainer_run import Settings, TrainerRun


def a_run(layout=None, accumulation=1, memory_bytes=None, optimizer="adamw", device="cuda", precision="fp32",
          **config):
    layout = layout or Layout("zero1", "deepspeed", ZeroOptions(1))
    return TrainerRun(get_model_config("gpt2-124m"), layout, Batch(8 * accumulation, 4, accumulation, 2), 2,
                      Settings(save_every=500, eval_every=250, eval_tokens=65536, log_every=50,
                               optimizer=optimizer, **config),
                      precision, Device(type=device, memory_bytes=memory_bytes))


def two_ranks(slow=0.0, host=0.0, data=0.2, transfer=4.0, operator="allreduce_", work="all_reduce",
              hosts=("made-up", "made-up")):
    """Return two steps of two ranks: in forward, rank 1 computes `slow` ms longer, or is idle for `host` ms."""
    traces = []
    for rank in (0, 1):
        trace = MadeUp(rank, [of_all(operator, [0, 1], 40_000_000)], host=hosts[rank])
        more = (slow + host) * (rank == 1)
        for number in (1, 2):
            start = 200.0 * number
            length = data + 20 + (slow + host) + 20 + transfer + 2
            trace.mark(f"step {number}", start, length)
            trace.mark("data", start, data)
            trace.mark("forward", start + data, 20 + more)
            trace.op(start + data, 20 + (slow if rank else 0))
            begin = start + data + 20 + more
            trace.mark("backward", begin, 20 + transfer + (slow + host) - more)
            trace.op(begin, 20)
            trace.collective(operator, work, begin + 20, transfer + (slow + host) - more)
            trace.mark("optimizer", start + length - 2, 2)
            trace.op(start + length - 2, 2)
        traces.append(trace.read())
    return split_traces(traces)


WALL = {"set-up": 30.0, "training": 10.0, "logging": 0.1, "checkpoints": 0.1, "evaluation": 0.3, "other": 0.1}


@pytest.mark.parametrize(("split", "wall", "kind", "message"), [
    (two_ranks(slow=30), WALL, "slow_rank", "rank 1 on made-up is slow: 30.0 ms per step more in forward"),
    (two_ranks(host=30), WALL, "slow_rank", "outside of operators"),
    (two_ranks(data=40), WALL, "data", "waiting for data"),
    (two_ranks(transfer=40), WALL, "communication", "exposed all_reduce (dp): data transfer, 1000 MB/s"),
    (two_ranks(), {**WALL, "checkpoints": 20.0}, "checkpoints", "training waits for checkpoints"),
    (two_ranks(), {**WALL, "evaluation": 20.0}, "evaluation", "evaluation"),
    (None, {**WALL, "sampling": 20.0}, "sampling", "generating samples"),
])
def test_the_most_expensive_cause_comes_first(split, wall, kind, message):
    causes = rank_causes(split, wall, a_run(), {})
    assert causes[0].kind == kind
    assert message in causes[0].what
    assert causes[0].advice
    assert [cause.seconds for cause in causes] == sorted((cause.seconds for cause in causes), reverse=True)
    assert all(0 < cause.share < 1 for cause in causes)


def test_zero_on_one_rank_is_advised_against_if_the_device_waits_for_the_cpu():
    trace = MadeUp(0, [])
    for start in (200.0, 400.0):
        trace.mark(f"step {start / 200:.0f}", start, 100)
        trace.mark("forward", start, 100)
        trace.op(start, 30)
    split = split_traces([trace.read()])
    for stage, dp_size in ((1, 1), (1, 2), (0, 1)):
        layout = Layout("zero1", "deepspeed", ZeroOptions(1)) if stage else Layout("ddp", "torch", ZeroOptions(0))
        run = replace(a_run(layout), batch=Batch(8, 8 // dp_size, 1, dp_size))
        (host,) = (cause for cause in rank_causes(split, WALL, run, {}) if cause.kind == "host")
        assert any("--ds-config ddp" in advice for advice in host.advice) == ((stage, dp_size) == (1, 1))


def test_the_cost_of_a_slow_rank_is_the_waiting_for_it_scaled_to_the_run():
    causes = rank_causes(two_ranks(slow=30), WALL, a_run(), {})
    step = 0.2 + 20 + 30 + 20 + 4 + 2
    assert causes[0].seconds == pytest.approx(10.0 * 30 / step)
    assert causes[0].share == pytest.approx(causes[0].seconds / 10.6)
    # The same waiting is not reported a second time.
    assert not [cause for cause in causes if cause.kind == "waiting"]


def test_traced_steps_of_zero_length_have_no_causes():
    trace = MadeUp()
    trace.mark("step 1", 0, 0)
    causes = rank_causes(split_traces([trace.read()]), WALL, a_run(), {})
    assert {cause.kind for cause in causes} == {"evaluation", "checkpoints", "logging"}


def links(slow=None, hosts=("a", "b", "c", "d"), receives=False):
    """Return the links of a ring of nodes at 100 MB/s; one node sends (or receives) at 20 MB/s."""
    measured = []
    for i, host in enumerate(hosts):
        for sender, receiver in ((host, hosts[i - 1]), (hosts[i - 1], host)):
            is_slow = (receiver if receives else sender) == slow
            measured.append({"sender": sender, "receiver": receiver, "rate": 20e6 if is_slow else 100e6})
    return measured


@pytest.mark.parametrize(("measured", "description"), [
    (links("c"), "c sends"), (links("a", receives=True), "a receives"), (links(), None), ([], None),
    (links("a", hosts=("a", "b")), "a sends"),
])
def test_the_node_with_a_slow_link_is_named(measured, description):
    slow = slow_link(measured)
    assert (slow and slow.what) == description


def test_a_slow_link_accounts_for_its_share_of_the_transfer():
    split = two_ranks(transfer=40, hosts=("b", "c"))
    split.ranks[0].notes["links"] = links("c")
    causes = rank_causes(split, WALL, a_run(), {})
    assert [cause.kind for cause in causes[:2]] == ["slow_link", "communication"]
    assert "c sends 20 MB/s, the other nodes 100 MB/s" in causes[0].what
    assert causes[0].seconds / causes[1].seconds == pytest.approx(4)
    # Collectives within one node do not use the link.
    split = two_ranks(transfer=40, hosts=("b", "b"))
    split.ranks[0].notes["links"] = links("c")
    assert "slow_link" not in {cause.kind for cause in rank_causes(split, WALL, a_run(), {})}


def test_the_cost_of_a_slow_rank_is_limited_by_the_next_slowest():
    """Two of four ranks are slow. Without the slowest, the others would wait for the second."""
    traces = []
    longest = 40.0
    for rank, more in enumerate((0.0, 0.0, 38.0, longest)):
        trace = MadeUp(rank, [of_all("all_reduce", [0, 1, 2, 3])])
        trace.mark("step 1", 0, 20 + longest + 4)
        trace.mark("forward", 0, 20 + more)
        trace.op(0, 20 + more)
        trace.mark("backward", 20 + more, longest - more + 4)
        trace.collective("allreduce_", "all_reduce", 20 + more, longest - more + 4)
        traces.append(trace.read())
    causes = {cause.kind: cause for cause in rank_causes(split_traces(traces), {"training": 0.064}, a_run(), {})}
    assert causes["slow_rank"].seconds == pytest.approx(0.002)
    assert "rank 3" in causes["slow_rank"].what
    assert "40.0 ms per step more" in causes["slow_rank"].what  # than the median of the others, which is 0


def test_advice_depends_on_the_layout():
    gathers = two_ranks(transfer=40, operator="_allgather_base_", work="all_gather")
    zero3 = Layout("zero3", "deepspeed", ZeroOptions(3))

    def advice(split, overlap=None, bucket=5000, **run):
        zero = {"reduce_bucket_size": bucket} | ({} if overlap is None else {"overlap_comm": overlap})
        return " | ".join(rank_causes(split, WALL, a_run(**run), {"zero_optimization": zero})[0].advice)

    assert "zero2 would fit: its states need" in advice(gathers, layout=zero3, memory_bytes=80 * 10 ** 9)
    assert "zero2 would not fit" in advice(gathers, layout=zero3, memory_bytes=10 ** 9)
    more = [float(re.search(r"need ([\d.]+) GB more", advice(gathers, layout=zero3, precision=precision))[1])
            for precision in ("fp32", "bf16_autocast", "bf16")]
    assert more[1] - more[0] == pytest.approx(2 * 12 * 12 * 768 ** 2 / 1e9, abs=0.01)  # autocast's weight cache
    # Full parameters have 4 bytes per element in fp32 and 2 in bf16; partitioned states are the same.
    assert more[2] == pytest.approx(more[0] / 2, abs=0.01)
    assert "GB more per rank" in advice(gathers, layout=zero3)
    reduces = advice(two_ranks(transfer=40))
    assert "overlap_comm" in reduces
    assert "overlap_comm" not in advice(two_ranks(transfer=40), overlap=True)
    assert "reduce_bucket_size" not in advice(two_ranks(transfer=40), overlap=True)  # the last bucket is exposed
    assert "overlap_comm" not in advice(two_ranks(transfer=40), device="cpu")  # DeepSpeed does not overlap there
    scatters = two_ranks(transfer=40, operator="_reduce_scatter_base_", work="all_reduce")
    assert "overlap_comm" not in advice(scatters, layout=zero3)  # on by default in stage 3
    assert "overlap_comm" in advice(scatters, overlap=False, layout=zero3)
    assert '"reduce_bucket_size" above 5,000' in reduces
    assert "reduce_bucket_size" not in advice(two_ranks(transfer=40), bucket=200_000_000)  # exceeds the model
    assert "--gradient-accumulation-steps 4" in advice(two_ranks(transfer=40), accumulation=2)
    assert "--save-async true" in " | ".join(
        rank_causes(None, {**WALL, "checkpoints": 20.0}, a_run(save_async=False), {})[0].advice)


def test_replicated_optimizer_steps_are_a_cause():
    kinds = {cause.kind for cause in rank_causes(two_ranks(), WALL, a_run(), {})}
    assert "optimizer" not in kinds
    replicated = rank_causes(two_ranks(), WALL, a_run(layout=Layout("ddp", "torch")), {})
    optimizer = next(cause for cause in replicated if cause.kind == "optimizer")
    assert "--ds-config zero1" in optimizer.advice[0]


def test_bars_are_readable_without_color():
    text = bars_plot([("forward", 20.0), ("exposed all_reduce (dp)", 5.0), ("idle", 0.0)], "ms", 60)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 60
    assert "\x1b" not in text
    row = {name: line.count("█") for line in lines for name in ("forward", "all_reduce", "idle") if name in line}
    assert row["forward"] > 3 * row["all_reduce"] > 0
    assert json.dumps(text)  # plain text
