"""Every key that DeepSpeed 0.19.8 reads from its configuration, by block.

A fact about DeepSpeed, taken from its configuration classes and constants. None stands for a value, or for a block
whose inside DeepSpeed passes on unread. DeepSpeed accepts most unknown keys in silence; `ds_config` does not.
"""

from __future__ import annotations

from collections.abc import Mapping

Keys = Mapping[str, "Keys | None"]


def _block(names: str, **blocks: Keys) -> Keys:
    return {**dict.fromkeys(names.split()), **blocks}


_OFFLOAD_PARAM = _block("device nvme_path buffer_count buffer_size max_in_cpu pin_memory")
_OFFLOAD_OPTIMIZER = _block("device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio "
                            "super_offload cpuadam_cores_perc")
_ZENFLOW = _block("topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
                  "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch")
_ZERO = _block(
    "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
    "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
    "elastic_checkpoint sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload "
    "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
    "stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save "
    "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
    "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients "
    "parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
    "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory",
    offload_param=_OFFLOAD_PARAM, offload_optimizer=_OFFLOAD_OPTIMIZER, zenflow=_ZENFLOW,
    leaf_module=_block("classes names name_suffixes"))
_BF16 = _block("enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
               "bf16_optimizer_states")
_FP16 = _block("enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
               "consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads")
_TENSOR_PARALLEL = _block("dtype autotp_size tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend tp "
                          "injection_policy_tuple partition_config preset_model keep_module_on_host kernel_inject")
_COMPILE = _block("deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
                  "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
                  "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
                  "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes")
_AUTOTUNING = _block("enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric_path "
                     "tuner_type tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size "
                     "min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu "
                     "num_tuning_micro_batch_sizes mp_size metric model_info_path model_info")

DEEPSPEED_KEYS: Keys = _block(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "gradient_clipping zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print "
    "communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor "
    "gradient_allreduce_op disable_allgather disable_python_gc dump_state wall_clock_breakdown memory_breakdown "
    "vocabulary_size dataloader_drop_last use_data_before_expert_parallelism log_level sequence_parallel_size "
    "data_parallel_size expert_parallel datastates_ckpt data_efficiency weight_quantization",
    optimizer=_block("type params legacy_fusion"),
    scheduler=_block("type params"),
    zero_optimization=_ZERO, bf16=_BF16, bfloat16=_BF16, fp16=_FP16,
    torch_autocast=_block("enabled dtype lower_precision_safe_modules"),
    data_types=_block("grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules"),
    activation_checkpointing=_block("partition_activations number_checkpoints contiguous_memory_optimization "
                                    "synchronize_checkpoint_boundary profile cpu_checkpointing"),
    aio=_block("block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds"),
    comms_logger=_block("enabled prof_all prof_ops verbose debug"),
    tensorboard=_block("enabled output_path job_name"),
    csv_monitor=_block("enabled output_path job_name"),
    wandb=_block("enabled group team project"),
    comet=_block("enabled samples_log_interval project workspace api_key experiment_name experiment_key online "
                 "mode"),
    flops_profiler=_block("enabled recompute_fwd_factor profile_step module_depth top_modules detailed "
                          "output_file"),
    checkpoint=_block("tag_validation load_universal use_node_local_storage checkpoint_serialization writer",
                      parallel_write=_block("pipeline_stage")),
    timers=_block("", throughput=_block("enabled synchronized")),
    pipeline=_block("stages partition seed_layers activation_checkpoint_interval pipe_partitioned "
                    "grad_partitioned"),
    hybrid_engine=_block("enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
                         "tp_gather_partition_size enable_cuda_graph"),
    tensor_parallel=_TENSOR_PARALLEL, compile=_COMPILE, autotuning=_AUTOTUNING)

OUR_KEYS: Keys = _block("engine tp pp sp partition tiled")
"""The block "ezpz_llm", for what DeepSpeed has no key for."""

REMOVED: Mapping[str, str] = {
    "nebula": "Nebula checkpoints", "compression_training": "compression", "amp": "Apex mixed precision",
    "quantize_training": "mixture-of-quantization", "sparse_gradients": "sparse embedding gradients",
    "eigenvalue": "mixture-of-quantization", "sparse_attention": "sparse attention",
    "elasticity": "elastic training", "graph_harvesting": "graph harvesting",
    "curriculum_learning": "the legacy curriculum", "progressive_layer_drop": "progressive layer dropping",
    "zero_optimization.mics_shard_size": "MiCS sharding",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS sharding",
    "zero_optimization.zeropp_loco_param": "LoCo-ZeRO++",
}
"""Keys that older releases read and this one refuses, with what they were for."""
