"""Verdict on a case: the bounds, and every measured difference beside its own (imports no torch)."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A comparison with its bound; a `ratio` above 1 or NaN is a failure."""

    what: str
    value: float
    bound: float
    detail: str = ""

    @property
    def ratio(self) -> float:
        """The difference in units of its bound."""
        if self.value == 0:
            return 0.0
        return math.inf if self.bound == 0 or not math.isfinite(self.value) else self.value / self.bound

    @property
    def failed(self) -> bool:
        """True if it is beyond its bound."""
        return not self.ratio <= 1

    def __str__(self) -> str:
        return f"{self.what} differs by {self.value:.2g}, allowed {self.bound:.2g}{self.detail}"


Numbers = dict[str, Any]
"""`ours`: losses, held_out, norms (per step, of each rank), first, gradient and weight as `compare` gives them.
`theirs`: losses, held_out, norms, noise, and by parameter numel and the 2-norms gradient and weight."""


def findings(ours: Numbers, theirs: Numbers, n_layer: int, dtype: str) -> dict[str, list[Finding]]:
    """Every comparison, by kind: cover, first, loss, norm, gradient, weight."""
    return {
        "cover": _cover(ours, theirs),
        "first": [Finding(f"initial weights of {name}", found["copy"], 0.0, _where(found))
                  for name, found in ours["first"].items()],
        "loss": _losses(ours, theirs),
        "norm": _norms(ours, theirs, n_layer, dtype),
        "gradient": _parameters("gradient", ours, theirs,
                                lambda name: gradient_bound(name, n_layer, dtype) * theirs["gradient"][name]),
        # Weights of any dtype are fp32: a last rounding apart is no difference.
        "weight": _parameters("weight", ours, theirs, lambda name: ROUNDING["fp32"] * theirs["weight"][name]),
    }


def worst(found: list[Finding]) -> Finding:
    """The comparison with the largest ratio."""
    return max(found, key=lambda one: one.ratio)


def failures(found: dict[str, list[Finding]]) -> list[str]:
    """Return the failures, a sentence each, the worst of each kind first; a kind's others are counted."""
    lines = []
    for kind in found.values():
        failed = sorted((one for one in kind if one.failed), key=lambda one: -one.ratio)
        # The first step that is wrong says more than the one that is most wrong.
        first = next((one for one in kind if one.failed), None)
        if first is not None:
            shown = first if " at step " in first.what else failed[0]
            lines.append(f"{shown}" + (f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""))
    return lines


def as_json(found: dict[str, list[Finding]]) -> dict[str, Any]:
    """The worst of each kind, with the number of comparisons."""
    return {kind: {**asdict(worst(entries)), "ratio": worst(entries).ratio, "compared": len(entries)}
            for kind, entries in found.items() if entries}


def _cover(ours: Numbers, theirs: Numbers) -> list[Finding]:
    return [Finding(f"the number of elements of {name} ({kind}) that were compared",
                    abs(ours[kind].get(name, {"elements": 0})["elements"] - numel), 0.0,
                    f": {ours[kind].get(name, {'elements': 0})['elements']} of {numel}")
            for kind in ("gradient", "weight") for name, numel in theirs["numel"].items()]


def _losses(ours: Numbers, theirs: Numbers) -> list[Finding]:
    bound = max(LEAST_LOSS, FACTOR * theirs["noise"]["loss"])
    steps = [Finding(f"loss at step {step}", _apart(mine, other), bound)
             for step, (mine, other) in enumerate(zip(ours["losses"], theirs["losses"], strict=True), 1)]
    return [*steps, Finding("loss after the last step", _apart(ours["held_out"], theirs["held_out"]), bound)]


def _norms(ours: Numbers, theirs: Numbers, n_layer: int, dtype: str) -> list[Finding]:
    """The whole gradient is no farther off, relatively, than the parameter that may be farthest."""
    rounding = max(gradient_bound(name, n_layer, dtype) for name in theirs["gradient"])
    found = []
    for step, (mine, other, noise) in enumerate(
            zip(ours["norms"], theirs["norms"], theirs["noise"]["norm"], strict=True), 1):
        rank, value = max(enumerate(mine), key=lambda pair: _apart(pair[1], other))
        found.append(Finding(f"gradient norm at step {step}", _apart(value, other) / other,
                             max(rounding, FACTOR * noise / other),
                             f" (relative): {value:.6g} on rank {rank}, {value / other:.4g} times the reference's"))
    return found


def _parameters(kind: str, ours: Numbers, theirs: Numbers, least: Any) -> list[Finding]:
    title = {"gradient": "gradient", "weight": "weights"}[kind]
    found = []
    for name, mine in ours[kind].items():
        scale = theirs[kind][name] or 1.0
        bound = max(least(name), FACTOR * theirs["noise"][kind][name]) / scale
        found.append(Finding(f"{title} of {name}", mine["difference"] / scale, bound, " (relative)"))
        found.append(Finding(f"{title} of {name} on rank {mine['rank']}", mine["copy"] / scale, bound,
                             " (relative)"))
    return found


def _apart(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a) else math.inf


def _where(found: dict[str, float]) -> str:
    return f" on rank {found['rank']}"


# How far two right runs may lie apart. No constant here was fitted to a layout.
ROUNDING = {"fp32": 2.0 ** -24, "bf16": 2.0 ** -8}
"""By recipe: half the distance of neighbouring numbers of the format that matrix products are rounded to."""
K, C = 4.0, 1.03
FACTOR = 5.0
LEAST_LOSS = 1e-5


def depth(name: str, n_layer: int) -> int:
    """L + 1 - l of a parameter: 0 at the head, 1 for the last of L layers, L + 1 for the embeddings."""
    if found := re.match(r"transformer\.h\.(\d+)\.", name):
        return n_layer - int(found[1])
    return n_layer + 1 if name.startswith(("transformer.wte.", "transformer.wpe.")) else 0


def gradient_bound(name: str, n_layer: int, dtype: str) -> float:
    """The largest relative difference of a parameter's gradient, ||g - g_ref|| / ||g_ref||."""
    return K * C ** depth(name, n_layer) * ROUNDING[dtype]
