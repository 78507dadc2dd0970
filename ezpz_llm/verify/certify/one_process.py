"""Comparison of the steps of a single process with the step definition (`plain_step`).

Each phase is recomputed from the process's own output of the phase before it, so that its bound covers the rounding
of one phase only. The loss and the gradients are recomputed from the weights before the step, the moments from the
gradients, and the new weights from the moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ezpz_llm.core.base import UserError
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.verify.certify import plain_step, recipe
from ezpz_llm.verify.certify.plain_step import ARITHMETIC, MicroBatch, Settings, State, Tensors
from ezpz_llm.verify.certify.records import LargestRatio
from ezpz_llm.verify.certify.verdict import Finding, backward_order

DISAGREES = "one process disagrees with the definition of the step"
INCONSISTENT = "one process disagrees with itself"
PHASES = ("resume", "forward", "backward", "reduction", "optimizer", "evaluation")
"""Phases of a step in the order of computation. Only some steps follow a resume or precede an evaluation."""

FACTOR = 2.0
"""Bound of gradients, as a multiple of the difference between two plain steps with different summation orders."""
_SCALAR_FACTOR = 6.0
"""Like FACTOR, for scalars (loss, gradient norm, clip factor). Their spread is the root mean square over steps."""
_U = 2.0 ** -24
"""Unit roundoff of fp32."""
_MIN_TOLERANCE = 2.0 ** -120
"""Minimum absolute tolerance of an element: smaller second moments may be denormal."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of a process: the batches, and the loss that the process computed for them."""

    batches: Sequence[MicroBatch]
    loss: float


@dataclass(frozen=True)
class ObservedStep:
    """Recorded step of a process: input, states before and after it, and the reported loss and gradient norm.

    Attributes:
        title: name of the step in messages, for example "step 2".
        resumed: the saved state, if `before` was loaded from a checkpoint.
        evaluated: an evaluation with the weights after the step, if there was one.
    """

    title: str
    before: State
    after: State
    micro_batches: Sequence[MicroBatch]
    rate: float
    settings: Settings
    loss: float
    norm: float
    resumed: State | None = None
    evaluated: Evaluation | None = None


@dataclass(frozen=True)
class Comparison:
    """Comparison of a quantity, with its step and phase."""

    step: str
    phase: str
    finding: Finding

    def __str__(self) -> str:
        return f"{self.phase}, {self.step}: {self.finding}"


@dataclass(frozen=True)
class Spread:
    """Relative difference between two plain steps with different summation orders.

    For scalars, the root mean square over the steps; for gradients, the maximum over the steps by parameter.
    `scale` is the spread of the common factor of the gradients.
    """

    loss: float
    norm: float
    scale: float
    gradient: dict[str, float]


def settings_of(config: ModelConfig, clip: float, z_loss: float = 0.0, end_of_text: int | None = None) -> Settings:
    """Return the settings of the plain step for the recipe's hyperparameters."""
    return Settings(config.n_head, config.n_kv_head, config.norm, config.norm_eps, config.rope_theta, clip,
                    recipe.BETAS, recipe.EPS, recipe.WEIGHT_DECAY, z_loss,
                    "erf" if config.mlp == "gelu_erf" else "tanh", config.norm_order == "after",
                    (config.rope_factor, config.rope_low, config.rope_high, config.rope_context), end_of_text)


def state_of(engine: Engine) -> State:
    """Copy the training state of a single-rank engine to the CPU."""
    return State(whole_tensors(engine, "weight"), whole_tensors(engine, "exp_avg"),
                 whole_tensors(engine, "exp_avg_sq"), engine.training_state().optimizer_step)


def whole_tensors(engine: Engine, kind: str) -> dict[str, Tensor]:
    """Copy the weights or an optimizer state of a single-rank engine to the CPU, by parameter name."""
    tensors: dict[str, Tensor] = {}
    for piece in engine.training_state().slices():
        whole = tensors.setdefault(piece.name, torch.full(piece.shape, torch.nan))
        # A parameter of a script has no optimizer state before its first step.
        whole.view(-1)[piece.start:piece.stop] = piece.tensors.get(kind, torch.zeros(())).detach().cpu()
    return tensors


@dataclass(frozen=True)
class _Recomputed:
    loss: float
    norm: float
    gradients: Tensors


def _recompute(step: ObservedStep, dtype: str, seed: int | None = None) -> _Recomputed:
    """Recompute a step's loss and gradients with the plain step, in the arithmetic of the precision recipe.

    Args:
        seed: selects another summation order; None for the usual one.
    """
    arithmetic = ARITHMETIC[dtype] if seed is None else ARITHMETIC[dtype].reordered(seed)
    loss, gradients = plain_step.gradients(step.before.weights, step.micro_batches, step.settings, arithmetic)
    return _Recomputed(loss, plain_step.global_norm(gradients), gradients)


