"""Differences between a case and the reference, with their bounds (imports no torch)."""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ezpz_llm.verify.certify.records import Worst

_AFTER_TRAINING = sys.maxsize
"""Value of `Finding.step` for what is compared after the last step."""


@dataclass(frozen=True)
class Finding:
    """A measured difference and its bound. It failed if `ratio` is above 1 or NaN.

    `step` is the step that it is about, from 1, or 0 for the state before the first step.
    """

    what: str
    value: float
    bound: float
    detail: str = ""
    step: int = _AFTER_TRAINING

    @property
    def ratio(self) -> float:
        """The difference in units of its bound."""
        if self.value == 0:
            return 0.0
        return math.inf if self.bound == 0 or not math.isfinite(self.value) else self.value / self.bound

    @property
    def failed(self) -> bool:
        """True if the difference exceeds the bound or is NaN."""
        return not self.ratio <= 1

    def __str__(self) -> str:
        return f"{self.what} differs by {self.value:.2g}, allowed {self.bound:.2g}{self.detail}"


class _CopyFinding(Finding):
    """Number of blocks whose replicas differ."""

    def __str__(self) -> str:
        return f"{self.what} is not bitwise equal: {self.value:.0f} of {self.detail} differ"


Numbers = dict[str, Any]
"""Numbers of a layout (`measured`) or of the reference (`expected`), by name.

`measured`: losses, held_out, norms (per step and rank); first, gradient and weight from `compare`; copy from
`differing_copies`; texts; again, with the loss, norms and weight of the last step after a resume. `expected`:
losses, held_out, norms, texts, noise; by parameter numel and the 2-norms gradient, weight and movement (difference
between last and initial weights)."""


PHASES = {"cover": "coverage", "first": "start", "loss": "forward", "gradient": "backward", "norm": "reduction",
          "weight": "optimizer", "copy": "copies", "text": "sampling", "again": "resume", "format": "format"}
"""Phase of a step by kind of finding, in the order of computation."""


def findings(measured: Numbers, expected: Numbers, n_layer: int, dtype: str) -> dict[str, list[Finding]]:
    """Return the comparisons of training steps by kind, in the order of computation."""
    return {
        "cover": _coverage_findings(measured, expected),
        "first": [Finding(f"initial weights of {name}", value, 0.0, f" on rank {rank}", 0)
                  for name, entry in measured["first"].items()
                  for rank, value in (_first_exceeding(entry["ranks"], 0.0),)],
        "loss": _loss_findings(measured, expected),
        "gradient": _parameter_findings("gradient", measured, expected,
                                        lambda name: (gradient_bound(name, n_layer, dtype)
                                                      * expected["gradient"][name]), FACTOR, step=1),
        "norm": _norm_findings(measured, expected, n_layer, dtype),
        "weight": _parameter_findings("weight", measured, expected, _min_weight_bound(expected),
                                      WEIGHT_FACTOR[dtype]),
        "copy": [_CopyFinding(f"the {label}{entry['where']}", entry["apart"], 0.0, f"{entry['compared']} blocks")
                 for label, entry in measured["copy"].items()],
    }


NOT_FINITE = [-1]
"""Text of a prompt whose logits are NaN or infinite."""


def end_findings(measured: Numbers, expected: Numbers, n_layer: int, dtype: str) -> dict[str, list[Finding]]:
    """Return the comparisons after training: of sampled texts, and of the last step after a resume."""
    differing = [row for row, text in enumerate(expected["texts"])
                 if measured["texts"][row] == NOT_FINITE or (text and measured["texts"][row] != text)]
    detail = f" of {sum(map(bool, expected['texts']))}" + (f"; first {differing[0]}" if differing else "")
    again, last = measured["again"], len(expected["losses"]) - 1
    title = f"step {last + 1} after a resume"
    return {
        "text": [Finding("the number of prompts with other most likely tokens", len(differing), 0.0, detail)],
        "again": [Finding(f"loss at {title}", _difference(again["loss"], expected["losses"][last]),
                          _loss_bound(expected)),
                  _norm_finding(title, again["norms"], last, expected, n_layer, dtype),
                  *_parameter_findings("weight", again, expected, _min_weight_bound(expected), WEIGHT_FACTOR[dtype],
                                       f" after {title}")],
    }


