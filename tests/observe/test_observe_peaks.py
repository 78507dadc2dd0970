"""Stated peaks: known device names have a dense rate, unknown names have none."""

from __future__ import annotations

import pytest
import torch

from ezpz_llm.training.observe import peak_flops
from ezpz_llm.training.observe.peaks import find_peak


@pytest.mark.parametrize(("name", "units", "precision", "teraflops"), [
    ("NVIDIA A100-SXM4-80GB", 108, "bf16", 312),
    ("NVIDIA A100 80GB PCIe", 108, "tf32", 156),
    ("NVIDIA A800-SXM4-80GB", 108, "bf16", 312),
    ("NVIDIA A800 80GB PCIe", 108, "fp16", 312),
    ("NVIDIA A30", 56, "bf16", 165),
    ("NVIDIA H100 80GB HBM3", 132, "bf16", 989),
    ("NVIDIA H100", 132, "bf16", 989),
    ("NVIDIA H100 96GB HBM3", 132, "tf32", 494),
    ("NVIDIA H100 64GB HBM2", 132, "bf16", 989),
    ("NVIDIA H800", 132, "bf16", 989),
    ("NVIDIA H800 PCIe", 114, "bf16", 756),
    ("NVIDIA H20", 78, "bf16", 148),
    ("NVIDIA H20-3e", 78, "tf32", 74),
    ("NVIDIA H100 PCIe", 114, "bf16", 756),
    ("NVIDIA H100 NVL", 132, "bf16", 835),
    ("NVIDIA H200", 132, "fp32", 67),
    ("NVIDIA GH200 480GB", 132, "bf16", 989),
    ("Tesla V100-SXM2-16GB", 80, "fp16", 125),
    ("NVIDIA L40S", 142, "bf16", 362),
    ("NVIDIA L4", 58, "fp16", 121),
    ("NVIDIA A10", 72, "bf16", 125),
    ("NVIDIA A40", 84, "bf16", 149.7),
    ("NVIDIA RTX A6000", 84, "bf16", 154.8),
    ("NVIDIA RTX 6000 Ada Generation", 142, "bf16", 364.2),
    ("NVIDIA GeForce RTX 3090", 82, "bf16", 71),
    ("NVIDIA GeForce RTX 4090", 128, "bf16", 165.2),
    ("NVIDIA GeForce RTX 5090", 170, "fp16", 209.5),
    ("NVIDIA B200", 148, "bf16", 2250),
    ("NVIDIA B300 SXM6 AC", 148, "bf16", 2250),
    ("NVIDIA GB200", 148, "tf32", 1250),
    ("AMD Instinct MI250X", 110, "bf16", 191.5),
    ("AMD Instinct MI250", 104, "bf16", 181.05),
    ("AMD Instinct MI250X / MI250", 110, "bf16", 191.5),
    ("AMD Instinct MI250X / MI250", 104, "bf16", 181.05),
    ("AMD Instinct MI300A", 228, "bf16", 980.6),
    ("AMD Instinct MI300X", 304, "bf16", 1307.4),
    ("AMD Instinct MI325X", 304, "fp16", 1307.4),
    ("AMD Instinct MI355X", 256, "bf16", 2516.6),
    ("Intel(R) Data Center GPU Max 1550", 512, "bf16", 419.4),
    ("Intel(R) Data Center GPU Max 1550", 1024, "bf16", 838.8),
    ("Intel(R) Data Center GPU Max 1550", 448, "bf16", 366.975),
    ("Intel(R) Data Center GPU Max 1100", 448, "bf16", 355.5),
])
def test_known_devices(name, units, precision, teraflops):
    peak = find_peak(name, precision, units)
    assert peak.flops == pytest.approx(teraflops * 1e12)
    assert peak.device == name
    assert peak.source


@pytest.mark.parametrize(("name", "units", "precision"), [
    ("NVIDIA A10G", 80, "bf16"),  # not an A10
    ("NVIDIA L40", 142, "bf16"),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, "bf16"),
    ("NVIDIA A100-SXM-64GB", 124, "bf16"),  # a special edition with more multiprocessors
    ("AMD Instinct MI300X", 38, "bf16"),  # one partition of eight
    ("AMD Instinct MI210", 104, "bf16"),
    ("AMD Instinct MI300A", 38, "bf16"),
    ("AMD Instinct MI355X", 256, "tf32"),
    ("NVIDIA GB300", 148, "bf16"),  # neither a B300 nor an A30
    ("NVIDIA A30X", 56, "bf16"),
    ("NVIDIA RTX 6000 Ada Generation Laptop GPU", 76, "bf16"),
    ("NVIDIA GeForce RTX 3090 Ti", 84, "bf16"),
    ("Quadro RTX 6000", 72, "fp16"),
    ("NVIDIA H100", 114, "bf16"),  # the number of units matches another part
    ("Tesla V100-SXM2-16GB", 80, "bf16"),  # has no bf16 matrix units
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, "bf16"),
    ("NVIDIA GeForce RTX 4090 D", 114, "bf16"),
    ("", None, "bf16"),
])
def test_unknown_devices_have_no_peak(name, units, precision):
    assert find_peak(name, precision, units) is None


def test_cpu_has_no_peak_and_unknown_precision_is_an_error():
    assert peak_flops(torch.device("cpu"), "fp32") is None
    with pytest.raises(ValueError, match="bfloat16"):
        find_peak("NVIDIA A100-SXM4-80GB", "bfloat16")
