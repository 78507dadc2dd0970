"""Self-checks of a run: first loss, gradients, optimizer coverage, and overfitting of one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather, all_reduce
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.group_norms import GroupNorms
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.model.init import decay_counts, initial_std
from ezpz_llm.training.model.parameters import parameter_shapes
from ezpz_llm.training.trainer.callbacks.callback import Callback, CallbackContext
from ezpz_llm.training.trainer.plan import RunPlan

_FIRST_LOSS_TOLERANCE = 0.3
"""Tolerance in nats of a first loss that is too high, if the embedding is tied.

The losses of batches of a few thousand tokens differ by 0.05.
"""
_FREQUENT_TOKENS_TOLERANCE = 1.0
"""Tolerance in nats of a first loss that is too low, or in an untied model too high.

Such a loss depends on frequent tokens, such as the spaces of indented code.

A tied model predicts its input token, which text often repeats: the loss of GPT-2 124M on the bytes of Python
source is 0.36 to 0.46 below the expected one (on an H200). In an untied model, the logit of a frequent token is
random: with Llama's initialization, 4 layers, and width 256, the loss on such text differed by -0.31 to 0.71 for 12
seeds.
"""
_OVERFIT_FRACTION = 0.5
"""The batch is overfitted if the last loss is below this fraction of the first."""


class SelfChecks(Callback):
    """Self-checks of a run at its first log, the same on every rank."""

    def __init__(self, plan: RunPlan, engine: Engine, first_step: int) -> None:
        self._config, self._model, self._verbose = plan.config, plan.model, plan.verbose
        self._engine = engine
        self._first = first_step == 0
        self._loaded = plan.init_weights_source is not None
        self._stepped: GroupNorms | None = None
        self._first_line: dict[str, Any] | None = None
        self._concluded = False
        self._losses: list[float | None] = []

    def on_step_end(self, context: CallbackContext) -> None:
        """Keep what the optimizer stepped in the first step, if the engine can tell."""
        if not self._concluded and self._first_line is None:
            self._stepped = self._engine.step_skip.last_measured

    def on_log(self, context: CallbackContext, lines: Sequence[dict[str, Any]]) -> None:
        """Check the run at its first log; print warnings, or with --verbose all results."""
        for line in lines:
            self.observe(line)
        if not (results := self.results(context.dist)):
            return
        for text in (["checks     " + "\n           ".join(results)] if self._verbose else
                     [text for text in results if text.startswith("warning: ")]):
            context.print(text)
        if context.dist.is_main:
            context.dist.side.update_record(context.dist.run_dir, checks=results)

    def observe(self, line: dict[str, Any]) -> None:
        """Keep this process's first metrics line, and its first and last loss."""
        self._first_line = self._first_line or line
        self._losses = [*self._losses[:1], line["loss"]]

    def results(self, dist: Dist) -> list[str]:
        """Return the results of the checks at the first flush, and nothing afterwards. Collective at that flush.

        Raises:
            UserError: the optimizer does not step exactly the model's parameters, with the right weight decay, or
                no gradient reaches a parameter of a new model.
        """
        if self._concluded or self._first_line is None:
            return []
        self._concluded = True
        updated = self._first_line["grad_norm"] and not self._first_line.get("skipped")
        stepped, self._stepped = self._stepped, None
        results = [*self._gradients(stepped, dist), self._optimizer(stepped, dist)] if stepped and updated else []
        if self._first and (loss := self._first_line["loss"]) is not None:
            remark = _first_loss_of_weights(self._model, loss) if self._loaded else first_loss(self._model, loss)
            results += [remark] if remark else []
        return results

    def _gradients(self, stepped: GroupNorms, dist: Dist) -> list[str]:
        names = list(parameter_shapes(self._model))
        index = {name: number for number, name in enumerate(names)}
        seen = torch.zeros(len(names), device=dist.device)
        for owners, norms in stepped.gradients:
            seen.index_add_(0, torch.tensor([index[name] for name in owners], device=dist.device),
                            (norms != 0).to(seen))
        counts = all_reduce(dist, seen).tolist()
        return check_reached([name for name, count in zip(names, counts, strict=True) if not count],
                             is_new=self._first and not self._loaded)

    def _optimizer(self, stepped: GroupNorms, dist: Dist) -> str:
        seen = torch.tensor([*stepped.elements, float(stepped.unknown_parameters)], dtype=torch.float64)
        *elements, unknown_parameters = (round(number) for number in all_reduce(dist, seen).tolist())
        all_ranks = all_gather(dist, stepped.decays)
        decays: list[set[float]] = [set().union(*(of_rank[group] for of_rank in all_ranks)) for group in (0, 1)]
        return check_stepped(self._model, elements, unknown_parameters, decays, self._config.weight_decay)

    def overfit_failure(self) -> str | None:
        """Return the failure of `--overfit-one-batch`; None if the run overfitted its batch."""
        first, last = self._losses[0], self._losses[-1]
        if first is not None and last is not None and last < _OVERFIT_FRACTION * first:
            return None
        return (f"failed to overfit one batch: the loss was {_show(first)} in the first step and is {_show(last)} "
                f"after {self._config.steps} steps")


