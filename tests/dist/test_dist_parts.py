"""Parts of dist that need no launched ranks: seeds, degrees, devices, stores, and heartbeats."""

from __future__ import annotations

import datetime
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from slowness import scaled
from torch.distributed import HashStore, TCPStore

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.private_folders import make_private
from ezpz_llm.launcher.basics.devices import MASKS, Devices
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.launcher.planning.environment import device_settings
from ezpz_llm.training.dist import device as device_module
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.device import (
    choose_device,
    claim_device,
    device_identity,
    device_index,
    reject_unusable_gpus,
)
from ezpz_llm.training.dist.heartbeat import Heartbeat
from ezpz_llm.training.dist.mesh import AXES, Degrees
from ezpz_llm.training.dist.rendezvous import _publish_name, node_file_store, share_error_without_group
from ezpz_llm.training.dist.seeds import seed_for

STREAMS = st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(["init", "data", "dropout", "sample"]),
                    st.integers(0, 2**24 - 1))
DEGREES = st.builds(Degrees, *(st.integers(1, 4) for _ in range(4)))


def unmix(value: int) -> int:
    """Invert the mixing of `seed_for`. That an inverse exists proves that no two streams share a seed."""
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
def test_stream_can_be_recovered_from_its_seed(stream):
    seed, purpose, index = stream
    value = seed_for(seed, purpose, index)
    assert 0 <= value < 2**64
    packed = unmix(value)
    assert (packed >> 32, packed & 2**24 - 1) == (seed, index)
    assert ["init", "data", "dropout", "sample"][packed >> 24 & 255] == purpose


def test_seeds_of_many_ranks_and_runs_all_differ():
    purposes = ("init", "data", "dropout", "sample")
    seeds = {seed_for(seed, purpose, index)
             for seed in range(4) for purpose in purposes for index in range(10_000)}
    assert len(seeds) == 4 * 4 * 10_000
    # Seeds of adjacent streams differ in about half of their bits, so that their generators are uncorrelated.
    flips = [(seed_for(1, "data", i) ^ seed_for(1, "data", i + 1)).bit_count() for i in range(1000)]
    assert 30 < sum(flips) / len(flips) < 34


@pytest.mark.parametrize("stream", [(-1, "data", 0), (2**32, "data", 0), (0, "data", 2**24), (0, "data", -1)])
def test_seed_out_of_range_is_rejected(stream):
    with pytest.raises(UserError, match="out of range"):
        seed_for(*stream)


