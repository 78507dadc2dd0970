"""Hold one process to the definition of the step: every step it made, from the state it made it from.

Each phase is judged on what the phase before it gave, so that a bound is that of one phase's rounding alone: the
loss and the gradients are those of the weights before the step, the moments those of the gradients, the new
weights those of the moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ezpz_llm.base import UserError
from ezpz_llm.certify import plain_step, recipe
from ezpz_llm.certify.plain_step import ARITHMETIC, MicroBatch, Settings, State, Tensors
from ezpz_llm.certify.verdict import Finding, in_order
from ezpz_llm.engine.base import Engine
from ezpz_llm.model.config import ModelConfig

DISAGREES = "one process disagrees with the definition of the step"
WITH_ITSELF = "one process disagrees with itself"
PHASES = ("resume", "forward", "backward", "reduction", "optimizer", "evaluation")
"""In the order of computation: a step begins with the state that it finds, and may be followed by an evaluation."""

FACTOR = 2.0
"""Times the distance of the plain step in another order: what vectors (gradients) may be apart."""
SCALAR_FACTOR = 6.0
"""The same for single numbers (loss, norm, clipping), whose distances are pooled over the steps."""
_U = 2.0 ** -24
_LEAST = 2.0 ** -120
"""A second moment below it may be a denormal number."""


@dataclass(frozen=True)
class Evaluated:
    """Batches that are never trained on, and the loss that a process said they have."""

    batches: Sequence[MicroBatch]
    loss: float


@dataclass(frozen=True)
class Observed:
    """A step that a process made: from `before` to `after`, and what it said of it.

    Attributes:
        title: in words, as "step 2".
        resumed: the state that was saved, where the one before this step was loaded.
        evaluated: with the weights after the step, where that was done.
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
    evaluated: Evaluated | None = None


@dataclass(frozen=True)
class Judged:
    """A comparison of one step in one phase."""

    step: str
    phase: str
    finding: Finding

    def __str__(self) -> str:
        return f"{self.phase}, {self.step}: {self.finding}"


@dataclass(frozen=True)
class Spread:
    """How far the plain step is from itself in another order, relatively: root mean squares over steps for numbers,
    the largest for the gradients, by parameter."""

    loss: float
    norm: float
    scale: float
    gradient: dict[str, float]


def settings_of(config: ModelConfig, clip: float, z_loss: float = 0.0) -> Settings:
    """The recipe's numbers for the plain step."""
    return Settings(config.n_head, config.n_kv_head, config.norm, config.norm_eps, config.rope_theta, clip,
                    recipe.BETAS, recipe.EPS, recipe.WEIGHT_DECAY, z_loss)


def state_of(engine: Engine) -> State:
    """A copy of what one process holds, on CPU. Only for engines of one rank."""
    parts: dict[str, dict[str, Tensor]] = {"weight": {}, "exp_avg": {}, "exp_avg_sq": {}}
    state = engine.training_state()
    for piece in state.slices():
        for kind, found in parts.items():
            found.setdefault(piece.name, torch.full(piece.shape, torch.nan)).view(-1)[piece.start:piece.stop] = (
                piece.tensors[kind].detach().cpu())
    return State(parts["weight"], parts["exp_avg"], parts["exp_avg_sq"], state.optimizer_step)


# The plain step of what was observed, in the recipe's arithmetic.
@dataclass(frozen=True)
class _Plain:
    loss: float
    norm: float
    gradients: Tensors


def _plain(one: Observed, dtype: str, seed: int | None = None) -> _Plain:
    arithmetic = ARITHMETIC[dtype] if seed is None else ARITHMETIC[dtype].reordered(seed)
    loss, found = plain_step.gradients(one.before.weights, one.micro_batches, one.settings, arithmetic)
    return _Plain(loss, plain_step.global_norm(found), found)


