"""Unwanted actions of DeepSpeed in a run, and other versions of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from slowness import scaled

from ezpz_llm.training.engine import optimizer_state
from ezpz_llm.training.engine.live_memory import live_storages


def python(program: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    path = [f"import sys; sys.path[:0] = {[str(folder) for folder in folders]}"]
    return subprocess.run([sys.executable, "-c", "\n".join([*path, program])], capture_output=True, text=True,
                          timeout=scaled(120), check=False)


@pytest.mark.full
@pytest.mark.parametrize("accelerator", ["cpu", "xpu"])
def test_with_intels_bindings_deepspeed_compiles_no_op(tmp_path, accelerator):
    """DeepSpeed would use its backend "ccl", and compile it, whatever torch's process group uses."""
    (tmp_path / "oneccl_bindings_for_pytorch.py").write_text("")
    process = python(f"""
import os, torch, torch.distributed as dist
os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed prints its choice on import
from ezpz_llm.training.engine import optimizer_state
from ezpz_llm.training.engine.deepspeed_import import import_deepspeed
from ezpz_llm.training.engine.live_memory import live_storages
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
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.split() == [{"cpu": "gloo", "xpu": "xccl"}[accelerator], "TorchBackend"]


def test_adamw_counts_steps_in_a_tensor_in_any_torch(monkeypatch):
    """AdamW is a subclass of Adam only since torch 2.7."""
    monkeypatch.setattr(torch.optim, "Adam", type("Adam", (), {}))
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    optimizer_state.raw(optimizer, optimizer.param_groups[0], parameter)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert optimizer_state.get_step(optimizer) == 1


def test_the_step_count_is_that_of_the_parameter_with_most_steps():
    often, seldom = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([seldom, often])
    for used in ((often, seldom), (often,)):
        for parameter in used:
            parameter.grad = torch.ones(2)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer_state.get_step(optimizer) == 2


def test_undefined_tensors_are_supported():
    """torch 2.6 leaves undefined tensors after a backward pass, and raises on any access."""
    class Undefined(torch.Tensor):
        @property
        def is_leaf(self):
            raise RuntimeError("cannot call get_autograd_meta() on undefined tensor")

    tensor = torch.ones(1000).as_subclass(Undefined)
    assert live_storages()[tensor.untyped_storage().data_ptr()] == 4000
