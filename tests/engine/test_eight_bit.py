"""AdamW with moments in 8 bits: it trains, saves memory, and its checkpoints are everybody's."""

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

from ezpz_llm.base.errors import UserError
from ezpz_llm.layout.optimizers import OPTIMIZERS, Optimizer, OptimizerName, check_optimizer
from ezpz_llm.layout.resolve import Request, resolve
from ezpz_llm.trainer.config import TrainConfig

SCRIPT = HELPERS / "eight_bit_ranks.py"
LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("bitsandbytes", reason="the extra 8bit is not installed")
    folder = tmp_path_factory.mktemp("eight")
    done = subprocess.run(
        [shutil.which("mpiexec") or "mpiexec", "-n", "2", sys.executable, str(SCRIPT), str(folder), *LAYOUTS],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}, capture_output=True, text=True,
        timeout=scaled(500), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_nearly_as_with_32_bits(results: dict[str, Any], layout: str) -> None:
    found = results[layout]
    assert found["losses"] == pytest.approx(found["plain"], abs=0.05)
    assert found["losses"] != found["plain"]
    assert found["losses"][-1] < found["losses"][0] - 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_take_a_quarter(results: dict[str, Any], layout: str) -> None:
    eight, whole = results[layout]["bytes"]
    # And scales, and what is too small for it: biases and norms, the table, under fsdp2 halves of small matrices.
    assert eight < (0.5 if layout in ("ddp", "fsdp2") else 0.28) * whole


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_goes_on_as_if_nothing_had_been(results: dict[str, Any], layout: str) -> None:
    found = results[layout]
    assert found["reading changes nothing"]
    assert found["restored"] < 1e-6
    again, ahead = found[f"{layout} adamw_8bit"]
    assert again == pytest.approx(ahead, abs=1e-5)
    other, ahead = found["ddp adamw"]
    assert other == pytest.approx(ahead, abs=0.02)


@pytest.mark.parametrize(("layout", "world", "word"), [
    ("tp2", 2, "diverge"), ("pp2", 2, "diverge")])
def test_layouts_whose_copies_would_come_apart_are_refused(layout: str, world: int, word: str) -> None:
    with pytest.raises(UserError, match=word):
        resolve(Request(layout, world_size=world, optimizer="adamw_8bit"))


def test_offloaded_state_has_an_optimizer_of_its_own() -> None:
    layout = resolve(Request("zero3", world_size=2)).layout.with_zero(offload_optimizer="cpu")
    for optimizer in ("adamw_8bit", "adamw_unfused"):
        with pytest.raises(UserError, match="DeepSpeed's CPU AdamW"):
            check_optimizer(optimizer, layout)
    check_optimizer("adamw", layout)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError) as error:
        resolve(Request("ddp", world_size=1, optimizer="adamw_8bit"))
    assert "pip install 'ezpz_llm[8bit]'" in error.value.instead


def test_every_optimizer_is_built_offered_and_described() -> None:
    page = (ROOT / "docs" / "reference" / "training.md").read_text()
    assert list(OPTIMIZERS) == list(get_args(OptimizerName))
    # What every one is built by is abstract in their class: Python makes none without it.
    assert Optimizer.build.__isabstractmethod__
    assert all(isinstance(one, Optimizer) for one in OPTIMIZERS.values())
    assert get_type_hints(TrainConfig)["optimizer"] == OptimizerName
    assert all(f"{name}`" in page for name in OPTIMIZERS)
    assert {name: row.state_bytes for name, row in OPTIMIZERS.items()} == {
        "adamw": 8, "adamw_unfused": 8, "adamw_8bit": 2}
