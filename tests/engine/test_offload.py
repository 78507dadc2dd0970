"""Offload to CPU memory and files computes the same results as one process: many tests of a job with two ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import HELPERS
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.engine import nvme
from ezpz_llm.training.engine.deepspeed_import import import_deepspeed
from ezpz_llm.training.engine.optimizer_state import TorchState
from ezpz_llm.training.layout import ops
from ezpz_llm.training.layout.layout import Layout, ZeroOptions
from ezpz_llm.training.layout.ops import is_built, needed_ops
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import plan_run

SCRIPT = HELPERS / "offload_ranks.py"
STEPS, HALF = 6, 3
LOSS_BOUND = {"fp32": 1e-5, "bf16_autocast": 2e-3, "bf16": 2e-3}
NORM_BOUND = {"fp32": 1e-4, "bf16_autocast": 1e-2, "bf16": 1e-2}
# Rounding in bf16 changes the norm by 1e-3 over 6 steps.
IN_MEMORY = ("zero1+offload", "zero2+offload", "zero3_offload_optimizer", "zero3_offload_all",
             "zero3_offload_all+only_parameters")
IN_FILES = ("zero3_nvme", "zero3_nvme+pieces", "zero3_nvme+pieces+overlap", "zero3_nvme+only_optimizer",
            "zero3_nvme+only_parameters", "zero3_nvme+pieces+some_in_memory", "zero3_nvme+parameters_in_memory")
OTHERS = ("gpt2:bf16_autocast:zero3_offload_all", "gpt2:bf16_autocast:zero3_nvme+pieces",
          "llama:fp32:zero3_offload_all", "llama:fp32:zero3_nvme+pieces", "llama:bf16:zero3_nvme+pieces")
RUNS = (*(f"gpt2:fp32:{layout}" for layout in (*IN_MEMORY, *IN_FILES)), *OTHERS)
IN_FULL = ("gpt2:fp32:zero1+offload", "gpt2:fp32:zero3_offload_all", "gpt2:fp32:zero3_nvme",
           "gpt2:fp32:zero3_nvme+pieces", "llama:bf16:zero3_nvme+pieces")
PAIRS = ("gpt2:fp32:zero3_nvme+pieces->gpt2:fp32:zero1", "gpt2:fp32:zero1->gpt2:fp32:zero3_nvme+pieces")
OPS = ("cpu_adam", "pin_memory", "async_io")

built = pytest.mark.skipif(not all(map(is_built, OPS)),
                           reason="cpu_adam and async_io are not built (ezpz-llm doctor --build-ops)")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("offload"), *IN_FULL, *PAIRS)


@pytest.fixture(scope="module")
def all_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("all"), *RUNS)


def trained(folder: Path, *runs: str) -> Path:
    """Run these runs on two ranks and return the folder of their results."""
    references = [f"{shape}:{precision}:ddp" for shape in ("gpt2", "llama")
                  for precision in ("fp32", "bf16_autocast" if shape == "gpt2" else "bf16")]
    command = [shutil.which("mpiexec") or "mpiexec", "-n", "2", sys.executable, str(SCRIPT), str(folder),
               *references, *runs]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(400), check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    lines = (process.stdout + process.stderr).splitlines()
    unexpected = [line for line in lines if not line.startswith(("gpt2:", "llama:"))]
    (folder / "printed.txt").write_text("\n".join(unexpected))
    return folder


def read(folder: Path, run: str) -> dict:
    return json.loads((folder / f"{run.replace(':', '-')}.json").read_text())


@built
@pytest.mark.timeout(450)
@pytest.mark.parametrize(("of", "run"), [
    *(pytest.param("two_ranks", run, marks=pytest.mark.full) for run in IN_FULL),
    *(pytest.param("all_of_two_ranks", run, marks=pytest.mark.slow) for run in RUNS if run not in IN_FULL)])
def test_every_step_is_that_of_one_process(request: pytest.FixtureRequest, of: str, run: str) -> None:
    folder = request.getfixturevalue(of)
    shape, precision, _ = run.split(":")
    result, alone = read(folder, run), read(folder, f"{shape}:{precision}:ddp")
    assert len(result["losses"]) == len(result["norms"]) == STEPS  # one norm per step, since ranks agree
    assert min(alone["norms"]) > 0.5  # the clip
    assert alone["losses"][-1] < alone["losses"][0] - 0.1
    assert result["losses"] == pytest.approx(alone["losses"], abs=LOSS_BOUND[precision], rel=0)
    assert result["norms"] == pytest.approx(alone["norms"], rel=NORM_BOUND[precision])
    per_token = [total / 256 for total in result["evaluated"]]
    assert per_token == pytest.approx([alone["evaluated"][0] / 256] * 2, abs=LOSS_BOUND[precision], rel=0)


@pytest.mark.slow
@built
def test_files_contain_the_offloaded_state(all_of_two_ranks: Path) -> None:
    """Files contain the state of sub-groups and the wide parameters; layouts in memory have no files."""
    for layout in IN_MEMORY:
        assert read(all_of_two_ranks, f"gpt2:fp32:{layout}")["files"] == {}
    counts = {layout: Counter(kind(name) for name in read(all_of_two_ranks, f"gpt2:fp32:{layout}")["files"])
              for layout in IN_FILES}
    parameters = Counter(param=3)  # attn.c_attn, mlp.c_fc and mlp.c_proj
    states = Counter(weight=1, exp_avg=1, exp_avg_sq=1, gradient=3)
    assert counts["zero3_nvme"] == parameters + states
    assert counts["zero3_nvme+only_parameters"] == parameters
    assert counts["zero3_nvme+only_optimizer"] == states
    assert counts["zero3_nvme+pieces"] == parameters + Counter(weight=3, exp_avg=3, exp_avg_sq=3, gradient=3)
    divided = (3 * 512 + 512 + 2 * 4 * 512) * 512 // 2
    sizes = read(all_of_two_ranks, "gpt2:fp32:zero3_nvme")["files"]
    assert sum(size for name, size in sizes.items() if kind(name) == "exp_avg_sq") >= 4 * divided


def kind(file: str) -> str:
    """Return the kind of a file: "58_param.tensor.swp", "52_60.tensor.swp", "exp_avg-52_60.tensor.swp"…"""
    return next((name for name in ("param", "gradient", "exp_avg_sq", "exp_avg") if name in file), "weight")


def test_gradients_at_unaligned_offsets_stay_in_memory() -> None:
    """Read from files, as on three ranks, they would be stale: DeepSpeed ignores the failed reads."""
    deepspeed = import_deepspeed("cpu")
    swapper = object.__new__(deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper)
    swapper.min_aio_bytes, swapper.swap_element_size, swapper.numel_alignment = 4096, 4, 256
    nvme.keep_unaligned_gradients(SimpleNamespace(optimizer_swapper=swapper), IN_NVME)
    parts, starts = swapper._adjust_for_misaligned_lengths(
        tensors=[torch.zeros(2048), torch.zeros(4098), torch.zeros(2048)], offsets=[0, 2048, 6146])
    assert starts == [0, 2048, 6144, 6146]
    assert [part.numel() for part in parts] == [2048, 4096, 2, 2048]
    assert [swapper.is_swappable_tensor(tensor=part) for part in parts] == [True, True, False, False]


IN_NVME = Layout("mine", "deepspeed", ZeroOptions(3, "nvme", "nvme"))


@pytest.mark.parametrize("zero", [SimpleNamespace(), SimpleNamespace(optimizer_swapper=None)])
def test_deepspeed_without_an_optimizer_swapper_is_rejected(zero: SimpleNamespace) -> None:
    """Otherwise the optimizer would step with stale gradients. Without state in files, nothing is swapped."""
    with pytest.raises(UserError, match=r"has no SimpleNamespace\.optimizer_swapper, which ezpz_llm uses"):
        nvme.keep_unaligned_gradients(zero, IN_NVME)
    nvme.keep_unaligned_gradients(zero, Layout("mine", "deepspeed", ZeroOptions(3, "cpu", "nvme")))


@pytest.mark.full
@built
def test_files_are_removed_and_deepspeed_is_quiet(two_ranks: Path) -> None:
    assert list(two_ranks.rglob("*.swp")) == []
    assert not (two_ranks / "run" / "nvme").exists()
    assert (two_ranks / "printed.txt").read_text() == ""


@pytest.mark.full
@built
@pytest.mark.parametrize("pair", PAIRS)
def test_checkpoints_move_between_files_and_memory(two_ranks: Path, pair: str) -> None:
    result = read(two_ranks, pair)
    alone = read(two_ranks, "gpt2:fp32:ddp")["losses"]
    assert result["losses"] == pytest.approx(result["straight"], abs=LOSS_BOUND["fp32"], rel=0)
    assert result["begun"] + result["losses"] == pytest.approx(alone, abs=LOSS_BOUND["fp32"], rel=0)
    assert len(result["losses"]) == STEPS - HALF


class _BetaPowers:
    """Powers of the betas in DeepSpeed's C++ Adam (csrc/includes/cpu_adam.h, IncrementStep), in fp32."""

    def __init__(self) -> None:
        self.powers, self._step = torch.ones(2), 0

    def adam_update(self, _: int, step: int, rate: float, beta1: float, beta2: float, *others: Any) -> None:
        """Multiply the powers in the step after the previous one; compute them directly after a jump."""
        betas = torch.tensor((beta1, beta2))
        if step != self._step:
            self.powers = self.powers * betas if step == self._step + 1 else betas ** step
            self._step = step


