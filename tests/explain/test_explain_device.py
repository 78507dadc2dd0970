"""Breakdown of steps on a device, from synthetic traces in the format that Kineto writes for CUDA and NCCL."""

from __future__ import annotations

import pytest
from made_up_traces import MadeUp, of_all

from ezpz_llm.verify.explain.split import split_traces

_STORAGE = "(ncclDevKernelArgsStorage<4096ul>)"


def a_step(trace, length=40.0):
    """Add a step in which the CPU launches everything within 10 ms and then waits for the device."""
    trace.mark("step 1", 0, length)
    trace.mark("data", 0, 1)
    trace.mark("forward", 1, 3)
    trace.mark("backward", 4, 4)
    trace.mark("optimizer", 8, 2)


def nccl(trace, name, start, ms, launched, **args):
    trace.kernel(start, ms, launched, name=f"ncclDevKernel_{name}{_STORAGE}", **args)


def split_of(trace):
    return split_traces([trace.read()]).ranks[0]


def labels(rank):
    return {exposed.label: (exposed.count, round(exposed.seconds * 1e3, 6)) for exposed in rank.exposed}


def test_kernels_belong_to_the_phase_that_launched_them_and_hide_communication():
    trace = MadeUp(device="cuda", collectives=[of_all("all_reduce", [0, 1])])
    a_step(trace)
    trace.add("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0.5, 1, thread=7, correlation=901)
    trace.add("cuda_runtime", "cudaMemcpyAsync", 0.4, 0.1, correlation=901)
    trace.kernel(2, 10, launched=2)
    trace.kernel(12, 15, launched=5)
    nccl(trace, "AllReduce_Sum_f32_RING_LL", 20, 12, 6)
    trace.kernel(32, 5, launched=8.5, name="void at::native::multi_tensor_apply_kernel<FusedAdam>")
    rank = split_of(trace)
    milliseconds = {name: round(seconds * 1e3, 6) for name, seconds in rank.seconds.items() if seconds}
    assert milliseconds == {"data": 1, "idle": 1 + 3, "forward": 10, "backward": 15, "exposed_communication": 5,
                            "optimizer": 5}
    assert labels(rank) == {"all_reduce (dp)": (1, 5)}


@pytest.mark.parametrize(("kernel", "kind"), [
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL" + _STORAGE, "all_reduce"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL" + _STORAGE, "reduce_scatter"),
    ("ncclDevKernel_AllGather_RING_LL" + _STORAGE, "all_gather"),
    ("ncclDevKernel_Broadcast_RING_LL" + _STORAGE, "broadcast"),
    ("ncclDevKernel_Reduce_Sum_f32_RING_LL" + _STORAGE, "reduce"),
    ("ncclDevKernel_SendRecv" + _STORAGE, "send/recv"),
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
    ("ncclSymkDevKernel_AllGather_LL" + _STORAGE, "all_gather"),
])
def test_kinds_are_recognized_by_kernel_names(kernel, kind):
    trace = MadeUp(device="cuda")
    a_step(trace)
    trace.kernel(15, 4, 6, name=kernel)
    assert labels(split_of(trace)) == {kind: (1, 4)}


def test_arguments_of_the_profiler_give_kind_size_and_ranks():
    trace = MadeUp(device="cuda")
    a_step(trace)
    arguments = {"Collective name": "_allgather_base", "In msg nelems": 500, "Out msg nelems": 1000,
                 "dtype": "BFloat16", "Process Group Ranks": "[0, 1]"}
    nccl(trace, "Generic", 15, 4, 6, **arguments)
    rank = trace.read().flights[0]
    assert (rank.kind, rank.size, rank.ranks) == ("all_gather", 2000, (0, 1))
    nccl(trace, "Generic", 21, 4, 7, **{**arguments, "Process Group Ranks": "[0, 1, 2, ..., 63]"})
    assert trace.read().flights[1].ranks == ()


def test_collectives_of_two_groups_are_distinguished_by_their_launches():
    """Each group has its own stream, so the second call begins first."""
    trace = MadeUp(device="cuda", collectives=[
        of_all("all_reduce", [0, 1], 100, "dp"), of_all("all_reduce", [0], 4, "alone"),
        of_all("all_reduce", [0, 2], 200, "tp")])
    a_step(trace)
    nccl(trace, "AllReduce_Sum_f32_RING_LL", 22, 4, 6)
    nccl(trace, "AllReduce_Sum_f32_RING_LL", 15, 6, 7)
    rank = split_of(trace)
    assert labels(rank) == {"all_reduce (dp)": (1, 4), "all_reduce (tp)": (1, 6)}
    assert {exposed.label: exposed.bytes for exposed in rank.exposed} == {
        "all_reduce (dp)": 100, "all_reduce (tp)": 200}


def test_a_group_of_one_rank_has_no_exposed_communication():
    trace = MadeUp(collectives=[of_all("all_reduce", [0], 4, "dp"), of_all("all_reduce", [0, 1], 4, "tp")])
    trace.mark("step 1", 0, 40)
    trace.mark("backward", 0, 40)
    trace.collective("allreduce_", "all_reduce", 0, 10)
    trace.collective("allreduce_", "all_reduce", 20, 5)
    assert list(labels(split_of(trace))) == ["all_reduce (tp)"]


def test_sendrecv_kernels_match_sends_and_receives():
    def half(kind):
        return {"kind": kind, "axes": "pp", "ranks": [0, 1], "bytes": 100, "peer": 1}

    trace = MadeUp(device="cuda", collectives=[half("send"), half("recv_")])
    a_step(trace)
    nccl(trace, "SendRecv", 15, 4, 6)
    nccl(trace, "SendRecv", 22, 5, 7)
    assert labels(split_of(trace)) == {"send (pp)": (1, 4), "recv (pp)": (1, 5)}


def test_annotations_of_the_device_do_not_count_as_work():
    trace = MadeUp(device="cuda")
    a_step(trace)
    trace.add("gpu_user_annotation", "nccl:all_reduce", 5, 30, thread=7)
    trace.add("gpu_user_annotation", "forward", 5, 30, thread=7)
    rank = split_of(trace)
    assert rank.seconds["idle"] == pytest.approx(0.039)
    assert not rank.exposed
