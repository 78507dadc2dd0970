"""Run this project's training loop, with a callback that ticks the clock."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

from ezpz_llm.core.rundir import RUN_DIR_VARIABLE
from ezpz_llm.training.dist import Heartbeat
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.model.parameters import flops_per_token
from ezpz_llm.training.observe import WallClock
from ezpz_llm.training.trainer.callbacks.callback import Callback, CallbackContext
from ezpz_llm.training.trainer.loop import train
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import start
from peers.collectives import apart
from peers.data import SHARDS
from peers.task import Clock, Task


class Watch(Callback):
    """Callback that ticks the clock after each step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, context: CallbackContext) -> None:
        self._clock.tick()


def options(task: Task) -> list[str]:
    """Return the task as options of `ezpz_llm.train`; all others have their defaults."""
    model = "gpt2-124m" if task.vocab_size > 50000 else "shakespeare-char"
    values = {
        "--model": model, "--n-layer": task.n_layer, "--n-head": task.n_head, "--n-embd": task.n_embd,
        "--block-size": task.block_size, "--bias": "true", "--dropout": 0, "--corpus": Path(task.data) / SHARDS,
        "--ds-config": task.layout, "--compile": str(task.compile).lower(),
        "--precision": "bf16_autocast" if task.precision == "bf16" else task.precision,
        "--global-batch-size": task.global_batch, "--gradient-accumulation-steps": 1, "--steps": task.steps,
        "--lr": task.lr, "--warmup-steps": task.warmup_steps, "--beta2": 0.95, "--weight-decay": 0.1,
        "--eval-every": 0, "--eval-tokens": task.eval_windows * task.block_size, "--sample-tokens": 0,
        "--save-every": -1, "--profile": "false"}
    return [str(word) for pair in values.items() for word in pair]


def run(task: Task, clock: Clock) -> dict[str, Any]:
    """Train; with `task.collectives`, also measure the layout's collectives separately."""
    run_dir = None if RUN_DIR_VARIABLE in os.environ else Path(task.scratch) / "run"
    with setup(run_dir=run_dir) as dist, contextlib.redirect_stdout(io.StringIO()):
        session = start(parse(options(task)), dist, WallClock(), Heartbeat(os.environ), [Watch(clock)])
        train(session)
        lines = list(map(json.loads, dist.run_dir.metrics.read_text().splitlines())) if dist.is_main else []
        config = session.plan.model
        result = {"options": " ".join(options(task)), "rows": config.padded_vocab_size,
                  "parameters": sum(parameter.numel() for parameter in session.engine.module.parameters()),
                  "flops_per_token": flops_per_token(config),
                  "flops_per_token_causal": flops_per_token(config, causal=True)}
        if lines:
            result.update(losses=[line["loss"] for line in lines], val_loss=lines[-1]["val_loss"])
        if task.collectives and dist.world_size > 1:
            result["collectives"] = apart(session)
        return result

