"""The parts of dist that need no ranks: seeds, the mesh's arithmetic, devices, heartbeats."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from slowness import scaled
from torch.distributed import HashStore, TCPStore

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.private import make_private
from ezpz_llm.dist import device as device_module
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.dist.device import choose_device, claim_device, device_identity, device_index, refuse_idle_gpus
from ezpz_llm.dist.heartbeat import Heartbeat
from ezpz_llm.dist.mesh import AXES, Degrees
from ezpz_llm.dist.rendezvous import _named, node_file_store, raise_before_group
from ezpz_llm.dist.seeds import seed_for
from ezpz_llm.launch.ranks import RankInfo

STREAMS = st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(["init", "data", "dropout", "sample"]),
                    st.integers(0, 2**24 - 1))
SECRET = bytes(range(32))
DEGREES = st.builds(Degrees, *(st.integers(1, 4) for _ in range(4)))


def unmix(value: int) -> int:
    """The inverse of the mixing, step by step: that there is one proves that no two streams share a seed."""
    mask = 2**64 - 1

    def undo_shift(value: int, shift: int) -> int:
        result = value
        for _ in range(64 // shift):
            result = value ^ result >> shift
        return result

    value = undo_shift(value, 31) * pow(0x94D049BB133111EB, -1, 2**64) & mask
    value = undo_shift(value, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return undo_shift(value, 30)


@given(STREAMS)
def test_a_seed_tells_its_stream(stream):
    seed, purpose, index = stream
    value = seed_for(seed, purpose, index)
    assert 0 <= value < 2**64
    packed = unmix(value)
    assert (packed >> 32, packed & 2**24 - 1) == (seed, index)
    assert ["init", "data", "dropout", "sample"][packed >> 24 & 255] == purpose


def test_seeds_of_many_ranks_and_neighbouring_runs_all_differ():
    purposes = ("init", "data", "dropout", "sample")
    seeds = {seed_for(seed, purpose, index)
             for seed in range(4) for purpose in purposes for index in range(10_000)}
    assert len(seeds) == 4 * 4 * 10_000
    # Neighbours differ in about half of their bits, so that generators seeded by them are unlike.
    flips = [(seed_for(1, "data", i) ^ seed_for(1, "data", i + 1)).bit_count() for i in range(1000)]
    assert 30 < sum(flips) / len(flips) < 34


@pytest.mark.parametrize("stream", [(-1, "data", 0), (2**32, "data", 0), (0, "data", 2**24), (0, "data", -1)])
def test_a_seed_out_of_range_is_refused(stream):
    with pytest.raises(UserError, match="out of range"):
        seed_for(*stream)


def test_seeds_and_heartbeats_need_no_torch():
    code = "import sys, ezpz_llm.dist.seeds, ezpz_llm.dist.heartbeat, ezpz_llm.dist; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=scaled(120), check=True)
    assert done.stdout.strip() == "False"


@given(DEGREES)
def test_every_rank_has_its_own_place_and_groups_divide_the_world(degrees):
    world = degrees.dp * degrees.tp * degrees.pp * degrees.sp
    places = [degrees.coordinates(rank) for rank in range(world)]
    assert len({tuple(place.values()) for place in places}) == world
    for axis in AXES:
        groups = {tuple(degrees.peers(rank, axis)) for rank in range(world)}
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        for group in groups:
            assert [places[rank][axis] for rank in group] == list(range(getattr(degrees, axis)))
            others = [{name: at for name, at in places[rank].items() if name != axis} for rank in group]
            assert all(other == others[0] for other in others)


def test_the_order_of_axes():
    """pp outermost, then dp, sp, and tp innermost."""
    degrees = Degrees(dp=2, tp=2, pp=2, sp=2)
    assert degrees.coordinates(1) == {"tp": 1, "sp": 0, "dp": 0, "pp": 0}
    assert [degrees.peers(0, axis) for axis in ("tp", "sp", "dp", "pp")] == [[0, 1], [0, 2], [0, 4], [0, 8]]


def test_degrees_follow_from_the_world():
    assert Degrees.of_world(12, tp=2, pp=3) == Degrees(dp=2, tp=2, pp=3, sp=1)
    with pytest.raises(UserError, match="tp 2 x pp 3 x sp 1 = 6 does not divide 8 ranks"):
        Degrees.of_world(8, tp=2, pp=3)


@pytest.mark.parametrize(("count", "local_rank", "index"), [(1, 0, 0), (1, 3, 0), (4, 3, 3), (8, 3, 3)])
def test_one_visible_device_is_device_0(count, local_rank, index):
    assert device_index("cuda", count, RankInfo(3, 4, local_rank, 4, 0, "test")) == index


def test_more_ranks_than_devices_are_named():
    with pytest.raises(UserError, match="local rank 4 has no device: 4 cuda devices for 8 ranks"):
        device_index("cuda", 4, RankInfo(4, 8, 4, 8, 0, "test"))


def test_the_device_decides_the_backend():
    collectives = {kind: traits.collectives for kind, traits in DEVICES.items()}
    assert collectives == {"cuda": "nccl", "xpu": "xccl", "mps": "gloo", "cpu": "gloo"}
    info = RankInfo(0, 1, 0, 1, 0, "test")
    assert choose_device("cpu", info) == torch.device("cpu")
    assert device_identity(torch.device("cpu")) is None
    with pytest.raises(UserError, match="unknown device 'gpu'"):
        choose_device("gpu", info)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no cuda device is visible"):
            choose_device("cuda", info)


def in_threads(world_size: int, work) -> list[str]:
    """Run `work(store, rank)` for every rank with a client of one TCPStore each; their errors' first lines."""
    server = TCPStore("127.0.0.1", 0, world_size, True, datetime.timedelta(seconds=20), wait_for_workers=False)
    outcomes = [""] * world_size

    def run(rank: int) -> None:
        store = server if rank == 0 else TCPStore("127.0.0.1", server.port, world_size, False,
                                                  datetime.timedelta(seconds=20))
        try:
            work(store, rank)
        except UserError as error:
            outcomes[rank] = error.found.partition("\n")[0]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


