"""Run nanoGPT's train.py from a checkout, configured by its options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from peers.script import run_script
from peers.task import Clock, Task, validation_loss

MAIN = "train.py"


def run(task: Task, clock: Clock) -> dict[str, Any]:
    """Train with the script. Its only evaluation, before the first step, uses one batch."""
    folder, checkout = Path(task.scratch), Path(task.peer)
    (folder / "configurator.py").symlink_to(checkout / "configurator.py")
    (folder / "data").mkdir()
    (folder / "data" / "tokens").symlink_to(task.data)
    options = {
        "dataset": "tokens", "device": "cpu", "dtype": "float32", "compile": task.compile, "bias": True,
        "n_layer": task.n_layer, "n_head": task.n_head, "n_embd": task.n_embd, "block_size": task.block_size,
        "batch_size": task.global_batch, "gradient_accumulation_steps": 1, "learning_rate": task.lr,
        "min_lr": task.lr / 10, "warmup_iters": task.warmup_steps, "lr_decay_iters": task.steps,
        "max_iters": 10**6, "eval_interval": 10**6, "eval_iters": 1}
    sys.argv = [MAIN, *(f"--{name}={value}" for name, value in options.items())]
    names = run_script(checkout / MAIN, folder, clock, loss="loss", values={"meta_vocab_size": task.vocab_size})
    model = names["raw_model"].eval()
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()),
            "val_loss": validation_loss(task, lambda tokens: model(tokens, tokens)[0])}
