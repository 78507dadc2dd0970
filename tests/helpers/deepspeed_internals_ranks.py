"""Run by two ranks: try each private name of DeepSpeed, and each patch, in engines of the installed version.

    mpiexec -n 2 python3 tests/helpers/deepspeed_internals_ranks.py FOLDER zero1 zero3:hpz pp2:bf16 …

A run is a layout, with a setting or a precision. Rank 0 writes FOLDER/results.json: for each run and name, True if
the name had its effect on both ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import deepspeed
import torch
from rank_jobs import sequences, take_runs
from torch import Tensor

from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.training.dist import Dist, deepspeed_internals as internals, deepspeed_patches as patches
from ezpz_llm.training.dist.torch_internals import count_groups
from ezpz_llm.training.engine.base import Engine, MicroStepEngine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.engine.deepspeed_groups import PipelineGrid
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.init import decay_groups

ACCUMULATION, BLOCK = 2, 16
SMALLEST = 4096
"""Bytes in the smallest file."""
CONFIG = replace(get_model_config("tiny-gpt2", n_layer=2, n_head=4, n_embd=64, block_size=BLOCK), vocab_size=64)
SETTINGS: dict[str, dict[str, Any]] = {
    "offload": {"offload_optimizer": {"device": "cpu"}},
    "buckets": {"contiguous_gradients": True},
    "hpz": {"zero_hpz_partition_size": 2},
    "files": {"sub_group_size": 50_000, "stage3_param_persistence_threshold": 0}}


def build(dist: Dist, layout: str, setting: str) -> Engine:
    values = json.loads((data_dir("ds_configs") / f"{layout}.json").read_text())
    values["zero_optimization"].update(SETTINGS.get(setting, {}))
    if setting == "files":
        values["aio"] = {"block_size": SMALLEST}
    path = dist.run_dir.path / f"{layout}-{setting}-{dist.rank}.json"
    path.write_text(json.dumps(values))
    resolved = resolve(Request(str(path), world_size=2, accumulation=ACCUMULATION, micro_batch=1, clip=1e9,
                               model=CONFIG, precision="bf16" if setting == "bf16" else "fp32", device="cpu"))
    dist.arrange(tp=resolved.layout.tp, pp=resolved.layout.pp, sp=resolved.layout.sp)
    model = assemble(CONFIG, resolved.layout, dist.mesh, 7)
    return build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                        param_groups=decay_groups(model, 0.1))


def micro_batches(dist: Dist) -> Iterator[tuple[Tensor, Tensor]]:
    for row in sequences(dist.mesh.place("dp")[0], ACCUMULATION, BLOCK + 1).chunk(ACCUMULATION):
        yield row[:, :-1], row[:, 1:]


def backward(engine: MicroStepEngine, dist: Dist, factor: float = 1.0) -> None:
    for number, (tokens, targets) in enumerate(micro_batches(dist)):
        engine.backward(engine.module(tokens, targets) * factor, is_last=number == ACCUMULATION - 1)


def recorded(owner: Any, name: str) -> list[Any]:
    """Record the results of a method."""
    results, method = [], getattr(owner, name)

    def record(*args: Any, **named: Any) -> Any:
        results.append(method(*args, **named))
        return results[-1]

    setattr(owner, name, record)
    return results


def weights(engine: Engine) -> list[Tensor]:
    return [part.tensors["weight"].clone() for part in engine.training_state().slices()]


def squares(engine: MicroStepEngine, dist: Dist) -> float:
    """Return the sum of squares of the gradients on both ranks."""
    total = torch.stack([gradient.float().square().sum() for _, gradient in engine.local_gradients()]).sum()
    torch.distributed.all_reduce(total)
    return total.item()


def norms_and_scale(engine: MicroStepEngine, dist: Dist, zero: Any) -> Iterator[tuple[str, bool]]:
    """Check the gradient norm, its NaN, and the loss scale."""
    norm_function = ("complete_grad_norm_calculation_for_cpu_offload" if engine.layout.zero.offload_optimizer
                     else "get_grad_norm_direct")
    backward(engine, dist)
    own_norm = math.sqrt(squares(engine, dist)) if engine.layout.zero.offload_optimizer is None else None
    norm = engine.step(0.0).item()
    yield "_global_grad_norm", math.isclose(internals.gradient_norm(zero), norm, rel_tol=1e-4)
    if own_norm is not None:
        yield "averaged_gradients", math.isclose(own_norm, norm, rel_tol=1e-4)
    internals.set_loss_scale(zero, 8.0)
    yield "override_loss_scale", zero.loss_scale == 8.0
    internals.set_loss_scale(zero, 1.0)
    before, norms = weights(engine), recorded(zero, norm_function)
    backward(engine, dist, math.nan)
    skipped = engine.step(1e-3).item()
    unchanged = all(map(torch.equal, before, weights(engine)))
    yield norm_function, bool(norms) and math.isinf(norms[0]) and not math.isfinite(skipped) and unchanged


def stages_1_and_2(engine: MicroStepEngine, dist: Dist, zero: Any) -> Iterator[tuple[str, bool]]:
    searches, averages = recorded(zero, "check_overflow"), recorded(zero, "average_tensor")
    buffers: list[Any] = []
    for parameter in engine.module.parameters():
        parameter.register_hook(lambda gradient: buffers.extend(internals.bucket_buffers(zero)))
    yield from norms_and_scale(engine, dist, zero)
    yield "check_grad_overflow", not searches
    yield "average_tensor", bool(averages)
    yield "overlap_comm", zero.overlap_comm is False
    yield "reduction_stream", zero.reduction_stream is None  # a CPU has no streams
    yield "contiguous_gradients", bool(zero.contiguous_gradients)
    yield "ipg_buckets", bool(buffers)
    backward(engine, dist)
    held = [len(zero.averaged_gradients), len(zero.all_grad_tensors)]
    internals.discard_averaged_gradients(zero)
    yield "all_grad_tensors", all(held) and not zero.averaged_gradients and not zero.all_grad_tensors
    engine.discard_gradients()
    yield from flat_weights(zero, "bit16_groups", "single_partition_of_fp32_groups")


def flat_weights(zero: Any, groups_name: str, flats_name: str) -> Iterator[tuple[str, bool]]:
    """Check the places of parameters in this rank's weights, and the copy of weights to the parameters."""
    groups, flats = internals.partitioned_groups(zero)
    yield groups_name, sum(map(len, groups)) > 0
    pairs = [(parameter.detach().flatten()[part.start:][:part.numel], flat[part.offset:][:part.numel])
             for parameters, flat in zip(groups, flats, strict=True) for parameter in parameters
             for part in [internals.fragment_of(parameter)]]
    is_same = all(torch.equal(part.float(), own.detach().to(part.dtype).float()) for part, own in pairs)
    for name in (flats_name, "_hp_mapping", "lp_fragment_address", "hp_fragment_address"):
        yield name, is_same and any(part.any() for part, _ in pairs)
    for flat in flats:
        flat.data.fill_(3.0)
    internals.refresh_parameters(zero)
    yield "update_lp_params", all((part == 3).all() for part, _ in pairs)