def judge(steps: Sequence[Observed], dtype: str, spread: Spread | None = None) -> tuple[list[Judged], Spread]:
    """Compare steps of one process with the plain step; in order of steps, phases and modules.

    Args:
        spread: of the plain step, where it was measured for this shape and dtype; else it is, on these steps.
    """
    plain = [_plain(one, dtype) for one in steps]
    if spread is None:
        spread = _spread(plain, [_plain(one, dtype, seed) for seed, one in enumerate(steps, 1)])
    found: list[Judged] = []
    for one, theirs in zip(steps, plain, strict=True):
        by_phase = {"resume": _resumed(one), "forward": [_loss("loss", one.loss, theirs.loss, spread)],
                    **_backward(one, theirs, spread), "optimizer": _optimizer(one),
                    "evaluation": _evaluation(one, dtype, spread)}
        found += [Judged(one.title, phase, finding) for phase in PHASES for finding in by_phase[phase]]
    return found, spread


def complaint(found: Sequence[Judged]) -> str | None:
    """What is wrong, the first of it with the number of the others, None if nothing is."""
    failed = [one for one in found if one.finding.failed]
    if not failed:
        return None
    phases = ", ".join(dict.fromkeys(one.phase for one in failed))
    return f"{failed[0]} ({len(failed)} of {len(found)} comparisons fail, in {phases})"


def refuse(found: Sequence[Judged], what: str, which: str) -> None:
    """End certify where a comparison failed.

    Args:
        what: DISAGREES or WITH_ITSELF.
        which: the run that was judged.

    Raises:
        UserError: names the phase, the step and the module.
    """
    if (why := complaint(found)) is not None:
        raise UserError(f"{what}: {which}: {why}", where="certify", exit_code=1,
                        instead="no certificate of any layout before one process is right")


def worst_by_phase(found: Sequence[Judged]) -> dict[str, dict[str, object]]:
    """The largest ratio of each phase, for the record."""
    return {phase: {"what": str(top), "ratio": top.finding.ratio, "compared": len(mine)}
            for phase in PHASES if (mine := [one for one in found if one.phase == phase])
            for top in (max(mine, key=lambda one: one.finding.ratio),)}


def _spread(plain: Sequence[_Plain], others: Sequence[_Plain]) -> Spread:
    pairs = list(zip(plain, others, strict=True))
    return Spread(
        _rms([other.loss / one.loss - 1 for one, other in pairs]),
        _rms([other.norm / one.norm - 1 for one, other in pairs]),
        _rms([_scale(other.gradients, one.gradients) - 1 for one, other in pairs]),
        {name: max(_apart(other.gradients[name], one.gradients[name]) for one, other in pairs)
         for name in plain[0].gradients})


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value ** 2 for value in values) / len(values))


def _apart(mine: Tensor, theirs: Tensor) -> float:
    return _ratio((mine - theirs).norm().item(), theirs.norm().item())


def _ratio(value: float, scale: float) -> float:
    return value / scale if scale else (0.0 if value == 0 else math.inf)


def _scale(mine: Tensors, theirs: Tensors) -> float:
    """How many times as large gradients are: the median over the parameters, which a wrong one does not move."""
    each = [(mine[name] * value).sum() / value.square().sum() for name, value in theirs.items() if value.any()]
    return torch.stack(each).median().item()


# The phases. Bounds of what fp32 rounds, element by element: _U a rounding, times how many of which numbers.
def _resumed(one: Observed) -> list[Finding]:
    """What was loaded is what was saved, to the last bit."""
    if one.resumed is None:
        return []
    kinds = (("weights", one.resumed.weights, one.before.weights),
             ("first moments", one.resumed.first, one.before.first),
             ("second moments", one.resumed.second, one.before.second))
    steps = Finding("the optimizer's step count after the resume", abs(one.before.step - one.resumed.step), 0.0)
    return [steps, *(Finding(f"{title} of {name} after the resume",
                             torch.nan_to_num((now[name] - value).abs().max(), nan=math.inf).item(), 0.0)
                     for title, saved, now in kinds for name, value in saved.items())]


def _loss(what: str, mine: float, theirs: float, spread: Spread) -> Finding:
    # The tokens' losses are fp32, and so are their sums.
    bound = (SCALAR_FACTOR * spread.loss + 16 * _U) * abs(theirs)
    return Finding(what, _finite(abs(mine - theirs)), bound, f": {mine:.7g}, not {theirs:.7g}")


