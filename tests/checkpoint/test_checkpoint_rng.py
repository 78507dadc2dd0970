"""Random states and CPU copies in one process, on the CPU and on a GPU if there is one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ezpz_llm.training.checkpoint import cpu_copy, writer
from ezpz_llm.training.checkpoint.cpu_copy import CpuMemory, cpu_bytes
from ezpz_llm.training.checkpoint.writer import read_shard, write_shard
from ezpz_llm.training.engine.optimizer_state import TorchState

DEVICES = ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])]


def draws(device: torch.device) -> list[object]:
    """Return numbers of every generator; an odd count of normals, so that the cached second one is in the state."""
    dropped = torch.nn.functional.dropout(torch.ones(64, device=device), 0.5)
    return [dropped.tolist(), torch.rand(3).tolist(), torch.rand(3, device=device).tolist(), random.random(),
            random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn(1).tolist()]


@pytest.mark.parametrize("name", DEVICES)
def test_every_generator_continues_after_restore(name: str, tmp_path: Path) -> None:
    device = torch.device(name)
    draws(device)
    states = writer.capture_rng_states(device)
    expected = draws(device), draws(device)
    assert expected[0] != expected[1]
    writer.restore_rng_states({source: value.clone() for source, value in states.items()}, device)
    assert (draws(device), draws(device)) == expected
    assert ("device" in states) == (name != "cpu")


@pytest.mark.parametrize("block", [cpu_copy._BLOCK, 1 << 12])
@pytest.mark.parametrize("name", DEVICES)
def test_a_copy_keeps_the_state_of_its_moment_and_reuses_memory(name: str, block: int, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_copy, "_BLOCK", block)
    device = torch.device(name)
    model = torch.nn.Linear(300, 70).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state, memory, places = TorchState(model, optimizer, 0, 1, None), CpuMemory(device), []
    for number in range(3):
        model(torch.randn(8, 300, device=device)).square().mean().backward()
        optimizer.step()
        moment = optimizer.state[model.bias]["exp_avg"]
        expected = model.weight.detach().flatten().cpu().clone(), moment.cpu().clone()
        shard = read_shard(state, 0, device)
        copy = memory.copy(shard)
        needed = sum(value.nbytes for value in shard.outline.values())
        assert needed <= cpu_bytes(shard, device) == sum(part.numel() for part in memory._blocks)
        # Pinned blocks are powers of two: one for all values may take twice their size.
        assert (cpu_bytes(shard, torch.device("cuda")) <= needed + 2 * 4096) == (block == 4096)
        with torch.no_grad():
            model.weight.fill_(number)
            moment.fill_(number)
        record, _ = write_shard(tmp_path, copy)
        written = load_file(tmp_path / record.name)
        assert torch.equal(written["weight/weight"], expected[0])
        assert torch.equal(written["exp_avg/bias"], expected[1])
        places.append(memory._blocks[0].data_ptr())
    assert len(set(places)) == 1