def sensitivity(expected: Numbers, dtype: str) -> dict[str, float | None]:
    """Return the sensitivity of certify: bounds relative to the change over all steps.

    "loss" is relative to the decrease of the loss; "weights" and "weights_largest" are the median and the maximum
    over parameters, relative to the movement of their weights.
    """
    floor = _min_weight_bound(expected)
    shares = [_share(_bound("weight", name, expected, floor, WEIGHT_FACTOR[dtype]), moved)
              for name, moved in expected["movement"].items()]
    return {"loss": _share(_loss_bound(expected), expected["losses"][0] - expected["losses"][-1]),
            "weights": statistics.median(shares), "weights_largest": max(shares)}


def _share(bound: float, effect: float) -> float:
    return bound / effect if effect > 0 else math.inf


def worst(entries: list[Finding]) -> Finding:
    """Return the comparison with the largest ratio."""
    return max(entries, key=lambda finding: finding.ratio)


def failures(by_kind: dict[str, list[Finding]], phases: Mapping[str, str] = PHASES) -> list[str]:
    """Return a line for each kind with failures: its first failure, and the number of other failures.

    "First" is in the order of computation, which is closer to the bug than the failure with the largest ratio. So
    is the order of the lines: by step, then by phase.
    """
    lines = []
    for kind, entries in by_kind.items():
        if failed := [finding for finding in entries if finding.failed]:
            suffix = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            lines.append((failed[0].step, f"{phases[kind]}: {failed[0]}{suffix}"))
    return [line for _, line in sorted(lines, key=lambda item: item[0])]


def worst_by_kind(by_kind: dict[str, list[Finding]]) -> dict[str, Worst]:
    """Return each kind's comparison with the largest ratio, and its number of comparisons."""
    return {kind: Worst(top.what, float(top.value), top.bound, top.detail, top.ratio, len(entries))
            for kind, entries in by_kind.items() if entries for top in (worst(entries),)}


def _coverage_findings(measured: Numbers, expected: Numbers) -> list[Finding]:
    return [Finding(f"the number of compared elements of {name} ({kind})",
                    abs(measured[kind].get(name, {"elements": 0})["elements"] - numel), 0.0,
                    f": {measured[kind].get(name, {'elements': 0})['elements']} of {numel}", 0)
            for kind in ("gradient", "weight") for name, numel in expected["numel"].items()]


def _loss_findings(measured: Numbers, expected: Numbers) -> list[Finding]:
    bound = _loss_bound(expected)
    steps = [Finding(f"loss at step {step}", _difference(actual, loss), bound, step=step)
             for step, (actual, loss) in enumerate(zip(measured["losses"], expected["losses"], strict=True), 1)]
    held_out = _difference(measured["held_out"], expected["held_out"])
    return [*steps, Finding("loss after the last step", held_out, bound)]


def _loss_bound(expected: Numbers) -> float:
    return max(MIN_LOSS, FACTOR * expected["noise"].loss)


def _norm_findings(measured: Numbers, expected: Numbers, n_layer: int, dtype: str) -> list[Finding]:
    return [replace(_norm_finding(f"step {step}", norms, step - 1, expected, n_layer, dtype), step=step)
            for step, norms in enumerate(measured["norms"], 1)]


def _norm_finding(title: str, norms: Sequence[float], step: int, expected: Numbers, n_layer: int,
                  dtype: str) -> Finding:
    """Compare the gradient norm of each rank with the reference's at a step, counted from 0.

    The relative bound is at least the largest gradient bound of a parameter, plus K fp32 roundings: of a tensor's
    norm, of its square, of their sum, and of its root.
    """
    norm, noise = expected["norms"][step], expected["noise"].norm[step]
    rounding = max(gradient_bound(name, n_layer, dtype) for name in expected["gradient"]) + K * ROUNDING["fp32"]
    bound = max(rounding, FACTOR * noise / norm)
    apart = {rank: _difference(value, norm) / norm for rank, value in enumerate(norms)}
    rank, value = _first_exceeding(apart, bound)
    return Finding(f"gradient norm at {title}", value, bound,
                   f" (relative): {norms[rank]:.6g} on rank {rank}, {norms[rank] / norm:.4g} times the reference's")