def _evaluation(one: Observed, dtype: str, spread: Spread) -> list[Finding]:
    """A forward pass rounds as much without a backward pass as with one."""
    if one.evaluated is None:
        return []
    theirs = plain_step.loss_of(one.after.weights, one.evaluated.batches, one.settings, ARITHMETIC[dtype])
    return [_loss("loss of the evaluation", one.evaluated.loss, theirs, spread)]


def _backward(one: Observed, theirs: _Plain, spread: Spread) -> dict[str, list[Finding]]:
    """Each parameter's gradient up to one common factor; and that factor, with the norm."""
    clipped, error = _clipped(one)
    factor = plain_step.clip_factor(one.norm, one.settings.clip)
    scale = _scale(clipped, theirs.gradients)
    each = []
    for name in in_order(theirs.gradients):
        length = theirs.gradients[name].norm().item()
        read = _ratio(error[name].norm().item(), abs(scale) * length)
        apart = _ratio((clipped[name] - scale * theirs.gradients[name]).norm().item(), abs(scale) * length)
        each.append(Finding(f"gradient of {name}", _finite(apart), FACTOR * spread.gradient[name] + read,
                            " (relative)"))
    norm = Finding("gradient norm", _finite(abs(one.norm / theirs.norm - 1)),
                   SCALAR_FACTOR * spread.norm + 16 * _U, f" (relative): {one.norm:.7g}, not {theirs.norm:.7g}")
    read = _ratio(math.sqrt(sum(value.square().sum().item() for value in error.values())),
                  plain_step.global_norm(clipped))
    # A step that was not made has moved nothing, or says of its norm that it is infinite.
    scaled = Finding("factor of the gradients that the optimizer gets",
                     _finite(_ratio(abs(scale - factor), factor)),
                     SCALAR_FACTOR * math.hypot(spread.scale, spread.norm) + read,
                     f" (relative): {scale:.7g}, where clipping a norm of {one.norm:.7g} to "
                     f"{one.settings.clip:g} gives {factor:.7g}")
    return {"backward": each, "reduction": [norm, scaled]}


def _clipped(one: Observed) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients that the optimizer got, as its first moments show them, and how far off each may be read.

    A first moment is two products and a sum, and 1 - beta1 is what fp32 makes of it.
    """
    share = 1 - one.settings.betas[0]
    found, error = {}, {}
    for name, after in one.after.first.items():
        new, old = after.double(), one.before.first[name].double()
        found[name] = (new - (1 - share) * old) / share
        error[name] = (4 * _U * (new.abs() + old.abs()) + _U * found[name].abs()) / share
    return found, error


def _optimizer(one: Observed) -> list[Finding]:
    """Second moments of the gradients that the first moments show; weights of both moments.

    However near a gradient lies to Adam's epsilon, its own rounding is all that can move the update.
    """
    clipped, error = _clipped(one)
    before, after = one.before.to(torch.float64), one.after.to(torch.float64)
    due = plain_step.averaged(before, clipped, one.settings)
    share = 1 - one.settings.betas[1]
    # From the moments that it has, whatever these should be.
    moved = plain_step.moved(State(before.weights, after.first, after.second, due.step), one.rate, one.settings)
    found = [Finding("the optimizer's step count", abs(after.step - due.step), 0.0)]
    for name in in_order(due.weights):
        g, off, old = clipped[name].abs(), error[name], before.second[name]
        allowed = share * (2 * g * off + off ** 2) + 8 * _U * (old + due.second[name]) + 2 * _U * g ** 2 + _LEAST
        found.append(_elements(f"second moments of {name}", after.second[name], due.second[name], allowed))
    for name in in_order(due.weights):
        old, new = before.weights[name], moved.weights[name]
        allowed = 2 * _U * (old.abs() + new.abs()) + 16 * _U * (new - old).abs() + _LEAST
        found.append(_elements(f"weights of {name}", after.weights[name], new, allowed))
    return found


def _elements(what: str, mine: Tensor, theirs: Tensor, allowed: Tensor) -> Finding:
    """The element that is farthest off in units of its own bound."""
    apart = torch.nan_to_num((mine - theirs).abs(), nan=math.inf)
    worst = int((apart / allowed).flatten().argmax())
    return Finding(what, apart.flatten()[worst].item(), allowed.flatten()[worst].item(), f" at element {worst}")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
