"""Why an efficiency is above 100 %: more devices did not make each of them faster (no torch).

It is noise, or the smallest point did more work for the same tokens, or it was short of something. Each cause is
looked for in what was measured; where none is found, that is said, and the number is not to be used.
"""

from __future__ import annotations

from ezpz_llm.scaling.efficiency import DISAGREEING, Curve, Measured
from ezpz_llm.scaling.fit import Fit
from ezpz_llm.scaling.law import setting_of
from ezpz_llm.scaling.predict import Prediction

_LESS = 0.9
"""Memory of a rank that counts as less."""
_SPREAD = 1.2
"""The slowest tenth of steps over the median that counts as unsteady."""


def explain_above(curve: Curve, point: Measured) -> tuple[str, ...]:
    """The causes, the likeliest first; empty where the efficiency is not above 100 %, and never otherwise."""
    efficiency = curve.efficiency(point)
    if point is curve.base or efficiency.value <= 1:
        return ()
    interval = efficiency.interval
    if interval is not None and interval[0] <= 1:
        runs = f", and runs of the smallest point differ by a factor of {curve.base.disagreement:.1f}"
        return (f"within the noise: its interval begins at {interval[0]:.1%}"
                + runs * (curve.base.disagreement > DISAGREEING),)
    found = [*_work(curve.base, point), *_parts(curve.base, point), *_memory(curve.base, point),
             *_unsteady(curve.base)]
    if interval is None:
        found.append("its error is not known (a single short run): measure with --repeats 3")
    if not found:
        found.append(f"not explained: {curve.base.name}, which all others are compared with, is too slow for a "
                     "reason that was not measured; do not use this number before its runs have been looked at "
                     f"(ezpz-llm explain {curve.base.first.run_dir})")
    return tuple(found)


def explain_predicted(fit: Fit, one: Prediction) -> str | None:
    """Why a prediction is above 100 %; None where it is not."""
    if one.efficiency <= 1:
        return None
    if one.efficiency_band[0] <= 1:
        return f"within the noise: its band begins at {one.efficiency_band[0]:.1%}"
    curve = one.curve
    before, base = fit.parts(setting_of(curve, curve.base, fit.shape)), curve.base
    work = base.tokens_per_second_per_device * base.step_time.value * one.ranks / (
        one.tokens_per_second * one.seconds)
    gains = {part: seconds - one.parts.get(part, 0.0) * work for part, seconds in before.items()}
    part, gain = max(gains.items(), key=lambda item: item[1])
    if gain * 2 < base.step_time.value - one.seconds * work:
        return f"not explained: {base.name}, which it is compared with, is slower than the fit; do not use it"
    return (f"what the fit calls {part} takes {gain * 1e3:.1f} ms a step less for the same tokens"
            + (": the optimizer's state is divided over more ranks" if part == "divided" else ""))


def _work(base: Measured, point: Measured) -> list[str]:
    """Another amount of work for the same tokens."""
    one, other = base.first, point.first
    found = []
    if other.accumulation < one.accumulation:
        found.append(f"fewer micro-steps a step ({other.accumulation}, at the smallest point {one.accumulation}): "
                     "what each costs besides its tokens is paid less often")
    if other.micro_batch > one.micro_batch:
        found.append(f"a larger micro batch ({other.micro_batch}, at the smallest point {one.micro_batch}) "
                     "keeps a device busier")
    if other.ranks / other.nodes < one.ranks / one.nodes:
        found.append(f"fewer ranks a node ({other.ranks / other.nodes:g}, at the smallest point "
                     f"{one.ranks / one.nodes:g}) share its memory and cores")
    return found


def _parts(base: Measured, point: Measured) -> list[str]:
    """Parts of the traced step that got shorter for the same tokens, if they make up for a tenth of the gain."""
    before, after = base.split, point.split
    if before is None or after is None:
        return []
    work = base.first.step_tokens / base.ranks * point.ranks / point.first.step_tokens
    gains = {part: before[part] - after[part] * work for part in before}
    gain = base.step_time.value - point.step_time.value * work
    why = {"optimizer": "its state is divided over more ranks", "data": "less of it to read a rank",
           "compute": "smaller tensors stay in the caches, or the smallest point ran on slower or hotter cores"}
    return [f"{part} takes {seconds * 1e3:.1f} ms a step less for the same tokens"
            + (f" ({why[part]})" if part in why else "")
            for part, seconds in sorted(gains.items(), key=lambda item: -item[1]) if seconds > max(gain, 0) / 10]


def _memory(base: Measured, point: Measured) -> list[str]:
    found = []
    for kind in ("device", "host"):
        before, after = (getattr(one, f"peak_{kind}_bytes") for one in (base, point))
        if before and after and after < _LESS * before:
            found.append(f"a rank takes {after / 2**30:.2f} GiB of {kind} memory, at the smallest point "
                         f"{before / 2**30:.2f}: that may have been short of it, or beyond its caches")
    return found


def _unsteady(base: Measured) -> list[str]:
    steps = base.steps
    if steps.high > _SPREAD * steps.median:
        return [f"the smallest point was not steady: a tenth of its steps took longer than {steps.high * 1e3:.1f} "
                f"ms, the median is {steps.median * 1e3:.1f}"]
    return []
