"""Tests of reading a ds_config: syntax, keys and values, precision, loss scale."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from deepspeed_table import TABLE, deepspeed_table, removed, write
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.untrusted_input import plain_json
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.launcher.basics.variables import PLACES_VARIABLE
from ezpz_llm.train import main
from ezpz_llm.training.engine.precision import LossScale
from ezpz_llm.training.layout import ops
from ezpz_llm.training.layout.ds_config import REMOVED, convert, table
from ezpz_llm.training.layout.ds_config_blocks import DynamicScale
from ezpz_llm.training.layout.resolve import Request, Resolved, resolve
from ezpz_llm.training.layout.value_source import COMMAND_LINE, Origin, ValueSource
from ezpz_llm.training.trainer import command

SAME = version("deepspeed") == table().version
NEEDS_TABLE_VERSION = pytest.mark.skipif(not SAME, reason=f"the table is for DeepSpeed {table().version}")


@pytest.fixture
def read(tmp_path: Path):
    """Resolve a ds_config given by its values or its text."""
    def read(values: dict[str, Any] | str | bytes, **request: Any) -> Resolved:
        path = tmp_path / "mine.json"
        if isinstance(values, bytes):
            path.write_bytes(values)
        else:
            path.write_text(values if isinstance(values, str) else json.dumps(values))
        return resolve(Request(str(path), world_size=request.pop("world_size", 2), **request))
    return read


ANNOTATED = """\ufeff{
  // which stage
  "zero_optimization": {"stage": 2, # gradients too
    "reduce_bucket_size": 5e6, /* elements,
    not bytes */ },
  "csv_monitor": {"job_name": "a // b # c /* d */, } \\" e",},
  "gradient_clipping": 0.5, // }
  "steps_per_print": 10, /* } */ "memory_breakdown": false /* ] */ ,
}
"""


def test_comments_trailing_commas_and_a_byte_order_mark_are_allowed(read) -> None:
    resolved = read(ANNOTATED.encode())
    assert (resolved.layout.zero.stage, resolved.clip) == (2, 0.5)
    assert resolved.deepspeed["zero_optimization"]["reduce_bucket_size"] == 5_000_000
    assert resolved.deepspeed["csv_monitor"]["job_name"] == 'a // b # c /* d */, } " e'
    plain = plain_json(ANNOTATED)
    assert [len(line) for line in plain.splitlines()] == [len(line) for line in ANNOTATED.splitlines()]


@pytest.mark.parametrize(("text", "message"), [
    ('{\n// one\n"zero_optimization": {"stage": 1}\n"fp16": {}}', "line 4, column 1"),
    ('{"fp16": {"enabled": false}, # no }\n"bf16" {}}', "line 2, column 8"),
    ("{zero_optimization: {}}", "names and strings in double quotes"),
    ('{"communication_data_type": fp32}', "column 29"),
    ("{'fp16': {}}", "double quotes"),
    ('{"fp16": {} /* for ever', "line 1"),
    ('{"gradient_clipping": NaN}', "JSON does not allow NaN"),
    ('{"fp16": {},, }', "not JSON"),
    ('{"fp16": {}, // once\n"fp16": {}}', "duplicate key"),
])
def test_invalid_json_is_rejected_with_line_and_column(read, text: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        read(text)
    assert message in str(raised.value), raised.value


def test_aliases_of_a_key_are_read_as_the_primary_key(read) -> None:
    resolved = read({"zero_optimization": {
        "stage": 3, "max_live_parameters": 5, "max_reuse_distance": 6, "prefetch_bucket_size": 7,
        "param_persistence_threshold": 8, "gather_16bit_weights_on_model_save": True}})
    zero = resolved.deepspeed["zero_optimization"]
    assert {key: zero[key] for key in zero if key.startswith("stage3")} == {
        "stage3_max_live_parameters": 5, "stage3_max_reuse_distance": 6, "stage3_prefetch_bucket_size": 7,
        "stage3_param_persistence_threshold": 8, "stage3_gather_16bit_weights_on_model_save": True}
    assert "stage3_prefetch_bucket_size" not in resolved.explain()  # ezpz_llm does not choose it
    with pytest.raises(UserError, match="two names for the same setting"):
        read({"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 1}})


@pytest.mark.parametrize(("values", "message"), [
    ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}, "is 0; DeepSpeed requires a whole number > 0"),
    ({"zero_optimization": {"stage": 2, "overlap_comm": "maybe"}}, "DeepSpeed requires true or false"),
    ({"zero_optimization": {"stage": 3, "sub_group_size": 1.5}}, "requires a whole number"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2}}}, "number <= 1"),
    ({"zero_optimization": True}, '"zero_optimization": {"stage": 1}'),
    ({"fp16": {"initial_scale_power": "high"}}, "initial_scale_power"),
])
def test_values_that_deepspeed_rejects_are_rejected(read, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        read(values)
    assert message in str(raised.value), raised.value


def test_a_null_block_counts_as_missing(read) -> None:
    resolved = read({"zero_optimization": {"stage": 3, "offload_optimizer": None}, "fp16": None})
    assert resolved.layout.zero.offload_optimizer is None


def test_an_unknown_key_is_a_warning_under_a_newer_deepspeed(read, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"zero_optimization": {"stage": 1, "overlap_com": True}, "brand_new": {"a": 1}}
    with pytest.raises(UserError, match="unknown key"):
        read(values)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.1.0")
    resolved = read(values)
    assert "did you mean overlap_comm" in resolved.warnings[0]
    assert "brand_new of mine.json is unknown to DeepSpeed" in resolved.warnings[1]
    assert resolved.deepspeed["brand_new"] == {"a": 1}
    assert resolved.deepspeed["zero_optimization"]["overlap_com"] is True
    with pytest.raises(UserError, match="removed"):
        read({"elasticity": {}})
    with pytest.raises(UserError, match="motor"):
        read({"ezpz_llm": {"motor": "torch"}})


@NEEDS_TABLE_VERSION
def test_the_table_of_keys_matches_the_installed_deepspeed(
        recording: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    if recording:
        write()
    assert json.loads(TABLE.read_text()) == deepspeed_table()
    assert removed() == set(REMOVED)


@NEEDS_TABLE_VERSION
def test_values_are_converted_as_deepspeed_converts_them() -> None:
    """Compare various values for a key of each kind with DeepSpeed's pydantic model."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    kinds = table().keys["zero_optimization"]
    checked = {kind: key for key, kind in kinds.items() if isinstance(kind, str) and kind != "any"
               and not key.startswith(("cpu_offload", "stage3_gather_fp16", "compute_grad_norm"))}
    assert len(checked) >= 4
    names = {alias: name for name, alias in table().aliases["zero_optimization"].items()}
    for kind, key in checked.items():
        for value in (0, 1, -1, 2, 2e8, 1.5, True, False, None, "5", "5e8", "true", "no", "maybe", [1], {}):
            try:
                expected = getattr(DeepSpeedZeroConfig(**{key: value}), names.get(key, key))
            except ValidationError:
                expected = ValidationError
            try:
                actual = convert(value, kind)
            except ValueError:
                actual = ValidationError
            if key == "overlap_comm" and value is None:
                expected = None  # depends on the stage
            assert (actual, type(actual)) == (expected, type(expected)), (key, kind, value)


@NEEDS_TABLE_VERSION
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3", "zero3_hpz2", "zero3_nvme",
                                  "zero3_offload_all", "tiled"])
