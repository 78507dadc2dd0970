"""Train GPT2LMHeadModel with Hugging Face's Trainer, with its defaults unless the task sets a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from peers.task import Clock, Task, validation_loss


class Windows(torch.utils.data.Dataset):
    """Training tokens in windows that do not overlap."""

    def __init__(self, task: Task) -> None:
        self._tokens, self._length = task.tokens("train"), task.block_size

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.from_numpy(self._tokens[index * self._length:(index + 1) * self._length].astype(np.int64))
        return {"input_ids": row, "labels": row}


class Ticks(TrainerCallback):
    """Callback that ticks the clock after each step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._clock.tick()


def run(task: Task, clock: Clock) -> dict[str, Any]:
    """Train with Trainer."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=task.vocab_size, n_positions=task.block_size, n_embd=task.n_embd, n_layer=task.n_layer,
        n_head=task.n_head, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0,
        eos_token_id=0))
    arguments = TrainingArguments(
        output_dir=str(Path(task.scratch) / "hf"), max_steps=task.steps, use_cpu=True,
        bf16=task.precision == "bf16", per_device_train_batch_size=task.micro_batch, learning_rate=task.lr,
        lr_scheduler_type="cosine", warmup_steps=task.warmup_steps, adam_beta2=0.95, weight_decay=0.1,
        max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False, torch_compile=task.compile)
    trainer = Trainer(model=model, args=arguments, train_dataset=Windows(task), callbacks=[Ticks(clock)])
    trainer.train()
    model.eval()

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bf16"):
            return model(input_ids=tokens).logits

    return {"losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
            "parameters": model.num_parameters(), "optimizer": arguments.optim.value,
            "attention": model.config._attn_implementation, "val_loss": validation_loss(task, logits)}
