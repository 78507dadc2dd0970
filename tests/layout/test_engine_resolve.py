"""Tests of the resolver: ds_configs, precedence, rejected settings, and records."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.layout import ds_config, ops
from ezpz_llm.training.layout.batch import Batch
from ezpz_llm.training.layout.ds_defaults import default_sizes
from ezpz_llm.training.layout.layout import Layout, ZeroOptions
from ezpz_llm.training.layout.memory import held_parameters
from ezpz_llm.training.layout.precision_recipes import GradientDtypes
from ezpz_llm.training.layout.resolve import Request, Resolved, resolve
from ezpz_llm.training.layout.value_source import COMMAND_LINE, DEFAULT, Origin, ValueSource
from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.parameters import parameter_count

SHIPPED = ("3d", "ddp", "fsdp2", "fsdp2_within2", "pp2", "pp2_tp2", "sp2", "tiled", "tp2", "tp2_zero1", "tp2_zero3",
           "zero0", "zero1", "zero2", "zero3", "zero3_hpz2", "zero3_nvme", "zero3_offload_all",
           "zero3_offload_optimizer")


@pytest.fixture
def write(tmp_path: Path):
    """Write a ds_config and return its path."""
    def write(values: dict[str, Any] | str) -> str:
        path = tmp_path / "mine.json"
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        return str(path)
    return write


def rejection(name: str, world_size: int = 2, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolve(Request(name, world_size=world_size, **settings))
    return str(caught.value)


def test_shipped_layouts_contain_no_run_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "is_built", lambda name: True)
    assert ds_config.names() == sorted(SHIPPED)
    purposes = (ds_config.data_dir("ds_configs") / "README.md").read_text()
    for name in SHIPPED:
        values = ds_config.load(name).values
        assert not {"optimizer", "scheduler", "gradient_clipping", "train_batch_size"} & values.keys()
        assert f"| `{name}` |" in purposes
        resolved = resolve(Request(name, world_size=8, global_batch=64, device="cpu"))
        assert (resolved.deepspeed is None) == (name in ("ddp", "fsdp2", "fsdp2_within2"))
        assert bool(resolved.notes) == (name == "zero3_nvme")  # about the folder for files


def test_nothing_heavy_is_imported() -> None:
    program = ("import sys; from ezpz_llm.training.layout.resolve import Request, resolve; "
               "resolve(Request('zero3', 4)); import ezpz_llm.doctor; "
               "sys.exit(bool({'torch', 'deepspeed', 'numpy'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", program], timeout=scaled(60), check=False).returncode == 0


def test_an_unknown_name_suggests_the_nearest() -> None:
    assert "did you mean zero3" in rejection("zero_3")
    assert "does not exist" in rejection("configs/zero3.json")


def test_invalid_json_is_reported_with_line_and_column(write) -> None:
    message = rejection(write('{ // one\n  /* two */ "zero_optimization": {"stage": one,}\n}'))
    assert "line 2, column 44" in message
    assert "mine.json" in message
    assert "double quotes" in message
    assert "duplicate key" in rejection(write('{"fp16": {"enabled": false, "enabled": true}}'))
    assert "a JSON object" in rejection(write("[1]"))


@pytest.mark.parametrize(("values", "parts"), [
    ({"zero_optimisation": {"stage": 1}}, ("zero_optimisation", "zero_optimization", "top level")),
    ({"zero_optimization": {"stage": 1, "overlap_com": True}}, ("did you mean overlap_comm", "zero_optim")),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"devise": "cpu"}}},
     ("did you mean device", "zero_optimization.offload_optimizer")),
    ({"bf16": {"enable": True}}, ("did you mean enabled", "bf16")),
    ({"ezpz_llm": {"motor": "torch"}}, ("motor", "ezpz_llm")),
    ({"ezpz-llm": {}}, ("did you mean ezpz_llm",)),
    ({"bf16": True}, ("not a block",)),
    ({"elasticity": {"enabled": True}}, ("removed elastic training", "delete")),
    ({"zero_optimization": {"mics_shard_size": 2}}, ("removed MiCS",)),
])
def test_unknown_keys_are_rejected(write, values: dict[str, Any], parts: tuple[str, ...]) -> None:
    message = rejection(write(values))
    assert all(word in message for word in parts), message


@pytest.mark.parametrize(("values", "settings", "parts"), [
    ({"ezpz_llm": {"tp": 0}}, {}, ("tensor-parallel", "at least 1")),
    ({"ezpz_llm": {"pp": "2"}}, {}, ("pipeline-parallel", "whole number")),
    ({"ezpz_llm": {"sp": True}}, {}, ("sequence-parallel", "whole number")),
    ({"ezpz_llm": {"partition": "layers"}}, {}, ("partition", "did you mean parameters")),
    ({"ezpz_llm": {"tiled": {"mlp.c_fc": 4}}}, {}, ("tiled", "along the output")),
    ({"tensor_parallel": {"autotp_size": 2}, "ezpz_llm": {"tp": 4}}, {}, ("autotp_size is 2", "is 4")),
    ({"ezpz_llm": {"engine": "dpp"}}, {}, ("did you mean ddp",)),
    ({"ezpz_llm": {"engine": "ddp"}, "zero_optimization": {"stage": 2}}, {}, ("does not support ZeRO stage 2",)),
    ({"zero_optimization": {"stage": 4}}, {}, ("stage is 4",)),
    ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, {}, ("stage 0",)),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "disk"}}}, {}, ('"none" or "cpu" or',)),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, {}, ("needs ZeRO stage 3",)),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, {}, ("dynamic", "loss_scale")),
    ({"fp16": {"enabled": True}}, {"device": "cpu"}, ("fp16 is unsupported on a CPU",)),
    ({"zero_optimization": {"stage": 1}}, {"precision": "fp16"}, ("engine deepspeed", "--precision fp16_autocast")),
    ({"zero_optimization": {"stage": 0}}, {"precision": "bf16"}, ("stage 0", "--ds-config ddp")),
    ({"zero_optimization": {"stage": 0}, "ezpz_llm": {"tp": 2}}, {"precision": "bf16"},
     ("--ds-config ddp --tp 2",)),
    ({"zero_optimization": {"stage": 1}, "ezpz_llm": {"pp": 2}}, {"precision": "fp16"}, ("engine pipeline",)),
    ({"zero_optimization": {"stage": 1}, "ezpz_llm": {"pp": 2}},
     {"precision": "bf16", "grad_accum_dtype": "bf16"}, ("grad_accum_dtype is bf16", "pipeline gradients")),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {}, ("several precisions", "bf16, fp16")),
    ({"optimizer": {"type": "Lamb"}}, {}, ("Lamb", "AdamW")),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {}, ("adam_w_mode false",)),
    ({"optimizer": {"params": {"lr": 1}}}, {}, ("no type",)),
    ({"optimizer": {"type": "AdamW", "params": {"lrr": 3}}}, {}, ("did you mean lr",)),
    ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, {}, ("amsgrad is true",)),
    ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, {}, ("bias_correction is false",)),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, {}, ("gradient_clipping",)),
    ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, {}, ("[0.9, 0.95]",)),
    ({"scheduler": {"type": "NoSuchLR"}}, {}, ("NoSuchLR", "WarmupDecayLR")),
    ({"scheduler": {"type": "OneCycle"}}, {}, ("momentum",)),
    ({"scheduler": {"params": {}}}, {}, ("no type",)),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, {}, ("total_num_steps", '"auto"')),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 9}}}, {}, ("did you mean warmup_num_steps",)),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, {}, ("warmup_num_steps is 0",)),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, {}, ('"log" or "linear"',)),
    ({"fp16": {"enabled": True, "hysteresis": 0}}, {}, ("fp16.hysteresis is 0",)),
    ({"fp16": {"enabled": True, "initial_scale_power": 2000}}, {}, ("initial_scale_power is 2000",)),
    ({"scheduler": {"type": "WarmupLR", "params": [500]}}, {}, ("params is [500], not a block",)),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, {}, ("moments are fp32",)),
    ({"gradient_allreduce_op": "sum"}, {}, ("supported here: \"mean\"",)),
    ({"data_parallel_size": 2}, {}, ("supported here: no value",)),
    ({"communication_data_type": "bf16"}, {}, ("reduce_dtype is bf16", "--precision bf16")),
    ({"managed_gradient_accumulation": False}, {}, ("micro-step",)),
    ({"train_batch_size": "16"}, {}, ("not a whole number",)),
    ({"gradient_clipping": True}, {}, ("not a number",)),
    ({}, {"precision": "bfloat16"}, ("did you mean bf16",)),
    ({"train_batch_size": 9}, {}, ("8 or 10", "mine.json")),
])
def test_unsupported_settings_are_rejected_with_the_reason(
        write, values: dict[str, Any], settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    message = rejection(write(values), **settings)
    assert all(word in message for word in parts), message


def test_more_ranks_than_sequences_are_rejected() -> None:
    assert "cannot feed 8" in rejection("zero2", 8, global_batch=4)


def test_the_error_for_a_missing_op_says_how_to_build_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path))
    monkeypatch.setattr(ops, "_installed_ops", frozenset)
    assert "ezpz-llm doctor --build-ops cpu_adam" in rejection("zero3_offload_optimizer")
    lock = ops.build_lock("cpu_adam")
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert str(lock) in rejection("zero3_offload_optimizer")
    library = ops.ops_dir() / "cpu_adam" / "cpu_adam.so"
    library.parent.mkdir()
    library.touch()
    assert resolve(Request("zero3_offload_optimizer", world_size=2)).layout.zero.offload_optimizer == "cpu"


USER_CONFIG = {
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW",
                  "params": {"lr": 1e-4, "betas": [0.9, 0.99], "eps": "auto", "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 50, "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True},
}


def resolve_user_config(write, **settings: Any) -> Resolved:
    return resolve(Request(write(USER_CONFIG), world_size=2, **settings))


def test_a_users_ds_config_is_applied_and_reported(write) -> None:
    resolved = resolve_user_config(write, device="cuda")
    assert resolved.batch == Batch(32, 4, 4, 2)
    assert (resolved.clip, resolved.precision, resolved.layout.zero.stage) == (0.5, "bf16", 2)
    assert resolved.gradients == GradientDtypes("bf16", "bf16")
    assert resolved.adam == {"lr": 0.001, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01,
                             "schedule": "WarmupDecayLR", "warmup_steps": 50, "warmup_type": "log",
                             "warmup_min_lr": 0.0}
    assert str(resolved.sources["beta2"]).endswith("mine.json")
    assert str(resolved.sources["warmup_type"]).startswith("DeepSpeed's default")
    notes = " ".join(resolved.notes)
    for word in ("gradient_accumulation_steps", "reduce_bucket_size", "optimizer.params.eps", "total_num_steps",
                 "--reduce-dtype fp32", "DeepSpeed's defaults: lr 0.001, warmup_type log, warmup_min_lr 0"):
        assert word in notes
    assert resolved.deepspeed["zero_optimization"] == {
        "stage": 2, "overlap_comm": True, "reduce_bucket_size": 25_000_000, "allgather_bucket_size": 50_000_000}
    assert not {"bf16", "optimizer", "scheduler"} & resolved.deepspeed.keys()
    assert "auto" not in json.dumps(resolved.deepspeed)


def test_precedence_is_command_line_then_ds_config_then_the_rest(write) -> None:
    sources = {"clip": COMMAND_LINE, "precision": ValueSource(Origin.FILE, "run.yaml"), "lr": COMMAND_LINE,
               "eps": DEFAULT, "global_batch": ValueSource(Origin.PRESET, "small"), "micro_batch": COMMAND_LINE}
    resolved = resolve_user_config(write, clip=2.0, precision="fp32", global_batch=64, micro_batch=8,
                               sources=sources)
    assert (resolved.clip, resolved.sources["clip"]) == (2.0, COMMAND_LINE)
    assert resolved.precision == "bf16"
    assert "lr" not in resolved.adam
    assert resolved.batch == Batch(32, 8, 2, 2)
    assert str(resolved.sources["global_batch"]).endswith("mine.json")
    assert resolved.sources["accumulation"].origin is Origin.DERIVED


def test_batch_numbers_of_lower_precedence_are_overridden(write) -> None:
    """A global batch on the command line keeps the file's micro-batch, not its accumulation steps."""
    path = write({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})
    resolved = resolve(Request(path, world_size=2, global_batch=64))
    assert resolved.batch == Batch(64, 4, 8, 2)
    assert "accumulation 2" in " ".join(resolved.notes)
    assert "64 is not" in rejection(write({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4,
                                         "gradient_accumulation_steps": 2}))


