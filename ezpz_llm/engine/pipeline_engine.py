"""The engine of pipeline layouts: DeepSpeed's pipeline under a client optimizer and ZeRO 1, one stage a rank.

Written against DeepSpeed 0.19. The stage is a module of our own; DeepSpeed sends activations and gradients, sums
the tied table's gradient, reduces and steps. Its schedule is executed here, since its train_batch ends each step
with collectives and prints of its own.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stdout
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.dist import Dist
from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.engine.base import Engine, Span
from ezpz_llm.engine.deepspeed_engine import deepspeed_state, mark_divided
from ezpz_llm.engine.deepspeed_import import import_deepspeed
from ezpz_llm.engine.optimizer_state import EngineState, make_optimizer, set_lr
from ezpz_llm.layout.resolve import Resolved
from ezpz_llm.model.parameters import parameter_shapes
from ezpz_llm.model.pipeline import PipelineStage
from ezpz_llm.rundir import RunDir

_PHASES = {"ForwardPass": "forward", "BackwardPass": "backward",
           "ReduceTiedGrads": "optimizer", "ReduceGrads": "optimizer", "OptimizerStep": "optimizer"}
"""What instructions count as. Loading has spans of its own; in sends and receives a stage mostly waits."""


class PipelineEngine(Engine):
    """A `deepspeed.PipelineEngine` behind the common interface."""

    module: PipelineStage

    def __init__(self, model: PipelineStage, resolved: Resolved, dist: Dist, groups: list[dict[str, Any]],
                 adam: dict[str, Any]) -> None:
        super().__init__(model, resolved, dist)
        self._stages = dist.mesh.degrees.peers(dist.rank, "pp")
        self._targets: Tensor | None = None
        mark_divided(model)
        deepspeed = import_deepspeed(dist.device.type)
        deepspeed.init_distributed(dist_backend=dist.backend, dist_init_required=False)
        pipeline = _pipeline_module(deepspeed, model, self._compute, dist.mesh)
        # On CPUs the fused kernel rounds a buffer's last few elements in another way than the others, and the
        # copies of a tied table lie at different places of their buffers.
        fused = dist.device.type != "cpu" or not model.config.tied
        optimizer = make_optimizer(groups, adam, resolved.optimizer, fused)
        self._engine = deepspeed.initialize(args=SimpleNamespace(device_rank=dist.device.index or 0),
                                            model=pipeline, optimizer=optimizer,
                                            config=_config(resolved, dist.run_dir, model))[0]
        zero = self._engine.optimizer
        self.step_skip.guard(optimizer, lambda: zero._global_grad_norm)
        schedule = deepspeed.runtime.pipe.schedule.TrainSchedule(self.batch.accumulation, self.layout.pp,
                                                                 dist.mesh.pp_rank)
        self._instructions = [instruction for step in schedule for instruction in step]
        self._engine._reserve_pipe_buffers(schedule.num_pipe_buffers())
        self._engine._compute_loss = True

    def _compute(self, inputs: Tensor) -> Tensor:
        """This stage's forward pass; in the last stage the loss, so that no logits outlive a micro batch."""
        return self.module(inputs, self._targets) if self.module.is_last else self.module(inputs)

    def train_step(self, micro_batches: Iterable[tuple[Tensor, ...]], lr: float,
                   span: Span) -> tuple[Tensor, Tensor]:
        engine = self._engine
        set_lr(engine.optimizer, lr)
        if self._scale is not None:
            engine.optimizer.override_loss_scale(self._scale.scale)
        engine.set_dataiterator(iter(micro_batches))
        engine.total_loss, engine.fwd_outputs = None, []
        for instruction in self._instructions:
            phase = _PHASES.get(instruction.name)
            if phase == "forward" and self.module.is_last:
                self._targets = engine.pipe_buffers["labels"][instruction.buffer_id]
            with nullcontext() if phase is None else span(phase):
                engine._INSTRUCTION_MAP[type(instruction)](engine, **instruction.kwargs)
        norm = torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32, device=self.device)
        self._update_scale(norm)
        if not self.module.is_last:
            return torch.zeros((), device=self.device), norm
        # Of all ranks only those of the last stage have a loss, and the mean is over all.
        return engine.total_loss * (self.layout.pp / self.batch.accumulation), norm

    def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The last stage's is the summed loss, the others' 0: they have sent the batch on and are free."""
        output = self._flow(tokens, targets, reduction="sum")
        return torch.zeros((), device=self.device) if output is None else output

    def row_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        output = self._flow(tokens, targets, reduction="rows")
        return torch.zeros(len(tokens), device=self.device) if output is None else output

    def next_logits(self, tokens: Tensor) -> Tensor:
        logits = self._flow(tokens, last_only=True)
        if logits is None:
            logits = torch.empty(len(tokens), self.module.config.padded_vocab_size, device=self.device)
        else:
            logits = logits[:, -1].float().contiguous()
        torch.distributed.broadcast(logits, self._stages[-1], group=self._mesh.group("pp"))
        return logits

    def _flow(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        """Pass a batch through this stage, to the next stage or, from the last one, to the caller."""
        x, stage = tokens, self._mesh.pp_rank
        if not self.module.is_first:
            x = torch.empty(*tokens.shape, self.module.config.n_embd, device=self.device)
            torch.distributed.recv(x, self._stages[stage - 1])
        if self.module.is_last:
            return self.module(x, *args, **kwargs)
        torch.distributed.send(self.module(x), self._stages[stage + 1])
        return None

    def training_state(self) -> EngineState:
        state = deepspeed_state(self._engine, *self._replica, self._scale)
        state.shapes = parameter_shapes(self.module.config)
        return state


def _config(resolved: Resolved, run_dir: RunDir, stage: PipelineStage) -> dict[str, Any]:
    """What DeepSpeed gets, with buckets that keep both copies of a tied table the same to the last bit.

    They start equal and get the same summed gradient, which each stage then reduces over its data-parallel ranks.
    In which order a backend adds depends on an element's place in its bucket; a bucket of the table's size holds
    the table alone, in both stages.
    """
    config = resolved.for_deepspeed(run_dir)
    if stage.table is not None:
        config["zero_optimization"] = {**config["zero_optimization"],
                                       "reduce_bucket_size": stage.table.weight.numel()}
    return config


def _pipeline_module(deepspeed: ModuleType, stage: PipelineStage, compute: Callable[[Tensor], Tensor],
                     mesh: Mesh) -> nn.Module:
    """A DeepSpeed pipeline of as many layers as stages, of which this rank's is `compute`.

    The tied table, and nothing else, is DeepSpeed's tied layer. It belongs to the first and the last layer, which
    have to say so on every rank.
    """
    pipe = deepspeed.runtime.pipe

    class Tied(pipe.module.TiedLayerSpec):  # type: ignore[name-defined]
        """A layer whose tied module exists already."""

        def build(self, log: bool = False) -> nn.Module:
            return stage.table

    layers: list[Any] = [compute] * mesh.pp_size
    if stage.config.tied:
        for end in (0, -1):
            layers[end] = Tied("table", nn.Module, forward_fn=lambda table, inputs: compute(inputs))
    topology = pipe.topology.PipeModelDataParallelTopology(mesh.pp_size, mesh.tp_size, mesh.size("dp", "sp"))
    # Without gradients, since it broadcasts the tied table, a leaf that requires one.
    with redirect_stdout(io.StringIO()), torch.no_grad():
        module = pipe.module.PipelineModule(layers, topology=topology, partition_method="uniform")
    module.add_module("stage", stage)
    return module
