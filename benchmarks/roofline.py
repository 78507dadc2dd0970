"""Compute an upper bound on MFU without a device: python3 benchmarks/roofline.py [--out FILE.json]

Counts the kernels, bytes, FLOPs and device-to-CPU reads of one optimizer step of the trainer's program on one rank
(see roofline_counts.py), and estimates the minimum time of each kernel:

    max(FLOPs / matmul rate,  bytes / memory bandwidth,  minimum kernel time)

A kernel computes while it reads, so these times are not added. The kernels of a stream run one after another, so
their times are added. The sum is the minimum step time. The model's FLOPs (6N + 12 L C T per token, as in the
trainer's MFU) divided by this time and the vendor's peak are the bound on MFU. It is an upper bound because it
ignores gaps between kernels, a slow CPU, the allocator, and synchronization at the end of the step.

The rates are assumptions, which are printed: fractions of the vendors' peaks that good kernels reach, the same for
all devices. They are not measured.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from roofline_compiled import count_compiled
from roofline_counts import Kernel, Step, count_eager, plan_of

from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.model.parameters import flops_per_token
from ezpz_llm.training.observe.peaks import find_peak
from ezpz_llm.training.observe.tables import table

PRODUCTS = 0.72
"""Fraction of the vendor's peak that matmuls reach."""
ATTENTION = 0.45
"""Fraction of the vendor's peak that flash attention reaches, not counting masked products."""
MEMORY = 0.85
"""Fraction of the vendor's memory bandwidth that kernels reach."""
LEAST_S = 2.5e-6
"""Minimum time of any kernel, from its launch to the start of the next one."""


@dataclass(frozen=True)
class Device:
    """Device: its `name` in torch, and the vendor's memory bandwidth in bytes/s."""

    name: str
    bandwidth: float

    def seconds(self, kernel: Kernel, peak: float) -> float:
        """Return the minimum time of a kernel; `peak` is the vendor's peak in FLOP/s."""
        products = kernel.flops / (peak * (ATTENTION if kernel.attention else PRODUCTS))
        return max(products, (kernel.read + kernel.written) / (self.bandwidth * MEMORY), LEAST_S)


DEVICES = {
    "A100": Device("NVIDIA A100-SXM4-80GB", 2.039e12), "H100": Device("NVIDIA H100 80GB HBM3", 3.35e12),
    "H200": Device("NVIDIA H200", 4.8e12),
    # One of two dies (MI250X) or tiles (PVC): half of the card's bandwidth.
    "MI250X GCD": Device("AMD Instinct MI250X", 1.6384e12),
    "PVC tile": Device("Intel(R) Data Center GPU Max 1550", 1.6384e12),
}
"""Devices; bandwidths are from the data sheets that are the sources of the peaks."""


def _work(model: str, micro_batch: int) -> tuple[str, ...]:
    return ("--model", model, "--micro-batch-size", str(micro_batch), "--global-batch-size", str(micro_batch))


WORKS = {f"{model} B {micro_batch}": _work(model, micro_batch) for model, micro_batch in (
    ("gpt2-124m", 16), ("gpt2-124m", 4), ("llama3-1b", 4), ("llama3-1b", 8))}
"""Options of `ezpz_llm.train` by name, for models at their full context length."""


def total(step: Step) -> dict[str, Any]:
    """Return the counts of a step."""
    return {"kernels": len(step.kernels), "bytes": sum(one.read + one.written for one in step.kernels),
            "product_flops": sum(one.flops for one in step.kernels), "host_reads": len(step.host_reads)}


def bound(step: Step, model_flops: float, device: Device) -> dict[str, float]:
    """Return the minimum seconds of a step, and the resulting MFU."""
    peak = find_peak(device.name, "bf16").flops
    seconds = sum(device.seconds(kernel, peak) for kernel in step.kernels)
    return {"step_s": seconds, "mfu": model_flops / seconds / peak}


def by_operator(step: Step, device: Device) -> list[dict[str, Any]]:
    """Return the counts and minimum seconds of each operator, longest first."""
    peak = find_peak(device.name, "bf16").flops
    rows: dict[str, dict[str, Any]] = {}
    for kernel in step.kernels:
        row = rows.setdefault(kernel.name, {"operator": kernel.name, "kernels": 0, "bytes": 0, "flops": 0.0,
                                            "seconds": 0.0})
        row["kernels"] += 1
        row["bytes"] += kernel.read + kernel.written
        row["flops"] += kernel.flops
        row["seconds"] += device.seconds(kernel, peak)
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def measure(words: Sequence[str]) -> dict[str, Any]:
    """Count the kernels of a work, and compute its bound on each device."""
    plan = plan_of([*words, "--compile", "false"])
    model_flops = flops_per_token(plan.model) * plan.tokens_per_step
    steps = {"eager": count_eager(plan), "compiled": count_compiled(plan_of([*words, "--compile", "true"]))}
    return {"options": list(words), "model_flops": model_flops,
            "steps": {how: {**total(step), "bounds": {name: bound(step, model_flops, device)
                                                      for name, device in DEVICES.items()},
                            "on_h200": by_operator(step, DEVICES["H200"])} for how, step in steps.items()}}


def assumptions() -> dict[str, Any]:
    """Return all assumed rates."""
    return {"products": PRODUCTS, "attention": ATTENTION, "memory": MEMORY, "least_kernel_s": LEAST_S,
            "devices": {name: {**asdict(device), "peak_flops": find_peak(device.name, "bf16").flops,
                               "peak_source": find_peak(device.name, "bf16").source}
                        for name, device in DEVICES.items()}}


def show(result: dict[str, Any]) -> str:
    """Format rates, counts and bounds as text."""
    rates = result["assumptions"]
    rows = [[name, f"{one['peak_flops'] / 1e12:.1f}", f"{one['peak_flops'] * PRODUCTS / 1e12:.0f}",
             f"{one['peak_flops'] * ATTENTION / 1e12:.0f}", f"{one['bandwidth'] / 1e12:.2f}",
             f"{one['bandwidth'] * MEMORY / 1e12:.2f}"] for name, one in rates["devices"].items()]
    text = table(f"Assumed: products {PRODUCTS:.0%} of the peak, attention {ATTENTION:.0%}, memory {MEMORY:.0%}, "
                 f"a kernel {LEAST_S * 1e6:g} us or more", ("device", "TFLOP/s", "products", "attention", "TB/s",
                                                           "reached"), rows)
    rows = [[f"{name}, {how}", f"{found['kernels']}", f"{found['bytes'] / 1e9:.1f}",
             f"{found['product_flops'] / 1e12:.2f}", f"{found['host_reads']}",
             *(f"{one['mfu']:.1%}" for one in found["bounds"].values())]
            for name, work in result["works"].items() for how, found in work["steps"].items()]
    return text + "\n" + table("A step, and its bound on MFU", ("work", "kernels", "GB", "TFLOP", "host reads",
                                                                *rates["devices"]), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", help="options of ezpz_llm.train for all works, after --")
    args = parser.parse_args()
    words = ("--ds-config", "ddp", "--precision", "bf16", *args.options)
    result = {
        "command": "python3 benchmarks/roofline.py " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "assumptions": assumptions(),
        "works": {name: measure((*WORKS[name], *words)) for name in args.works},
    }
    print(show(result))
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