def test_a_resumed_cpu_adam_has_the_powers_of_the_betas_of_an_uninterrupted_one() -> None:
    steps, betas = 40, (0.9, 0.95)
    optimizer: Any = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], betas=betas)
    optimizer.param_groups[0]["bias_correction"] = True
    optimizer.ds_opt_adam, optimizer.opt_id = _BetaPowers(), 0
    optimizer.ds_opt_adam.adam_update(0, 70, 0.0, *betas)  # steps before the resume
    TorchState(torch.nn.Module(), optimizer, 0, 1, None).loaded(steps)
    uninterrupted = _BetaPowers()
    for step in range(steps + 2):
        uninterrupted.adam_update(0, step, 0.0, *betas)
    optimizer.ds_opt_adam.adam_update(0, steps + 1, 0.0, *betas)
    assert torch.equal(optimizer.ds_opt_adam.powers, uninterrupted.powers)


def test_ops_needed_by_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {(None, None): (), ("cpu", None): ("cpu_adam",), (None, "cpu"): (), ("cpu", "cpu"): ("cpu_adam",),
                ("nvme", None): OPS, ("cpu", "nvme"): OPS, (None, "nvme"): OPS[1:]}
    for (optimizer, param), needed in expected.items():
        layout = Layout("mine", "deepspeed", ZeroOptions(3, optimizer, param))
        assert needed_ops(layout) == needed
    monkeypatch.setattr(ops, "is_built", lambda name: name == "cpu_adam")
    resolve(Request("zero3_offload_all", world_size=2))
    with pytest.raises(UserError) as caught:
        resolve(Request("zero3_nvme", world_size=2))
    assert caught.value.instead == "ezpz-llm doctor --build-ops pin_memory async_io"