def test_yaml_overrides_a_preset(write) -> None:
    file = ValueSource(Origin.FILE, "run.yaml")
    sources = {"global_batch": ValueSource(Origin.PRESET, "small"), "micro_batch": file, "accumulation": file}
    resolved = resolve(Request("zero1", world_size=2, global_batch=64, micro_batch=2, accumulation=3,
                               sources=sources))
    assert resolved.batch == Batch(12, 2, 3, 2)
    assert "global_batch 64 of preset small" in " ".join(resolved.notes)


def test_deepspeed_json_is_what_deepspeed_gets(tmp_path: Path) -> None:
    resolved = resolve(Request("zero2", world_size=2, global_batch=16, accumulation=2, clip=1.0,
                               precision="bf16_autocast"))
    run_dir = RunDir(tmp_path)
    resolved.write(run_dir)
    assert json.loads(run_dir.deepspeed.read_text()) == resolved.deepspeed
    layout = json.loads(run_dir.layout.read_text())
    assert layout["layout"] == {"name": "zero2", "engine": "deepspeed", "zero_stage": 2, "tp": 1, "pp": 1, "sp": 1,
                                "partition": "parameters", "tiled": [], "offload_optimizer": None,
                                "offload_param": None, "hpz_partition_size": 1, "shard_within": None}
    assert layout["batch"]["micro_batch"] == 4
    assert layout["sources"]["micro_batch"] == {"origin": "derived", "detail": "global_batch and accumulation"}
    text = resolved.explain()
    assert "zero2" in text
    assert "follows from" in text


def test_ddp_leaves_no_deepspeed_file(tmp_path: Path) -> None:
    resolve(Request("ddp", world_size=2)).write(RunDir(tmp_path))
    assert not RunDir(tmp_path).deepspeed.exists()


def test_bucket_sizes_depend_on_the_model_unless_the_user_sets_them(write) -> None:
    small, large = get_model_config("tiny-gpt2", vocab_size=256), get_model_config("llama3-1b")
    size = parameter_count(small)
    assert zero_of(resolve(Request("zero2", world_size=2, model=small))) == (size, size, None, None)
    resolved = resolve(Request("zero3", world_size=2, model=large))
    reduce, gather, prefetch, persists = zero_of(resolved)
    assert (reduce, gather, persists) == (50_000_000, None, 100_000)
    assert prefetch == 50_000_000  # a block has 61 million
    assert re.search(r"^stage3_prefetch_bucket_size +50,000,000 +200 MB of fp32", resolved.explain(), re.M)
    sharded = zero_of(resolve(Request("tp2_zero3", world_size=4, model=large)))
    assert sharded[2] < prefetch
    # The bucket also holds parameters that tensor parallelism replicates. In a pipeline the largest stage counts.
    for name in ("tp2_zero1", "pp2", "3d"):
        resolved = resolve(Request(name, world_size=8, model=small))
        stage_parameters = [held_parameters(resolved.layout, small, stage) for stage in range(resolved.layout.pp)]
        assert zero_of(resolved)[:2] == (max(stage_parameters), max(stage_parameters))
        assert size / resolved.layout.tp / resolved.layout.pp < max(stage_parameters) < size
    wide = get_model_config("tiny-gpt2", vocab_size=256, n_embd=40_000, n_head=4)
    assert zero_of(resolve(Request("zero3", world_size=2, model=wide)))[3] == 4 * 40_000
    file = write({"zero_optimization": {"stage": 3, "reduce_bucket_size": 7, "stage3_prefetch_bucket_size": 0}})
    resolved = resolve(Request(file, world_size=2, model=large))
    assert zero_of(resolved) == (7, None, 0, 100_000)
    assert "reduce_bucket_size" not in resolved.explain()


