"""Tests of layouts under other versions of DeepSpeed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env
from slowness import scaled

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist import deepspeed_names
from ezpz_llm.training.dist.deepspeed_names import NAMES
from ezpz_llm.training.layout import deepspeed_versions
from ezpz_llm.training.layout.layout import Layout, ZeroOptions
from ezpz_llm.training.layout.resolve import Request, resolve


def check(folder: Path, *layout: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ezpz_llm.train", "--check", "--world-size", "4", "--ds-config", *layout]
    return subprocess.run(command, env=clean_env(PYTHONPATH=str(folder)), cwd=folder, capture_output=True,
                          text=True, timeout=scaled(60), check=False)


def copy_deepspeed(folder: Path) -> Path:
    """Make a package of symlinks to the modules of the installed DeepSpeed and return its folder."""
    installed = Path(importlib.util.find_spec("deepspeed").origin).parent
    for path in installed.rglob("*.py"):
        link = folder / "deepspeed" / path.relative_to(installed)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    return folder / "deepspeed"


def pretend_version(folder: Path, version: str) -> None:
    """Make a folder in which package metadata have another version of DeepSpeed."""
    metadata = folder / f"deepspeed-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")


def test_a_missing_name_fails_only_the_layouts_that_use_it(tmp_path: Path) -> None:
    module = copy_deepspeed(tmp_path) / "runtime" / "zero" / "stage3.py"
    text = module.read_text()
    module.unlink()
    module.write_text(text.replace("grad_partitions_flat_buffer", "renamed"))
    failed = check(tmp_path, "zero3")
    assert failed.returncode == 2
    assert "no deepspeed.runtime.zero.stage3.grad_partitions_flat_buffer, which layout zero3 uses" in failed.stderr
    assert "pip install 'deepspeed" in failed.stderr
    assert check(tmp_path, "zero1").returncode == 0


LAYOUTS = {
    "every layout": Layout("mine", "deepspeed", ZeroOptions(0)),
    "ZeRO 1 and 2": Layout("mine", "deepspeed", ZeroOptions(1)),
    "ZeRO 3": Layout("mine", "deepspeed", ZeroOptions(3)),
    "pipelines": Layout("mine", "deepspeed", ZeroOptions(1), pp=2),
    "optimizer offload": Layout("mine", "deepspeed", ZeroOptions(2, "cpu")),
    "compiled ops": Layout("mine", "deepspeed", ZeroOptions(3, None, "nvme")),
    "offload to NVMe": Layout("mine", "deepspeed", ZeroOptions(3, None, "nvme")),
    "optimizer offload to NVMe": Layout("mine", "deepspeed", ZeroOptions(3, "nvme")),
}
"""A layout that uses the names of each part of the table."""


@pytest.mark.parametrize(("layouts", "module", "name"), [
    (layouts, module, name) for layouts, modules in NAMES.items()
    for module, names in modules.items() for name in names])
def test_a_version_without_a_name_is_rejected(monkeypatch: pytest.MonkeyPatch, layouts: str, module: str,
                                              name: str) -> None:
    deepspeed_versions.require_support(LAYOUTS[layouts])
    find_words = deepspeed_versions._source_words
    monkeypatch.setattr(deepspeed_versions, "_source_words", lambda other: (
        find_words(other) - {name.split(".")[-1]} if other == module else find_words(other)))
    with pytest.raises(UserError, match=re.escape(f"has no {module}.{name}, which layout mine uses")) as error:
        deepspeed_versions.require_support(LAYOUTS[layouts])
    assert error.value.instead.startswith("pip install 'deepspeed")


def test_other_engines_work_without_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_versions.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(deepspeed_names, "installed", lambda name: None)
    deepspeed_versions._source_words.cache_clear()
    with pytest.raises(UserError, match="deepspeed is not installed"):
        resolve(Request("zero1", world_size=4))
    assert resolve(Request("fsdp2", world_size=4)).layout.name == "fsdp2"
    deepspeed_versions._source_words.cache_clear()


@pytest.mark.parametrize(("version", "layout", "problem"), [
    ("0.17.6", ("zero2",), "computes wrong gradients in ZeRO stage 2"),
    ("0.17.6", ("pp2",), "by the accumulation steps again in each pipeline stage"),
    ("0.18.5", ("pp2_tp2",), "by the accumulation steps again in each pipeline stage"),
    ("0.17.6", ("zero1", "--precision", "bf16"), "engine deepspeed does not support bf16"),
    ("0.18.5", ("zero2", "--precision", "bf16"), "(deepspeed 0.18.5; 0.19.8 supports it)"),
    ("0.19.2", ("pp2",), "github.com/deepspeedai/DeepSpeed/issues/8152"), ("0.19.3", ("pp2",), None),
    ("0.17.6", ("zero1",), None), ("0.17.6", ("zero3", "--precision", "bf16"), None), ("0.18.5", ("zero2",), None),
])
def test_layouts_that_an_old_version_computes_incorrectly_are_rejected(
        tmp_path: Path, version: str, layout: tuple[str, ...], problem: str | None) -> None:
    pretend_version(tmp_path, version)
    result = check(tmp_path, *layout)
    assert result.returncode == (2 if problem else 0), result.stderr
    assert (problem or "") in result.stderr


@pytest.mark.parametrize(("version", "is_wrong"), [("0.18.5", True), ("0.19.2", True), ("0.19.3", False)])
def test_gradients_are_not_overlapped_by_a_version_that_reduces_incomplete_ones(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_wrong: bool) -> None:
    pretend_version(tmp_path, version)
    monkeypatch.syspath_prepend(str(tmp_path))

    def overlap(source: str, device: str) -> object:
        zero = resolve(Request(source, world_size=4, device=device, precision="fp32")).deepspeed
        return zero["zero_optimization"].get("overlap_comm")

    assert overlap("zero1", "cuda") == overlap("zero2", "xpu") == (None if is_wrong else True)
    assert overlap("zero3", "cuda") is None
    mine = tmp_path / "mine.json"
    mine.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    assert overlap(str(mine), "cpu") is False
    if is_wrong:
        with pytest.raises(UserError, match="reduces gradients before they are complete") as error:
            overlap(str(mine), "cuda")
        assert error.value.where == "overlap_comm of mine.json"
    else:
        assert overlap(str(mine), "cuda") is True
