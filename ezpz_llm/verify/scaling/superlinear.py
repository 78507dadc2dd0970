"""Causes of a scaling efficiency above 100 % (no torch)."""

from __future__ import annotations

from ezpz_llm.core.base.shell_commands import to_typable
from ezpz_llm.verify.scaling.efficiency import MAX_DISAGREEMENT, Curve, Measured

_MEMORY_RATIO = 0.9
"""Memory peak relative to the smallest point's, below which memory is reported as a cause."""
_SPREAD = 1.2
"""90th percentile of the step time over the median above which a point is reported as unsteady."""


def explain_superlinear(curve: Curve, point: Measured) -> tuple[str, ...]:
    """Return the possible causes of an efficiency above 100 %, likeliest first.

    More devices do not make each of them faster, so such an efficiency always gets a cause or "not explained".
    The result is empty only if efficiency is at most 100 %.
    """
    efficiency = curve.efficiency(point)
    if point is curve.base or efficiency.value <= 1:
        return ()
    interval = efficiency.interval
    if efficiency.is_too_wide or (interval is not None and interval[0] <= 1):
        runs = f", and runs of the smallest point differ by a factor of {curve.base.disagreement:.1f}"
        return ("within the noise: its interval " + (f"begins at {interval[0]:.1%}" if interval else "is too wide")
                + runs * (curve.base.disagreement > MAX_DISAGREEMENT),)
    causes = [*_batch_causes(curve.base, point), *_breakdown_causes(curve.base, point),
              *_memory_causes(curve.base, point), *_unsteady_causes(curve.base)]
    if interval is None:
        causes.append("its error is unknown (a single short run): measure with --repeats 3")
    if not causes:
        causes.append(f"not explained: the baseline {curve.base.name} is too slow for a reason that was not "
                      "measured; do not use this number before you have checked its runs "
                      f"({to_typable(f'ezpz-llm explain {curve.base.first.run_dir}')})")
    return tuple(causes)


def _batch_causes(base: Measured, point: Measured) -> list[str]:
    """Return differences in batch and placement that reduce the work per token."""
    before, after = base.first, point.first
    causes = []
    if after.accumulation < before.accumulation:
        causes.append(f"fewer micro-steps per step ({after.accumulation}, at the smallest point "
                      f"{before.accumulation}): less overhead per token")
    if after.micro_batch > before.micro_batch:
        causes.append(f"a larger micro-batch ({after.micro_batch}, at the smallest point {before.micro_batch}) "
                      "utilizes a device better")
    if after.ranks / after.nodes < before.ranks / before.nodes:
        causes.append(f"fewer ranks per node ({after.ranks / after.nodes:g}, at the smallest point "
                      f"{before.ranks / before.nodes:g}) share its memory and cores")
    return causes


def _breakdown_causes(base: Measured, point: Measured) -> list[str]:
    """Return the parts of the traced step that account for at least a tenth of the gain."""
    before, after = base.split, point.split
    if before is None or after is None:
        return []
    work = base.first.step_tokens / base.ranks * point.ranks / point.first.step_tokens
    gains = {part: before[part] - after[part] * work for part in before}
    gain = base.step_time.value - point.step_time.value * work
    causes = {"optimizer": "its state is sharded over more ranks", "data": "each rank reads less",
              "compute": "smaller tensors fit into the caches, or the smallest point ran on slower or hotter cores"}
    return [f"{part} takes {seconds * 1e3:.1f} ms per step less for the same tokens"
            + (f" ({causes[part]})" if part in causes else "")
            for part, seconds in sorted(gains.items(), key=lambda item: -item[1]) if seconds > max(gain, 0) / 10]


def _memory_causes(base: Measured, point: Measured) -> list[str]:
    causes = []
    for kind, name in (("device", "device"), ("host", "CPU")):
        before, after = (getattr(measured, f"peak_{kind}_bytes") for measured in (base, point))
        if before and after and after < _MEMORY_RATIO * before:
            causes.append(f"a rank uses {after / 2**30:.2f} GiB of {name} memory, at the smallest point "
                          f"{before / 2**30:.2f}: the smallest point may have been short of memory or cache")
    return causes


def _unsteady_causes(base: Measured) -> list[str]:
    steps = base.steps
    if steps.high > _SPREAD * steps.median:
        return [f"the smallest point was not steady: 10 % of its steps took longer than {steps.high * 1e3:.1f} "
                f"ms, and the median is {steps.median * 1e3:.1f} ms"]
    return []