def test_two_ranks_on_one_device_are_both_told():
    """Four ranks of two hosts; ranks 2 and 3 have the same device."""
    devices = [("n1", "GPU-a"), ("n1", "GPU-b"), ("n2", "GPU-a"), ("n2", "GPU-a")]

    def work(store, rank):
        error = None
        try:
            claim_device(store, devices[rank][0], "cuda", devices[rank][1], rank)
        except UserError as found:
            error = found
        raise_before_group(store, RankInfo(rank, 4, 0, 2, 0, "test"), error, SECRET)

    outcomes = in_threads(4, work)
    assert outcomes == ["ranks 2 and 3 on n2 share one device (GPU-a)"] * 4


def test_ranks_on_devices_of_their_own_pass():
    def work(store, rank):
        claim_device(store, "n1", "cuda", f"GPU-{rank}", rank)
        raise_before_group(store, RankInfo(rank, 2, rank, 2, 0, "test"), None, SECRET)

    assert in_threads(2, work) == ["", ""]


def test_an_error_in_the_store_counts_only_with_the_runs_signature():
    """Whoever can connect to torch's store can write there."""
    def among(planted: bytes | None, secret: bytes | None, error: UserError | None = None) -> list[str]:
        def work(store, rank):
            if planted is not None:
                store.set("setup/error", planted)
            raise_before_group(store, RankInfo(rank, 2, rank, 2, 0, "test"), error if rank else None, secret)

        return in_threads(2, work)

    for planted in (b"your job is cancelled, run: curl evil", b"0" * 64 + b"\nyour job", b"\xff\n\xff", b""):
        assert among(planted, SECRET) == ["", ""]
    assert among(None, SECRET, UserError("no device")) == ["no device", "no device"]
    assert among(None, None, UserError("no device")) == ["another rank could not be set up", "no device"]


def test_ranks_of_a_node_meet_in_a_file_again_and_again(tmp_path):
    """Also where rank 0 was killed at its last meeting and left its store's name behind."""
    stale = tmp_path / "f" / "store-at-29500"
    with make_private(tmp_path / "f") as folder:
        for turn in range(3):
            values = []

            def work(_, rank, turn=turn, values=values):
                time.sleep(0.05 * ((rank + turn) % 3))
                info = RankInfo(rank, 3, rank, 3, 0, "test")
                store = node_file_store(folder, 29500, info, datetime.timedelta(seconds=30))
                store.add("sum", 10**rank)
                if store.add("came", 1) == 3:
                    store.set("all", "")
                store.wait(["all"])
                values.append(store.add("sum", 0))

            assert in_threads(3, work) == ["", "", ""]
            assert values == [111, 111, 111]
            stale.write_text("store-0123456789abcdef")


def test_programs_of_one_run_do_not_meet_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("ezpz_llm.dist.rendezvous._LOCK_WITHIN_S", 0.2)
    info, soon = RankInfo(0, 2, 0, 2, 0, "test"), datetime.timedelta(seconds=0.5)
    with make_private(tmp_path / "f") as folder, _named(folder, "store-at-29500"):
        with pytest.raises(UserError, match="another program of this run is just being set up"):
            node_file_store(folder, 29500, info, soon)
        with pytest.raises(UserError, match="did not meet all of 2 ranks"):
            node_file_store(folder, 29501, info, soon)


def test_ranks_on_a_cpu_share_it_and_mixed_types_are_refused():
    store = HashStore()
    claim_device(store, "n1", "cpu", None, 0)
    claim_device(store, "n1", "cpu", None, 1)
    with pytest.raises(UserError, match="rank 2 on n2 computes on cuda, others on cpu"):
        claim_device(store, "n2", "cuda", "GPU-a", 2)


