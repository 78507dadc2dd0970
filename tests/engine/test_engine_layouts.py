"""Every layout computes the same results as one process: many tests of one job with two ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS

from ezpz_llm.training.layout.ops import is_built

SCRIPT = HELPERS / "engine_ranks.py"
LAYOUTS = ("ddp", "zero0", "zero1", "zero2", "zero3")
ZERO = LAYOUTS[1:]
SHARDED = ("zero1", "zero2", "zero3")
STEPS = 20
LOSS_BOUND = {"fp32": 1e-5, "bf16_autocast": 2e-3, "bf16": 2e-3}
NORM_BOUND = {"fp32": 1e-4, "bf16_autocast": 3e-2, "bf16": 3e-2}
# With two micro-steps and two ranks, rounding in bf16 changes the loss by 3e-4 and the norm by 4e-3 over 20 steps.


def run_ranks(folder: Path, runs: list[str], ranks: int, timeout: float = 240) -> str:
    """Run `engine_ranks.py`, assert that it succeeds, and return its output."""
    command = [sys.executable, str(SCRIPT), str(folder), *runs]
    if ranks > 1:
        command = [shutil.which("mpiexec") or "mpiexec", "-n", str(ranks), *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout + process.stderr


def read(folder: Path, run: str) -> dict:
    return json.loads((folder / f"{run.replace(':', '-')}.json").read_text())


def differences(folder: Path, run: str, reference: str) -> tuple[float, float]:
    """Return the largest loss difference, and the largest relative difference of gradient norms."""
    result, expected = read(folder, run), read(folder, reference)
    assert len(result["losses"]) == len(expected["losses"]) == STEPS
    losses = [abs(a - b) for a, b in zip([*result["losses"], result["evaluated"]],
                                         [*expected["losses"], expected["evaluated"]], strict=True)]
    return max(losses), max(abs(a - b) / b for a, b in zip(result["norms"], expected["norms"], strict=True))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("two-ranks")
    runs = [f"fp32:{layout}" for layout in ("reference", *LAYOUTS, "ddp+undivided", "ddp+early-sync")]
    runs += ["bf16:reference", "bf16:ddp", "bf16:zero2", "bf16_autocast:reference", "bf16_autocast:zero2",
             "fp16_autocast:ddp+overflow", "fp16_autocast:zero2+overflow"]
    return folder, run_ranks(folder, runs, ranks=2)


@pytest.fixture(scope="module")
def more_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that the default tests omit: every layout in bf16 and fp16, buckets, another shape."""
    folder = tmp_path_factory.mktemp("more-of-two-ranks")
    runs = ["fp32:reference", "fp32:reference+llama", "fp32:zero3+llama",
            *(f"fp32:{layout}+buckets" for layout in SHARDED),
            *(f"bf16_autocast:{layout}" for layout in ("reference", *LAYOUTS) if layout != "zero2"),
            *(f"fp16_autocast:{layout}+overflow" for layout in ("ddp", "zero0", "zero3"))]
    run_ranks(folder, runs, ranks=2)
    return folder


def check(folder: Path, run: str, reference: str) -> None:
    precision = run.partition(":")[0]
    loss, norm = differences(folder, run, reference)
    assert loss <= LOSS_BOUND[precision]
    assert norm <= NORM_BOUND[precision]


@pytest.mark.parametrize("run", [*(f"fp32:{layout}" for layout in LAYOUTS), "bf16_autocast:zero2",
                                 "bf16:ddp", "bf16:zero2"])
def test_every_step_is_that_of_one_process(two_ranks: tuple[Path, str], run: str) -> None:
    check(two_ranks[0], run, f"{run.partition(':')[0]}:reference")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "zero2"])
def test_every_step_in_bf16_equals_one_process(more_of_two_ranks: Path, layout: str) -> None:
    check(more_of_two_ranks, f"bf16_autocast:{layout}", "bf16_autocast:reference")


@pytest.mark.slow
@pytest.mark.parametrize("layout", SHARDED)
def test_bucket_sizes_and_overlap_change_nothing(more_of_two_ranks: Path, layout: str) -> None:
    check(more_of_two_ranks, f"fp32:{layout}+buckets", "fp32:reference")


@pytest.mark.slow
def test_llama_shape_equals_one_process(more_of_two_ranks: Path) -> None:
    check(more_of_two_ranks, "fp32:zero3+llama", "fp32:reference+llama")