def compare_steps(steps: Sequence[ObservedStep], dtype: str,
                  spread: Spread | None = None) -> tuple[list[Comparison], Spread]:
    """Compare the steps of one process with the plain step.

    Args:
        spread: spread of the plain step for this model and dtype; by default, it is measured on these steps.

    Returns:
        The comparisons, ordered by step, phase and module, and the spread.
    """
    plain = [_recompute(step, dtype) for step in steps]
    if spread is None:
        spread = _measure_spread(plain, [_recompute(step, dtype, seed) for seed, step in enumerate(steps, 1)])
    comparisons: list[Comparison] = []
    for step, recomputed_step in zip(steps, plain, strict=True):
        by_phase = {"resume": _resume_findings(step),
                    "forward": [_loss_finding("loss", step.loss, recomputed_step.loss, spread)],
                    **_gradient_findings(step, recomputed_step, spread), "optimizer": _optimizer_findings(step),
                    "evaluation": _evaluation_findings(step, dtype, spread)}
        comparisons += [Comparison(step.title, phase, finding) for phase in PHASES for finding in by_phase[phase]]
    return comparisons, spread


def describe_failures(comparisons: Sequence[Comparison]) -> str | None:
    """Return the first failure and the number of failures as text, or None."""
    failed = [comparison for comparison in comparisons if comparison.finding.failed]
    if not failed:
        return None
    phases = ", ".join(dict.fromkeys(comparison.phase for comparison in failed))
    return f"{failed[0]} ({len(failed)} of {len(comparisons)} comparisons fail, in {phases})"


def raise_if_failed(comparisons: Sequence[Comparison], what: str, which: str) -> None:
    """Raise an error if any comparison failed.

    Args:
        what: DISAGREES or INCONSISTENT.
        which: name of the compared run.

    Raises:
        UserError: names the phase, the step and the module.
    """
    if (failure := describe_failures(comparisons)) is not None:
        raise UserError(f"{what}: {which}: {failure}", where="certify", exit_code=1,
                        instead="fix this first: every layout is compared with the single process")


def worst_by_phase(comparisons: Sequence[Comparison]) -> dict[str, LargestRatio]:
    """Return each phase's comparison with the largest ratio, for certify.json."""
    return {phase: LargestRatio(str(top), top.finding.ratio, len(part))
            for phase in PHASES if (part := [comparison for comparison in comparisons if comparison.phase == phase])
            for top in (max(part, key=lambda comparison: comparison.finding.ratio),)}


def _measure_spread(plain: Sequence[_Recomputed], reordered: Sequence[_Recomputed]) -> Spread:
    pairs = list(zip(plain, reordered, strict=True))
    return Spread(
        _rms([second.loss / first.loss - 1 for first, second in pairs]),
        _rms([second.norm / first.norm - 1 for first, second in pairs]),
        _rms([_common_factor(second.gradients, first.gradients) - 1 for first, second in pairs]),
        {name: max(_relative_difference(second.gradients[name], first.gradients[name]) for first, second in pairs)
         for name in plain[0].gradients})


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value ** 2 for value in values) / len(values))


def _relative_difference(value: Tensor, expected: Tensor) -> float:
    return _ratio((value - expected).norm().item(), expected.norm().item())


def _ratio(value: float, scale: float) -> float:
    return value / scale if scale else (0.0 if value == 0 else math.inf)


def _common_factor(values: Tensors, expected: Tensors) -> float:
    """Return the common factor between two sets of gradients: the median over parameters, robust to outliers."""
    each = [(values[name] * value).sum() / value.square().sum() for name, value in expected.items() if value.any()]
    return torch.stack(each).median().item()


def _resume_findings(step: ObservedStep) -> list[Finding]:
    """Check that the loaded state equals the saved one exactly."""
    if step.resumed is None:
        return []
    kinds = (("weights", step.resumed.weights, step.before.weights),
             ("first moments", step.resumed.first, step.before.first),
             ("second moments", step.resumed.second, step.before.second))
    steps = Finding("the optimizer's step count after the resume", abs(step.before.step - step.resumed.step), 0.0)
    return [steps, *(Finding(f"{title} of {name} after the resume",
                             torch.nan_to_num((loaded[name] - value).abs().max(), nan=math.inf).item(), 0.0)
                     for title, saved, loaded in kinds for name, value in saved.items())]


def _loss_finding(label: str, loss: float, expected: float, spread: Spread) -> Finding:
    # 16 roundings: the losses of tokens and their sum are computed in fp32.
    bound = (_SCALAR_FACTOR * spread.loss + 16 * _U) * abs(expected)
    return Finding(label, _nan_to_inf(abs(loss - expected)), bound, f": {loss:.7g}, not {expected:.7g}")


