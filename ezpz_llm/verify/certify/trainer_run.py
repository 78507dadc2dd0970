"""Checks of the trainer's loop against the step definition: a run, its resume, and both with dropout.

Every step is compared with the step definition, which starts from the state before the step and uses the correct
samples and learning rate. The logged loss and gradient norm are compared too. One step overflows at first and must
be repeated on the same samples. In the middle of the run there are an evaluation on the validation split and a
checkpoint, from which a second run resumes. With dropout, the losses of both runs must be bitwise equal.
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
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
from ezpz_llm.verify.certify.plain_step import EXACT, MicroBatch, State, cosine_rate

LENGTH, MICRO, GLOBAL, EVALUATED, SEED = 32, 2, 4, 64, 11
STEPS, _SAVE_STEP, WARMUP, _OVERFLOW_STEP = 5, 3, 2, 1
"""Number of steps; step of the checkpoint and evaluation; warm-up steps; step (from 0) that overflows at first."""
CLIP, _SPIKE_LIMIT, CHUNK = 0.5, 50.0, 24
TOO_LARGE = 2.0 ** 70
"""Loss scale under which the squares of gradients overflow fp32."""
_OPTIONS = {
    "model": "tiny-gpt2", "n_layer": 1, "n_head": 2, "n_kv_head": 2, "n_embd": 32, "block_size": LENGTH,
    "tokenizer": "bytes", "precision": "fp32", "device": "cpu", "ds_config": "ddp", "profile": "false",
    "sample_tokens": 0, "log_every": 100, "eval_every": _SAVE_STEP, "eval_tokens": EVALUATED,
    "save_every": _SAVE_STEP, "steps": STEPS, "micro_batch_size": MICRO, "global_batch_size": GLOBAL, "seed": SEED,
    "lr": recipe.PEAK_LR, "min_lr": recipe.FLOOR_LR, "warmup_steps": WARMUP, "grad_clip": CLIP,
    "weight_decay": recipe.WEIGHT_DECAY, "eps": recipe.EPS, "beta1": recipe.BETAS[0], "beta2": recipe.BETAS[1],
    "spike_norm": 1e6, "loss_chunk": CHUNK, "z_loss": recipe.Z_LOSS}


def find_problems() -> Iterator[str]:
    """Yield a message for each failed check of the trainer's loop."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        text = folder / "text.txt"
        text.write_text("".join(map(chr, np.random.default_rng(SEED).integers(97, 123, 20_000))))
        tokens = prepare(str(text), "bytes", out=folder / "tokens", workers=1, progress=False)
        first = _train(folder / "first", tokens, 0.0, _overflow_once)
        yield from _check_start(first)
        yield from _check_steps(first, 0, None)
        newest = checkpoint.find(first.session.dist.run_dir.path).name
        if newest != f"step-{STEPS:08d}":
            yield f"a resume of a run of {STEPS} steps begins with {newest}"
        resumed = _train(folder / "resumed", tokens, 0.0, resume=first.checkpoint)
        yield from _check_steps(resumed, _SAVE_STEP, first.after[_SAVE_STEP - 1])
        if resumed.limit != _SPIKE_LIMIT:
            yield (f"a resumed run skips steps with a gradient norm above {resumed.limit:g}, not above "
                   f"{_SPIKE_LIMIT:g} as before")
        yield from _check_masks(folder, tokens)


@dataclass(frozen=True)
class _Run:
    """Finished run: log lines and states before and after each step (from 0).

    `limit` is the gradient norm above which it skips steps, `seed` the initial torch seed, and `is_training` is
    True if all modules were in training mode before every step.
    """

    session: Session
    lines: dict[int, dict[str, Any]]
    before: dict[int, State]
    after: dict[int, State]
    limit: float
    seed: int
    is_training: bool

    def split(self, name: str) -> TokenStream:
        """Return the tokens of a split."""
        tokens = self.session.data.tokens.split(name)
        assert isinstance(tokens, TokenStream)
        return tokens

    @property
    def checkpoint(self) -> Path:
        """Checkpoint of step SAVED."""
        return self.session.dist.run_dir.checkpoints / f"step-{_SAVE_STEP:08d}"


class _StateRecorder(Callback):
    """Callback that records the states before and after each step. Set `session` before the first step."""

    session: Session

    def __init__(self, at: Callable[[Session, int], None]) -> None:
        self._at = at
        self.before: dict[int, State] = {}
        self.after: dict[int, State] = {}
        self.is_training = True

    def on_step_begin(self, context: CallbackContext) -> None:
        """Record the state, and check that all modules are in training mode."""
        self._at(self.session, context.step)
        self.before[context.step] = state_of(self.session.engine)
        self.is_training &= all(module.training for module in context.module.modules())

    def on_step_end(self, context: CallbackContext) -> None:
        """Record the state."""
        self.after[context.step - 1] = state_of(self.session.engine)


def _overflow_once(session: Session, step: int) -> None:
    """Set a loss scale too large for one step, as in fp16; at step 0, set the limit of the gradient norm."""
    scale = LossScale(DynamicScale(start=TOO_LARGE)) if step == _OVERFLOW_STEP else None
    session.engine._scale = scale
    if step == 0:
        session.spikes.restore(msgspec.structs.replace(session.spikes.state(), limit=_SPIKE_LIMIT))


