"""Run settings in a user's ds_config: used, translated, or rejected with the reason (imports no torch).

A shipped ds_config describes only a layout. A file written for another trainer also sets batch sizes, clipping,
precision, an optimizer and a scheduler, often as "auto". No key is dropped: each is used, translated with a note,
passed to DeepSpeed, or rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ezpz_llm.core.base import UserError
from ezpz_llm.training.layout.ds_config import DsConfig, number
from ezpz_llm.training.layout.ds_config_blocks import (
    BlockSettings,
    Precision,
    read_optimizer,
    read_precision,
    read_scheduler,
)

BATCH_KEYS = {"global_batch": "train_batch_size", "micro_batch": "train_micro_batch_size_per_gpu",
              "accumulation": "gradient_accumulation_steps"}
_DEGREES = {"tp": ("tensor_parallel.autotp_size", "ezpz_llm's own tensor-parallel layers, not AutoTP"),
            "pp": ("pipeline.stages", "stages of ezpz_llm's own blocks"),
            "sp": ("sequence_parallel_size", "sequence parallelism over the mesh, not over DeepSpeed's groups")}
"""DeepSpeed's key for each degree, and what a run does instead of DeepSpeed's own implementation."""


@dataclass(frozen=True)
class _Rule:
    """Allowed values of a key that changes what the run computes."""

    key: str
    allowed: tuple[Any, ...]
    reason: str


_OFF = (False, None)
_RULES = (
    _Rule("managed_gradient_accumulation", (True,), "the training loop marks the last micro-step"),
    _Rule("gradient_allreduce_op", ("mean",), "gradients are averaged over ranks"),
    _Rule("communication_data_type", ("fp32", "bf16", None), "gradients are reduced in fp32 or bf16"),
    _Rule("data_types.grad_accum_dtype", ("fp32", "bf16", None), "gradients are accumulated in fp32 or bf16"),
    _Rule("data_types.param_dtype", (None,), "the block bf16 or fp16 sets the parameter dtype"),
    _Rule("bf16.bf16_master_weights_and_grads", _OFF, "master weights are fp32 in every precision"),
    _Rule("fp16.fp16_master_weights_and_grads", _OFF, "master weights are fp32 in every precision"),
    _Rule("bf16.bf16_optimizer_states", _OFF, "moments are fp32 in every precision"),
    _Rule("zero_optimization.compute_grad_norm", (True,), "the gradient norm of each step is logged"),
    _Rule("zero_optimization.zero_quantized_weights", _OFF,
          "it needs an op that DeepSpeed compiles during the run"),
    _Rule("zero_optimization.zero_quantized_nontrainable_weights", _OFF,
          "it needs an op that DeepSpeed compiles during the run"),
    _Rule("zero_optimization.zero_quantized_gradients", _OFF,
          "it needs an op that DeepSpeed compiles during the run"),
    _Rule("zero_optimization.zenflow", _OFF, "it does not compute the same steps as the other layouts"),
    _Rule("zero_optimization.legacy_stage1", _OFF, "DeepSpeed has removed it"),
    _Rule("zero_optimization.cpu_offload_param", _OFF,
          "write \"offload_param\": {\"device\": \"cpu\"} instead"),
    _Rule("zero_optimization.offload_optimizer.device", ("none", "cpu", "nvme", None),
          "optimizer state is offloaded to CPU memory or files"),
    _Rule("zero_optimization.offload_optimizer.super_offload", _OFF,
          "partial offload of optimizer state is unsupported"),
    _Rule("zero_optimization.offload_optimizer.ratio", (1, None),
          "partial offload of optimizer state is unsupported"),
    _Rule("zero_optimization.offload_optimizer.fast_init", _OFF, "DeepSpeed's buffers are too small for it"),
    _Rule("aio.use_gds", _OFF, "it needs an op that DeepSpeed compiles during the run"),
    _Rule("tensor_parallel.tp", (None,), "the degree is tensor_parallel.autotp_size, or tp in \"ezpz_llm\""),
    _Rule("data_parallel_size", (None,), "it follows from the number of ranks and the other degrees"),
    _Rule("pipeline.partition", ("parameters", "uniform", "best", None),
          "stages are balanced by parameters, or by \"partition\": \"time\" in \"ezpz_llm\""),
    _Rule("pipeline.seed_layers", _OFF, "every layout has the initial weights of a single process"),
    _Rule("pipeline.pipe_partitioned", _OFF, "tensor-parallel ranks pass on unpartitioned activations"),
    _Rule("pipeline.grad_partitioned", _OFF, "tensor-parallel ranks pass on unpartitioned gradients"),
    _Rule("compile.deepcompile", _OFF, "--compile compiles the model's blocks"),
    _Rule("data_efficiency.enabled", _OFF, "the sample order depends only on the seed"),
    _Rule("pipeline.activation_checkpoint_interval", (0, 1, None),
          "activations are recomputed by whole blocks; pass --recompute K for every K-th block, or "
          "--recompute selective"),
    *(_Rule(f"activation_checkpointing.{key}", _OFF, "recomputed blocks keep their whole input on the device")
      for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
                  "synchronize_checkpoint_boundary", "profile")),
    _Rule("wandb.enabled", _OFF, "pass --track wandb, which also logs the loss"),
    _Rule("comet.enabled", _OFF, "pass --track tensorboard, wandb or mlflow"),
    _Rule("hybrid_engine.enabled", _OFF, "it is for generation during training"),
    _Rule("autotuning.enabled", _OFF, "it starts its own runs"),
    _Rule("expert_parallel.enabled", _OFF, "the models have no experts"),
    _Rule("checkpoint.load_universal", _OFF, "checkpoints have their own layout-neutral format"),
)


_WITHOUT_EFFECT = {
    "checkpoint": "checkpoints have their own layout-neutral format",
    "datastates_ckpt": "checkpoints have their own layout-neutral format",
    "dataloader_drop_last": "every step uses a whole global batch",
    "seq_parallel_communication_data_type":
        "sequence-parallel and data-parallel ranks reduce gradients in the same dtype",
    "weight_quantization": "weights are quantized for inference only",
    "vocabulary_size": "the model sets the vocabulary size",
}
"""Keys without effect, which are not passed to DeepSpeed, with a note for each."""


@dataclass
class RunOverrides:
    """Run settings in a ds_config, None if not set, and `rest`, the keys for DeepSpeed.

    `gradients` holds "grad_accum_dtype" and "reduce_dtype" if the file sets them.
    """

    rest: dict[str, Any]
    batch: dict[str, int] = field(default_factory=dict)
    clip: float | None = None
    precision: Precision = field(default_factory=Precision)
    optimizer: BlockSettings = field(default_factory=BlockSettings)
    scheduler: BlockSettings = field(default_factory=BlockSettings)
    recompute: int | None = None
    gradients: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def split_ds_config(config: DsConfig) -> RunOverrides:
    """Split a ds_config into settings of the run and keys for DeepSpeed.

    Raises:
        UserError: a value of the wrong type, or one that would change what the run computes.
    """
    _apply_rules(config)
    overrides = RunOverrides(deepcopy(config.values))
    autos = _drop_autos(overrides.rest, "")
    if autos:
        overrides.notes.append(f"\"auto\" in {config.path.name} is set by the run or by DeepSpeed: "
                            f"{', '.join(autos)}")
    remaining = overrides.rest
    for name, key in BATCH_KEYS.items():
        if (value := remaining.pop(key, None)) is not None:
            overrides.batch[name] = number(value, key, config, whole=True)
    if (clip := remaining.pop("gradient_clipping", None)) is not None:
        overrides.clip = number(clip, "gradient_clipping", config)
    overrides.precision = read_precision(remaining, autos, config)
    overrides.optimizer = read_optimizer(remaining.get("optimizer"), autos, config)
    overrides.scheduler = read_scheduler(remaining.get("scheduler"), autos, config)
    overrides.notes += [*overrides.precision.notes, *overrides.optimizer.notes, *overrides.scheduler.notes]
    for name, dtype in (("grad_accum_dtype", remaining.get("data_types", {}).get("grad_accum_dtype")),
                        ("reduce_dtype", remaining.get("communication_data_type"))):
        if dtype is not None:
            overrides.gradients[name] = dtype
    pipeline = remaining.get("pipeline", {})
    overrides.recompute = pipeline.get("activation_checkpoint_interval")
    if pipeline.get("partition") == "uniform":
        overrides.notes.append(f"pipeline.partition uniform of {config.path.name}: stages are balanced by "
                            "parameters, which gives equal blocks the same number per stage")
    overrides.notes += [f"{key} of {config.path.name}: {note}" for key, note in _WITHOUT_EFFECT.items()
                     if remaining.pop(key, None) not in (None, False, {})]
    for name, key in (("csv_monitor", "output_path"), ("tensorboard", "output_path"),
                      ("flops_profiler", "output_file")):
        if remaining.get(name, {}).get("enabled") and (path := remaining[name].get(key)):
            overrides.notes.append(f"{name} of {config.path.name} writes to {path}, outside the run directory; "
                                f"delete {key} to write into the run directory")
    for name, value in translated_degrees(config).items():
        key, note = _DEGREES[name]
        overrides.notes.append(f"{key} {value} of {config.path.name} becomes {name} {value}: {note}")
    for key in ("activation_checkpointing", "bf16", "bfloat16", "communication_data_type", "data_types", "fp16",
                "optimizer", "pipeline", "scheduler", "sequence_parallel_size", "tensor_parallel",
                "torch_autocast"):
        remaining.pop(key, None)  # _RULES allowed only what the run does anyway, or ezpz_llm implements it
    return overrides


def translated_degrees(config: DsConfig) -> dict[str, int]:
    """Return the degrees above 1 that a ds_config sets by DeepSpeed's own keys.

    Raises:
        UserError: an invalid value, or one that contradicts the block "ezpz_llm".
    """
    degrees = {}
    for name, (key, _) in _DEGREES.items():
        value = _look_up(config.values, key)
        if value in (_ABSENT, None, "auto") or (value == 0 and name == "tp"):
            continue
        value = number(value, key, config, whole=True)
        degree = config.ours.get(name, value)
        if value < 1 or degree != value:
            contradiction = "" if degree == value else f', and {name} in "ezpz_llm" is {degree}'
            raise UserError(f"{key} is {value}{contradiction}", where=str(config.path),
                            instead=f'"{name}": N in "ezpz_llm", without {key}')
        if value > 1 and name not in config.ours:
            degrees[name] = value
    return degrees


def _apply_rules(config: DsConfig) -> None:
    for rule in _RULES:
        value = _look_up(config.values, rule.key)
        if value is _ABSENT or value == "auto" or any(_same(value, allowed) for allowed in rule.allowed):
            continue
        allowed = " or ".join(json.dumps(choice) for choice in rule.allowed if choice is not None) or "no value"
        raise UserError(f"{rule.key} is {json.dumps(value)}; supported here: {allowed}", where=str(config.path),
                        instead=f"delete the key ({rule.reason})")


_ABSENT = object()


def _look_up(values: Mapping[str, Any], dotted: str) -> Any:
    block: Any = values
    for key in dotted.split("."):
        if not isinstance(block, Mapping) or key not in block:
            return _ABSENT
        block = block[key]
    return block


def _same(value: Any, allowed: Any) -> bool:
    # True == 1 in Python, but not in JSON.
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _drop_autos(values: dict[str, Any], prefix: str) -> list[str]:
    dropped = []
    for key, value in list(values.items()):
        if value == "auto":
            del values[key]
            dropped.append(prefix + key)
        elif isinstance(value, dict):
            dropped += _drop_autos(value, f"{prefix}{key}.")
    return dropped
