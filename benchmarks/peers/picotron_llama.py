"""Run picotron's Llama and its train_step from a checkout, in the order of picotron's loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from peers.plain import batch
from peers.script import stand_in
from peers.task import Clock, Task, validation_loss

MAIN = "train.py"
_ONLY_ON_GPUS = {"flash_attn": {}, "flash_attn.flash_attn_interface": {"flash_attn_func": None},
                 "flash_attn.layers": {}, "flash_attn.layers.rotary": {"apply_rotary_emb": None},
                 "flash_attn.ops": {}, "flash_attn.ops.triton": {},
                 "flash_attn.ops.triton.layer_norm": {"layer_norm_fn": None}}


class Samples:
    """The part of picotron's data loader that train_step uses; the loader itself would download data."""

    grad_acc_steps = 1

    def __init__(self, task: Task) -> None:
        self._task, self._generator = task, torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        tokens, targets = batch(self._task, self._generator)
        return {"input_ids": tokens, "target_ids": targets}


def run(task: Task, clock: Clock) -> dict[str, Any]:
    """Train in fp32, picotron's precision on CPUs."""
    os.environ.update({"LOCAL_RANK": "0", "DEVICE": "cpu", "DTYPE": "float32", "FLASH_ATTEN": "0",
                       "CONTEXT_PARALLEL": "0"})
    if find_spec("flash_attn") is None:
        for name, members in _ONLY_ON_GPUS.items():
            stand_in(name, **members)
    for name in ("wandb", "datasets"):
        if find_spec(name) is None:
            stand_in(name, Features=None, Sequence=None, Value=None, load_dataset=None)
    sys.path.insert(0, task.peer)
    sys.dont_write_bytecode = True
    torch.distributed.init_process_group("gloo", init_method=f"file://{Path(task.scratch) / 'meet'}", rank=0,
                                         world_size=1)
    import train
    from picotron.model import Llama
    from picotron.process_group_manager import setup_process_group_manager
    from picotron.utils import average_loss_across_dp_cp_ranks

    setup_process_group_manager(tp_size=1, cp_size=1, pp_size=1, dp_size=1)
    torch.manual_seed(1)
    model = Llama(SimpleNamespace(
        vocab_size=task.vocab_size, hidden_size=task.n_embd, num_hidden_layers=task.n_layer,
        num_attention_heads=task.n_head, num_key_value_heads=task.n_head, intermediate_size=8 * task.n_embd // 3,
        max_position_embeddings=task.block_size, rms_norm_eps=1e-5, rope_theta=500000.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    samples, device = Samples(task), torch.device("cpu")
    for _ in range(task.steps):
        optimizer.zero_grad()
        loss = average_loss_across_dp_cp_ranks(train.train_step(model, samples, device), device)
        optimizer.step()
        clock.tick(loss)
    found = {"parameters": sum(one.numel() for one in model.parameters()), "val_loss": validation_loss(task, model)}
    torch.distributed.destroy_process_group()
    return found
