"""Model of one layer, micro-batches of a step, and the Dist of a single CPU rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.data.samples import IGNORED
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.verify.certify.reference import make_engine

LENGTH, BATCH, ACCUMULATION, VOCABULARY = 32, 4, 2, 90


def one_layer(dropout: float = 0.0) -> ModelConfig:
    """Return the config of a GPT-2 with one layer and a padded vocabulary."""
    return get_model_config("tiny-gpt2", n_layer=1, n_head=2, n_kv_head=2, n_embd=32, block_size=LENGTH,
                            vocab_size=VOCABULARY, vocab_multiple=32, dropout=dropout)


def micro_batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and targets of a step, with some targets ignored."""
    tokens = np.random.default_rng(seed).integers(VOCABULARY, size=(BATCH, LENGTH + 1))
    targets = tokens[:, 1:].copy()
    targets[::3, :5] = IGNORED
    return [(torch.from_numpy(part.copy()), torch.from_numpy(part_targets.copy()))
            for part, part_targets in zip(np.split(tokens[:, :-1], ACCUMULATION), np.split(targets, ACCUMULATION),
                                          strict=True)]


def single_rank(folder: Path) -> Dist:
    """Return the Dist of a single CPU rank with this run directory."""
    return Dist(RankInfo(0, 1, 0, 1, 0, "test"), torch.device("cpu"), None, Mesh(Degrees(1), 0), RunDir(folder))


def one_layer_engine(dist: Dist, *, clip: float, precision: str = "fp32",
                     optimizer: str = "adamw") -> MicroStepEngine:
    """Build the engine of `ddp` on a single rank."""
    resolved = resolve(Request("ddp", world_size=1, global_batch=BATCH, accumulation=ACCUMULATION, clip=clip,
                               precision=precision, device="cpu", optimizer=optimizer))
    engine = make_engine(one_layer(), resolved, dist)
    assert isinstance(engine, MicroStepEngine)
    return engine
