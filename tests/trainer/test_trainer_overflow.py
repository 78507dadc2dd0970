"""Overflow of fp16 gradients: the step is repeated with the same learning rate and samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.engine import build
from ezpz_llm.training.engine.precision import LossScale
from ezpz_llm.training.layout.ds_config_blocks import DynamicScale
from ezpz_llm.training.trainer import plan
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import run

SMALL = ["--n-layer", "1", "--n-head", "2", "--n-kv-head", "2", "--n-embd", "32", "--block-size", "32",
         "--steps", "4", "--eval-tokens", "64", "--sample-tokens", "0", "--save-every", "-1", "--profile", "false",
         "--ds-config", "ddp", "--device", "cpu", "--precision", "bf16_autocast"]


def train(folder, scale, monkeypatch):
    """Train in fp16 with an initial loss scale on a CPU, bypassing the check that rejects fp16 there as slow."""
    def with_fp16(*args, **given):
        return replace(resolve(*args, **given), precision="fp16_autocast", loss_scale=DynamicScale(start=scale))

    resolve = plan.resolve
    with monkeypatch.context() as patched:
        patched.setattr(build, "check_precision", lambda *_: None)
        patched.setattr(plan, "resolve", with_fp16)
        assert run(parse([*SMALL, "--run-dir", str(folder)])) == 0
    run_dir = RunDir(folder)
    return list(read_lines(run_dir.metrics)), read_record(run_dir)


def test_a_skipped_step_is_taken_again(tmp_path, monkeypatch):
    calm, calm_record = train(tmp_path / "calm", 1024.0, monkeypatch)
    verdicts = []
    update = LossScale.update
    monkeypatch.setattr(LossScale, "update", lambda scale, finite: (verdicts.append(finite), update(scale, finite)))
    wild, wild_record = train(tmp_path / "wild", 2.0**40, monkeypatch)
    assert verdicts.count(True) == 4
    assert verdicts.count(False) > 4
    for names in ("step", "lr"):
        assert [line[names] for line in wild] == [line[names] for line in calm]
    assert [line["loss"] for line in wild] == pytest.approx([line["loss"] for line in calm], abs=2e-3)
    assert all(line["grad_norm"] is not None for line in wild)
    assert wild_record.sample_hash == calm_record.sample_hash


def test_an_overflow_at_the_smallest_scale_ends_the_run():
    scale = LossScale(DynamicScale(start=4.0))
    scale.update(False)
    scale.update(False)
    with pytest.raises(UserError, match="diverged"):
        scale.update(False)