def test_deepspeed_parses_the_resolved_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "is_built", lambda name: True)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    resolved = resolve(Request(name, world_size=1, global_batch=8, clip=1.0))
    parsed = DeepSpeedConfig(json.loads(json.dumps(resolved.deepspeed)))
    assert parsed.zero_optimization_stage == resolved.layout.zero.stage
    assert parsed.train_batch_size == 8


@pytest.mark.parametrize(("values", "precision", "message"), [
    ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, "fp32", "no precision is enabled"),
    ({"fp16": {"enabled": False}}, "fp32", "no precision is enabled"),
    ({"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}, "fp32", "no precision is enabled"),
    ({"torch_autocast": {"enabled": False}}, "fp32", "no precision is enabled"),
    ({"bf16": {}}, "fp32", "no precision is enabled"),
    ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}, "auto", "is set by the run"),
    ({"fp16": {"enabled": "auto"}}, "auto", "is set by the run"),
    ({}, "auto", "DeepSpeed would compute in fp32"),
    ({"ezpz_llm": {"tp": 1}}, "auto", ""),
    ({"bfloat16": {"enabled": True, "check_grad_overflow": False}, "zero_optimization": {"stage": 2}}, "bf16",
     "is still skipped"),
    ({"bf16": {"enabled": True, "immediate_grad_update": True}, "zero_optimization": {"stage": 1}}, "bf16",
     "gradients are always accumulated immediately"),
    ({"fp16": {"enabled": True, "auto_cast": True}, "ezpz_llm": {"engine": "ddp"}}, "fp16", "inputs are tokens"),
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]},
      }, "bf16_autocast", "covers the whole forward pass"),
    ({"fp16": {"enabled": False, "loss_scale": 128}}, "fp32", ""),
])
def test_the_precision_of_a_ds_config(read, values: dict[str, Any], precision: str, message: str) -> None:
    resolved = read(values)
    assert resolved.precision == precision
    assert message in " ".join(resolved.notes)
    assert bool(resolved.notes) == bool(message) or precision == "fp32"
    assert read(values, precision="fp16_autocast").precision == "fp16_autocast"  # the command line comes first


def test_a_note_suggests_ddp_in_the_users_ds_config_on_a_single_gpu(read) -> None:
    values: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
                              "train_micro_batch_size_per_gpu": 4}
    notes = read(values, world_size=1, device="cuda").notes
    assert any('"stage": 0 and "ezpz_llm": {"engine": "ddp"} in mine.json' in note for note in notes)
    advised = read(values | {"zero_optimization": {"stage": 0}, "ezpz_llm": {"engine": "ddp"}}, world_size=1,
                   device="cuda")
    assert (advised.layout.engine, advised.precision, advised.batch.micro_batch) == ("ddp", "bf16", 4)
    assert not any("nothing to shard" in note for note in advised.notes)


def test_the_fp16_block_sets_the_loss_scale(read) -> None:
    block = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 4,
             "min_loss_scale": 2, "consecutive_hysteresis": True}
    ddp = {"engine": "ddp"}
    assert read({"fp16": block, "ezpz_llm": ddp}).loss_scale == DynamicScale(4096.0, 500, 4, 2, True)
    assert read({"fp16": {"enabled": True}, "ezpz_llm": ddp}).loss_scale == DynamicScale(65536.0, 1000, 2, 1, False)
    assert read({}, precision="fp16_autocast").loss_scale == DynamicScale()


@NEEDS_TABLE_VERSION
@pytest.mark.parametrize("settings", [
    DynamicScale(), DynamicScale(2.0**8, 3, 2, 1.0), DynamicScale(2.0**8, 3, 3, 4.0, True),
    DynamicScale(2.0**5, 1, 1)])
def test_the_loss_scale_changes_as_in_deepspeed(settings: DynamicScale) -> None:
    import random

    from deepspeed import comm
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    draw = random.Random(0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(comm, "get_rank", lambda: 1)  # it prints only on rank 0
        expected = DynamicLossScaler(settings.start, settings.window, settings.least, settings.hysteresis,
                                     settings.consecutive)
        actual = LossScale(settings)
        for _ in range(200):
            finite = draw.random() < 0.7
            try:
                expected.update_scale(not finite)
            except Exception:
                with pytest.raises(UserError, match="diverged"):
                    actual.update(finite)
                return
            actual.update(finite)
            assert actual.scale == expected.cur_scale


def test_settings_of_the_run_override_deepspeeds_defaults(read) -> None:
    values = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "eps": "auto"}}}
    file = ValueSource(Origin.FILE, "run.yaml")
    resolved = read(values, sources={"beta2": ValueSource(Origin.RECIPE, "gpt2-124m")})
    assert resolved.adam == {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01}
    assert "beta1 0.9, beta2 0.999, weight_decay 0.01" in " ".join(resolved.notes)
    assert "torch_adam of the optimizer" in " ".join(resolved.notes)
    resolved = read(values, sources={"beta2": file, "lr": file, "weight_decay": COMMAND_LINE})
    assert resolved.adam == {"lr": 1e-4, "beta1": 0.9}


def test_a_schedule_on_the_command_line_overrides_the_file(read) -> None:
    values = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
              "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 7}}}
    assert read(values).adam["lr"] == 3e-4
    resolved = read(values, sources={"schedule": COMMAND_LINE})
    assert (resolved.adam["lr"], resolved.adam.keys() & {"schedule", "warmup_steps"}) == (1e-4, set())
    assert "is ignored: --schedule overrides it" in " ".join(resolved.notes)


@NEEDS_TABLE_VERSION
def test_defaults_equal_deepspeeds() -> None:
    """Compare the defaults for missing keys with the signatures of DeepSpeed and torch."""
    import inspect

    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    from ezpz_llm.training.layout import ds_config_blocks
    from ezpz_llm.training.trainer.plan import _DEFAULT_CLIP

    def defaults(function: Any) -> dict[str, Any]:
        return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}

    for kind, decay in ((FusedAdam, 0.0), (DeepSpeedCPUAdam, 0.0),
                        (torch.optim.AdamW, ds_config_blocks.TORCH_ADAM_DECAY)):
        adam = defaults(kind)
        assert (adam["lr"], *adam["betas"], adam["eps"]) == tuple(ds_config_blocks.ADAM_DEFAULTS.values())[:4]
        assert adam["weight_decay"] == decay
    warmup = defaults(lr_schedules.WarmupLR)
    assert {"warmup_steps": warmup["warmup_num_steps"], "warmup_type": warmup["warmup_type"],
            "warmup_min_lr": warmup["warmup_min_lr"]} == ds_config_blocks.WARMUP_DEFAULTS
    assert defaults(lr_schedules.WarmupDecayLR)["warmup_max_lr"] == ds_config_blocks.DECAY_LR_PEAK
    assert defaults(lr_schedules.WarmupCosineLR)["cos_min_ratio"] == ds_config_blocks.COS_MIN_RATIO
    assert DeepSpeedFP16Config().dynamic_loss_scale_args() == {
        "init_scale": 2**16, "scale_window": 1000, "delayed_shift": 2, "consecutive_hysteresis": False,
        "min_scale": 1}
    assert GRADIENT_CLIPPING_DEFAULT == _DEFAULT_CLIP  # without the key, gradients are clipped as by DeepSpeed


@pytest.mark.parametrize(("values", "world_size", "message"), [
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}, 6, "4 does not divide the 6 ranks"),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}, 6,
     '"zero_hpz_partition_size": 2 or "zero_hpz_partition_size": 3 or "zero_hpz_partition_size": 6'),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "ezpz_llm": {"tp": 2}}, 4, "with tp 2"),
    ({"zero_optimization": {"stage": 2}, "prescale_gradients": True}, 2, "cannot scale gradients before it"),
    ({"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 4}, 2, '"reduce_scatter": false'),
    ({"wandb": {"enabled": True}}, 1, "--track wandb"),
    ({"comet": {"enabled": True}}, 1, "delete the key"),
])
def test_settings_that_deepspeed_rejects_on_every_rank_are_rejected_before_the_start(
        read, values: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(UserError) as raised:
        read(values, world_size=world_size)
    assert message in str(raised.value), raised.value


def test_settings_that_deepspeed_accepts_are_accepted(read) -> None:
    for world_size in (1, 2, 4, 8):
        resolved = read({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, world_size=world_size)
        assert resolved.deepspeed["zero_optimization"]["zero_hpz_partition_size"] == 8
    first = read({"zero_optimization": {"stage": 1, "zero_hpz_partition_size": 4}, "prescale_gradients": True},
                 world_size=6)
    assert first.deepspeed["prescale_gradients"]
    whole = read({"zero_optimization": {"stage": 3, "reduce_scatter": False}, "prescale_gradients": True})
    assert whole.deepspeed["zero_optimization"]["reduce_scatter"] is False
    assert whole.deepspeed["prescale_gradients"]
    stages = read({"ezpz_llm": {"pp": 2}, "pipeline": {"partition": "uniform"}, "zero_optimization": {"stage": 1}})
    assert (stages.layout.pp, stages.layout.zero.stage) == (2, 1)


def test_keys_without_effect_are_removed_with_a_note(read) -> None:
    resolved = read({"checkpoint": {"tag_validation": "Fail"}, "dataloader_drop_last": True,
                     "seq_parallel_communication_data_type": "bf16", "pipeline": {"partition": "uniform"}})
    notes = " ".join(resolved.notes)
    for word in ("layout-neutral form", "whole global batch", "ranks reduce gradients in the same dtype",
                 "partition uniform"):
        assert word in notes
    assert not {"checkpoint", "dataloader_drop_last", "pipeline"} & resolved.deepspeed.keys()


@pytest.mark.full
def test_a_users_ds_config_sets_the_run_and_output_goes_to_the_run_directory(tmp_path: Path) -> None:
    """Train with fp32, WarmupLR and AdamW settings from the file, and with DeepSpeed's CSV monitor."""
    config = tmp_path / "mine.json"
    config.write_text('''{
      "bf16": {"enabled": false}, // an old GPU
      "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "torch_adam": true}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
      "csv_monitor": {"enabled": true, "job_name": "curves"},
      "zero_optimization": {"stage": 1,},
    }''')
    folder, run_dir = tmp_path / "here", RunDir(tmp_path / "run")
    folder.mkdir()
    process = subprocess.run(
        [sys.executable, "-m", "ezpz_llm.train", "--ds-config", str(config), "--run-dir", str(run_dir.path),
         "--n-layer", "1", "--n-embd", "32", "--block-size", "32", "--steps", "6", "--micro-batch-size", "2",
         "--eval-tokens", "64", "--sample-tokens", "0", "--save-every", "-1", "--profile", "false",
         "--device", "cpu"], cwd=folder, capture_output=True, text=True, timeout=scaled(280), check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.returncode == 0, process.stdout + process.stderr
    record = read_record(run_dir)
    assert record.precision == "fp32"
    assert (record.config["beta2"], record.config["weight_decay"]) == (0.999, 0.01)
    rates = [line["lr"] for line in read_lines(run_dir.metrics)]
    assert rates == pytest.approx([0, 0, 0.0005, 0.001, 0.0015, 0.002])
    assert list(run_dir.path.glob("trackers/deepspeed-csv_monitor/curves/*.csv"))
    assert list(folder.iterdir()) == []
    assert "no precision is enabled in mine.json" in process.stdout


def test_the_check_rejects_fp16_without_accelerators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """launch says that all ranks will run on this node, which has no accelerator."""
    config = tmp_path / "mine.json"
    config.write_text('{"fp16": {"enabled": true}, "ezpz_llm": {"engine": "ddp"}}')

    def check(hosts: str, *argv: str) -> int:
        monkeypatch.setenv(PLACES_VARIABLE, hosts)
        return main(["--ds-config", str(config), "--check", "--world-size", "2", *argv])

    monkeypatch.setattr(command, "has_no_accelerator", lambda env: True)
    with pytest.raises(UserError, match="fp16 is unsupported on a CPU"):
        check(f"{socket.gethostname()} 2")
    assert check("elsewhere 2") == 0
    assert check(f"{socket.gethostname()} 2", "--device", "cuda") == 0
    monkeypatch.setattr(command, "has_no_accelerator", lambda env: False)
    assert check(f"{socket.gethostname()} 2") == 0
