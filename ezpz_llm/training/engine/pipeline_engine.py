"""Engine for pipeline layouts: DeepSpeed's pipeline with a client optimizer and ZeRO 1, one stage per rank.

In bf16, DeepSpeed wraps the optimizer in a different class, which adds each micro-batch's gradients to flat fp32
buffers of the whole stage. This module averages the buffers over data-parallel ranks in place.

Written for DeepSpeed 0.19. The stage is a module of ezpz_llm; DeepSpeed sends activations and gradients, sums the
gradient of the tied embedding, reduces and steps. This module executes DeepSpeed's schedule itself, since
DeepSpeed's train_batch ends each step with further collectives and prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.dist import Dist, deepspeed_internals
from ezpz_llm.training.dist.deepspeed_internals import gradient_norm, set_loss_scale
from ezpz_llm.training.dist.deepspeed_patches import send_within
from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.engine import gradient_reducer
from ezpz_llm.training.engine.base import Engine, Span
from ezpz_llm.training.engine.deepspeed_engine import mark_sharded
from ezpz_llm.training.engine.deepspeed_groups import using_mesh_groups
from ezpz_llm.training.engine.deepspeed_import import import_deepspeed
from ezpz_llm.training.engine.deepspeed_state import deepspeed_state
from ezpz_llm.training.engine.optimizer_state import EngineState, MakeOptimizer, set_lr
from ezpz_llm.training.engine.precision import gradient_dtype, parameter_dtype
from ezpz_llm.training.layout.resolve import Resolved
from ezpz_llm.training.model.parameters import parameter_shapes
from ezpz_llm.training.model.pipeline import PipelineStage

_PHASES = {"ForwardPass": "forward", "BackwardPass": "backward",
           "ReduceTiedGrads": "optimizer", "ReduceGrads": "optimizer", "OptimizerStep": "optimizer"}
"""Phases of instructions. Loading has its own spans, and sends and receives are mostly idle time."""


class PipelineEngine(Engine):
    """Engine that wraps `deepspeed.PipelineEngine`."""

    module: PipelineStage

    def __init__(self, model: PipelineStage, resolved: Resolved, dist: Dist, groups: list[dict[str, Any]],
                 make: MakeOptimizer) -> None:
        super().__init__(model, resolved, dist)
        self._stages = dist.mesh.degrees.peers(dist.rank, "pp")
        self._sends = dist.mesh.separate_group("pp")
        self._tokens: Tensor | None = None
        self._targets: Tensor | None = None
        self._dtype = parameter_dtype(resolved.precision)
        self._reduced = gradient_dtype(resolved.gradients.reduced)
        self._bucket = gradient_reducer.BUCKET
        mark_sharded(model)
        deepspeed = import_deepspeed(dist.device.type)
        deepspeed.init_distributed(dist_backend=dist.backend, dist_init_required=False)
        send_within(deepspeed, self._sends)
        pipeline = _pipeline_module(deepspeed, model, self._compute, dist.mesh)
        # On CPUs, the fused kernel rounds the last few elements of a buffer differently, and the copies of a tied
        # embedding have different positions in their buffers.
        fused = dist.device.type != "cpu" or not model.config.tied
        optimizer = make(groups, fused=fused)
        with using_mesh_groups(deepspeed, dist.mesh):
            self._engine = deepspeed.initialize(args=SimpleNamespace(device_rank=dist.device.index or 0),
                                                model=pipeline, optimizer=optimizer,
                                                config=_config(resolved, dist.run_dir, model))[0]
        zero = self._engine.optimizer
        self.step_skip.guard(optimizer, lambda: gradient_norm(zero))
        self._instructions = deepspeed_internals.prepare_pipeline(self._engine, deepspeed, self.batch.accumulation,
                                                                  self.layout.pp, dist.mesh.pp_rank)

    def _compute(self, inputs: Tensor) -> Tensor:
        """Run this stage's forward pass; the last stage returns the loss, so that logits are freed at once."""
        targets = self._targets if self.module.is_last else None
        return self.module(inputs, targets, sequences=self._tokens)

    def _keep_tokens(self, micro_batches: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Yield micro-batches; keep the tokens of the latest one for the document mask."""
        for micro_batch in micro_batches:
            self._tokens = micro_batch[0]
            yield micro_batch

    def train_step(self, micro_batches: Iterable[tuple[Tensor, ...]], lr: float,
                   span: Span) -> tuple[Tensor, Tensor]:
        """Execute DeepSpeed's schedule for one step, timing instructions; return mean loss and gradient norm."""
        engine = self._engine
        set_lr(engine.optimizer, lr)
        if self.loss_scale is not None:
            set_loss_scale(engine.optimizer, self.loss_scale.scale)
        batches = self._keep_tokens(micro_batches)
        engine.set_dataiterator(batches)
        deepspeed_internals.begin_pipeline_step(engine)
        for instruction in self._instructions:
            phase = _PHASES.get(instruction.name)
            if phase == "forward" and self.module.is_last:
                self._targets = deepspeed_internals.pipeline_labels(engine)[instruction.buffer_id]
            elif phase == "forward" and self.module.end_of_text is not None and not self.module.is_first:
                next(batches)  # DeepSpeed loads micro-batches only in the first and the last stage
            with nullcontext() if phase is None else span(phase):
                if instruction.name == "ReduceTiedGrads":
                    self._sum_over_replicas()
                if instruction.name == "ReduceGrads" and self._dtype == torch.bfloat16:
                    self._average_gradients()
                else:
                    deepspeed_internals.execute_instruction(engine, instruction)
        norm = torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32, device=self.device)
        self._update_scale(norm)
        if not self.module.is_last:
            return torch.zeros((), device=self.device), norm
        # The loss of the step is the mean over all ranks, but only the last stage has a loss.
        return deepspeed_internals.pipeline_loss(engine) * (self.layout.pp / self.batch.accumulation), norm

    def _sum_over_replicas(self) -> None:
        """Sum the tied embedding's gradient over data-parallel ranks, before DeepSpeed adds the two stages' sums.

        Both copies must stay bitwise identical, but a backend may add three or more numbers in a different order in
        each stage, whose ranks have different links. So each stage first computes its sum, and then the two sums
        are added, for which there is only one order. Afterwards DeepSpeed reduces over data-parallel ranks again;
        therefore only the first rank keeps the sum.
        """
        rank, ranks = self._replica
        if self.module.table is None or ranks < 3:
            return
        table = self.module.table.weight
        grad = deepspeed_internals.fp32_gradient(table) if self._dtype == torch.bfloat16 else table.grad
        torch.distributed.all_reduce(grad, group=self._mesh.group("dp", "sp"))
        if rank > 0:
            grad.zero_()

    def _average_gradients(self) -> None:
        """Average the fp32 gradients of bf16 parameters over data-parallel ranks, in the reduction dtype.

        DeepSpeed's own reduction would copy all gradients.
        """
        ranks = self._replica[1]
        if ranks == 1:
            return
        for flat in deepspeed_internals.flat_gradients(self._engine.optimizer):
            flat.mul_(1 / ranks)
            for part in flat.split(self._bucket):
                reduced = part.to(self._reduced)
                torch.distributed.all_reduce(reduced, group=self._mesh.group("dp", "sp"))
                if reduced is not part:
                    part.copy_(reduced)

    def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss on the last stage; other stages return 0 once they have sent their output."""
        output = self._forward_through_stage(tokens, targets, reduction="sum", sequences=tokens)
        return torch.zeros((), device=self.device) if output is None else output

    def row_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each row on the last stage, zeros on the others."""
        output = self._forward_through_stage(tokens, targets, reduction="rows", sequences=tokens)
        return torch.zeros(len(tokens), device=self.device) if output is None else output

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Return fp32 logits (B, padded vocabulary) of the next token, on every stage."""
        logits = self._forward_through_stage(tokens, last_only=True)
        if logits is None:
            logits = torch.empty(len(tokens), self.module.config.padded_vocab_size, device=self.device)
        else:
            logits = logits[:, -1].float().contiguous()
        torch.distributed.broadcast(logits, self._stages[-1], group=self._mesh.group("pp"))
        return logits

    def _forward_through_stage(self, tokens: Tensor, *args: Any, sequences: Tensor | None = None,
                               **kwargs: Any) -> Tensor | None:
        """Run a batch through this stage and send it to the next; the last stage returns its output."""
        x, stage = tokens, self._mesh.pp_rank
        if not self.module.is_first:
            x = torch.empty(*tokens.shape, self.module.config.n_embd, dtype=self._dtype, device=self.device)
            torch.distributed.recv(x, self._stages[stage - 1], group=self._sends)
        if self.module.is_last:
            return self.module(x, *args, sequences=sequences, **kwargs)
        torch.distributed.send(self.module(x, sequences=sequences), self._stages[stage + 1], group=self._sends)
        return None

    def training_state(self) -> EngineState:
        """Return slices of this stage's parameters, with the whole model's shapes so that any layout can load."""
        state = deepspeed_state(self._engine, *self._replica, self.loss_scale)
        state.shapes = parameter_shapes(self.module.config)
        return state


def _config(resolved: Resolved, run_dir: RunDir, stage: PipelineStage) -> dict[str, Any]:
    """Return DeepSpeed's config; in both stages with a tied embedding, buckets have the embedding's size.

    Therefore the tied embedding is a separate bucket, with the same positions in both stages. Certified counts of
    collectives depend on these buckets; `_sum_over_replicas` keeps the copies identical with any backend.
    """
    config = resolved.for_deepspeed(run_dir)
    if stage.table is not None:
        config["zero_optimization"] = {**config["zero_optimization"],
                                       "reduce_bucket_size": stage.table.weight.numel()}
    if "bf16" in config:
        # Free each bf16 gradient as soon as it is added to the fp32 gradient.
        config["bf16"] = {**config["bf16"], "immediate_grad_update": True}
    return config


def _pipeline_module(deepspeed: ModuleType, stage: PipelineStage, compute: Callable[[Tensor], Tensor],
                     mesh: Mesh) -> nn.Module:
    """Build a DeepSpeed pipeline with one layer per stage; this rank's layer is `compute`.

    Only the tied embedding is a tied layer of DeepSpeed. It belongs to the first and the last layer, which every
    rank must declare.
    """
    pipe = deepspeed.runtime.pipe

    class Tied(pipe.module.TiedLayerSpec):  # type: ignore[name-defined]
        """Tied layer with an existing module."""

        def build(self, log: bool = False) -> nn.Module:
            return stage.table

    layers: list[Any] = [compute] * mesh.pp_size
    if stage.config.tied:
        for end in (0, -1):
            layers[end] = Tied("table", nn.Module, forward_fn=lambda table, inputs: compute(inputs))
    topology = pipe.topology.PipeModelDataParallelTopology(mesh.pp_size, mesh.tp_size, mesh.size("dp", "sp"))
    # no_grad, because PipelineModule broadcasts the tied embedding, a leaf that requires a gradient.
    with torch.no_grad(), using_mesh_groups(deepspeed, mesh):
        module = pipe.module.PipelineModule(layers, topology=topology, partition_method="uniform")
    module.add_module("stage", stage)
    return module
