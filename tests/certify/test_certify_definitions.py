"""Checks of the code around and beneath a step: they pass, and they notice faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from ezpz_llm.core.base import UserError
from ezpz_llm.training.checkpoint import reader, retention
from ezpz_llm.training.checkpoint.saver import CpuMemory
from ezpz_llm.training.engine import build, gradients, optimizer_state, sequence_parallel
from ezpz_llm.training.engine.gradients import NonFiniteStepSkipper
from ezpz_llm.training.engine.pipeline_engine import PipelineEngine
from ezpz_llm.training.engine.precision import LossScale
from ezpz_llm.training.engine.whole_matrices import WholeMatrices
from ezpz_llm.training.layout.optimizers import muon
from ezpz_llm.training.model import document_mask, gpt, init, loss, tensor_parallel
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.tensor_parallel import RankedDropout
from ezpz_llm.training.trainer import loop, run
from ezpz_llm.training.trainer.schedule import SCHEDULES
from ezpz_llm.verify.certify import (
    architectures,
    definitions,
    dropout_masks,
    initial_weights,
    loss_scaling,
    muon_step,
    schedule_rates,
    tensor_parts,
    trainer_run,
    wide_sums,
)
from ezpz_llm.verify.certify.local_launches import read_definition_outcomes

update_scale, samples, state_of = LossScale.update, loop.micro_batches, run.resume_from_checkpoint
scale_gradients, init_dropout = gradients._scale_gradients, RankedDropout.__init__
replay_cpu_adam, shared = optimizer_state._replay_cpu_adam, sequence_parallel._shared
reduced, mask_of, draw_normal = loss.reduced, document_mask.document_mask, init._draw_normal
parameter_named, candidates, restore_scale = init.parameter_named, retention.candidates, LossScale.restore


@pytest.mark.parametrize("topic", [schedule_rates, initial_weights, tensor_parts, loss_scaling, dropout_masks,
                                   wide_sums, muon_step, architectures,
                                   pytest.param(trainer_run, marks=pytest.mark.full)])
def test_the_code_passes_its_checks(topic: Any) -> None:
    assert list(topic.find_problems()) == []


def previous_samples(session: Any, hashes: list[int]) -> Iterator[Any]:
    """Yield the samples of the previous step."""
    position = session.data.position
    session.data.position = position.at(max(0, position.consumed - trainer_run.GLOBAL), position.sample_hash)
    yield from samples(session, hashes)
    session.data.position = position


@pytest.mark.parametrize(("topic", "of", "name", "fault", "reason"), [
    (schedule_rates, SCHEDULES, "wsd", SCHEDULES["constant"], "wsd, a linear warm-up of 0 steps from 0:"),
    (schedule_rates, SCHEDULES, "WarmupLR", SCHEDULES["constant"], "WarmupLR, a linear warm-up of 1 steps"),
    (schedule_rates, SCHEDULES, "sine", SCHEDULES["constant"], "sine: certify has no definition"),
    (initial_weights, init, "initial_std", lambda *args, **named: 0.02,
     "the initial transformer.h.0.attn.c_proj.weight has a standard deviation of 0.02"),
    (initial_weights, init, "parameter_named", lambda name: replace(parameter_named(name), initial="ones"),
     "the initial transformer.wte.weight has a mean of 1"),
    (initial_weights, init, "_draw_normal", lambda columns, box, seed: draw_normal(columns, box, 1),
     "initial weights of a model of gpt2's scheme are repeated"),
    (tensor_parts, tensor_parts, "common", lambda *parts: iter(()), f"of a tensor {tensor_parts.SHAPE} is not []"),
    (tensor_parts, tensor_parts, "first_element", lambda shape, rank, size: 0, "rank 1 of 2 begins at element 0"),
    (tensor_parts, CpuMemory, "copy", lambda memory, shard: shard, "in the background changes with the training"),
    (tensor_parts, GPT, "_tie", lambda model: None, "the head is no longer tied to the embedding"),
    (tensor_parts, PipelineEngine, "_sum_over_replicas", lambda engine: torch.distributed.all_reduce(
        engine.module.table.weight.grad, group=engine._mesh.group("dp", "sp")), "over three pipelines add up to"),
    (tensor_parts, PipelineEngine, "_sum_over_replicas", lambda engine: None,
     "several pipelines have a part of the torch.float32 gradient of a tied embedding"),
    (tensor_parts, sequence_parallel, "_shared", lambda inner, *args, **named: shared(
        lambda tokens, *rest, first, sequences: inner(tokens, *rest, first=first, sequences=tokens),
        *args, **named), "do not get whole sequences"),
    (tensor_parts, optimizer_state, "_replay_cpu_adam", lambda optimizer, step: replay_cpu_adam(
        optimizer, step - 1), "CPU Adam resumed at step 40 has other powers of its betas"),
    (loss_scaling, LossScale, "update", lambda scale, finite: update_scale(scale, True), "the scale is"),
    (loss_scaling, LossScale, "restore", lambda scale, state: restore_scale(
        scale, structs.replace(state, tolerated=0)), "hysteresis=3"),
    (loss_scaling, gradients, "_scale_gradients", lambda optimizer, grads, norm, clip, scale: scale_gradients(
        optimizer, grads, norm, clip, 1.0), "factor by which the gradients are scaled before the optimizer"),
    (loss_scaling, NonFiniteStepSkipper, "_before", lambda *args: None, "changed the state"),
    (dropout_masks, GPT, "eval", lambda model: model, "the loss of an evaluation differs"),
    (dropout_masks, dropout_masks, "dropout_seed", lambda config, dist: dist.rank, "draws the masks of ranks [0]"),
    (dropout_masks, dropout_masks, "recompute_blocks", lambda model, every: None, "computed 1 times a step, not 2"),
    (dropout_masks, RankedDropout, "__init__", lambda self, inner, rank: init_dropout(self, inner, 0),
     "the same masks"),
    (wide_sums, build, "round_parameters", lambda model, precision: None, "initial weights are not rounded"),
    (wide_sums, build, "autocast_forward", lambda model, device, precision: None, "outputs are torch.float32"),
    (muon_step, muon, "_ITERATIONS", 4, "Muon, step 1: transformer.h.0.attn.c_attn.weight differs by"),
    (muon_step, WholeMatrices, "_sum_on_owner", lambda *args: None, "a function of matrices over 2 ranks differs"),
    (muon_step, muon, "_is_block_matrix", lambda name, dimensions: dimensions == 2,
     "Muon, step 1: transformer.wte.weight differs by"),
    (architectures, gpt, "_normalize_width", lambda norm, x: x, "olmo2: the loss on rank 0 has a relative error"),
    (architectures, document_mask, "document_mask", lambda tokens, end_of_text, dtype: mask_of(
        tokens, end_of_text + 1, dtype), "untied: the loss on rank 0 has a relative error of"),
    (architectures, tensor_parallel, "sum_gradients", lambda *args: None,
     "qwen3, on two tensor-parallel ranks: the gradient of transformer.h.0.attn.q_head_norm.weight on rank 0"),
    (architectures, loss, "reduced", lambda losses, targets, reduction: reduced(
        losses, targets, "mean" if reduction == "rows" else reduction), "the loss of a row on rank 0"),
    *(pytest.param(trainer_run, *fault, marks=pytest.mark.full) for fault in (
        (loop, "learning_rate", lambda step, config: config.lr,
         "step 1 of a run has the learning rate 0.002, not 0.001"),
        (loop, "micro_batches", previous_samples, "forward, step 2 of a run"),
        (reader, "restore_rng_states", lambda states, device: None, "a resumed run with dropout has the losses"),
        (run, "resume_from_checkpoint", lambda *args: structs.replace(state_of(*args), guard=None),
         "a resumed run skips steps with a gradient norm above inf"),
        (retention, "candidates", lambda where: candidates(where)[::-1],
         "a resume of a run of 5 steps begins with"),
        (GPT, "eval", lambda model: model, "an evaluation of a run with dropout gives"))),
])
def test_a_fault_is_named(topic: Any, of: Any, name: str, fault: Any, reason: str,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(of, dict):
        monkeypatch.setitem(of, name, fault)
    else:
        monkeypatch.setattr(of, name, fault)
    complaint = next(topic.find_problems(), None)
    assert complaint is not None
    assert reason in complaint


def test_checks_that_hang_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions, "LIMIT_S", 0.05)
    with pytest.raises(UserError, match=r"definition of the step: the checks did not finish within 0\.05 s "
                                        r"\(last: startup\)"):
        definitions.check_definitions(tmp_path)


@pytest.mark.full
def test_a_separate_process_checks_all_topics(tmp_path: Path) -> None:
    definitions.check_definitions(tmp_path)
    assert [topic.what for topic in read_definition_outcomes(tmp_path)] == [
        "rates", "initial weights", "parts", "loss scale", "dropout", "sums", "Muon", "architectures", "trainer"]
