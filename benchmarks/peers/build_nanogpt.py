"""Run build-nanogpt's train_gpt2.py from a checkout. Its constants are replaced when they are assigned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from peers.script import Names, run_script, stand_in
from peers.task import Clock, Task, validation_loss

MAIN = "train_gpt2.py"


class NoText:
    """Stub for the tokenizer, which the script only needs for text samples."""

    def encode(self, text: str) -> list[int]:
        return [0]

    def decode(self, tokens: list[int]) -> str:
        return ""


def run(task: Task, clock: Clock) -> dict[str, Any]:
    """Train with the script. It validates and scores HellaSwag (one example of zeros) before the first step."""
    folder = Path(task.scratch)
    (folder / "edu_fineweb10B").mkdir()
    for split in ("train", "val"):
        (folder / "edu_fineweb10B" / f"{split}.npy").symlink_to(Path(task.data) / f"{split}.npy")
    example = torch.zeros(4, 8, dtype=torch.long)
    stand_in("hellaswag", iterate_examples=lambda split: [None],
             render_example=lambda _: (None, example, torch.ones_like(example), 0))
    stand_in("tiktoken", get_encoding=lambda name: NoText())

    def shape(names: Names) -> None:
        config = names["GPTConfig"]
        names["GPTConfig"] = lambda **_: config(
            block_size=task.block_size, vocab_size=task.vocab_size, n_layer=task.n_layer, n_head=task.n_head,
            n_embd=task.n_embd)

    names = run_script(
        Path(task.peer) / MAIN, folder, clock, loss="loss_accum", after={"GPTConfig": shape},
        values={"total_batch_size": task.tokens_per_step, "B": task.global_batch, "T": task.block_size,
                "use_compile": task.compile, "max_lr": task.lr, "warmup_steps": task.warmup_steps,
                "max_steps": task.steps + 1})
    model = names["raw_model"].eval()

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens)[0]

    return {"parameters": sum(parameter.numel() for parameter in model.parameters()),
            "val_loss": validation_loss(task, logits)}