@pytest.fixture
def ops_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "is_built", lambda name: True)


def write(folder: Path, **zero: object) -> str:
    """Write a ds_config that offloads optimizer and parameters to files, with changes."""
    blocks: dict = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
    for key, value in zero.items():
        blocks[key] = {**blocks[key], **value} if isinstance(value, dict) else value
    path = folder / "own.json"
    path.write_text(json.dumps({"zero_optimization": blocks}))
    return str(path)


@pytest.mark.parametrize(("zero", "message"), [
    ({"offload_optimizer": {"buffer_count": 3}}, "buffer_count is 3, but must be at least 4"),
    ({"offload_optimizer": {"buffer_count": 8, "pipeline_read": True, "pipeline_write": True}}, "at least 12"),
    ({"offload_param": {"buffer_count": 1}}, "buffer_count is 1, but must be at least 5"),
    ({"offload_param": {"buffer_size": 1000}}, "buffer_size is 1000"),
    ({"offload_optimizer": {"fast_init": True}}, "fast_init"),
    ({"offload_optimizer": {"ratio": 0.5}}, "ratio"),
    ({"stage3_prefetch_bucket_size": 1e7}, "stage3_prefetch_bucket_size"),
    ({"stage3_max_reuse_distance": 1e9}, "stage3_max_reuse_distance"),
    ({"offload_param": {"nvme_path": "/a"}, "offload_optimizer": {"nvme_path": "/b"}},
     "different values of nvme_path: /a and /b"),
    ({"stage": 2, "offload_param": {"device": "none"}}, "to NVMe needs ZeRO stage 3"),
])
def test_options_that_deepspeed_would_fail_with_are_rejected(tmp_path: Path, ops_are_built: None, zero: dict,
                                                   message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(Request(write(tmp_path, **zero), world_size=2, model=get_model_config("gpt2-124m")))


def test_buffers_follow_from_the_model(tmp_path: Path, ops_are_built: None) -> None:
    def zero(world_size: int, **options: object) -> dict:
        return resolve(Request("zero3_nvme", world_size=world_size, **options)).deepspeed["zero_optimization"]

    model = get_model_config("gpt2-124m")
    table = model.padded_vocab_size * model.n_embd
    assert zero(2, model=model)["offload_param"]["buffer_size"] == table // 2
    assert zero(8, model=model)["offload_param"]["buffer_size"] == table // 8
    assert zero(2, model=get_model_config("tiny-gpt2"))["offload_param"]["buffer_size"] == 2 ** 18
    # Tensor-parallel ranks shard the token embedding and replicate the positions.
    long = get_model_config("tiny-gpt2", n_embd=384, n_head=6, block_size=4096)
    assert zero(4, model=model, tp=2)["offload_param"]["buffer_size"] == table // 4
    assert zero(2, model=long, tp=2)["offload_param"]["buffer_size"] == 4096 * 384
    both = resolve(Request(write(tmp_path, offload_optimizer={"pipeline_read": True}), world_size=2, model=model))
    assert both.deepspeed["zero_optimization"]["offload_optimizer"]["buffer_count"] == 8


def test_precedence_of_the_folder_for_files(tmp_path: Path, ops_are_built: None) -> None:
    file = write(tmp_path, offload_param={"nvme_path": "/theirs"}, offload_optimizer={"nvme_path": "/theirs"})
    for arguments, path in ((["--ds-config", "zero3_nvme"], None), (["--ds-config", file], "/theirs"),
                            (["--ds-config", file, "--nvme-path", "/ours"], "/ours")):
        resolved = plan_run(parse(arguments), 2).resolved
        assert resolved.nvme_path == path
        assert any("--nvme-path DIR" in note for note in resolved.notes) == (path is None)
        assert "nvme_path" not in resolved.deepspeed["zero_optimization"]["offload_param"]
    with pytest.raises(UserError, match="offloads nothing to files"):
        plan_run(parse(["--ds-config", "zero1", "--nvme-path", "/ours"]), 2)


class Owner:
    """Object whose lifetime is the lifetime of the files."""


def alone(folder: Path) -> Dist:
    import torch

    run_dir = RunDir(folder / "run")
    run_dir.create()
    return Dist(RankInfo(0, 1, 0, 1, 0, "test"), torch.device("cpu"), None, Mesh(Degrees(1), 0), run_dir)


def prepare(dist: Dist, path: str | None, owner: Owner, numel: int = 1000, **block: object) -> dict:
    import torch

    zero = {"offload_optimizer": {"device": "nvme", **block}, "offload_param": {"device": "none"}}
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(numel, device="meta"))])
    nvme.prepare(zero, path, model, dist, owner)
    return zero


