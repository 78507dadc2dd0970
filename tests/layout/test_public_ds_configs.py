"""Tests with public ds_configs: each is applied, or rejected for a true reason."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from public_ds_configs import PUBLIC, Public

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.layout import ops
from ezpz_llm.training.layout.ds_config import table
from ezpz_llm.training.layout.precision_recipes import AUTOCAST
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import RunPlan, check_run


def plan(public: Public, folder: Path) -> RunPlan:
    """Plan a run of 100 steps with a ds_config, as `launch` does."""
    text = json.dumps(public.values)
    for plain, value_text in public.text.items():
        assert plain in text
        text = text.replace(plain, value_text)
    path = folder / "ds_config.json"
    path.write_text(text)
    return check_run(parse(["--ds-config", str(path), "--steps", "100", *public.argv]), public.world_size)


def setting(run: RunPlan, name: str) -> Any:
    """Return a setting of the run by its name in the table."""
    resolved = run.resolved
    if name == "stage":
        return resolved.layout.zero.stage
    if name == "scale":
        return resolved.loss_scale.start, resolved.loss_scale.window, resolved.loss_scale.hysteresis
    if name.startswith("zero."):
        return resolved.deepspeed["zero_optimization"][name.removeprefix("zero.")]
    for owner in (resolved.layout.zero, resolved.layout, resolved.batch, resolved):
        if hasattr(owner, name):
            return getattr(owner, name)
    return getattr(run.config, name) if hasattr(run.config, name) else resolved.deepspeed[name]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.title)
def test_a_public_ds_config(public: Public, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "is_built", lambda name: True)
    if isinstance(public.expected, str):
        with pytest.raises(UserError) as raised:
            plan(public, tmp_path)
        assert public.expected in str(raised.value), raised.value
        return
    typed = public.expected.get("precision")
    if typed in AUTOCAST:
        # DeepSpeed's fp16, and its stage 0 in bf16, are rejected with a suggested precision.
        with pytest.raises(UserError, match=r"fp16|bf16") as raised:
            plan(public, tmp_path)
        assert f"--precision {typed}" in str(raised.value)
        public = replace(public, argv=(*public.argv, "--precision", typed))
    run = plan(public, tmp_path)
    assert {name: setting(run, name) for name in public.expected} == public.expected
    notes = " ".join(run.resolved.notes)
    for note in public.notes:
        assert note in notes, notes


def test_the_table_has_enough_files_of_each_project() -> None:
    projects = Counter(public.repo.split("/")[1] for public in PUBLIC)
    assert set(projects) == {"axolotl", "accelerate", "transformers", "DeepSpeedExamples", "Megatron-DeepSpeed"}
    assert min(projects.values()) >= 6
    assert len({(public.repo, public.path, public.commit) for public in PUBLIC}) == len(PUBLIC) >= 40


@pytest.mark.skipif(version("deepspeed") != table().version, reason="the table is for another DeepSpeed")
@pytest.mark.parametrize("public", [public for public in PUBLIC if isinstance(public.expected, str) and (
    "unknown key" in public.expected or "DeepSpeed requires" in public.expected or "removed" in public.expected)],
    ids=lambda public: public.title)
def test_deepspeed_rejects_what_we_say_it_rejects(public: Public, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed itself rejects or silently ignores keys that we call unknown or removed."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    values = {**json.loads(json.dumps(public.values)), "train_batch_size": 1, "train_micro_batch_size_per_gpu": 1,
              "gradient_accumulation_steps": 1}
    if "cuda_visible_devices" in public.expected:
        assert not hasattr(DeepSpeedConfig(values), "cuda_visible_devices")
        return
    with pytest.raises(Exception, match=r"extra_forbidden|Extra inputs|greater than|has been removed"):
        DeepSpeedConfig(values)
