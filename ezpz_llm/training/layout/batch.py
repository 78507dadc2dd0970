"""Batch sizes in sequences: global batch = micro-batch x accumulation x data-parallel size (imports no torch)."""

from __future__ import annotations

from ezpz_llm.core.base import UserError, count_noun
from ezpz_llm.core.rundir.layout_record import Batch

SPELLINGS = {"global_batch": "global_batch_size", "micro_batch": "micro_batch_size",
             "accumulation": "gradient_accumulation_steps", "clip": "grad_clip"}
"""Option and YAML name of each field whose name differs from it; run.json uses the field's name."""


def option_of(name: str) -> str:
    """Return the option of a field, such as --grad-clip for clip."""
    return "--" + SPELLINGS.get(name, name).replace("_", "-")


def solve_batch(global_batch: int | None, micro_batch: int | None, accumulation: int | None, dp_size: int, *,
                default_micro_batch: int | None = 4, where: str | None = None) -> Batch:
    """Compute the missing sizes; any two of the three determine the third.

    Without a global batch, a missing micro-batch is `default_micro_batch` and a missing accumulation is 1. With a
    global batch alone, the micro-batch is the largest size up to `default_micro_batch` that divides a rank's share.
    If it is None, the accumulation is 1.

    Raises:
        UserError: a size is below 1, the sizes contradict each other or do not divide (with the nearest valid
            sizes), or there are more ranks than sequences.
    """
    for name, value in (("global batch", global_batch), ("micro-batch", micro_batch),
                        ("accumulation", accumulation)):
        if value is not None and value < 1:
            raise UserError(f"a {name} of {value} sequences" if name != "accumulation" else f"{value} micro-steps",
                            where=where, instead="1 or more")
    if global_batch is None:
        micro_batch = micro_batch or default_micro_batch or 1
        accumulation = accumulation or 1
        return Batch(micro_batch * accumulation * dp_size, micro_batch, accumulation, dp_size)
    if micro_batch is not None and accumulation is not None:
        return _batch_if_consistent(global_batch, micro_batch, accumulation, dp_size, where)
    if global_batch < dp_size:
        raise UserError(f"a global batch of {count_noun(global_batch, 'sequence')} cannot feed {dp_size} "
                        "data-parallel ranks", where=where,
                        instead=f"at least {dp_size} sequences, or at most {count_noun(global_batch, 'rank')}")
    if micro_batch is not None:
        _check_divides(global_batch, micro_batch, dp_size, "micro-batch", where)
        accumulation = global_batch // (micro_batch * dp_size)
    elif accumulation is not None:
        _check_divides(global_batch, accumulation, dp_size, "accumulation", where)
        micro_batch = global_batch // (accumulation * dp_size)
    else:
        _check_divides(global_batch, 1, dp_size, None, where)
        share = global_batch // dp_size
        largest = min(share, default_micro_batch or share)
        micro_batch = max(size for size in range(1, largest + 1) if share % size == 0)
        accumulation = share // micro_batch
    return Batch(global_batch, micro_batch, accumulation, dp_size)


def _batch_if_consistent(global_batch: int, micro_batch: int, accumulation: int, dp_size: int,
                         where: str | None) -> Batch:
    product = micro_batch * accumulation * dp_size
    if product == global_batch:
        return Batch(global_batch, micro_batch, accumulation, dp_size)
    problem = (f"a global batch of {global_batch} is not micro-batch {micro_batch} x accumulation {accumulation} x "
             f"{count_noun(dp_size, 'data-parallel rank')} = {product}")
    ranks, remainder = divmod(global_batch, micro_batch * accumulation)
    if remainder == 0 and dp_size == 1:
        # With a world size of 1, the program was almost certainly started without its launcher.
        raise UserError(problem, where=where,
                        instead=f"start {count_noun(ranks, 'rank')} (launch -n {ranks} …), or set only two of the "
                                "three numbers")
    raise UserError(problem, where=where,
                    instead=f"use a global batch of {product}, or set only two of the three numbers")


def _check_divides(global_batch: int, factor: int, dp_size: int, name: str | None, where: str | None) -> None:
    unit = factor * dp_size
    if global_batch % unit == 0:
        return
    below = global_batch - global_batch % unit
    near = " or ".join(str(value) for value in (below, below + unit) if value)
    ranks = count_noun(dp_size, "data-parallel rank")
    product = f"{name} {factor} x {ranks} = {unit}" if name else ranks
    instead = f"a global batch of {near}"
    if name and global_batch % dp_size == 0:
        share = global_batch // dp_size
        divisors = [size for size in range(1, share + 1) if share % size == 0]
        smaller, larger = ([size for size in divisors if size < factor][-1:],
                           [size for size in divisors if size > factor][:1])
        instead += f", or {name} {' or '.join(map(str, smaller + larger))}"
    raise UserError(f"a global batch of {count_noun(global_batch, 'sequence')} is not a multiple of {product}",
                    where=where, instead=instead)
