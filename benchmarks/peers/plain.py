"""Baseline: a simple GPT-2 and training loop with eager modules, autocast, DDP, and torch's AdamW."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from peers.task import Clock, Task, validation_loss


class Block(nn.Module):
    """Attention and MLP, each with a pre-LayerNorm and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        split = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(heads.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Model(nn.Module):
    """GPT-2 with learned positions and a head tied to the token embedding."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.tokens = nn.Embedding(task.vocab_size, task.n_embd)
        self.positions = nn.Embedding(task.block_size, task.n_embd)
        self.blocks = nn.ModuleList([Block(task.n_embd, task.n_head) for _ in range(task.n_layer)])
        self.norm = nn.LayerNorm(task.n_embd)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * task.n_layer) if residual else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(task: Task, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random windows of the training tokens, and the same windows shifted by one token."""
    stream, length = task.tokens("train"), task.block_size
    starts = torch.randint(len(stream) - length, (task.micro_batch,), generator=generator).tolist()
    rows = torch.from_numpy(np.stack([stream[start:start + length + 1] for start in starts]).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def run(task: Task, clock: Clock) -> dict[str, Any]:
    """Train, with DistributedDataParallel if there are several ranks."""
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(rank)
    plain = model = Model(task)
    matrices = [parameter for parameter in plain.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in plain.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": vectors, "weight_decay": 0.0}], lr=task.lr, betas=(0.9, 0.95))
    if task.ranks > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    if task.compile:
        model = torch.compile(model)
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(task, step)
        tokens, targets = batch(task, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bf16"):
            loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.tick(loss.detach())

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bf16"):
            return plain(tokens)

    result = {"parameters": sum(parameter.numel() for parameter in plain.parameters()),
              "val_loss": validation_loss(task, logits)}
    if task.ranks > 1:
        torch.distributed.destroy_process_group()
    return result


def rate(task: Task, step: int) -> float:
    """Return the learning rate: linear warm-up, then cosine decay to a tenth."""
    if step < task.warmup_steps:
        return task.lr * (step + 1) / task.warmup_steps
    share = (step - task.warmup_steps) / max(1, task.steps - task.warmup_steps)
    return task.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))
