"""What is around a step and beneath it, held to its definition: right as it is, refused with a fault in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ezpz_llm.base import UserError
from ezpz_llm.certify import (
    definitions,
    dropout_masks,
    loss_scaling,
    schedule_rates,
    tensor_parts,
    trainer_run,
    wide_sums,
)
from ezpz_llm.certify.lead import definitions as lead_definitions
from ezpz_llm.checkpoint import writer
from ezpz_llm.checkpoint.saver import HostMemory
from ezpz_llm.engine import build, gradients
from ezpz_llm.engine.gradients import NonFiniteStepSkipper
from ezpz_llm.engine.precision import LossScale
from ezpz_llm.model.gpt import GPT
from ezpz_llm.model.tensor_parallel import RankedDropout
from ezpz_llm.trainer import loop, run
from ezpz_llm.trainer.schedule import SCHEDULES

settled, samples, state_of = LossScale.update, loop.micro_batches, run.resume_from_checkpoint
divided, masked = gradients._scale, RankedDropout.__init__


@pytest.mark.parametrize("topic", [schedule_rates, tensor_parts, loss_scaling, dropout_masks, wide_sums,
                                   pytest.param(trainer_run, marks=pytest.mark.full)])
def test_what_is_around_a_step_is_what_the_definition_says(topic: Any) -> None:
    assert list(topic.complaints()) == []


def consumed(session: Any) -> Iterator[Any]:
    """The samples of the step before."""
    position = session.position
    session.position = position.at(max(0, position.consumed - trainer_run.GLOBAL), position.sample_hash)
    yield from samples(session)
    session.position = position


@pytest.mark.parametrize(("topic", "of", "name", "fault", "why"), [
    (schedule_rates, SCHEDULES, "wsd", SCHEDULES["constant"], "wsd, a linear warm-up of 0 steps from 0:"),
    (schedule_rates, SCHEDULES, "WarmupLR", SCHEDULES["constant"], "WarmupLR, a linear warm-up of 1 steps"),
    (schedule_rates, SCHEDULES, "sine", SCHEDULES["constant"], "sine: certify has no definition"),
    (tensor_parts, tensor_parts, "common", lambda *parts: iter(()), "have in common is not []"),
    (tensor_parts, tensor_parts, "first_element", lambda shape, rank, size: 0, "rank 1 of 2 begins at element 0"),
    (tensor_parts, HostMemory, "copy", lambda memory, shard: shard, "in the background changes with the training"),
    (tensor_parts, GPT, "_tie", lambda model: None, "has another weight than the table"),
    (loss_scaling, LossScale, "update", lambda scale, finite: settled(scale, True), "the scale is"),
    (loss_scaling, gradients, "_scale", lambda optimizer, grads, norm, clip, scale: divided(
        optimizer, grads, norm, clip, 1.0), "factor of the gradients that the optimizer gets"),
    (loss_scaling, NonFiniteStepSkipper, "_before", lambda *args: None, "changed the state"),
    (dropout_masks, GPT, "eval", lambda model: model, "an evaluation has another loss"),
    (dropout_masks, dropout_masks, "dropout_seed", lambda config, dist: dist.rank, "draws the masks of ranks [0]"),
    (dropout_masks, dropout_masks, "recompute_blocks", lambda model, every: None, "computed 1 times a step, not 2"),
    (dropout_masks, RankedDropout, "__init__", lambda self, inner, rank: masked(self, inner, 0), "the same masks"),
    (wide_sums, build, "round_parameters", lambda model, precision: None, "do not begin as what"),
    (wide_sums, build, "autocast_forward", lambda model, device, precision: None, "products are torch.float32"),
    *(pytest.param(trainer_run, *fault, marks=pytest.mark.full) for fault in (
        (loop, "learning_rate", lambda step, config: config.lr, "step 1 of a run has the rate 0.002, not 0.001"),
        (loop, "micro_batches", consumed, "forward, step 2 of a run"),
        (writer, "restore", lambda states, device: None, "a resumed run with dropout has the losses"),
        (run, "resume_from_checkpoint", lambda *args: {**state_of(*args), "guard": None},
         "a resumed run skips steps of a norm above inf"),
        (GPT, "eval", lambda model: model, "an evaluation of a run with dropout gives"))),
])
def test_a_fault_is_named(topic: Any, of: Any, name: str, fault: Callable[..., Any], why: str,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(of, dict):
        monkeypatch.setitem(of, name, fault)
    else:
        monkeypatch.setattr(of, name, fault)
    found = next(topic.complaints(), None)
    assert found is not None
    assert why in found


def test_certify_ends_before_any_layout_where_they_do_not_end(tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions, "LIMIT_S", 0.05)
    with pytest.raises(UserError, match=r"the definition of the step: no end in 0\.05 s, in its start"):
        definitions.hold_to_definitions(tmp_path)


@pytest.mark.full
def test_a_process_of_their_own_checks_all_of_them(tmp_path: Path) -> None:
    definitions.hold_to_definitions(tmp_path)
    assert [one["what"] for one in lead_definitions(tmp_path)] == [
        "rates", "parts", "loss scale", "dropout", "sums", "trainer"]