def _train(folder: Path, tokens: Path, dropout: float, at: Callable[[Session, int], None] = lambda *_: None,
           resume: Path | None = None) -> _Run:
    """Train in one process, like `ezpz_llm.training.trainer.run` but without the summary at the end.

    Args:
        at: called before each step, with the session and the step number.
        resume: checkpoint to resume from.
    """
    values = {**_OPTIONS, "dropout": dropout, "corpus": tokens, **({} if resume is None else {"resume": resume})}
    arguments = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    dist = Dist(RankInfo(0, 1, 0, 1, 0, "certify"), torch.device("cpu"), None, Mesh(Degrees(1), 0),
                RunDir(folder).create())
    with contextlib.redirect_stdout(io.StringIO()):
        options = broadcast_resume_point(parse(arguments), dist).options
        recorder = _StateRecorder(at)
        recorder.session = session = start(options, dist, WallClock(), Heartbeat({}), [recorder])
        seed, limit = torch.initial_seed(), session.engine.step_skip.limit
        train(session)
        dist.side.close()
    lines = {line["step"] - 1: line for line in read_lines(dist.run_dir.metrics)}
    return _Run(session, lines, recorder.before, recorder.after, limit, seed, recorder.is_training)


def _pairs(windows: np.ndarray) -> list[MicroBatch]:
    """Split windows (n, T + 1) into micro-batches."""
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous())
            for part in torch.from_numpy(windows.astype(np.int64)).split(MICRO)]


def _evaluated(run: _Run, line: dict[str, Any]) -> Evaluation | None:
    """Return the evaluation whose loss is in a log line, or None if there is none."""
    if "val_loss" not in line:
        return None
    held_out = run.split("val")
    windows = np.stack([held_out[place:place + LENGTH + 1] for place in range(0, EVALUATED, LENGTH)])
    return Evaluation(_pairs(windows), line["val_loss"])


def _check_start(run: _Run) -> Iterator[str]:
    """Check that a run starts with the initial weights of its seed and without moments."""
    values, state = initial_values(run.session.plan.model, SEED), run.before[0]
    for name, weight in state.weights.items():
        if not torch.equal(weight, values(name, whole_box(weight.shape))):
            yield f"the initial {name} of a run does not match its seed"
    if state.step or any(value.any() for kind in (state.first, state.second) for value in kind.values()):
        yield "a run starts with nonzero moments or a nonzero step count"


def _check_steps(run: _Run, first: int, saved: State | None) -> Iterator[str]:
    """Compare every step from `first` on with the step definition; `saved` is the state before a resume."""
    text, config = run.split("train"), run.session.plan.model
    observed = []
    for step in range(first, STEPS):
        if step not in run.lines or step not in run.after:
            yield f"a run of {STEPS} steps from step {first + 1} does not have step {step + 1}"
            return
        line, rate = run.lines[step], cosine_rate(step, recipe.PEAK_LR, recipe.FLOOR_LR, WARMUP, STEPS)
        if not math.isclose(line["lr"], rate, rel_tol=1e-9):
            yield f"step {step + 1} of a run has the learning rate {line['lr']:.7g}, not {rate:.7g}"
        numbers = np.arange(GLOBAL * step, GLOBAL * (step + 1))
        windows = text.windows(sample_windows(len(text), LENGTH, SEED, numbers), LENGTH + 1)
        loss, norm = (math.inf if line[name] is None else line[name] for name in ("loss", "grad_norm"))
        title = f"step {step + 1} of a {'run' if saved is None else 'resumed run'}"
        observed.append(ObservedStep(title, run.before[step], run.after[step], _pairs(windows), rate,
                                     settings_of(config, CLIP, recipe.Z_LOSS), loss, norm,
                                     saved if step == first else None, _evaluated(run, line)))
    if (problem := one_process.describe_failures(one_process.compare_steps(observed, "fp32")[0])) is not None:
        yield problem
    if [step for step in range(first, STEPS) if observed[step - first].evaluated] != [
            step - 1 for step in (_SAVE_STEP, STEPS) if step > first]:
        yield f"evaluations do not follow steps {_SAVE_STEP} and {STEPS}"
    if first == 0 and not run.session.engine.skipped_steps:
        yield f"no gradient overflows under a loss scale of {TOO_LARGE:g}"
    if run.session.data.position.consumed != GLOBAL * STEPS:
        yield f"{STEPS} steps of {GLOBAL} samples have consumed {run.session.data.position.consumed} samples"


def _check_masks(folder: Path, tokens: Path) -> Iterator[str]:
    """Check that dropout is on in steps and off in evaluations, and that a resume restores the random state."""
    uninterrupted = _train(folder / "masks", tokens, 0.2)
    if uninterrupted.seed != dropout_seed(uninterrupted.session.config, uninterrupted.session.dist):
        yield "a run does not start with its dropout seed"
    resumed = _train(folder / "masks-resumed", tokens, 0.2, resume=uninterrupted.checkpoint)
    for run in (uninterrupted, resumed):
        if not run.is_training:
            yield "a step has no dropout: a module is in evaluation mode"
        for step, line in run.lines.items():
            if (evaluated := _evaluated(run, line)) is None:
                continue
            exact = plain_step.evaluation_loss(run.after[step].weights, evaluated.batches,
                                               settings_of(run.session.plan.model, CLIP), EXACT)
            if not math.isclose(evaluated.loss, exact, rel_tol=1e-5):
                yield f"an evaluation of a run with dropout gives the loss {evaluated.loss:.7g}, not {exact:.7g}"
    steps = range(_SAVE_STEP, STEPS)
    losses, expected = ([run.lines[step]["loss"] if step in run.lines else None for step in steps]
                        for run in (resumed, uninterrupted))
    if losses != expected:
        yield f"a resumed run with dropout has the losses {losses}, the uninterrupted run {expected}"