def test_folder_is_removed_with_its_owner(tmp_path: Path) -> None:
    dist = alone(tmp_path)
    first, second, third = Owner(), Owner(), Owner()
    named = tmp_path / "disk"
    named.mkdir()
    folders = [Path(prepare(dist, path, owner)["offload_optimizer"]["nvme_path"])
               for path, owner in ((None, first), (None, second), (str(named), third))]
    assert len(set(folders)) == 3  # two engines of a run have separate folders
    assert folders[0].parent == dist.run_dir.offloaded
    assert folders[2].parent == named
    assert all(folder.is_dir() for folder in folders)
    del first, second, third
    assert not any(folder.exists() for folder in folders)
    assert not dist.run_dir.offloaded.exists()
    assert named.exists()  # it belongs to the user


def test_unusable_folder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist, owner = alone(tmp_path), Owner()
    with pytest.raises(UserError, match="No such file or directory") as missing:
        prepare(dist, str(tmp_path / "missing"), owner)
    assert "--nvme-path" in missing.value.instead
    assert missing.value.exit_code != 0
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Not a directory"):
        prepare(dist, str(tmp_path / "file"), owner)
    with pytest.raises(UserError, match=r"No space left on device|File too large"):
        prepare(dist, None, owner, numel=2 ** 52)
    monkeypatch.setattr(nvme, "_may_lock_all", lambda: False)
    monkeypatch.setattr(nvme.resource, "getrlimit", lambda resource: (2 ** 16, 2 ** 16))
    with pytest.raises(UserError, match=r"lock 0.\d+ GB of memory"):
        prepare(dist, None, owner, numel=10 ** 7)
    assert not dist.run_dir.offloaded.exists()  # although the owner still exists


KILLED = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import test_offload
owner = test_offload.Owner()
test_offload.prepare(test_offload.alone(Path(sys.argv[1])), sys.argv[1], owner)
print("there", flush=True)
time.sleep(60)
"""


def test_folders_of_killed_processes_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), *sys.path],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout.readline() == "there\n"
        remaining, = tmp_path.glob("ezpz-llm-*")
        owner = Owner()
        prepare(alone(tmp_path), str(tmp_path), owner)
        assert remaining.exists()
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
    time.sleep(0.1)
    second_owner = Owner()
    prepare(alone(tmp_path), str(tmp_path), second_owner)
    assert not remaining.exists()
    del owner, second_owner
    assert list(tmp_path.glob("ezpz-llm-*")) == []


def test_launch_removes_offloaded_files_of_killed_ranks(tmp_path: Path) -> None:
    program = ("import os, signal; os.makedirs(os.environ['EZPZ_LLM_RUN_DIR'] + '/nvme/rank'); "
               "os.kill(os.getpid(), signal.SIGKILL)")
    run = subprocess.run([sys.executable, "-m", "ezpz_llm.launch", "-n", "1", "--run-dir", str(tmp_path / "run"),
                          sys.executable, "-c", program], capture_output=True, text=True,
                         timeout=scaled(60), check=False)
    assert "SIGKILL" in run.stderr
    assert not RunDir(tmp_path / "run").offloaded.exists()
