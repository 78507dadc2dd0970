"""Trainer in one process against a plain definition of its steps: samples, rates, losses, evaluation, dropout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.samples import sample_windows
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.dist import Degrees
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import init_weights
from ezpz_llm.training.trainer.config import TrainConfig
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import dropout_seed, run
from ezpz_llm.verify.certify import plain_step
from ezpz_llm.verify.certify.plain_step import MicroBatch, Settings

LENGTH, MICRO, GLOBAL, STEPS, SEED, EVALUATED = 32, 2, 4, 6, 11, 64
PEAK, FLOOR, WARMUP, CLIP, DECAY, EPS, BETAS = 2e-3, 2e-4, 2, 0.5, 0.1, 1e-4, (0.9, 0.95)
SHAPE = {"n_layer": 1, "n_head": 2, "n_kv_head": 2, "n_embd": 32, "block_size": LENGTH}
WORDS = [word for name, value in {
    **SHAPE, "model": "tiny-gpt2", "corpus": "stdlib", "tokenizer": "bytes", "precision": "fp32", "device": "cpu",
    "ds_config": "ddp", "profile": "false", "sample_tokens": 0, "log_every": 1, "eval_tokens": EVALUATED,
    "steps": STEPS, "micro_batch_size": MICRO, "global_batch_size": GLOBAL, "seed": SEED, "lr": PEAK,
    "min_lr": FLOOR, "warmup_steps": WARMUP, "grad_clip": CLIP, "weight_decay": DECAY, "eps": EPS,
    "beta1": BETAS[0], "beta2": BETAS[1]}.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def lines_of(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Run training in this process and return its metrics lines."""
    assert run(parse([*WORDS, *words, "--run-dir", str(folder)])) == 0
    return list(read_lines(RunDir(folder).metrics))


def pairs(windows: np.ndarray) -> list[MicroBatch]:
    """Split windows (n, T + 1) into micro-batches."""
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous())
            for part in torch.from_numpy(windows.astype(np.int64)).split(MICRO)]


def test_a_run_is_the_definition_of_its_steps(tmp_path: Path) -> None:
    """Check that sample i is a function of (seed, i), the schedule is warm-up and cosine, the loss is the mean over
    micro-batches, and validation starts at the beginning of its split, with the weights after the last step."""
    lines = lines_of(tmp_path / "run", "--dropout", "0", "--save-every", "-1")
    data = TokenData.open(prepare("stdlib", "bytes"))
    config = get_model_config("tiny-gpt2", **SHAPE, vocab_size=data.vocab_size)
    model = GPT(config)
    init_weights(model, config, SEED)
    settings = Settings(config.n_head, config.n_kv_head, config.norm, config.norm_eps, config.rope_theta, CLIP,
                        BETAS, EPS, DECAY)
    state = plain_step.initial_state({name: value.detach().double() for name, value in model.named_parameters()})
    train, held_out = data.split("train"), data.split("val")
    for step, line in enumerate(lines):
        numbers = np.arange(GLOBAL * step, GLOBAL * (step + 1))
        windows = train.windows(sample_windows(len(train), LENGTH, SEED, numbers), LENGTH + 1)
        rate = plain_step.cosine_rate(step, PEAK, FLOOR, WARMUP, STEPS)
        loss, norm, state = plain_step.train_step(state, pairs(windows), rate, settings)
        assert norm > CLIP
        assert line["lr"] == pytest.approx(rate, rel=1e-9)
        assert line["loss"] == pytest.approx(loss, rel=1e-6), step
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-5), step
    assert len(lines) == STEPS
    windows = np.stack([held_out[start:start + LENGTH + 1] for start in range(0, EVALUATED, LENGTH)])
    evaluated = plain_step.evaluation_loss(state.weights, pairs(windows), settings)
    assert lines[-1]["val_loss"] == pytest.approx(evaluated, rel=1e-6)
    assert lines[-1]["val_tokens"] == EVALUATED


def test_a_resumed_run_draws_the_masks_of_an_unbroken_one(tmp_path: Path) -> None:
    whole = lines_of(tmp_path / "whole", "--dropout", "0.2", "--save-every", "3")
    saved = tmp_path / "whole" / "checkpoints" / "step-00000003"
    resumed = lines_of(tmp_path / "resumed", "--dropout", "0.2", "--save-every", "-1", "--resume", str(saved))
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole[3:]]


def test_who_draws_the_same_masks() -> None:
    """Check that tensor-parallel peers, with the same activations, and no other ranks share a dropout seed."""
    degrees = Degrees(dp=2, tp=2, pp=2, sp=2)

    def seed_of(rank: int) -> int:
        def place(*axes: Any) -> tuple[int, int]:
            ranks = degrees.peers(rank, *axes)
            return ranks.index(rank), len(ranks)

        return dropout_seed(TrainConfig(), SimpleNamespace(rank=rank, mesh=SimpleNamespace(place=place)))

    seeds = [seed_of(rank) for rank in range(16)]
    for rank, seed in enumerate(seeds):
        assert {other for other in range(16) if seeds[other] == seed} == set(degrees.peers(rank, "tp"))
