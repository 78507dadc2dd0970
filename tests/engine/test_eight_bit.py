"""AdamW with 8-bit moments: it trains, saves memory, and its checkpoints work with any optimizer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any, get_args, get_type_hints

import pytest
from places import HELPERS, ROOT
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.layout.optimizers import OPTIMIZERS, Optimizer, OptimizerName, check_optimizer
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.trainer.config import TrainConfig

SCRIPT = HELPERS / "eight_bit_ranks.py"
LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("bitsandbytes", reason="the extra 8bit is not installed")
    folder = tmp_path_factory.mktemp("eight")
    process = subprocess.run(
        [shutil.which("mpiexec") or "mpiexec", "-n", "2", sys.executable, str(SCRIPT), str(folder), *LAYOUTS],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}, capture_output=True, text=True,
        timeout=scaled(500), check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads((folder / "results.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_bit_losses_are_close_to_32_bit(results: dict[str, Any], layout: str) -> None:
    result = results[layout]
    assert result["losses"] == pytest.approx(result["plain"], abs=0.05)
    assert result["losses"] != result["plain"]
    assert result["losses"][-1] < result["losses"][0] - 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_take_a_quarter(results: dict[str, Any], layout: str) -> None:
    eight, whole = results[layout]["bytes"]
    # Plus scales and tensors that stay in 32 bits: biases, norms, the embedding, in fsdp2 halves of small matrices.
    assert eight < (0.5 if layout in ("ddp", "fsdp2") else 0.28) * whole


@pytest.mark.parametrize("layout", LAYOUTS)
def test_measuring_a_step_copies_no_moments(results: dict[str, Any], layout: str) -> None:
    # The copies are 8 bytes per parameter, and would be kept until the step.
    assert results[layout]["fp32 copies"] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_run_equals_an_uninterrupted_one(results: dict[str, Any], layout: str) -> None:
    result = results[layout]
    assert result["reading changes nothing"]
    assert result["restored"] < 1e-6
    again, ahead = result[f"{layout} adamw_8bit"]
    assert again == pytest.approx(ahead, abs=1e-5)
    losses, ahead = result["ddp adamw"]
    assert losses == pytest.approx(ahead, abs=0.02)


@pytest.mark.parametrize(("layout", "world", "word"), [
    ("tp2", 2, "diverge"), ("pp2", 2, "diverge")])
def test_layouts_whose_copies_would_diverge_are_rejected(layout: str, world: int, word: str) -> None:
    with pytest.raises(UserError, match=word):
        resolve(Request(layout, world_size=world, optimizer="adamw_8bit"))


def test_offloaded_state_requires_deepspeeds_adamw() -> None:
    layout = resolve(Request("zero3", world_size=2)).layout.with_zero(offload_optimizer="cpu")
    for optimizer in ("adamw_8bit", "adamw_unfused"):
        with pytest.raises(UserError, match="DeepSpeed uses its own CPU Adam"):
            check_optimizer(optimizer, layout)
    check_optimizer("adamw", layout)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError) as error:
        resolve(Request("ddp", world_size=1, optimizer="adamw_8bit"))
    assert "pip install 'ezpz_llm[8bit]'" in error.value.instead


def test_every_optimizer_is_built_offered_and_described() -> None:
    page = (ROOT / "docs" / "reference" / "training.md").read_text()
    assert list(OPTIMIZERS) == list(get_args(OptimizerName))
    # `build` is abstract, so Python cannot create an optimizer without it.
    assert "build" in Optimizer.__abstractmethods__
    assert all(isinstance(optimizer, Optimizer) for optimizer in OPTIMIZERS.values())
    assert get_type_hints(TrainConfig)["optimizer"] == OptimizerName
    assert all(f"{name}`" in page for name in OPTIMIZERS)
    assert {name: row.state_bytes for name, row in OPTIMIZERS.items()} == {
        "adamw": 8, "adamw_unfused": 8, "adamw_8bit": 2, "muon": 8}
