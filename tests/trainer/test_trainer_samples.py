"""Copies of a step's samples to the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.trainer.device_copy import to_device
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import run

SMALL = ["--n-layer", "1", "--n-head", "2", "--n-kv-head", "2", "--n-embd", "64", "--block-size", "32",
         "--steps", "3", "--global-batch-size", "4", "--micro-batch-size", "2", "--eval-every", "0",
         "--eval-tokens", "64", "--sample-tokens", "0", "--profile", "false",
         "--device", "cpu", "--ds-config", "ddp",
         "--save-every", "-1"]


@pytest.mark.parametrize("pins", [False, True])
def test_samples_are_pinned_if_the_device_copies_from_pinned_memory(tmp_path, monkeypatch, pins):
    """Check the calls of pin_memory and record_stream, since no device here copies from pinned memory."""
    pinned, kept = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory",
                        lambda self: pinned.append((tuple(self.shape), self.is_contiguous())) or self)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: kept.append(tuple(self.shape)))
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], pins=pins))
    assert run(parse([*SMALL, "--run-dir", str(tmp_path / "run")])) == 0
    # Three steps of two micro-batches, tokens and targets.
    assert kept == [(2, 32)] * 12 * pins
    assert pinned == [((2, 32), True)] * 12 * pins, "torch blocks the CPU while it copies a view"


@pytest.mark.gpu
def test_copies_to_the_device_do_not_block_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    a, samples = torch.randn(8192, 8192, device=device), torch.arange(64 * 1025).view(64, 1025)[:, 1:]
    to_device([samples], device)  # the first pinned allocation synchronizes
    torch.cuda.synchronize()
    for _ in range(50):
        a @ a
    computed = torch.cuda.Event()
    computed.record()
    (copy,) = to_device([samples], device)
    assert not computed.query()
    assert torch.equal((copy + 0).cpu(), samples)  # later kernels wait for the copy