def _evaluation_findings(step: ObservedStep, dtype: str, spread: Spread) -> list[Finding]:
    """Compare the loss of an evaluation, with the bound of a training step's loss."""
    if step.evaluated is None:
        return []
    expected = plain_step.evaluation_loss(step.after.weights, step.evaluated.batches, step.settings,
                                          ARITHMETIC[dtype])
    return [_loss_finding("loss of the evaluation", step.evaluated.loss, expected, spread)]


def _gradient_findings(step: ObservedStep, plain: _Recomputed, spread: Spread) -> dict[str, list[Finding]]:
    """Compare gradients up to a common factor ("backward"), and the norm and that factor ("reduction")."""
    clipped, error = _recover_clipped_gradients(step)
    factor = plain_step.clip_factor(step.norm, step.settings.clip)
    scale = _common_factor(clipped, plain.gradients)
    each = []
    for name in backward_order(plain.gradients):
        length = plain.gradients[name].norm().item()
        recovery_error = _ratio(error[name].norm().item(), abs(scale) * length)
        difference = _ratio((clipped[name] - scale * plain.gradients[name]).norm().item(), abs(scale) * length)
        each.append(Finding(f"gradient of {name}", _nan_to_inf(difference),
                            FACTOR * spread.gradient[name] + recovery_error, " (relative)"))
    norm = Finding("gradient norm", _nan_to_inf(abs(step.norm / plain.norm - 1)),
                   _SCALAR_FACTOR * spread.norm + 16 * _U, f" (relative): {step.norm:.7g}, not {plain.norm:.7g}")
    recovery_error = _ratio(math.sqrt(sum(value.square().sum().item() for value in error.values())),
                            plain_step.global_norm(clipped))
    # `_ratio`, because a skipped step leaves the moments unchanged or reports an infinite norm: both divide by 0.
    scaled = Finding("factor by which the gradients are scaled before the optimizer",
                     _nan_to_inf(_ratio(abs(scale - factor), factor)),
                     _SCALAR_FACTOR * math.hypot(spread.scale, spread.norm) + recovery_error,
                     f" (relative): {scale:.7g}, where clipping a norm of {step.norm:.7g} to "
                     f"{step.settings.clip:g} gives {factor:.7g}")
    return {"backward": each, "reduction": [norm, scaled]}


def _recover_clipped_gradients(step: ObservedStep) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Recover the clipped gradients from the optimizer's first moments.

    Returns:
        The gradients, and the error bound of each element. A first moment is computed with two rounded products
        and a rounded sum, and 1 - beta1 is rounded to fp32.
    """
    beta1 = step.settings.betas[0]
    gradients, error = {}, {}
    for name, after in step.after.first.items():
        new, old = after.double(), step.before.first[name].double()
        gradients[name] = (new - beta1 * old) / (1 - beta1)
        error[name] = (4 * _U * (new.abs() + old.abs()) + _U * gradients[name].abs()) / (1 - beta1)
    return gradients, error


def _optimizer_findings(step: ObservedStep) -> list[Finding]:
    """Compare second moments and weights element by element, within a few fp32 roundings (_U) of the terms.

    Second moments are recomputed from the gradients, weights from the moments after the step. The bounds hold for
    gradients near Adam's epsilon too, because an element's update depends on its own gradient only.
    """
    clipped, error = _recover_clipped_gradients(step)
    before, after = step.before.to(torch.float64), step.after.to(torch.float64)
    expected = plain_step.update_moments(before, clipped, step.settings)
    beta2 = step.settings.betas[1]
    # Use the process's own moments; the loop below checks the second moments.
    updated = plain_step.update_weights(State(before.weights, after.first, after.second, expected.step), step.rate,
                                        step.settings)
    findings = [Finding("the optimizer's step count", abs(after.step - expected.step), 0.0)]
    for name in backward_order(expected.weights):
        g, off, old = clipped[name].abs(), error[name], before.second[name]
        second = expected.second[name]
        allowed = ((1 - beta2) * (2 * g * off + off ** 2) + 8 * _U * (old + second) + 2 * _U * g ** 2
                   + _MIN_TOLERANCE)
        findings.append(_worst_element(f"second moments of {name}", after.second[name], second, allowed))
    for name in backward_order(expected.weights):
        old, new = before.weights[name], updated.weights[name]
        allowed = 2 * _U * (old.abs() + new.abs()) + 16 * _U * (new - old).abs() + _MIN_TOLERANCE
        findings.append(_worst_element(f"weights of {name}", after.weights[name], new, allowed))
    return findings


def _worst_element(label: str, actual: Tensor, expected: Tensor, allowed: Tensor) -> Finding:
    """Return the finding of the element whose ratio of difference to bound is largest."""
    difference = torch.nan_to_num((actual - expected).abs(), nan=math.inf)
    worst = int((difference / allowed).flatten().argmax())
    return Finding(label, difference.flatten()[worst].item(), allowed.flatten()[worst].item(),
                   f" at element {worst}")


def _nan_to_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf
