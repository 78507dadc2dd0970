"""Keys and values of public ds_configs, copied from the named files, with the expected result of each.

`Public.text` describes how a file deviates from plain JSON. `expected` was written before the first run: either the
settings of the run by name, or a part of the error message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"


@dataclass(frozen=True)
class Public:
    """A ds_config at `repo`, `path`, `commit`; `argv` and `world_size` complete its "auto" values."""

    repo: str
    path: str
    commit: str
    values: dict[str, Any]
    expected: dict[str, Any] | str
    notes: tuple[str, ...] = ()
    world_size: int = 2
    argv: tuple[str, ...] = ()
    text: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.repo.split('/')[1]}/{self.path}@{self.commit[:7]}"


def fp16(enabled: Any = True, power: int | None = 16, window: int = 1000, **more: Any) -> dict[str, Any]:
    """Return the fp16 block found in most files."""
    block = {"enabled": enabled, "loss_scale": 0, "loss_scale_window": window, "hysteresis": 2, "min_loss_scale": 1}
    return {**block, **({} if power is None else {"initial_scale_power": power}), **more}


def autos(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, AUTO)


def adamw(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": params}


def warmup(kind: str = "WarmupLR", **params: Any) -> dict[str, Any]:
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", *(("total_num_steps",) * (kind != "WarmupLR")))
    return {"type": kind, "params": params or autos(*names)}


CPU = {"device": "cpu", "pin_memory": True}
BATCH = autos("train_batch_size", "train_micro_batch_size_per_gpu")
HF = {**BATCH, "gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO, "wall_clock_breakdown": False}
STAGE_2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True,
           "reduce_scatter": True, "contiguous_gradients": True}
OPEN_BUCKETS = autos("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
STAGE_3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, **OPEN_BUCKETS,
           "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
ALL_AUTO = adamw(**autos("lr", "betas", "eps", "weight_decay"))
IN_STEP = {"schedule": "WarmupLR", "warmup_type": "log", "lr": 1e-3, "warmup_steps": 10}
"""Expected for WarmupLR with only "auto" values: the run's learning rate and warm-up, in DeepSpeed's shape."""
DECAYING = {"schedule": "WarmupDecayLR", "warmup_type": "log", "lr": 1e-3, "warmup_steps": 10,
            "decay_steps": 100}

_AXOLOTL, _ACCELERATE = "axolotl-ai-cloud/axolotl", "huggingface/accelerate"
_NOW = "067b021c8b87a9e5e380b9173c704cf7340e30f5"
_AXOLOTL_16 = {"bf16": {"enabled": AUTO}, "fp16": fp16(AUTO, 32, auto_cast=False)}
_AXOLOTL_3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, **OPEN_BUCKETS,
              "max_live_parameters": 0, "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True}
_AXOLOTL_2 = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True,
              "overlap_comm": True}
_OLD_COMPILE = {"compile": {"disable": False, "backend": "inductor"}}
_NO_FORCE = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}


def _axolotl(path: str, values: dict[str, Any], expected: dict[str, Any] | str, commit: str = _NOW,
             **more: Any) -> Public:
    return Public(_AXOLOTL, path, commit, values, expected, **more)


AXOLOTL = [
    _axolotl("deepspeed_configs/zero1.json",
             {"zero_optimization": {"stage": 1, "overlap_comm": True}, **_AXOLOTL_16, **HF},
             {"stage": 1, "precision": AUTO, "clip": 1.0, "zero.overlap_comm": True, "scale": (2.0**32, 1000, 2)}),
    _axolotl("deepspeed_configs/zero1_torch_compile.json",
             {"zero_optimization": {"stage": 1, "overlap_comm": True}, **_AXOLOTL_16, **_OLD_COMPILE, **HF},
             "unknown key 'disable'"),
    _axolotl("deepspeed_configs/zero2.json", {"zero_optimization": _AXOLOTL_2, **_AXOLOTL_16, **HF},
             {"stage": 2, "offload_optimizer": "cpu", "precision": AUTO}),
    _axolotl("deepspeed_configs/zero2_torch_compile.json",
             {**_OLD_COMPILE, "zero_optimization": _AXOLOTL_2, **_AXOLOTL_16, **HF}, "unknown key 'disable'"),
    _axolotl("deepspeed_configs/zero3.json", {"zero_optimization": _AXOLOTL_3, **_AXOLOTL_16, **HF},
             {"stage": 3, "precision": AUTO, "zero.stage3_max_live_parameters": 0, "zero.sub_group_size": 0,
              "zero.stage3_gather_16bit_weights_on_model_save": True}),
    _axolotl("deepspeed_configs/zero3_bf16.json",
             {"zero_optimization": _AXOLOTL_3, "bf16": {"enabled": True}, **HF},
             {"stage": 3, "precision": "bf16"}),
    _axolotl("deepspeed_configs/zero3_bf16_cpuoffload_all.json",
             {**_NO_FORCE, "zero_optimization": {**_AXOLOTL_3, "offload_optimizer": CPU, "offload_param": CPU},
              "bf16": {"enabled": True}, **HF},
             {"stage": 3, "precision": "bf16", "offload_optimizer": "cpu", "offload_param": "cpu"}),
    _axolotl("deepspeed_configs/zero3_bf16_cpuoffload_params.json",
             {**_NO_FORCE, "zero_optimization": {**_AXOLOTL_3, "offload_param": CPU}, "bf16": {"enabled": True},
              **HF},
             {"stage": 3, "precision": "bf16", "offload_optimizer": None, "offload_param": "cpu"}),
    _axolotl("deepspeed/zero3.json",
             {"zero_optimization": {**STAGE_3, "sub_group_size": 0, "stage3_max_live_parameters": 0,
                                    "stage3_max_reuse_distance": 0, "offload_optimizer": CPU, "offload_param": CPU,
                                    "stage3_gather_16bit_weights_on_model_save": True},
              **_AXOLOTL_16, "optimizer": adamw(lr=AUTO, betas=[0.9, 0.95], eps=1e-8, weight_decay=AUTO),
              "scheduler": warmup(), **BATCH, "wall_clock_breakdown": False},
             {"stage": 3, "offload_param": "cpu", "beta2": 0.95, "weight_decay": 0.1, **IN_STEP},
             commit="bb53a165f5f2805b78f4d7c252c6978e24d81cd2"),
    _axolotl("deepspeed/zero2.json",
             {"zero_optimization": _AXOLOTL_2, **_AXOLOTL_16, "scheduler": warmup("WarmupDecayLR"),
              "optimizer": adamw(lr=AUTO, betas=[0.9, 0.999], eps=1e-8, weight_decay=AUTO), **BATCH,
              "wall_clock_breakdown": False},
             {"stage": 2, "beta2": 0.999, "weight_decay": 0.1, **DECAYING},
             commit="3fc900629881e369a41ab656d4811c3a0410ea89"),
    _axolotl("ds_config.json",
             {"bf16": {"enabled": AUTO}, "fp16": fp16(AUTO), "optimizer": ALL_AUTO, "scheduler": warmup(),
              "zero_optimization": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU,
                                    "stage3_gather_16bit_weights_on_model_save": True},
              "steps_per_print": 5, **HF},
             {"stage": 3, "offload_optimizer": "cpu", "precision": AUTO, "beta2": 0.95, "steps_per_print": 5,
              **IN_STEP},
             commit="05fffb53b4f815dd938da7516b2a3b5352daab1c",
             text={'"bf16": {"enabled": "auto"}': '"bf16": {\n "enabled": "auto",\n}'}),
]

_AT = "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
_TEMPLATES = "examples/deepspeed_config_templates"
_ONE = {**HF, "gradient_accumulation_steps": 1, "steps_per_print": 2000}
_TORCH_ADAM = adamw(lr=AUTO, weight_decay=AUTO, torch_adam=True, adam_w_mode=True)
_FP16_DECAYING = {"fp16": fp16(), "scheduler": warmup("WarmupDecayLR"), **_ONE}
_STAGE_3_GATHER = {**STAGE_3, "stage3_gather_16bit_weights_on_model_save": AUTO}
_LEFT_OUT = ("beta1 0.9, beta2 0.999, eps 1e-08",)
_IN_FP16 = {"precision": "fp16_autocast", "accumulation": 1, "scale": (2.0**16, 1000, 2), "beta2": 0.999,
            "weight_decay": 0.1, **DECAYING}


def _accelerate(path: str, values: dict[str, Any], expected: dict[str, Any] | str, *notes: str) -> Public:
    return Public(_ACCELERATE, path, _AT, values, expected, notes)


ACCELERATE = [
    _accelerate("examples/alst_ulysses_sequence_parallelism/sp-alst.ds-config.json",
                {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 1,
                 **BATCH, "seq_parallel_communication_data_type": "bf16"},
                {"stage": 3, "precision": "bf16", "accumulation": 1},
                "sequence-parallel and data-parallel ranks reduce gradients in the same dtype"),
    _accelerate(f"{_TEMPLATES}/zero_stage1_config.json",
                {**_FP16_DECAYING, "optimizer": _TORCH_ADAM,
                 "zero_optimization": {**STAGE_2, "stage": 1, "reduce_bucket_size": AUTO}},
                {"stage": 1, "zero.allgather_bucket_size": 200_000_000, **_IN_FP16}, *_LEFT_OUT, "torch_adam"),
    _accelerate(f"{_TEMPLATES}/zero_stage2_config.json",
                {**_FP16_DECAYING, "optimizer": _TORCH_ADAM,
                 "zero_optimization": {**STAGE_2, "reduce_bucket_size": AUTO}},
                {"stage": 2, "offload_optimizer": None, **_IN_FP16}, *_LEFT_OUT),
    _accelerate(f"{_TEMPLATES}/zero_stage2_offload_config.json",
                {**_FP16_DECAYING, "optimizer": _TORCH_ADAM,
                 "zero_optimization": {**STAGE_2, "reduce_bucket_size": AUTO, "offload_optimizer": CPU}},
                {"stage": 2, "offload_optimizer": "cpu", **_IN_FP16}, *_LEFT_OUT),
    _accelerate(f"{_TEMPLATES}/zero_stage3_config.json",
                {**_FP16_DECAYING, "optimizer": adamw(lr=AUTO, weight_decay=AUTO),
                 "zero_optimization": _STAGE_3_GATHER},
                {"stage": 3, "zero.stage3_max_live_parameters": 10**9, **_IN_FP16}, *_LEFT_OUT),
    _accelerate(f"{_TEMPLATES}/zero_stage3_offload_config.json",
                {**_FP16_DECAYING, "optimizer": adamw(lr=AUTO, weight_decay=AUTO),
                 "zero_optimization": {**_STAGE_3_GATHER, "offload_optimizer": CPU, "offload_param": CPU}},
                {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", **_IN_FP16}, *_LEFT_OUT),
    _accelerate("tests/deepspeed/ds_config_zero2.json",
                {"fp16": fp16(AUTO), "bf16": {"enabled": AUTO}, "optimizer": _TORCH_ADAM, "scheduler": warmup(),
                 "zero_optimization": {**STAGE_2, "reduce_bucket_size": AUTO, "offload_optimizer": CPU}, **_ONE},
                {"stage": 2, "precision": AUTO, "offload_optimizer": "cpu", **IN_STEP}, *_LEFT_OUT),
    _accelerate("tests/deepspeed/ds_config_zero3.json",
                {"fp16": fp16(AUTO), "bf16": {"enabled": AUTO}, "optimizer": _TORCH_ADAM, "scheduler": warmup(),
                 "zero_optimization": {**_STAGE_3_GATHER, "offload_optimizer": CPU, "offload_param": CPU}, **_ONE},
                {"stage": 3, "precision": AUTO, "offload_param": "cpu", **IN_STEP}, *_LEFT_OUT),
    _accelerate("tests/deepspeed/ds_config_zero3_model_only.json",
                {"fp16": fp16(AUTO), "bf16": {"enabled": AUTO}, "train_micro_batch_size_per_gpu": 1,
                 "zero_optimization": {"stage": 3, "offload_param": CPU, "overlap_comm": True, **dict.fromkeys(
                     ("sub_group_size", "reduce_bucket_size", "stage3_prefetch_bucket_size",
                      "stage3_param_persistence_threshold", "stage3_max_live_parameters",
                      "stage3_max_reuse_distance"), 1e9), "stage3_gather_16bit_weights_on_model_save": True}},
                {"stage": 3, "micro_batch": 1, "schedule": "cosine", "beta2": 0.95, "offload_optimizer": None,
                 "zero.stage3_param_persistence_threshold": 10**9}),
]

_HF_TESTS = "tests/deepspeed"
_FIXED_ADAM = {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}
_FIXED_WARMUP = warmup(warmup_min_lr=0, warmup_max_lr=3e-5, warmup_num_steps=500)
_PRINT = {"steps_per_print": 2000, "wall_clock_breakdown": False}
_FIXED = {"lr": 3e-5, "beta1": 0.8, "beta2": 0.999, "weight_decay": 3e-7, "schedule": "WarmupLR",
          "warmup_steps": 500, "warmup_type": "log", "warmup_min_lr": 0.0}
_OLD_GATHER = {"stage3_gather_fp16_weights_on_model_save": True}


def _transformers(path: str, commit: str, values: dict[str, Any], expected: dict[str, Any] | str,
                  *notes: str) -> Public:
    return Public("huggingface/transformers", path, commit, values, expected, notes)


TRANSFORMERS = [
    _transformers(f"{_HF_TESTS}/ds_config_zero2.json", "00e12e7c54598e50e7bef1540db3408f81916de1",
                  {"fp16": fp16(AUTO), "bf16": {"enabled": AUTO}, "optimizer": ALL_AUTO, "scheduler": warmup(),
                   "zero_optimization": {**STAGE_2, "reduce_bucket_size": 2e8, "offload_optimizer": CPU},
                   **HF, **_PRINT},
                  {"stage": 2, "precision": AUTO, "beta2": 0.95, "zero.reduce_bucket_size": 200_000_000, **IN_STEP},
                  "optimizer.params.betas", "scheduler.params.warmup_max_lr"),
    _transformers(f"{_HF_TESTS}/ds_config_zero3.json", "61c7ec94b563d371cbafde35f3c6822049ebf131",
                  {"fp16": fp16(), "optimizer": adamw(**_FIXED_ADAM), "scheduler": _FIXED_WARMUP, **_PRINT,
                   "zero_optimization": {**STAGE_3, "sub_group_size": 1e14, **dict.fromkeys(OPEN_BUCKETS, 0),
                                         "offload_optimizer": CPU, "offload_param": CPU, **_OLD_GATHER}},
                  "zero_optimization.reduce_bucket_size is 0; DeepSpeed requires a whole number > 0"),
    _transformers(f"{_HF_TESTS}/ds_config_zero2_bf16.json", "a9c1721ff6eeba4729ba7760c6ec809c72935b2b",
                  {"bfloat16": {"enabled": AUTO}, "optimizer": ALL_AUTO, "scheduler": warmup(),
                   "zero_optimization": {**STAGE_2, "reduce_bucket_size": 2e8, "offload_optimizer": CPU},
                   **HF, **_PRINT},
                  {"stage": 2, "precision": AUTO, **IN_STEP}, "bfloat16.enabled"),
    _transformers(f"{_HF_TESTS}/ds_config_zero3_bf16.json", "a9c1721ff6eeba4729ba7760c6ec809c72935b2b",
                  {"bfloat16": {"enabled": AUTO}, "optimizer": ALL_AUTO, "scheduler": warmup(),
                   "zero_optimization": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU, **_OLD_GATHER},
                   **HF, **_PRINT},
                  {"stage": 3, "precision": AUTO, "zero.stage3_gather_fp16_weights_on_model_save": True,
                   **IN_STEP}),
    _transformers("examples/research_projects/wav2vec2/ds_config_wav2vec2_zero2.json",
                  "0ea01089f778cba53d0a06e62972b8be1ed554e7",
                  {"fp16": fp16(AUTO), "optimizer": ALL_AUTO, "scheduler": warmup(),
                   "zero_optimization": {**STAGE_2, "reduce_bucket_size": 2e8, "offload_optimizer": CPU,
                                         "find_unused_parameters": True}, **HF, **_PRINT},
                  "unknown key 'find_unused_parameters'"),
    _transformers("examples/research_projects/wav2vec2/ds_config_wav2vec2_zero3.json",
                  "52341e88b5acd88fdd4545a727947f949aeeb0ed",
                  {"fp16": fp16(AUTO), "optimizer": ALL_AUTO, "scheduler": warmup(),
                   "zero_optimization": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU, **_OLD_GATHER},
                   **HF, **_PRINT},
                  {"stage": 3, "precision": AUTO, "scale": (2.0**16, 1000, 2), **IN_STEP}),
    _transformers("examples/tests/deepspeed/ds_config.json", "201f8914b5b9cef46b1805edb5de0358703936db",
                  {"fp16": fp16(power=None), "optimizer": adamw(**_FIXED_ADAM), "scheduler": _FIXED_WARMUP,
                   "zero_optimization": {**STAGE_2, "reduce_bucket_size": 2e8, "cpu_offload": True},
                   "zero_allow_untested_optimizer": True, **_PRINT},
                  {"stage": 2, "precision": "fp16_autocast", "offload_optimizer": "cpu",
                   "scale": (2.0**16, 1000, 2), **_FIXED}, "warmup_type log"),
    _transformers("examples/tests/deepspeed/ds_config_zero3.json", "0799eacaf314d779f28c6298437f8f615b63a42d",
                  {"fp16": fp16(), "optimizer": adamw(**_FIXED_ADAM), "scheduler": _FIXED_WARMUP, **_PRINT,
                   "zero_optimization": {**STAGE_3, "sub_group_size": 1e14, "reduce_bucket_size": 1e6,
                                         "stage3_prefetch_bucket_size": 0.94e6,
                                         "stage3_param_persistence_threshold": 1e4, "cpu_offload": True,
                                         "cpu_offload_params": True, "cpu_offload_use_pin_memory": True,
                                         **_OLD_GATHER}},
                  "unknown key 'cpu_offload_params'"),
    _transformers("examples/seq2seq/ds_config.json", "05209c2b166addd234f01536bb6831818aad73e5",
                  {"fp16": fp16(power=None), "optimizer": adamw("Adam", **_FIXED_ADAM), "scheduler": _FIXED_WARMUP,
                   "zero_optimization": {**STAGE_2, "allgather_bucket_size": 200000000,
                                         "reduce_bucket_size": 200000000, "cpu_offload": True}, **_PRINT},
                  {"stage": 2, "precision": "fp16_autocast", "offload_optimizer": "cpu", **_FIXED}),
]

_EXAMPLES = "45b4b7156c8794a3452a5a7d03dbd8d797068569"
_SMALL_ADAM = {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}


def _examples(path: str, values: dict[str, Any], expected: dict[str, Any] | str, *notes: str,
              **more: Any) -> Public:
    return Public("deepspeedai/DeepSpeedExamples", path, _EXAMPLES, values, expected, notes, **more)


DEEPSPEED_EXAMPLES = [
    _examples("benchmarks/autosp/configs/autosp_config.json",
              {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0},
               "compile": {"deepcompile": True, "passes": ["autosp"]}, "gradient_accumulation_steps": 1,
               "gradient_clipping": AUTO, "train_batch_size": 1, "train_micro_batch_size_per_gpu": 1,
               "sequence_parallel_size": 2, **_PRINT}, "compile.deepcompile is true"),
    _examples("compression/gpt2/config/ds_config.json",
              {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 50,
               "optimizer": adamw("Adam", **_SMALL_ADAM), "zero_optimization": {"stage": 0},
               "fp16": {"enabled": True}, "gradient_clipping": 1.0, "prescale_gradients": True,
               "wall_clock_breakdown": False},
              {"stage": 0, "precision": "fp16_autocast", "global_batch": 8, "micro_batch": 4, "lr": 1e-3,
               "beta1": 0.8, "weight_decay": 3e-7, "schedule": "cosine", "prescale_gradients": True}),
    _examples("inference/sglang/ds_offload_nvme_aio.json",
              {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": AUTO,
                                     "stage3_prefetch_bucket_size": AUTO,
                                     "stage3_param_persistence_threshold": AUTO,
                                     "offload_param": {"device": "nvme", "nvme_path": "/local_nvme/sglang",
                                                       "pin_memory": True, "buffer_size": AUTO, "buffer_count": 5}},
               "aio": {"block_size": 8388608, "queue_depth": 32, "intra_op_parallelism": 8, "single_submit": False,
                       "overlap_events": True, "use_gds": False}, "train_batch_size": 1},
              {"stage": 3, "offload_param": "nvme", "precision": AUTO, "nvme_path": "/local_nvme/sglang"},
              "DeepSpeed would compute in fp32", world_size=1),
    _examples("training/BingBertSquad/deepspeed_bsz24_config.json",
              {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "steps_per_print": 10,
               "optimizer": adamw("Adam", lr=3e-5, weight_decay=0.0, bias_correction=False),
               "gradient_clipping": 1.0, "fp16": {"enabled": True}}, "bias_correction is false"),
    _examples("training/BingBertSquad/1-bit_adam/nccl/deepspeed_onebitadam_bsz96_config.json",
              {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 3, "steps_per_print": 100,
               "optimizer": adamw("OnebitAdam", lr=3e-5, freeze_step=400, weight_decay=0.0, bias_correction=False,
                                  cuda_aware=False, comm_backend_name="nccl"),
               "gradient_clipping": 1.0, "fp16": {"enabled": True}}, "the optimizer is OnebitAdam"),
    _examples("training/DeepSpeed-ZenFlow/finetuning/zf_config.json",
              {"train_batch_size": 8, "bf16": {"enabled": True}, "gradient_accumulation_steps": 1,
               "zero_optimization": {"stage": 2, "offload_optimizer": CPU,
                                     "zenflow": {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0,
                                                 "overlap_step": True}},
               "optimizer": adamw(lr=2e-5, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01),
               "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True}, "zero_optimization.zenflow"),
    _examples("training/autotuning/hf/dsconfigs/ds_config_fp16_z3.json",
              {"train_micro_batch_size_per_gpu": AUTO, "zero_optimization": {"stage": 3},
               "fp16": {"enabled": True}},
              {"stage": 3, "precision": "fp16_autocast", "scale": (2.0**16, 1000, 2)}),
    _examples("training/autotuning/hf/dsconfigs/ds_config_tune.json",
              {"train_micro_batch_size_per_gpu": AUTO,
               "autotuning": {"enabled": True, "overwrite": False, "fast": True,
                              "arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
                                               "gradient_accumulation_steps ": "--gradient_accumulation_steps"}}},
              "autotuning.enabled is true"),
    _examples("training/bf16_master_weight/configs/baseline.json",
              {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "steps_per_print": 100,
               "optimizer": adamw(lr=1e-4, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01),
               "bf16": {"enabled": True}, "torch_autocast": {"enabled": False},
               "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True,
                                     "reduce_bucket_size": 5e7, "stage3_param_persistence_threshold": 0}},
              {"stage": 3, "precision": "bf16", "micro_batch": 4, "accumulation": 1, "lr": 1e-4,
               "beta2": 0.999,
               "weight_decay": 0.01, "zero.stage3_param_persistence_threshold": 0}),
    _examples("training/bf16_master_weight/configs/bf16_full.json",
              {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "steps_per_print": 100,
               "optimizer": adamw(lr=1e-4, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01),
               "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
               "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"},
               "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True,
                                     "reduce_bucket_size": 5e7, "stage3_param_persistence_threshold": 0}},
              "bf16.bf16_master_weights_and_grads is true"),
    _examples("training/bing_bert/deepspeed_bsz4k_progressive_layer_drop_config_seq128.json",
              {"train_batch_size": 4096, "train_micro_batch_size_per_gpu": 16, "steps_per_print": 1000,
               "prescale_gradients": True, "gradient_predivide_factor": 8,
               "optimizer": adamw("Adam", lr=1e-3, weight_decay=0.01, bias_correction=False),
               "gradient_clipping": 1.0, "wall_clock_breakdown": False, "fp16": {"enabled": True, "loss_scale": 0},
               "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001}},
              "removed progressive layer dropping"),
    _examples("training/gan/gan_deepspeed_config.json",
              {"train_batch_size": 64, "optimizer": adamw("Adam", lr=0.0002, betas=[0.5, 0.999], eps=1e-8),
               "steps_per_print": 10},
              {"stage": 0, "global_batch": 64, "lr": 2e-4, "beta1": 0.5, "weight_decay": 0.0, "precision": AUTO},
              "weight_decay 0", "DeepSpeed would compute in fp32"),
    _examples("training/imagenet/config/ds_fp16_z1_config.json",
              {"train_batch_size": 256, "gradient_accumulation_steps": 1, "steps_per_print": 50,
               "optimizer": adamw("Adam", **_SMALL_ADAM), "zero_optimization": {"stage": 1},
               "zero_allow_untested_optimizer": True, "fp16": {"enabled": True, "auto_cast": True},
               "gradient_clipping": 0, "prescale_gradients": False, "cuda_visible_devices": 0,
               "wall_clock_breakdown": False}, "unknown key 'cuda_visible_devices'"),
    _examples("training/pipeline_parallelism/ds_config.json",
              {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 8, "steps_per_print": 10,
               "optimizer": adamw("Adam", lr=0.001, betas=[0.9, 0.999], eps=1e-8), "wall_clock_breakdown": False},
              {"stage": 0, "micro_batch": 8, "accumulation": 16, "beta2": 0.999, "weight_decay": 0.0}),
    _examples("training/tensor_parallel/hf_integration/configs/ds_config.json",
              {"bf16": {"enabled": AUTO}, "optimizer": ALL_AUTO, "scheduler": warmup("WarmupDecayLR"),
               "zero_optimization": {"stage": 2, "gather_16bit_weights_on_model_save": True},
               "tensor_parallel": {"autotp_size": 4}, **HF, "steps_per_print": 1},
              {"stage": 2, "tp": 4, "precision": AUTO, **DECAYING},
              "tensor_parallel.autotp_size 4", world_size=4),
]

_MEGATRON, _BIGSCIENCE = "deepspeedai/Megatron-DeepSpeed", "bigscience-workshop/Megatron-DeepSpeed"
_MEGATRON_AT = "4efb479d5317ce9b86096b9d8e3e8030b0b5263b"
_MEGATRON_16 = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 16, "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 1}, **_PRINT}

MEGATRON_DEEPSPEED = [
    Public(_MEGATRON, "examples_deepspeed/curriculum_learning/ds_zero_stage_1_config_baseline.json", _MEGATRON_AT,
           {"train_batch_size": 512, "gradient_accumulation_steps": 1, "steps_per_print": 1,
            "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, "fp16": fp16(power=None),
            "optimizer": adamw("Adam", lr=0.00015, max_grad_norm=1.0, betas=[0.9, 0.95]),
            "wall_clock_breakdown": False, "zero_allow_untested_optimizer": False},
           "reject max_grad_norm"),
    Public(_MEGATRON, "examples_deepspeed/data_efficiency/gpt/eval/ds_config_eval_dummy.json", _MEGATRON_AT,
           {"train_batch_size": 2048, "train_micro_batch_size_per_gpu": 16, "steps_per_print": 10,
            "zero_optimization": {"stage": 0}, "gradient_clipping": 1.0, "prescale_gradients": True,
            "fp16": fp16(False, 11, 500), "bf16": {"enabled": False}, "wall_clock_breakdown": False},
           {"stage": 0, "precision": "fp32", "global_batch": 2048, "micro_batch": 16, "accumulation": 64},
           ("no precision is enabled",)),
    Public(_MEGATRON, "examples_deepspeed/finetune_hf_llama/ds_config.json", _MEGATRON_AT,
           {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 16, "steps_per_print": 100,
            "zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
           {"stage": 0, "precision": "bf16_autocast", "accumulation": 8, "clip": 1.0}),
    Public(_MEGATRON, "examples_deepspeed/finetune_hf_llama/ds_config_empty.json", _MEGATRON_AT,
           {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 16, "steps_per_print": 100},
           {"stage": 0, "precision": AUTO, "accumulation": 8}, ("DeepSpeed would compute in fp32",)),
    Public(_MEGATRON, "examples_deepspeed/universal_checkpointing/ds_config.json", _MEGATRON_AT,
           {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 16, "steps_per_print": 1,
            "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"}, "wall_clock_breakdown": False},
           {"stage": 1, "precision": "bf16", "micro_batch": 16, "accumulation": 1}, world_size=1),
    Public(_BIGSCIENCE, "ds_config.json", "aa3ead77d83a649e9d2030d90dc038ba44925be8",
           {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 64, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "steps_per_print": 1,
            "wall_clock_breakdown": False,
            "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1,
                               "detailed": True, "output_file": None}},
           {"stage": 0, "precision": "bf16_autocast", "global_batch": 64, "accumulation": 16}),
    Public(_BIGSCIENCE, "tests/ds_config.json", "55b7036ce9fd63d9117d48b79d5b4267101fb081",
           {**_MEGATRON_16, "fp16": fp16(True, 12, 500)},
           {"stage": 1, "precision": "fp16_autocast", "scale": (2.0**12, 500, 2), "accumulation": 8}),
    Public(_BIGSCIENCE, "tests/ds_config_bf16.json", "7f2441edb6e23b6f923ac88e4f1c2e4bce19a028",
           {**_MEGATRON_16, "bf16": {"enabled": True}}, {"stage": 1, "precision": "bf16"}),
    Public(_BIGSCIENCE, "tests/ds_config_cl.json", "a319a6cae5986889500eaf66e641e9b1f5df1aa4",
           {**_MEGATRON_16, "fp16": fp16(True, 12, 500),
            "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8,
                                    "max_difficulty": 128, "schedule_type": "fixed_linear",
                                    "schedule_config": {"total_curriculum_step": 25, "difficulty_step": 2}}},
           "removed the legacy curriculum"),
    Public(_BIGSCIENCE, "tests/ds_config_fp32.json", "87d997fbd64c8532872061a1e0cbeb1ba950e3ea",
           {**_MEGATRON_16, "fp16": {"enabled": False}}, {"stage": 1, "precision": "fp32"},
           ("no precision is enabled",)),
]

PUBLIC = [*AXOLOTL, *ACCELERATE, *TRANSFORMERS, *DEEPSPEED_EXAMPLES, *MEGATRON_DEEPSPEED]
