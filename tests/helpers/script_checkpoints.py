"""Train scripts' models for a step, save a checkpoint of each, and the module's own state to compare exports with.

Usage: [mpiexec -n 2] python3 script_checkpoints.py FOLDER MODEL:LAYOUT…, MODEL being a key of MODELS and LAYOUT as
in library_ranks.py. Writes results.json: for each run, the checkpoint and a file with the expected state_dict.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from library_models import TRAININGS, Batch, Training
from library_ranks import ds_config, precision_of, saved
from torch import Tensor, nn
from unusual_models import UNUSUAL

import ezpz_llm


class Odd(nn.Module):
    """Module with a tied weight, a frozen parameter, unusual names, and buffers that are easy to lose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.add_module("größe/x", nn.Linear(8, 4))
        self.fixed = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("rounded", torch.randn(3).bfloat16())
        self.register_buffer("temporary", torch.ones(2), persistent=False)
        self.register_buffer("same", self.temporary)
        self.register_buffer("nothing", torch.zeros(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, "größe/x")(self.second(self.first(x)))


class Odder(Odd):
    """The same with a scalar and a parameter without elements, which some layouts do not support."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.none.sum()


class WithExtraState(Odd):
    """The same with extra state, which checkpoints do not contain."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


def llama() -> nn.Module:
    """Return a Llama of transformers whose head the script ties, against its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False))
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def numbers(generator: torch.Generator, size: int) -> Batch:
    return {"x": torch.randn(size, 8, generator=generator)}


def square(model: Any, batch: Batch) -> Tensor:
    return model(batch["x"]).float().square().mean()


MODELS = {**TRAININGS, "frozen": UNUSUAL["frozen"], "llama": dataclasses.replace(TRAININGS["qwen3"], module=llama),
          **{kind.__name__: Training(kind, numbers, square) for kind in (Odd, Odder, WithExtraState)}}


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's gathered parameters and its buffers, by each of their names. Collective."""
    state = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                state[name] = parameter.detach().clone()
        else:
            state[name] = getattr(parameter, "full_tensor", lambda value=parameter: value)().detach().clone()
    return state | {name: buffer.clone() for name, buffer in module.named_buffers(remove_duplicate=False)}


def main() -> None:
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    results = {}
    with ezpz_llm.setup(device="cpu", run_dir=folder / "run") as run:
        for step, name in enumerate(runs, 1):
            kind, layout = name.split(":")
            training = MODELS[kind]
            torch.manual_seed(0)
            model = training.module()
            names = list(model.state_dict())
            wrapped = ezpz_llm.wrap(model, torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters())),
                                    ds_config(folder, layout) if run.world_size > 1 else layout)
            batch = training.batch(torch.Generator().manual_seed(1), 4)
            wrapped.backward(training.loss(wrapped, batch))
            wrapped.step()
            checkpoint = ezpz_llm.save_checkpoint(wrapped, step, kind=kind)
            if precision_of(layout) == "fp32" and not layout.startswith("tp"):
                state = whole_state(wrapped.module)
            else:  # the module has rounded or sharded parameters
                weights, buffers = saved(checkpoint)
                state = {**weights, **buffers}
            results[name] = [str(checkpoint), str(folder / f"{step}.pt")]
            if run.is_main:
                torch.save({key: state[key] for key in names if key in state}, folder / f"{step}.pt")
            run.models.clear()
        if run.is_main:
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
