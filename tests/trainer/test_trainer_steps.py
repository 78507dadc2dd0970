"""Steps of a run and of its resume, each compared with the step definition from the state before the step.

One step overflows at first, and must be repeated on the same samples. In the middle of the run there are an
evaluation on the validation split and a checkpoint, from which a second run resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training import checkpoint
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.samples import sample_windows
from ezpz_llm.training.data.shards import TokenStream
from ezpz_llm.training.dist import Degrees, Dist, Heartbeat, Mesh
from ezpz_llm.training.engine.precision import LossScale
from ezpz_llm.training.layout.ds_config_blocks import DynamicScale
from ezpz_llm.training.model.init import initial_values
from ezpz_llm.training.model.parameters import whole_box
from ezpz_llm.training.observe import WallClock
from ezpz_llm.training.trainer.callbacks.callback import Callback, CallbackContext
from ezpz_llm.training.trainer.loop import train
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import broadcast_resume_point, dropout_seed, start
from ezpz_llm.training.trainer.session import Session
from ezpz_llm.verify.certify import one_process, plain_step, recipe
from ezpz_llm.verify.certify.one_process import Evaluation, ObservedStep, settings_of, state_of
from ezpz_llm.verify.certify.plain_step import MicroBatch, State, cosine_rate

LENGTH, MICRO, GLOBAL, EVALUATED, SEED = 32, 2, 4, 64, 11
STEPS, SAVE_STEP, WARMUP, OVERFLOW_STEP = 5, 3, 2, 1
"""Number of steps; step of the checkpoint and evaluation; warm-up steps; step (from 0) that overflows at first."""
CLIP, SPIKE_LIMIT = 0.5, 50.0
TOO_LARGE = 2.0 ** 70
"""Loss scale under which the squares of gradients overflow fp32."""
OPTIONS = {
    "model": "tiny-gpt2", "n_layer": 1, "n_head": 2, "n_kv_head": 2, "n_embd": 32, "block_size": LENGTH,
    "tokenizer": "bytes", "precision": "fp32", "device": "cpu", "ds_config": "ddp", "profile": "false",
    "sample_tokens": 0, "log_every": 100, "eval_every": SAVE_STEP, "eval_tokens": EVALUATED,
    "save_every": SAVE_STEP, "steps": STEPS, "micro_batch_size": MICRO, "global_batch_size": GLOBAL, "seed": SEED,
    "lr": recipe.PEAK_LR, "min_lr": recipe.FLOOR_LR, "warmup_steps": WARMUP, "grad_clip": CLIP,
    "weight_decay": recipe.WEIGHT_DECAY, "eps": recipe.EPS, "beta1": recipe.BETAS[0], "beta2": recipe.BETAS[1],
    "spike_norm": 1e6, "loss_chunk": 24, "z_loss": recipe.Z_LOSS}


class Recorder(Callback):
    """Callback that records the states before and after each step (from 0). Set `session` before the first step."""

    session: Session

    def __init__(self, before_step: Callable[[Session, int], None]) -> None:
        self._before_step = before_step
        self.before: dict[int, State] = {}
        self.after: dict[int, State] = {}
        self.is_training = True

    def on_step_begin(self, context: CallbackContext) -> None:
        self._before_step(self.session, context.step)
        self.before[context.step] = state_of(self.session.engine)
        self.is_training &= all(module.training for module in context.module.modules())

    def on_step_end(self, context: CallbackContext) -> None:
        self.after[context.step - 1] = state_of(self.session.engine)


@dataclass(frozen=True)
class Run:
    """Finished run, with its metrics lines by step (from 0), and the seed and limit of the norm at its start."""

    session: Session
    lines: dict[int, dict[str, Any]]
    recorder: Recorder
    limit: float
    seed: int

    def split(self, name: str) -> TokenStream:
        tokens = self.session.data.tokens.split(name)
        assert isinstance(tokens, TokenStream)
        return tokens

    @property
    def checkpoint(self) -> Path:
        return self.session.dist.run_dir.checkpoints / f"step-{SAVE_STEP:08d}"

    def evaluation(self, step: int) -> Evaluation | None:
        """Return the evaluation after a step, or None if there is none."""
        if "val_loss" not in self.lines[step]:
            return None
        held_out = self.split("val")
        windows = np.stack([held_out[place:place + LENGTH + 1] for place in range(0, EVALUATED, LENGTH)])
        return Evaluation(pairs(windows), self.lines[step]["val_loss"])


def pairs(windows: np.ndarray) -> list[MicroBatch]:
    """Split windows (n, T + 1) into micro-batches."""
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous())
            for part in torch.from_numpy(windows.astype(np.int64)).split(MICRO)]


def overflow_once(session: Session, step: int) -> None:
    """Set a loss scale too large for one step, as in fp16; at step 0, set the limit of the gradient norm."""
    session.engine.loss_scale = LossScale(DynamicScale(start=TOO_LARGE)) if step == OVERFLOW_STEP else None
    if step == 0:
        session.spikes.restore(msgspec.structs.replace(session.spikes.state(), limit=SPIKE_LIMIT))


def run_trainer(folder: Path, tokens: Path, dropout: float = 0.0,
                before_step: Callable[[Session, int], None] = lambda *_: None, resume: Path | None = None) -> Run:
    """Train in this process, like `ezpz_llm.training.trainer.run` but without the summary at the end."""
    values = {**OPTIONS, "dropout": dropout, "corpus": tokens, **({} if resume is None else {"resume": resume})}
    arguments = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    dist = Dist(RankInfo(0, 1, 0, 1, 0, "test"), torch.device("cpu"), None, Mesh(Degrees(1), 0),
                RunDir(folder).create())
    options = broadcast_resume_point(parse(arguments), dist).options
    recorder = Recorder(before_step)
    recorder.session = session = start(options, dist, WallClock(), Heartbeat({}), [recorder])
    seed, limit = torch.initial_seed(), session.engine.step_skip.limit
    train(session)
    dist.side.close()
    lines = {line["step"] - 1: line for line in read_lines(dist.run_dir.metrics)}
    return Run(session, lines, recorder, limit, seed)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text.txt"
    text.write_text("".join(map(chr, np.random.default_rng(SEED).integers(97, 123, 20_000))))
    return prepare(str(text), "bytes", out=folder / "tokens", workers=1, progress=False)


@pytest.fixture(scope="module")
def first(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_trainer(tmp_path_factory.mktemp("first"), tokens, before_step=overflow_once)


@pytest.fixture(scope="module")
def resumed(first: Run, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_trainer(tmp_path_factory.mktemp("resumed"), tokens, resume=first.checkpoint)


@pytest.fixture(scope="module")
def with_dropout(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_trainer(tmp_path_factory.mktemp("dropout"), tokens, dropout=0.2)


def assert_steps(run: Run, begin: int, saved: State | None) -> None:
    """Compare every step from `begin` on with the step definition; `saved` is the state before a resume."""
    text, observed = run.split("train"), []
    assert list(run.lines) == list(run.recorder.after) == list(range(begin, STEPS))
    for step, line in run.lines.items():
        rate = cosine_rate(step, recipe.PEAK_LR, recipe.FLOOR_LR, WARMUP, STEPS)
        assert line["lr"] == pytest.approx(rate, rel=1e-9)
        numbers = np.arange(GLOBAL * step, GLOBAL * (step + 1))
        windows = text.windows(sample_windows(len(text), LENGTH, SEED, numbers), LENGTH + 1)
        loss, norm = (math.inf if line[name] is None else line[name] for name in ("loss", "grad_norm"))
        observed.append(ObservedStep(
            f"step {step + 1}", run.recorder.before[step], run.recorder.after[step], pairs(windows), rate,
            settings_of(run.session.plan.model, CLIP, recipe.Z_LOSS), loss, norm,
            saved if step == begin else None, run.evaluation(step)))
    assert one_process.describe_failures(one_process.compare_steps(observed, "fp32")[0]) is None
    assert run.session.data.position.consumed == GLOBAL * STEPS


def test_a_run_begins_with_the_weights_of_its_seed_and_without_moments(first: Run) -> None:
    values, state = initial_values(first.session.plan.model, SEED), first.recorder.before[0]
    for name, weight in state.weights.items():
        assert torch.equal(weight, values(name, whole_box(weight.shape))), name
    assert state.step == 0
    assert not any(value.any() for kind in (state.first, state.second) for value in kind.values())


def test_every_step_matches_the_definition(first: Run) -> None:
    assert_steps(first, 0, None)
    assert first.session.engine.skipped_steps > 0


def test_every_step_after_a_resume_matches_the_definition(first: Run, resumed: Run) -> None:
    assert_steps(resumed, SAVE_STEP, first.recorder.after[SAVE_STEP - 1])


def test_evaluations_follow_the_requested_step_and_the_last(first: Run) -> None:
    assert [step + 1 for step in first.lines if first.evaluation(step)] == [SAVE_STEP, STEPS]


def test_a_resume_begins_with_the_newest_checkpoint(first: Run) -> None:
    assert checkpoint.find(first.session.dist.run_dir.path).name == f"step-{STEPS:08d}"


def test_a_resumed_run_has_the_limit_of_the_norm_of_its_checkpoint(resumed: Run) -> None:
    assert resumed.limit == SPIKE_LIMIT


def test_a_run_with_dropout_begins_with_its_dropout_seed(with_dropout: Run) -> None:
    assert with_dropout.seed == dropout_seed(with_dropout.session.config, with_dropout.session.dist)


def test_dropout_is_on_in_steps_and_off_in_evaluations(with_dropout: Run) -> None:
    assert with_dropout.recorder.is_training
    for step in (SAVE_STEP - 1, STEPS - 1):
        evaluation = with_dropout.evaluation(step)
        assert evaluation is not None
        settings = settings_of(with_dropout.session.plan.model, CLIP)
        exact = plain_step.evaluation_loss(with_dropout.recorder.after[step].weights, evaluation.batches, settings)
        assert evaluation.loss == pytest.approx(exact, rel=1e-5)
