"""Verdict on a case: the bounds, and every measured difference beside its own (imports no torch)."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
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


class _Copies(Finding):
    """Blocks of copies that are not the same on all ranks."""

    def __str__(self) -> str:
        return f"{self.what} is not the same bits: {self.value:.0f} of {self.detail}"


Numbers = dict[str, Any]
"""`ours`: losses, held_out, norms (per step, of each rank), first, gradient and weight as `compare` gives them, and
copy as `copies_apart` does.
`theirs`: losses, held_out, norms, noise, and by parameter numel and the 2-norms gradient, weight and movement (of
the last step's weights from the first ones)."""


PHASES = {"cover": "coverage", "first": "start", "loss": "forward", "gradient": "backward", "norm": "reduction",
          "weight": "optimizer", "copy": "copies", "format": "format"}
"""Of a step, by the kind of findings that shows it; in the order of computation."""


def findings(ours: Numbers, theirs: Numbers, n_layer: int, dtype: str) -> dict[str, list[Finding]]:
    """Every comparison, by kind, in the order of computation: all kinds of PHASES but format."""
    return {
        "cover": _cover(ours, theirs),
        "first": [Finding(f"initial weights of {name}", value, 0.0, f" on rank {rank}")
                  for name, found in ours["first"].items()
                  for rank, value in (_first_beyond(found["ranks"], 0.0),)],
        "loss": _losses(ours, theirs),
        "gradient": _parameters("gradient", ours, theirs,
                                lambda name: gradient_bound(name, n_layer, dtype) * theirs["gradient"][name]),
        "norm": _norms(ours, theirs, n_layer, dtype),
        "weight": _parameters("weight", ours, theirs, _least_weight(theirs)),
        "copy": [_Copies(f"the {what}{seen['where']}", seen["apart"], 0.0, f"{seen['compared']} blocks of elements")
                 for what, seen in ours["copy"].items()],
    }


def sight(theirs: Numbers) -> dict[str, float]:
    """What share of the effect of all steps a bound is, so what certify can see: of the loss's fall, and of the
    movement of weights by parameter, the median and the largest.
    """
    least = _least_weight(theirs)
    shares = [_share(_bound("weight", name, theirs, least), moved) for name, moved in theirs["movement"].items()]
    return {"loss": _share(_loss_bound(theirs), theirs["losses"][0] - theirs["losses"][-1]),
            "weights": statistics.median(shares), "weights_largest": max(shares)}


def _share(bound: float, effect: float) -> float:
    return bound / effect if effect > 0 else math.inf


def worst(found: list[Finding]) -> Finding:
    """The comparison with the largest ratio."""
    return max(found, key=lambda one: one.ratio)


def failures(found: dict[str, list[Finding]], phases: Mapping[str, str] = PHASES) -> list[str]:
    """Return the failures, a sentence each after the phase, of each kind the first in the order of computation; a
    kind's others are counted.

    Where a fault is, is more often there than where the ratio is largest.
    """
    lines = []
    for kind, entries in found.items():
        if failed := [one for one in entries if one.failed]:
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            lines.append(f"{phases[kind]}: {failed[0]}{others}")
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
    bound = _loss_bound(theirs)
    steps = [Finding(f"loss at step {step}", _apart(mine, other), bound)
             for step, (mine, other) in enumerate(zip(ours["losses"], theirs["losses"], strict=True), 1)]
    return [*steps, Finding("loss after the last step", _apart(ours["held_out"], theirs["held_out"]), bound)]


def _loss_bound(theirs: Numbers) -> float:
    return max(LEAST_LOSS, FACTOR * theirs["noise"]["loss"])


def _norms(ours: Numbers, theirs: Numbers, n_layer: int, dtype: str) -> list[Finding]:
    """The whole gradient is no farther off, relatively, than the parameter that may be farthest."""
    rounding = max(gradient_bound(name, n_layer, dtype) for name in theirs["gradient"])
    found = []
    for step, (mine, other, noise) in enumerate(
            zip(ours["norms"], theirs["norms"], theirs["noise"]["norm"], strict=True), 1):
        bound = max(rounding, FACTOR * noise / other)
        apart = {rank: _apart(value, other) / other for rank, value in enumerate(mine)}
        rank, value = _first_beyond(apart, bound)
        found.append(Finding(f"gradient norm at step {step}", value, bound,
                             f" (relative): {mine[rank]:.6g} on rank {rank}, {mine[rank] / other:.4g} times the "
                             "reference's"))
    return found


def _least_weight(theirs: Numbers) -> Callable[[str], float]:
    """Weights of any dtype are fp32: a last rounding apart is no difference. Nor is the factor of decay, 1 - rate x
    decay, on each step: torch's AdamW rounds it to fp32 (half a spacing below 1), DeepSpeed's for CPUs does not.
    """
    steps = len(theirs["losses"])
    return lambda name: (ROUNDING["fp32"] + steps * 2.0 ** -25) * theirs["weight"][name]


def _bound(kind: str, name: str, theirs: Numbers, least: Callable[[str], float]) -> float:
    return max(least(name), FACTOR * theirs["noise"][kind][name])


def _parameters(kind: str, ours: Numbers, theirs: Numbers, least: Callable[[str], float]) -> list[Finding]:
    title = {"gradient": "gradient", "weight": "weights"}[kind]
    found = []
    for name in in_order(ours[kind]):
        mine = ours[kind][name]
        scale = theirs[kind][name] or 1.0
        bound = _bound(kind, name, theirs, least) / scale
        found.append(Finding(f"{title} of {name}", mine["difference"] / scale, bound, " (relative)"))
        rank, copy = _first_beyond({rank: value / scale for rank, value in mine["ranks"].items()}, bound)
        found.append(Finding(f"{title} of {name} on rank {rank}", copy, bound, " (relative)"))
    return found


def _apart(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a) else math.inf


def _first_beyond(apart: Mapping[int, float], bound: float) -> tuple[int, float]:
    """The first rank whose difference is beyond the bound, or that of the largest one; and the difference."""
    return next(((rank, value) for rank, value in apart.items() if value > bound),
                max(apart.items(), key=lambda one: one[1]))


# How far two right runs may lie apart. No constant here was fitted to a layout.
ROUNDING = {"fp32": 2.0 ** -24, "bf16_autocast": 2.0 ** -8, "bf16": 2.0 ** -8}
"""By recipe: half the distance of neighbouring numbers of the format that matrix products are rounded to."""
K, C = 4.0, 1.03
FACTOR = 5.0
LEAST_LOSS = 1e-5


_LAYER = re.compile(r"transformer\.h\.(\d+)\.")


def depth(name: str, n_layer: int) -> int:
    """L + 1 - l of a parameter: 0 at the head, 1 for the last of L layers, L + 1 for the embeddings."""
    if found := _LAYER.match(name):
        return n_layer - int(found[1])
    return n_layer + 1 if name.startswith(("transformer.wte.", "transformer.wpe.")) else 0


_BACKWARDS = ("lm_head", "transformer.ln_f", "mlp.c_proj", "mlp.c_fc", "mlp.c_gate", "ln_2", "attn.c_proj",
              "attn.c_attn", "ln_1", "transformer.wpe", "transformer.wte")
"""Modules, of a layer those of the same depth, the nearest to the loss first."""


def in_order(names: Iterable[str]) -> list[str]:
    """Parameters in the order in which the backward pass reaches them; a tied table by its lookup, last of all."""
    names = list(names)
    layers = 1 + max((int(found[1]) for name in names if (found := _LAYER.match(name))), default=0)

    def place(name: str) -> tuple[int, int]:
        """Where the backward pass comes to a parameter: by layer from the last, then by module."""
        module = _LAYER.sub("", name).rpartition(".")[0]
        return depth(name, layers), _BACKWARDS.index(module) if module in _BACKWARDS else len(_BACKWARDS)

    return sorted(names, key=place)


def gradient_bound(name: str, n_layer: int, dtype: str) -> float:
    """The largest relative difference of a parameter's gradient, ||g - g_ref|| / ||g_ref||."""
    return K * C ** depth(name, n_layer) * ROUNDING[dtype]