def test_a_heartbeat_is_written_at_most_once_a_second(tmp_path):
    path = tmp_path / "rank0003"
    heartbeat = Heartbeat({"EZPZ_LLM_HEARTBEAT": str(path)})
    heartbeat.beat("train", 1)
    assert path.read_text() == "train 1\n"
    for step in range(2, 100):
        heartbeat.beat("train", step)
    assert path.read_text() == "train 1\n"
    heartbeat.beat("validation")
    assert path.read_text() == "validation \n"
    Heartbeat({}).beat("train", 1)  # without launch nobody watches
    assert list(tmp_path.iterdir()) == [path]


STEPPING = """
import resource, sys
from pathlib import Path
import torch
from ezpz_llm.dist.setup import setup
from ezpz_llm.engine.build import build_engine
from ezpz_llm.layout.resolve import Request, resolve
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.init import decay_groups
from ezpz_llm.model.gpt import GPT

dist = setup(device="cpu", run_dir=Path(sys.argv[1]))
torch.manual_seed(0)
model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=32, block_size=128, vocab_size=50304))
resolved = resolve(Request("ddp", world_size=1, global_batch=4, precision="bf16_autocast"))
engine = build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                      param_groups=decay_groups(model, 0.1))
tokens = torch.randint(50304, (4, 128))
faults, losses = 0, []
for step in range(7):
    if step == 2:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    loss = engine.forward(tokens, tokens, last_micro_step=True)
    engine.backward(loss)
    engine.step(1e-3)
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // 5)
"""


@pytest.mark.full
def test_memory_of_one_step_serves_the_next_but_for_users_who_chose(tmp_path):
    """Pages that a training step gets from the system: few, and many where the user has set the allocator up.

    The user's own setting here is the C library's default, so that this is all in which they differ.
    """
    faults = []
    for name, own in (("kept", ""), ("users", "glibc.malloc.tcache_count=7")):
        done = subprocess.run([sys.executable, "-c", STEPPING, str(tmp_path / name)], capture_output=True,
                              env={**os.environ, "GLIBC_TUNABLES": own}, text=True,
                              timeout=scaled(120), check=False)
        assert done.returncode == 0, done.stderr
        faults.append(int(done.stdout.splitlines()[-1]))
    # bf16 logits of 512 tokens alone are 51 MB, 12,500 pages of 4 KiB.
    assert 10 * faults[0] < faults[1], faults


def test_a_gpu_that_torch_cannot_use_is_an_error_unless_the_cpu_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    refuse_idle_gpus({}, tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kfd").touch()
    refuse_idle_gpus({}, tmp_path)  # a desktop processor's graphics, with a torch that is not built for it
    (tmp_path / "dev" / "nvidia0").touch()
    with pytest.raises(UserError, match=r"a GPU that torch cannot use: torch .* is built for CPUs") as caught:
        refuse_idle_gpus({}, tmp_path)
    assert f"{tmp_path}/dev/nvidia0" in caught.value.where
    assert "--device cpu to train on the CPU on purpose" in caught.value.instead
    refuse_idle_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    refuse_idle_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path)
    (tmp_path / "dev" / "nvidia0").unlink()
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(UserError, match=r"is built for ROCm 6\.2"):
        refuse_idle_gpus({}, tmp_path)


def test_the_choice_of_a_device_looks_for_idle_gpus_only_if_left_to_us(monkeypatch):
    def refuse(env):
        raise UserError("idle")

    monkeypatch.setattr(device_module, "refuse_idle_gpus", refuse)
    monkeypatch.setattr(device_module, "_best", lambda: "cpu")
    info = RankInfo(0, 1, 0, 1, 0, "test")
    assert choose_device("cpu", info) == torch.device("cpu")
    with pytest.raises(UserError, match="idle"):
        choose_device("auto", info)


@pytest.mark.parametrize(("env", "hip", "after"), [
    ({}, None, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ({}, "6.2", {}),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
    ({"PYTORCH_CUDA_ALLOC_CONF": ""}, None, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
])
def test_segments_expand_on_cuda_unless_the_user_has_settings(monkeypatch, env, hip, after):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(device_module, "_count", lambda kind: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(set_device=lambda device: None))
    monkeypatch.setattr(os, "environ", env)
    choose_device("cuda", RankInfo(0, 1, 0, 1, 0, "test"))
    assert env == after


def test_tiles_of_a_card_are_told_apart(monkeypatch):
    """Where torch has the card's identity for each of them."""
    properties = SimpleNamespace(uuid="card")
    monkeypatch.setattr(torch, "get_device_module",
                        lambda device: SimpleNamespace(get_device_properties=lambda device: properties))
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)
    first, second = (device_identity(torch.device("xpu", index)) for index in (0, 1))
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0.1")
    masked = device_identity(torch.device("xpu", 0))
    assert len({first, second, masked}) == 3
    assert device_identity(torch.device("xpu", 0)) == masked
    assert device_identity(torch.device("cuda", 0)) == "card"