def test_accumulation_that_is_not_divided_fails_the_comparison(two_ranks: tuple[Path, str]) -> None:
    folder, _ = two_ranks
    _, norm = differences(folder, "fp32:ddp+undivided", "fp32:reference")
    assert norm == pytest.approx(1.0, abs=1e-3)  # twice the gradient; clipped Adam's losses do not show it
    assert norm > NORM_BOUND["bf16_autocast"]


def test_reducing_at_the_wrong_micro_step_fails_the_comparison(two_ranks: tuple[Path, str]) -> None:
    loss, norm = differences(two_ranks[0], "fp32:ddp+early-sync", "fp32:reference")
    assert loss > LOSS_BOUND["bf16_autocast"]
    assert norm > NORM_BOUND["bf16_autocast"]
    assert not read(two_ranks[0], "fp32:ddp+early-sync")["ranks_agree"]


def test_losses_fall_and_clipping_is_at_work(two_ranks: tuple[Path, str]) -> None:
    reference = read(two_ranks[0], "fp32:reference")
    assert reference["losses"][-1] < reference["losses"][0] - 0.5
    assert min(reference["norms"]) > 0.5  # the clip


def test_bf16_really_computes_in_bf16(two_ranks: tuple[Path, str]) -> None:
    fp32, bf16 = (read(two_ranks[0], f"{precision}:reference")["losses"]
                  for precision in ("fp32", "bf16_autocast"))
    assert fp32[0] != bf16[0]
    assert fp32[0] == pytest.approx(bf16[0], abs=2e-2)


def test_ddp_reduces_once_a_step_despite_accumulation(two_ranks: tuple[Path, str]) -> None:
    assert read(two_ranks[0], "fp32:ddp")["rounds"] == STEPS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_agree_and_the_model_stays_plain(two_ranks: tuple[Path, str], layout: str) -> None:
    folder, _ = two_ranks
    result = read(folder, f"fp32:{layout}")
    assert result["norms_agree"]
    assert result["ranks_agree"]  # every rank evaluates with the same result
    assert result["training"] == [False, True]
    assert result["keys"] == read(folder, "fp32:reference")["keys"]
    assert not any(key.startswith("module.") for key in result["keys"])
    if layout in ("ddp", "zero0"):
        assert result["optimizer_is_models"]


@pytest.mark.parametrize(("runs", "layout"), [
    ("two_ranks", "zero2"),
    *(pytest.param("more_of_two_ranks", layout, marks=pytest.mark.slow) for layout in ("zero0", "zero3")),
])
def test_fp16_skips_overflowing_steps_on_all_ranks(request: pytest.FixtureRequest, runs: str,
                                                         layout: str) -> None:
    fixture = request.getfixturevalue(runs)
    folder = fixture[0] if runs == "two_ranks" else fixture
    ddp, result = read(folder, "fp16_autocast:ddp+overflow"), read(folder, f"fp16_autocast:{layout}+overflow")
    assert result["skipped"] == ddp["skipped"] == result["norms"].count(float("inf")) > 0
    assert result["losses"] == pytest.approx(ddp["losses"], abs=LOSS_BOUND["bf16_autocast"])
    assert result["ranks_agree"]
    assert result["losses"][-1] < result["losses"][0] - 0.3


def test_deepspeed_is_quiet(two_ranks: tuple[Path, str]) -> None:
    lines = [line for line in two_ranks[1].splitlines()
             if not line.startswith(("fp32:", "bf16:", "bf16_autocast:", "fp16_autocast:"))]
    assert lines == []


@pytest.mark.full
def test_one_rank_works_in_every_layout(tmp_path: Path) -> None:
    run_ranks(tmp_path, ["fp32:reference", *(f"fp32:{layout}" for layout in LAYOUTS)], ranks=1)
    for layout in LAYOUTS:
        check(tmp_path, f"fp32:{layout}", "fp32:reference")


@pytest.mark.slow
@pytest.mark.skipif(not is_built("cpu_adam"), reason="cpu_adam is not built (ezpz-llm doctor --build-ops)")
def test_offloaded_optimizer_equals_one_process(tmp_path: Path) -> None:
    runs = [f"{precision}:{layout}" for precision in ("fp32", "bf16_autocast")
            for layout in ("reference", "zero3_offload_optimizer")]
    run_ranks(tmp_path, runs, ranks=2)
    for precision in ("fp32", "bf16_autocast"):
        check(tmp_path, f"{precision}:zero3_offload_optimizer", f"{precision}:reference")
