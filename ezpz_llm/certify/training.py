"""Train one engine for a few steps on the common tokens, and take down what it computed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from ezpz_llm.certify import recipe
from ezpz_llm.dist import Dist
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.engine.base import Engine
from ezpz_llm.engine.build import assemble, build_engine
from ezpz_llm.engine.deepspeed_import import import_deepspeed
from ezpz_llm.evaluate.validation import validation_loss
from ezpz_llm.layout.ds_defaults import uses_nvme
from ezpz_llm.layout.resolve import Resolved
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.init import decay_groups
from ezpz_llm.model.loss import configure_head

Rows = Callable[[np.ndarray, int], np.ndarray]
"""The sequences (n, T + 1) of this rank's micro batches, one after the other, of the global batch of a step."""


@dataclass
class Trajectory:
    """Losses and norms of this rank. `losses` are its parts, whose means over the ranks are the losses."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held_out: float = 0.0

    @property
    def clip_factor(self) -> float:
        """Factor that clipping multiplied the first step's gradient by."""
        return min(1.0, recipe.CLIP / (self.norms[0] + 1e-6))


def make_engine(config: ModelConfig, resolved: Resolved, dist: Dist,
                sabotage: Callable[[torch.nn.Module], None] | None = None,
                loss_chunk: int = recipe.LOSS_CHUNK) -> Engine:
    """The model with its initial weights in the engine of a layout; `sabotage` sees the model before the engine."""
    model = assemble(config, resolved.layout, dist.mesh, recipe.SEED, dist.device.type)
    configure_head(model, loss_chunk)
    if sabotage is not None:
        sabotage(model)
    with _small_files(dist) if uses_nvme(resolved.layout) else nullcontext():
        return build_engine(model, resolved, dist, lr=recipe.PEAK_LR, betas=recipe.BETAS, eps=recipe.EPS,
                            param_groups=decay_groups(model, recipe.WEIGHT_DECAY))


@contextmanager
def _small_files(dist: Dist) -> Iterator[None]:
    """Let DeepSpeed move parameters of these models' sizes into files, which its constant keeps it from."""
    import_deepspeed(dist.device.type)
    from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper

    before = optimizer_utils.MIN_AIO_BYTES
    for module in (optimizer_utils, partitioned_param_swapper):
        module.MIN_AIO_BYTES = recipe.SMALLEST_FILE
    try:
        yield
    finally:
        for module in (optimizer_utils, partitioned_param_swapper):
            module.MIN_AIO_BYTES = before


def own_rows(dist: Dist) -> Rows:
    """The data-parallel place's share of each batch."""
    def rows(batch: np.ndarray, step: int) -> np.ndarray:
        return np.split(batch, dist.mesh.dp_size)[dist.mesh.dp_rank]
    return rows


def micro_batches(engine: Engine, rows: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets (B, T) on the device, for each micro-step."""
    for part in np.split(rows, engine.batch.accumulation):
        tensor = torch.from_numpy(part).to(engine.device)
        yield tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous()


def train(engine: Engine, config: ModelConfig, dist: Dist, rows: Rows, steps: int, *,
          around: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
          span: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext(),
          after_first: Callable[[Trajectory], None]) -> Trajectory:
    """`steps` optimizer steps and a held-out batch. Collective.

    Args:
        around: entered for each step by its number.
        span: what the engine tells of its phases.
        after_first: called between the first step and the second.
    """
    seen = Trajectory()
    for step in range(steps):
        data = rows(recipe.sequences(config, step), step)
        with around(step):
            loss, norm = engine.train_step(micro_batches(engine, data), recipe.learning_rate(step, steps), span)
        seen.losses.append(loss.item())
        seen.norms.append(norm.item())
        if step == 0:
            after_first(seen)
    held_out = own_rows(dist)(recipe.sequences(config, recipe.HELD_OUT), steps)
    parts = np.split(held_out, engine.batch.accumulation)
    with engine.evaluating():
        seen.held_out, _ = validation_loss(
            engine.loss_sum, [(np.ascontiguousarray(part[:, :-1]), np.ascontiguousarray(part[:, 1:]))
                              for part in parts], device=engine.device, mesh=dist.mesh)
    return seen


def release(device: torch.device) -> None:
    """Free what a dropped engine still holds in reference cycles."""
    gc.collect()
    if DEVICES[device.type].own:
        torch.get_device_module(device).empty_cache()