def _min_weight_bound(expected: Numbers) -> Callable[[str], float]:
    """Return a function from a parameter's name to the minimum bound of its weights.

    The bound is one fp32 rounding, since master weights are fp32 in every recipe, plus 2^-25 per step for the decay
    factor 1 - lr x decay, which torch's AdamW rounds to fp32 and DeepSpeed's CPU Adam does not.
    """
    steps = len(expected["losses"])
    return lambda name: (ROUNDING["fp32"] + steps * 2.0 ** -25) * expected["weight"][name]


def _bound(kind: str, name: str, expected: Numbers, minimum: Callable[[str], float], factor: float) -> float:
    return max(minimum(name), factor * getattr(expected["noise"], kind)[name])


def _parameter_findings(kind: str, measured: Numbers, expected: Numbers,
                        minimum: Callable[[str], float], factor: float, when: str = "",
                        step: int = _AFTER_TRAINING) -> list[Finding]:
    title = {"gradient": "gradient", "weight": "weights"}[kind]
    findings = []
    for name in backward_order(measured[kind]):
        entry = measured[kind][name]
        scale = expected[kind][name] or 1.0
        bound = _bound(kind, name, expected, minimum, factor) / scale
        findings.append(Finding(f"{title} of {name}{when}", entry["difference"] / scale, bound, " (relative)",
                                step))
        rank, copy = _first_exceeding({rank: value / scale for rank, value in entry["ranks"].items()}, bound)
        findings.append(Finding(f"{title} of {name}{when} on rank {rank}", copy, bound, " (relative)", step))
    return findings


def _difference(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a) else math.inf


def _first_exceeding(apart: Mapping[int, float], bound: float) -> tuple[int, float]:
    """Return the first rank whose difference exceeds the bound, else that with the largest; and its difference."""
    return next(((rank, value) for rank, value in apart.items() if value > bound),
                max(apart.items(), key=lambda item: item[1]))


# Constants of the bounds. None was fitted to a layout: docs/evidence/certify.md has their sources.
ROUNDING = {"fp32": 2.0 ** -24, "bf16_autocast": 2.0 ** -8, "bf16": 2.0 ** -8}
"""Rounding error by recipe: half the spacing of numbers in the dtype of matmul outputs."""
K, C = 4.0, 1.03
"""Constants of the gradient bound: K roundings at the head, times C for each layer before it."""
FACTOR = 5.0
"""Bound as a multiple of the baseline noise."""
WEIGHT_FACTOR = {"fp32": FACTOR, "bf16_autocast": 3.0, "bf16": 3.0}
"""Like FACTOR, for weights. In bf16, five times the noise would exceed a tenth of the weights' movement."""
MIN_LOSS = 1e-5
"""Minimum bound of losses."""


_LAYER = re.compile(r"transformer\.h\.(\d+)\.")


def depth(name: str, n_layer: int) -> int:
    """Return a parameter's distance from the loss: 0 for the head, 1 for the last layer, L + 1 for embeddings."""
    if match := _LAYER.match(name):
        return n_layer - int(match[1])
    return n_layer + 1 if name.startswith(("transformer.wte.", "transformer.wpe.")) else 0


_MODULES = ("lm_head", "transformer.ln_f", "mlp.c_proj", "mlp.c_fc", "mlp.c_gate", "ln_2", "attn.c_proj",
            "attn.c_attn", "ln_1", "transformer.wpe", "transformer.wte")
"""Modules in the order of the backward pass; layers are ordered by `depth` first."""


def backward_order(names: Iterable[str]) -> list[str]:
    """Sort parameters in the order in which the backward pass reaches them; tied embeddings come last."""
    names = list(names)
    layers = 1 + max((int(match[1]) for name in names if (match := _LAYER.match(name))), default=0)

    def place(name: str) -> tuple[int, int]:
        """Return the sort key of a parameter."""
        module = _LAYER.sub("", name).rpartition(".")[0]
        return depth(name, layers), _MODULES.index(module) if module in _MODULES else len(_MODULES)

    return sorted(names, key=place)


def gradient_bound(name: str, n_layer: int, dtype: str) -> float:
    """Return the bound of ||g - g_ref|| / ||g_ref|| (theorem 5.3 of TTrace, arXiv:2506.09280)."""
    return K * C ** depth(name, n_layer) * ROUNDING[dtype]