def check_reached(names: list[str], is_new: bool) -> list[str]:
    """Return warnings about parameters whose gradients are zero or missing on all ranks.

    Args:
        is_new: the model has random initial weights, with which every parameter gets a gradient. Loaded weights may
            contain zeros that block gradients.

    Raises:
        UserError: a new model has such parameters.
    """
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    text = (f"no gradient reaches {', '.join(names[:3])}{more} in the first step (zero or missing on every "
            "rank)")
    if not is_new:
        return [f"warning: {text}"]
    raise UserError(text, where="the model's forward pass",
                    instead="make the loss depend on these parameters, which may be frozen, detached or unused",
                    exit_code=1)


def check_stepped(model: ModelConfig, elements: list[int], unknown_parameters: int, decays: list[set[float]],
                  weight_decay: float) -> str:
    """Compare the number of parameters that the optimizer steps, per decay group, with the model's.

    Raises:
        UserError: the numbers or the weight decays differ.
    """
    counts = decay_counts(model)
    expected = [size for _, size in counts]
    if elements != expected or unknown_parameters:
        more = f", and {unknown_parameters} values that are not model parameters" if unknown_parameters else ""
        raise UserError(f"the optimizer steps {elements[0]:,} parameters that decay and {elements[1]:,} that do not"
                        f"{more}; the model has {expected[0]:,} and {expected[1]:,}", where="the first step",
                        instead="report this with layout.json; results of this run are invalid",
                        exit_code=1)
    if not (decays[0] <= {weight_decay} and decays[1] <= {0.0}):
        raise UserError(f"weight decays are {sorted(decays[0])} for matrices and {sorted(decays[1])} for vectors, "
                        f"not {weight_decay:g} and 0", where="the optimizer's groups", exit_code=1)
    return (f"the optimizer steps all {sum(expected):,} parameters: {counts[0][0]} tensors / {expected[0]:,} with "
            f"weight decay {weight_decay:g}, {counts[1][0]} tensors / {expected[1]:,} without")


def first_loss(model: ModelConfig, loss: float) -> str:
    """Describe the actual and expected loss of an untrained model, as a warning if they differ too much."""
    expected = expected_first_loss(model)
    text = f"first loss {loss:.4f}, expected {expected:.2f} (ln V plus half the variance of the logits)"
    above = _FIRST_LOSS_TOLERANCE if model.tied else _FREQUENT_TOKENS_TOLERANCE
    if -_FREQUENT_TOKENS_TOLERANCE <= loss - expected <= above:
        return text
    tolerance = above if loss > expected else _FREQUENT_TOKENS_TOLERANCE
    return (f"warning: {text}: they differ by more than {tolerance}. Check the initialization, the "
            f"vocabulary ({model.vocab_size} tokens) and the targets")


def _first_loss_of_weights(model: ModelConfig, loss: float) -> str | None:
    """Return a warning if loaded weights predict worse than a uniform guess."""
    guess = math.log(model.vocab_size)
    if loss <= guess:
        return None
    return (f"warning: first loss {loss:.4f} of the loaded weights is above ln V = {guess:.2f}, the loss of a "
            f"uniform guess among {model.vocab_size} tokens. Check the tokenizer and the weights")


def expected_first_loss(model: ModelConfig) -> float:
    """Return ln V + C std^2 / 2, since logits of C unit-variance activations with weights N(0, std^2) have variance
    C std^2."""
    std = initial_std(model, "transformer.wte.weight" if model.tied else "lm_head.weight", fan_in=model.n_embd)
    return math.log(model.padded_vocab_size) + model.n_embd * std**2 / 2


def _show(loss: float | None) -> str:
    return "NaN or Inf" if loss is None else f"{loss:.4f}"