def stage_3(engine: MicroStepEngine, dist: Dist, zero: Any) -> Iterator[tuple[str, bool]]:
    parameters = list(engine.module.parameters())
    widest = max(parameters, key=internals.whole_numel)
    for name in ("ds_status", "local_device", "_convert_to_deepspeed_param"):
        yield name, all(map(internals.is_partitioned, parameters)) and not internals.is_gathered(widest)
    with deepspeed.zero.GatheredParameters([widest]):
        whole = widest.detach().clone()
        yield "partition", internals.is_gathered(widest)
    yield "ds_shape", internals.whole_shape(widest) == whole.shape
    yield "ds_numel", internals.whole_numel(widest) == whole.numel()
    size = internals.shard_numel(widest)
    yield "partition_numel", size == -(-whole.numel() // 2)
    if engine.layout.zero.offload_param != "nvme":  # otherwise the shard is in a file
        yield "ds_tensor", torch.equal(internals.shard_of(widest), whole.flatten()[size * dist.rank:][:size])
    is_shard = all(torch.equal(torch.cat([internals.shard_of(parameter).float() for parameter in group.parameters]),
                               group.flat.detach()) for group in internals.sub_groups(zero)
                   if engine.layout.zero.offload_optimizer is None)
    for name in ("fp16_groups", "sub_group_to_group_id", "fp32_partitioned_groups_flat"):
        yield name, is_shard
    for name in ("contiguous_gradients", "ipg_buckets"):
        yield name, len(internals.bucket_buffers(zero)) == zero.contiguous_gradients
    yield from norms_and_scale(engine, dist, zero)
    backward(engine, dist)
    held = zero.grad_partitions_flat_buffer.any()
    internals.zero_partitioned_gradients(zero)
    yield "grad_partitions_flat_buffer", bool(held) and not zero.grad_partitions_flat_buffer.any()
    engine.discard_gradients()
    with torch.no_grad():
        widest.all_gather()
        gathered = internals.is_gathered(widest)
        internals.release_gathered(zero)
    yield "empty_partition_cache", gathered and not internals.is_gathered(widest)
    yield from files(zero, "zero3_nvme" in engine.layout.name)
    for number, group in enumerate(internals.sub_groups(zero)):
        with internals.in_memory(zero, number):
            group.flat.data.fill_(3.0)
    internals.refresh_shards(zero, parameters)
    refreshed = []
    for parameter in parameters:
        with deepspeed.zero.GatheredParameters([parameter]):
            refreshed.append(bool((parameter == 3).all()))
    for name in ("_reassign_or_swap_out_partitioned_parameters", "checkpoint_event_prologue",
                 "checkpoint_event_epilogue"):
        yield name, all(refreshed)


def files(zero: Any, has_files: bool) -> Iterator[tuple[str, bool]]:
    numbers = range(len(zero.fp16_groups))
    in_files = [internals.is_in_files(zero, number) for number in numbers]
    yield "_swappable_optimizer_subgroup", any(in_files) == has_files
    if not has_files:
        return
    number = in_files.index(True)
    flat = internals.sub_groups(zero)[number].flat
    with internals.in_memory(zero, number):
        loaded = bool(flat.any())
        flat.data.fill_(5.0)
    outside = flat.numel() and bool(flat.any())
    with internals.in_memory(zero, number):
        written = bool((flat == 5).all())
    yield "_optimizer_states_and_gradient_swap_in", loaded and not outside
    yield "_optimizer_states_and_gradient_swap_out", written
    yield "MIN_AIO_BYTES", True  # otherwise no sub-group of this model would be in files
    swapper = zero.optimizer_swapper
    for name in ("optimizer_swapper", "_adjust_for_misaligned_lengths", "numel_alignment", "swappable"):
        yield name, _keeps_unaligned(swapper)


def _keeps_unaligned(swapper: Any) -> bool:
    alignment = swapper.numel_alignment
    parts, _ = swapper._adjust_for_misaligned_lengths(
        tensors=[torch.zeros(8 * alignment + 1), torch.zeros(8 * alignment)], offsets=[0, 8 * alignment + 1])
    return [swapper.is_swappable_tensor(tensor=part) for part in parts] == [True, False, False]


def hpz(engine: MicroStepEngine, dist: Dist, zero: Any) -> Iterator[tuple[str, bool]]:
    def second_shards() -> list[Tensor]:
        return [shard for parameter in engine.module.parameters()
                if (shard := internals.second_shard_of(parameter)) is not None]

    groups = deepspeed.utils.groups
    own = dist.mesh.divided(2)[1]
    for name in ("_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_create_zero_param_parallel_group"):
        yield name, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is own
    backward(engine, dist)
    created = len(second_shards())
    engine.step(1e-3)
    kept = len(second_shards())
    patches.keep_second_shards(zero)
    backward(engine, dist)
    engine.step(1e-3)
    yield "invalidate_secondary_tensor", created > 0 and kept == 0 and len(second_shards()) == created
    for parameter in engine.module.parameters():
        internals.discard_second_shard(parameter)
    yield "ds_secondary_tensor", not second_shards()


def pipeline(engine: Any, dist: Dist, zero: Any) -> Iterator[tuple[str, bool]]:
    inner = engine._engine
    yield "PipelineParallelGrid", isinstance(inner.grid, PipelineGrid)
    sends = deepspeed.runtime.pipe.p2p.dist
    for name in ("send", "recv"):
        yield f"dist.{name}", getattr(sends, name).keywords["group"] is dist.mesh.separate_group("pp")
    count = count_groups()
    losses: list[Any] = []
    # A second step must not add to the loss of the first.
    for _ in range(2):
        loss, norm = engine.train_step(micro_batches(dist), 0.0, lambda phase: nullcontext())
        losses.append(loss.item())
    yield "dist.new_group", count_groups() == count
    is_loss = losses[0] == losses[1] and (losses[0] > 0) == engine.module.is_last
    for name in ("total_loss", "_compute_loss", "_INSTRUCTION_MAP"):
        yield name, is_loss
    yield "fwd_outputs", len(inner.fwd_outputs) <= ACCUMULATION
    labels = [label for label in internals.pipeline_labels(inner) if label is not None]
    targets = [target for _, target in micro_batches(dist)]
    yield "pipe_buffers", not engine.module.is_last or any(torch.equal(label, targets[-1]) for label in labels)
    for name in ("TrainSchedule", "num_pipe_buffers", "_reserve_pipe_buffers"):
        yield name, 0 < len(internals.pipeline_labels(inner)) == inner.num_pipe_buffers <= ACCUMULATION
    yield "_global_grad_norm", math.isclose(internals.gradient_norm(zero), norm.item(), rel_tol=1e-4) and norm > 0
    if hasattr(zero, "bf16_groups"):
        parameter = next(engine.module.parameters())
        for flat in internals.flat_gradients(zero):
            flat.fill_(3.0)
        gradient = internals.fp32_gradient(parameter)
        for name in ("_hp_grad", "non_expert_gradients"):
            yield name, gradient.numel() == parameter.numel() and bool((gradient == 3).all())
        yield "immediate_grad_update", all(parameter.grad is None for parameter in engine.module.parameters())
        yield from flat_weights(zero, "bf16_groups", "fp32_groups_flat_partition")


def log(engine: MicroStepEngine, dist: Dist, zero: Any) -> Iterator[tuple[str, bool]]:
    internals.log_collectives(True)
    backward(engine, dist)
    engine.step(0.0)
    calls = internals.log_collectives(False)
    backward(engine, dist)
    engine.step(0.0)
    for name in ("comms_logger", "configure"):
        yield name, sum(call["count"] for call in calls.values()) > 0 and not internals.log_collectives(False)


def cpu_adam(engine: Any, dist: Dist, zero: Any) -> Iterator[tuple[str, bool]]:
    yield "_loaded_ops", "cpu_adam" in internals.loaded_ops()
    optimizer = zero.optimizer
    weight, gradient, *moments = torch.ones(1), torch.ones(1), torch.zeros(1), torch.zeros(1)
    internals.step_cpu_adam(optimizer, 1, optimizer.param_groups[0], [weight, gradient, *moments])
    moved = weight.item() == 1 and all(moment.item() > 0 for moment in moments)
    for name in ("ds_opt_adam", "opt_id"):
        yield name, internals.is_cpu_adam(optimizer) and moved


CHECKS: dict[str, tuple[Callable[..., Iterator[tuple[str, bool]]], ...]] = {
    "zero1": (stages_1_and_2,), "zero2": (stages_1_and_2, log), "zero3": (stage_3,), "zero3:buckets": (stage_3,),
    "zero3:hpz": (hpz,), "pp2": (pipeline,), "pp2:bf16": (pipeline,), "zero2:offload": (norms_and_scale,),
    "zero3_offload_optimizer": (cpu_adam, stage_3), "zero3_nvme:files": (stage_3,)}


def run(dist: Dist, name: str) -> dict[str, bool]:
    layout, _, setting = name.partition(":")
    with patches.smallest_file(SMALLEST) if setting == "files" else nullcontext():
        engine: Any = build(dist, layout, setting)
        found: dict[str, bool] = {}
        for check in CHECKS[name]:
            for private, good in check(engine, dist, engine._engine.optimizer):
                found[private] = found.get(private, True) and bool(good)
    everyone: list[Any] = [None] * dist.world_size
    torch.distributed.all_gather_object(everyone, found)
    return {private: all(ranks.get(private, True) for ranks in everyone) for private in found}


if __name__ == "__main__":
    take_runs(run)
