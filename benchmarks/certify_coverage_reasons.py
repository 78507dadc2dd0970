"""Reasons why lines that certify_coverage.py lists belong into no layout case of certify.

Patterns are of "FILE:FUNCTION:FIRST LINE", as in fnmatch. The longest matching pattern counts. The reason "" means
that a case should run the lines.
"""

from __future__ import annotations

REASONS = {
    "": (
        "data/samples.py:*", "data/sample_order.py:*", "data/shards.py:Mixture.*", "data/shards.py:TokenStream.*",
        "data/shards.py:TokenData.split:*", "data/shards.py:TokenData._stream:*",
        "data/shards.py:samples_per_block:*", "engine/deepspeed_state.py:ZeroState.stepped:*",
        "engine/fsdp2_engine.py:_FsdpState.*", "evaluate/generation.py:generate:*",
        "evaluate/model.py:open_model:*", "evaluate/tasks.py:run_*", "layout/optimizers/adamw_8bit.py:*",
        "layout/optimizers/muon.py:*", "layout/resolve.py:_Inputs.gradients:value*",
        "model/recomputation.py:recompute_blocks:*",
    ),
    "GPUs only": (
        "checkpoint/writer.py:capture_rng_states:states*device*",
        "checkpoint/writer.py:restore_rng_states:module*", "dist/deepspeed_patches.py:keep_until_reduced*",
        "engine/precision.py:rounds_matmuls:*", "model/attention.py:*",
        "model/loss.py:_Buffer.normalizer:softmax*", "model/loss.py:adds_wide_products:*",
        "model/tensor_parallel.py:RankedDropout*:with torch.random.fork_rng(devices=[*",
    ),
    "a choice by the number of threads": (
        "model/init.py:_draw_normal:*",
    ),
    "a head without a gradient: tests/library": (
        "model/loss.py:_Gradients.add:return",
    ),
    "checks of the machine": (
        "engine/nvme.py:*", "dist/collective_values.py:*",
    ),
    "choice of a device": (
        "dist/device.py:*",
    ),
    "command lines": (
        "evaluate/command.py:*", "evaluate/generation.py:*", "evaluate/hellaswag.py:Score.*",
        "evaluate/model.py:*", "evaluate/tasks.py:*", "*/__main__.py:*",
    ),
    "compiled code: tests/engine": (
        "model/compile.py:*", "model/gpt.py:gelu:*", "model/gpt.py:rotate:*",
        "model/loss.py:_ChunkedLoss.backward:*", "model/loss.py:_CompiledBuffer.*", "model/loss.py:_compiled:*",
        "model/loss.py:_normalizer:*", "model/loss.py:_scaled:*", "model/loss.py:_softmax_in_place:*",
    ),
    "default chunk size": (
        "model/loss.py:most_logits_on:*", "model/loss_chunk.py:*",
    ),
    "error messages": (
        "checkpoint/chain.py:on_chain:readable*", "checkpoint/chain.py:_try_read_state:*",
        "checkpoint/index.py:_coverage_problem:*", "checkpoint/index.py:check_shapes:*",
        "checkpoint/manifest.py:check_size:*", "checkpoint/saver.py:Saver.advance:except*",
        "checkpoint/saver.py:Saver._run_together.attempt:except*", "dist/agreement.py:first_value:values*",
        "dist/agreement.py:raise_together:*", "dist/agreement.py:run_together:*", "*_error:*",
    ),
    "estimates and measurements": (
        "dist/agreement.py:all_gather_number:*", "dist/links.py:*",
        "engine/collectives.py:*", "engine/live_memory.py:*", "engine/step_trace.py:*",
        "layout/optimizers/__init__.py:Optimizer.state_bytes:*", "model/attention_kernels.py:attention_kernel*",
        "model/init.py:decay_counts:*", "model/parameters.py:*",
    ),
    "fp16, which needs a GPU": (
        "checkpoint/reader.py:load:training.scale*", "engine/base.py:Engine._update_scale:*",
        "engine/deepspeed_engine.py:DeepSpeedEngine._step_stage_0:*",
        "engine/deepspeed_engine.py:DeepSpeedEngine.backward:*",
        "engine/gradients.py:_scale_gradients:elif loss_scale*",
        "engine/pipeline_engine.py:PipelineEngine.train_step:engine.optimizer.override*",
        "engine/precision.py:LossScale.*", "engine/torch_engine.py:TorchEngine.step:*",
    ),
    "lookups of names in torch": (
        "dist/torch_internals.py:*",
    ),
    "models of a script: `certify --target` and tests/library": (
        "checkpoint/reader.py:_check_buffers:*", "checkpoint/reader.py:_form:*",
        "checkpoint/reader.py:_load_buffers:*", "checkpoint/reader.py:load:_load_buffers*",
        "checkpoint/script_model.py:*", "engine/base.py:MicroStepEngine.*",
        "engine/build.py:put_in_engine:for buffer*",
        "engine/deepspeed_engine.py:DeepSpeedEngine.*",
        "dist/deepspeed_internals.py:zero_partitioned_gradients:*",
        "engine/deepspeed_state.py:*", "engine/fsdp2_engine.py:*",
        "engine/gradient_reducer.py:GradientReducer.discard:*", "engine/masters.py:*",
        "engine/optimizer_state.py:EngineState._frozen_slices:*", "engine/optimizer_state.py:adopt:*",
        "engine/optimizer_state.py:groups_of:*", "engine/optimizer_state.py:set_lr:*",
        "engine/optimizer_state.py:TorchState.adopt_parameters:*", "engine/running_statistics.py:*",
        "engine/sharded_start.py:*", "engine/sliced_optimizer.py:*", "engine/torch_engine.py:*",
    ),
    "DeepSpeed reads these names only in other settings": (
        "engine/deepspeed_groups.py:*",
    ),
    "norms by decay group, a metric: tests/engine": (
        "engine/group_norms.py:*",
        "engine/step_skip.py:*:self._measuring*",
        "engine/step_skip.py:NonFiniteStepSkipper.measured:*",
        "engine/step_skip.py:NonFiniteStepSkipper.call_at_step:*",
    ),
    "one process": (
        "engine/torch_engine.py:TorchEngine._make_reducer:*",
        "engine/torch_engine.py:TorchEngine.show_gradients:*", "model/init.py:init_weights:*",
    ),
    "other versions of DeepSpeed and torch": (
        "dist/version_rules.py:*",
        "engine/deepspeed_import.py:*", "dist/deepspeed_names.py:*", "dist/deepspeed_patches.py:import_muon:*",
        "dist/deepspeed_patches.py:without_mlflow:*",
    ),
    "the trainer's own state: tests/checkpoint": (
        "checkpoint/retention.py:*", "checkpoint/state.py:*",
    ),
    "runs before the ranks start": (
        "data/document_separator.py:*", "data/prompts.py:*", "data/samples.py:stream_offsets:*",
        "data/*",
        "engine/precision.py:native_precision:*", "evaluate/hellaswag.py:read_items:*",
        "evaluate/hellaswag.py:_item:*", "evaluate/validation.py:open_corpus:*",
        "layout/optimizers/__init__.py:*", "layout/optimizers/*.unsupported_reason:*", "layout/*",
        "model/config.py:*", "model/partition.py:*",
    ),
    "setup of the process group": (
        "dist/control_group.py:*", "dist/collective_network.py:*", "dist/collective_records.py:*",
        "dist/rendezvous.py:*", "dist/setup.py:*", "dist/process_group.py:*", "dist/freed_memory.py:*",
        "dist/shared_run_dir.py:*",
    ),
    "supervision": (
        "dist/heartbeat.py:*",
    ),
    "work that may fail": (
        "dist/optional_work.py:*",
    ),
}