def test_seeds_and_heartbeats_need_no_torch():
    code = ("import sys, ezpz_llm.training.dist.seeds, ezpz_llm.training.dist.heartbeat, ezpz_llm.training.dist; "
            "print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=scaled(120), check=True)
    assert done.stdout.strip() == "False"


@given(DEGREES)
def test_coordinates_are_unique_and_groups_partition_the_world(degrees):
    world = degrees.dp * degrees.tp * degrees.pp * degrees.sp
    coordinates = [degrees.coordinates(rank) for rank in range(world)]
    assert len({tuple(of_rank.values()) for of_rank in coordinates}) == world
    for axis in AXES:
        groups = {tuple(degrees.peers(rank, axis)) for rank in range(world)}
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        for group in groups:
            assert [coordinates[rank][axis] for rank in group] == list(range(getattr(degrees, axis)))
            others = [{name: value for name, value in coordinates[rank].items() if name != axis} for rank in group]
            assert all(other == others[0] for other in others)
    for axes in itertools.permutations(AXES, 2):
        for rank in range(world):
            peers = degrees.peers(rank, *axes)
            assert peers == sorted(peers), "torch numbers the ranks of a group in ascending order"
            assert len(peers) == getattr(degrees, axes[0]) * getattr(degrees, axes[1])


def test_order_of_axes():
    """The order is pp (outermost), dp, sp, tp (innermost)."""
    degrees = Degrees(dp=2, tp=2, pp=2, sp=2)
    assert degrees.coordinates(1) == {"tp": 1, "sp": 0, "dp": 0, "pp": 0}
    assert [degrees.peers(0, axis) for axis in ("tp", "sp", "dp", "pp")] == [[0, 1], [0, 2], [0, 4], [0, 8]]


def test_dp_is_derived_from_the_world_size():
    assert Degrees.of_world(12, tp=2, pp=3) == Degrees(dp=2, tp=2, pp=3, sp=1)
    with pytest.raises(UserError, match="tp 2 x pp 3 x sp 1 = 6 does not divide 8 ranks"):
        Degrees.of_world(8, tp=2, pp=3)


@pytest.mark.parametrize(("count", "local_rank", "index"), [(1, 0, 0), (1, 3, 0), (4, 3, 3), (8, 3, 3)])
def test_single_visible_device_has_index_0(count, local_rank, index):
    assert device_index("cuda", count, RankInfo(3, 4, local_rank, 4, 0, "test")) == index


def test_more_ranks_than_devices_are_reported():
    with pytest.raises(UserError, match="local rank 4 has no device: 4 cuda devices for 8 ranks"):
        device_index("cuda", 4, RankInfo(4, 8, 4, 8, 0, "test"))


def test_device_type_determines_the_backend():
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
    """Run `work(store, rank)` for every rank, each with its own client of a TCPStore. Return the first line of each
    rank's error."""
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


def test_all_ranks_report_two_ranks_on_one_device():
    """Four ranks on two nodes; ranks 2 and 3 have the same device."""
    devices = [("n1", "GPU-a"), ("n1", "GPU-b"), ("n2", "GPU-a"), ("n2", "GPU-a")]

    def work(store, rank):
        error = None
        try:
            claim_device(store, devices[rank][0], "cuda", devices[rank][1], rank)
        except UserError as own_error:
            error = own_error
        share_error_without_group(store, RankInfo(rank, 4, 0, 2, 0, "test"), error)

    outcomes = in_threads(4, work)
    assert outcomes == ["ranks 2 and 3 on n2 share one device (GPU-a)"] * 4


def test_ranks_on_different_devices_are_accepted():
    def work(store, rank):
        claim_device(store, "n1", "cuda", f"GPU-{rank}", rank)
        share_error_without_group(store, RankInfo(rank, 2, rank, 2, 0, "test"), None)

    assert in_threads(2, work) == ["", ""]


def test_every_rank_raises_the_error_of_one():
    def work(store, rank):
        error = UserError("no device") if rank else None
        share_error_without_group(store, RankInfo(rank, 2, rank, 2, 0, "test"), error)

    assert in_threads(2, work) == ["no device", "no device"]


def test_ranks_on_one_node_can_repeat_the_file_rendezvous(tmp_path):
    """A killed rank 0 may have left the name of an earlier store behind."""
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


def test_programs_of_one_run_have_separate_rendezvous(tmp_path, monkeypatch):
    monkeypatch.setattr("ezpz_llm.training.dist.rendezvous._LOCK_WITHIN_S", 0.2)
    info, short = RankInfo(0, 2, 0, 2, 0, "test"), datetime.timedelta(seconds=0.5)
    with make_private(tmp_path / "f") as folder, _publish_name(folder, "store-at-29500"):
        with pytest.raises(UserError, match="another program of this run is starting at the same time"):
            node_file_store(folder, 29500, info, short)
        with pytest.raises(UserError, match="but not all 2 ranks joined the store"):
            node_file_store(folder, 29501, info, short)


def test_ranks_share_a_cpu_and_mixed_device_types_are_rejected():
    store = HashStore()
    claim_device(store, "n1", "cpu", None, 0)
    claim_device(store, "n1", "cpu", None, 1)
    with pytest.raises(UserError, match="rank 2 on n2 uses cuda, but other ranks use cpu"):
        claim_device(store, "n2", "cuda", "GPU-a", 2)


def test_heartbeat_is_written_at_most_once_a_second(tmp_path):
    path = tmp_path / "rank0003"
    heartbeat = Heartbeat({"EZPZ_LLM_HEARTBEAT": str(path)})
    heartbeat.beat("train", 1)
    assert path.read_text() == "train 1\n"
    for step in range(2, 100):
        heartbeat.beat("train", step)
    assert path.read_text() == "train 1\n"
    heartbeat.beat("validation")
    assert path.read_text() == "validation \n"
    Heartbeat({}).beat("train", 1)  # no heartbeat file without launch
    assert list(tmp_path.iterdir()) == [path]


STEPPING = """
import resource, sys
from pathlib import Path
import torch
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine.build import build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.model.init import decay_groups
from ezpz_llm.training.model.gpt import GPT

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
    loss = engine.module(tokens, tokens)
    engine.backward(loss, is_last=True)
    engine.step(1e-3)
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // 5)
"""


@pytest.mark.full
def test_memory_is_reused_between_steps_unless_the_user_configured_malloc(tmp_path):
    """A training step has few page faults, but many if the user has configured the allocator.

    The user's setting in this test equals glibc's default, so that the runs differ in nothing else.
    """
    faults = []
    for name, tunables in (("kept", ""), ("users", "glibc.malloc.tcache_count=7")):
        done = subprocess.run([sys.executable, "-c", STEPPING, str(tmp_path / name)], capture_output=True,
                              env={**os.environ, "GLIBC_TUNABLES": tunables}, text=True,
                              timeout=scaled(120), check=False)
        assert done.returncode == 0, done.stderr
        faults.append(int(done.stdout.splitlines()[-1]))
    # bf16 logits of 512 tokens alone are 51 MB, 12,500 pages of 4 KiB.
    assert 10 * faults[0] < faults[1], faults


def test_gpu_that_torch_cannot_use_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    reject_unusable_gpus({}, tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kfd").touch()
    reject_unusable_gpus({}, tmp_path)  # integrated graphics of a desktop CPU, and a torch build without ROCm
    (tmp_path / "dev" / "nvidia0").touch()
    with pytest.raises(UserError, match=r"an NVIDIA GPU that torch cannot use: .* built for CPUs") as caught:
        reject_unusable_gpus({}, tmp_path)
    assert f"{tmp_path}/dev/nvidia0" in caught.value.where
    assert "--device cpu to use the CPU intentionally" in caught.value.instead
    reject_unusable_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    reject_unusable_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path)
    (tmp_path / "dev" / "nvidia0").unlink()
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(UserError, match=r"is built for ROCm 6\.2"):
        reject_unusable_gpus({}, tmp_path)


def gpus_of(folder: Path, *, amd: int = 0, intel: str = "") -> Path:
    """Make the root of a node with an AMD or Intel GPU, as their drivers list it."""
    node, pci = folder / "sys/class/kfd/kfd/topology/nodes/1", folder / "sys/bus/pci/devices/0000:18:00.0"
    for place in (node, pci):
        place.mkdir(parents=True)
    (node / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {amd}\n")
    (pci / "vendor").write_text("0x8086\n")
    (pci / "device").write_text(f"{intel}\n")
    return folder


@pytest.mark.parametrize(("gpu", "vendor"), [
    ({"amd": 90010}, "AMD"),  # Frontier
    ({"amd": 90402}, "AMD"),  # Tuolumne
    ({"intel": "0x0bd5"}, "Intel"),  # Aurora
    ({"amd": 90012}, None), ({"intel": "0x7d55"}, None),  # integrated graphics
    ({"amd": 110000}, None),  # a Radeon of a desktop
])
def test_torch_for_cpus_is_an_error_on_a_node_with_gpus_of_any_vendor(tmp_path, monkeypatch, gpu, vendor):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    root = gpus_of(tmp_path, **gpu)
    if vendor is None:
        reject_unusable_gpus({}, root)
    else:
        with pytest.raises(UserError, match=f"this node has an {vendor} GPU that torch cannot use"):
            reject_unusable_gpus({}, root)


@pytest.mark.parametrize(("source", "is_told"), [("site frontier", True), ("CUDA_VISIBLE_DEVICES", False),
                                                 ("/sys/class/kfd/kfd/topology/nodes", False)])
def test_launch_tells_ranks_only_of_devices_that_they_cannot_see(source, is_told):
    """A driver lists integrated graphics, too."""
    expected = {"EZPZ_LLM_DEVICES": "1 " + source} if is_told else {}
    assert {name: setting.value for name, setting in device_settings(Devices(("0",), source)).items()} == expected


def test_torch_for_cpus_is_an_error_if_launch_knows_of_devices(tmp_path):
    with pytest.raises(UserError, match=r"this node has a GPU that torch cannot use: .* built for") as caught:
        reject_unusable_gpus({"EZPZ_LLM_DEVICES": "8 site frontier"}, tmp_path)
    assert "EZPZ_LLM_DEVICES=8 site frontier, from launch" in caught.value.where
    reject_unusable_gpus({"EZPZ_LLM_DEVICES": "8 site frontier", "ROCR_VISIBLE_DEVICES": ""}, tmp_path)


def test_idle_gpus_are_checked_only_for_device_auto(monkeypatch):
    def reject(env):
        raise UserError("idle")

    monkeypatch.setattr(device_module, "reject_unusable_gpus", reject)
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
def test_expandable_segments_are_set_on_cuda_unless_the_user_configured_them(monkeypatch, env, hip, after):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(device_module, "_count", lambda kind: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(set_device=lambda device: None))
    monkeypatch.setattr(os, "environ", env)
    choose_device("cuda", RankInfo(0, 1, 0, 1, 0, "test"))
    assert env == after


def test_tiles_of_a_card_have_different_identities(monkeypatch):
    """torch reports the card's UUID for each tile."""
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


def test_partitions_of_an_amd_card_have_different_identities(monkeypatch):
    """torch may report the same UUID for all partitions of an MI300."""
    properties = SimpleNamespace(uuid="card", pci_domain_id=0, pci_bus_id=0x11, pci_device_id=0)
    monkeypatch.setattr(torch, "get_device_module",
                        lambda device: SimpleNamespace(get_device_properties=lambda device: properties))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name in MASKS:
        monkeypatch.delenv(name, raising=False)
    assert device_identity(torch.device("cuda", 3)) == "card PCI 0000:11:00 /3"
    masked = []
    for mask in "45":
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", mask)
        masked.append(device_identity(torch.device("cuda", 0)))
    assert masked == ["card PCI 0000:11:00 4/0", "card PCI 0000:11:00 5/0"]


def test_ranks_may_share_a_device_if_the_user_says_so(monkeypatch, capfd):
    monkeypatch.setenv("EZPZ_LLM_SHARED_DEVICES", "warn")
    store = HashStore()
    for rank in range(2):
        claim_device(store, "n1", "cuda", "GPU-a", rank)
    assert "warning: ranks 0 and 1 on n1 share one device (GPU-a)" in capfd.readouterr().err