def test_gradients_are_copied_once_on_cpus_unless_the_user_chose_otherwise(write) -> None:
    def copying(source: str, device: str = "cpu") -> tuple[bool | None, ...]:
        zero = resolve(Request(source, world_size=2, device=device)).deepspeed["zero_optimization"]
        return zero.get("reduce_scatter"), zero.get("contiguous_gradients")

    assert copying("zero1") == copying("zero2") == (False, None)
    assert copying("zero3") == (None, False)
    assert copying("zero2", "cuda") == copying("zero3", "cuda") == (None, None)
    assert re.search(r"^reduce_scatter +false +\w", resolve(Request("zero1", world_size=2,
                                                                    device="cpu")).explain(), re.M)
    assert copying(write({"zero_optimization": {"stage": 3, "contiguous_gradients": True}})) == (None, True)
    # With one owner per gradient it is really scattered; with all-reduce, stage 3 needs its bucket.
    owners = {"stage": 2, "use_multi_rank_bucket_allreduce": False}
    assert copying(write({"zero_optimization": owners})) == (None, None)
    assert copying(write({"zero_optimization": {"stage": 3, "reduce_scatter": False}})) == (False, None)


def test_gradients_are_reduced_during_the_backward_pass_on_devices_with_streams(write) -> None:
    small, large = get_model_config("gpt2-124m"), get_model_config("llama3-1b")

    def reducing(source: str, device: str | None = "cuda", model: ModelConfig = large,
                 world_size: int = 4) -> tuple[bool | None, ...]:
        zero = resolve(Request(source, world_size=world_size, device=device, model=model)).deepspeed
        return zero["zero_optimization"].get("overlap_comm"), zero["zero_optimization"]["reduce_bucket_size"]

    assert reducing("zero1") == reducing("zero2", "xpu") == (True, 25_000_000)
    assert reducing("zero2", model=small) == (True, parameter_count(small) // 8)
    tiny = get_model_config("tiny-gpt2", vocab_size=256)
    assert reducing("zero1", model=tiny) == (True, parameter_count(tiny))
    assert reducing("zero1", model=replace(small, n_layer=1, n_embd=96)) == (True, 1_000_000)  # of 5 million
    # Stage 3 overlaps by default, pipelines and CPUs cannot overlap, and the device may be unknown.
    assert reducing("zero3") == reducing("zero1", None) == (None, 50_000_000)
    assert reducing("pp2") == (None, 50_000_000)
    assert reducing("zero1", "cpu") == reducing("zero2", "mps") == (False, 50_000_000)
    offloaded = Layout("mine", "deepspeed", ZeroOptions(2, offload_optimizer="cpu"))
    assert "overlap_comm" not in default_sizes({}, offloaded, large, "cuda")
    # The user's settings are kept.
    assert resolve_zero(write, {"stage": 1, "overlap_comm": False}) == {
        "stage": 1, "overlap_comm": False, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
    assert resolve_zero(write, {"stage": 2, "reduce_bucket_size": 7})["reduce_bucket_size"] == 7
    for slow in ("contiguous_gradients", "use_multi_rank_bucket_allreduce"):
        assert "overlap_comm" not in resolve_zero(write, {"stage": 2, slow: False})
    assert re.search(r"^overlap_comm +true +reduces gradients", resolve(Request("zero1", world_size=2, model=large,
                                                                       device="cuda")).explain(), re.M)


def resolve_zero(write, zero: dict[str, Any]) -> dict[str, Any]:
    config = resolve(Request(write({"zero_optimization": zero}), world_size=2, device="cuda",
                             model=get_model_config("llama3-1b"))).deepspeed
    assert config is not None
    return config["zero_optimization"]


def zero_of(resolved: Resolved) -> tuple[int | None, ...]:
    zero = resolved.deepspeed["zero_optimization"]
    return tuple(zero.get(key) for key in ("reduce_bucket_size", "allgather_bucket_size",
                                           "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"))


def test_bf16_uses_deepspeeds_bf16_with_fp32_gradients(tmp_path: Path) -> None:
    """zero1 uses stage 2's settings (docs/reference/layouts.md). Under autocast DeepSpeed gets no dtypes."""
    for layout, stage in (("zero1", 2), ("zero2", 2), ("zero3", 3)):
        resolved = resolve(Request(layout, world_size=2, precision="bf16"))
        config = resolved.for_deepspeed(RunDir(tmp_path))
        assert (config["bf16"], config["data_types"]) == ({"enabled": True}, {"grad_accum_dtype": "fp32"})
        assert config["communication_data_type"] == "fp32"
        assert config["zero_optimization"]["stage"] == stage
        assert resolved.layout.zero.stage == int(layout[-1])
        plain = resolve(Request(layout, world_size=2, precision="bf16_autocast")).for_deepspeed(RunDir(tmp_path))
        assert not {"bf16", "data_types", "communication_data_type"} & plain.keys()
        assert plain["zero_optimization"]["stage"] == int(layout[-1])


@pytest.mark.parametrize(("layout", "world_size", "device", "expected"), [
    ("zero1", 1, "cuda", True), ("zero3", 1, "cuda", True), ("ddp", 1, "cuda", False), ("zero1", 1, "cpu", False),
    ("zero1", 2, "cuda", False), ("tiled", 1, "cuda", False)])
def test_a_note_suggests_ddp_on_a_single_gpu(layout: str, world_size: int, device: str, expected: bool) -> None:
    resolved = resolve(Request(layout, world_size=world_size, device=device))
    assert any("--ds-config ddp" in note for note in resolved.notes) == expected
