"""Faults that benchmarks/mutations.py plants: bugs that occurred in real code, or easily could."""

from __future__ import annotations

from mutation_table import layouts, several_ranks, step, training

FAULTS = (*step.FAULTS, *training.FAULTS, *layouts.FAULTS, *several_ranks.FAULTS)

EQUIVALENT = {
    "rotary positions that begin at 1": "scores depend on the distance of two positions alone",
    "`x.float()` left out of `rotate`": "torch promotes to the fp32 of the angles",
    "wsd's `left >= decay` as `left > decay`": "at that step the straight line is at the peak",
    "DDP that reduces in every micro-step": "averages are linear, and what is averaged already stays as it is: the "
                                            "same step, with more traffic",
    "RMSNorm of bf16 left to torch": "torch 2.13 computes it in fp32 on CPUs, with the same result",
    "`missing` of a bucket not reset": "all buckets are then reduced after the backward pass instead of during it",
    "stage 3's small parameters not gathered after a load": "the next forward pass gathers them",
    "norm of -1 not replaced by infinity in stages 1 to 3": "DeepSpeed 0.19.8 reports infinity and skips the step; "
                                                            "older versions do not",
    "hpZ's second copy kept after a load": "DeepSpeed discards it with the gathered parameters, except that of a "
                                           "frozen parameter",
    "fp32 products set to \"high\"": "a CPU has no TF32",
}
"""Equivalent mutants, which do not change results, each with the argument. They are not among the faults."""
