"""Names taken from inside DeepSpeed and torch, and what DeepSpeed must not do in a run."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from slowness import scaled

from ezpz_llm.base.errors import UserError
from ezpz_llm.dist.private_names import find
from ezpz_llm.dist.stubbed import stubbed_collectives
from ezpz_llm.engine import optimizer_state
from ezpz_llm.engine.live_memory import live_storages


def python(program: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    path = [f"import sys; sys.path[:0] = {[str(folder) for folder in folders]}"]
    return subprocess.run([sys.executable, "-c", "\n".join([*path, program])], capture_output=True, text=True,
                          timeout=scaled(120), check=False)


def test_a_private_name_of_torch_that_is_gone_is_told_at_import():
    done = python("import torch; del torch._fused_sdp_choice\n"
                  "from ezpz_llm.train import main\nfrom ezpz_llm.base.errors import run_command\n"
                  "sys.exit(run_command(main, ['--steps', '1', '--device', 'cpu']))")
    assert done.returncode == 2, done.stderr
    version = importlib.metadata.version("torch")
    assert f"error: torch {version} has no torch._fused_sdp_choice, which ezpz_llm uses" in done.stderr
    assert "pip install 'torch" in done.stderr


def test_what_is_there_is_found():
    assert find("torch.distributed", "ProcessGroup.BackendType.GLOO").name == "GLOO"
    with pytest.raises(UserError, match=r"has no torch\.distributed\.no_such_module\.name"):
        find("torch.distributed.no_such_module", "name")


@pytest.mark.full
@pytest.mark.parametrize("accelerator", ["cpu", "xpu"])
def test_with_intels_bindings_deepspeed_compiles_no_op(tmp_path, accelerator):
    """It would take its own backend "ccl", and compile that, whatever torch's process group is of."""
    (tmp_path / "oneccl_bindings_for_pytorch.py").write_text("")
    done = python(f"""
import os, torch, torch.distributed as dist
os.environ["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed prints what it takes when it is imported
from ezpz_llm.engine import optimizer_state
from ezpz_llm.engine.deepspeed_import import import_deepspeed
from ezpz_llm.engine.live_memory import live_storages
import deepspeed.accelerator.{accelerator}_accelerator as kind
from deepspeed.accelerator import get_accelerator, set_accelerator
chosen = kind.{accelerator.upper()}_Accelerator()
assert chosen.communication_backend_name() == "ccl"
set_accelerator(chosen)
deepspeed = import_deepspeed("{accelerator}")
print(get_accelerator().communication_backend_name())
from deepspeed.ops.op_builder.builder import OpBuilder
OpBuilder.load = OpBuilder.jit_load = lambda *args, **kwargs: sys.exit("an op is compiled")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
print(type(deepspeed.comm.comm.cdb).__name__)
""", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [{"cpu": "gloo", "xpu": "xccl"}[accelerator], "TorchBackend"]


def test_collectives_are_stubbed_twice_where_a_group_is_bound_to_its_device():
    """As NCCL's groups are: they keep the first stand-in, and refuse another that is bound to nothing."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.group.WORLD.bound_device_id = torch.device("cpu", 0)
        for _ in range(3):
            with stubbed_collectives():
                dist.all_reduce(torch.ones(2))
            # Outside of it the real ones work.
            summed = torch.ones(2)
            dist.all_reduce(summed)
            assert summed.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()


def test_adamw_counts_steps_in_a_tensor_whatever_it_derives_from(monkeypatch):
    """It became a kind of Adam only in torch 2.7."""
    monkeypatch.setattr(torch.optim, "Adam", type("Adam", (), {}))
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    optimizer_state.raw(optimizer, optimizer.param_groups[0], parameter)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert optimizer_state.get_step(optimizer) == 1


def test_a_tensor_that_is_undefined_holds_nothing():
    """torch 2.6 leaves such ones behind a backward pass, and raises at whatever they are asked."""
    class Undefined(torch.Tensor):
        @property
        def is_leaf(self):
            raise RuntimeError("cannot call get_autograd_meta() on undefined tensor")

    there = torch.ones(1000).as_subclass(Undefined)
    assert live_storages()[there.untyped_storage().data_ptr()] == 4000
