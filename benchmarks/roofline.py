"""A bound on MFU that can be checked without a device: python3 benchmarks/roofline.py [--out FILE.json]

Counts the kernels, bytes, products and host reads of one optimizer step of the trainer's own program, on one rank
(roofline_counts.py says how), and gives each kernel the time that a device needs at least:

    the longest of  products / their rate,  bytes / the memory's rate,  and a kernel's least time

A device computes while it reads, so the times of one kernel are not added; kernels of one stream follow each
other, so those of different kernels are. The sum is the least step time, and the model's FLOPs (6N + 12 L C T a
token, as the trainer's MFU counts them) over that and the stated peak is a bound on MFU. It is an upper bound: no
gaps between kernels, no host that is too slow, no allocator, no wait at the step's end.

The rates are assumptions, and printed: shares of the vendors' peaks that good kernels reach, the same for all
devices. They are not measured.
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

from ezpz_llm.model.parameters import flops_per_token
from ezpz_llm.observe.peaks import find_peak
from ezpz_llm.observe.tables import table
from ezpz_llm.rundir import write_json

PRODUCTS = 0.72
"""Of the stated peak, in matrix products."""
ATTENTION = 0.45
"""Of the stated peak, in a flash attention kernel, counting the products that a causal mask leaves."""
MEMORY = 0.85
"""Of the stated bandwidth."""
LEAST_S = 2.5e-6
"""A kernel's least time, whatever it does: to start it, and to end it before the next one."""


@dataclass(frozen=True)
class Device:
    """What torch calls one device: `name` as torch reports it, stated memory bandwidth in bytes a second."""

    name: str
    bandwidth: float

    def seconds(self, kernel: Kernel, peak: float) -> float:
        """The least time of a kernel, where `peak` is the stated rate of products in FLOP/s."""
        products = kernel.flops / (peak * (ATTENTION if kernel.attention else PRODUCTS))
        return max(products, (kernel.read + kernel.written) / (self.bandwidth * MEMORY), LEAST_S)


DEVICES = {
    "A100": Device("NVIDIA A100-SXM4-80GB", 2.039e12), "H100": Device("NVIDIA H100 80GB HBM3", 3.35e12),
    "H200": Device("NVIDIA H200", 4.8e12),
    # One of the card's two dies, and one of its two tiles: half of the card's bandwidth.
    "MI250X GCD": Device("AMD Instinct MI250X", 1.6384e12),
    "PVC tile": Device("Intel(R) Data Center GPU Max 1550", 1.6384e12),
}
"""Bandwidths are the data sheets' of the names that the peaks' sources name."""


def _work(model: str, micro_batch: int) -> tuple[str, ...]:
    return ("--model", model, "--micro-batch-size", str(micro_batch), "--global-batch-size", str(micro_batch))


WORKS = {f"{model} B {micro_batch}": _work(model, micro_batch) for model, micro_batch in (
    ("gpt2-124m", 16), ("gpt2-124m", 4), ("llama3-1b", 4), ("llama3-1b", 8))}
"""Options of `ezpz_llm.train` by name: a model at its whole context."""


def total(step: Step) -> dict[str, Any]:
    """A step's counts."""
    return {"kernels": len(step.kernels), "bytes": sum(one.read + one.written for one in step.kernels),
            "product_flops": sum(one.flops for one in step.kernels), "host_reads": len(step.host_reads)}


def bound(step: Step, model_flops: float, device: Device) -> dict[str, float]:
    """The least seconds of a step, and the MFU at that."""
    peak = find_peak(device.name, "bf16").flops
    seconds = sum(device.seconds(kernel, peak) for kernel in step.kernels)
    return {"step_s": seconds, "mfu": model_flops / seconds / peak}


def by_operator(step: Step, device: Device) -> list[dict[str, Any]]:
    """Counts and least seconds of each operator, the longest first."""
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
    """Count one work and bound it on every device."""
    plan = plan_of([*words, "--compile", "false"])
    model_flops = flops_per_token(plan.model) * plan.tokens_per_step
    steps = {"eager": count_eager(plan), "compiled": count_compiled(plan_of([*words, "--compile", "true"]))}
    return {"options": list(words), "model_flops": model_flops,
            "steps": {how: {**total(step), "bounds": {name: bound(step, model_flops, device)
                                                      for name, device in DEVICES.items()},
                            "on_h200": by_operator(step, DEVICES["H200"])} for how, step in steps.items()}}


def assumptions() -> dict[str, Any]:
    """Every rate that is not counted."""
    return {"products": PRODUCTS, "attention": ATTENTION, "memory": MEMORY, "least_kernel_s": LEAST_S,
            "devices": {name: {**asdict(device), "peak_flops": find_peak(device.name, "bf16").flops,
                               "peak_source": find_peak(device.name, "bf16").source}
                        for name, device in DEVICES.items()}}


def show(result: dict[str, Any]) -> str:
    """The result as text: rates, counts and bounds."""
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
    parser.add_argument("options", nargs="*", help="of ezpz_llm.train, for every work; after --")
    args = parser.parse_args()
    words = ("--ds-config", "ddp", "--precision", "bf16_autocast", *args.options)
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
