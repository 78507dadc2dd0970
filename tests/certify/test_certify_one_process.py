"""Single process against the step definition: a correct one passes, and faults shared by all layouts are named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.verify.certify import one_process, reference
from ezpz_llm.verify.certify.injected_faults import FAULTS
from ezpz_llm.verify.certify.one_process import Comparison, Spread
from ezpz_llm.verify.certify.uncovered_paths import observe

SHARED = [name for name, fault in FAULTS.items() if fault.shared]
TOO_SMALL = {("mask-beyond-64", "bf16"): "forward"}
"""Phases in which a recipe's rounding hides a fault: the loss of 160 tokens hardly changes, its gradients do."""
IN_MINUTES = {("half-the-micro-batches", "fp32"), ("mask-beyond-64", "fp32"), ("beta2", "fp32"),
              ("evaluation-cut-short", "fp32")}
"""Faults in the default tests."""
IN_FULL = {("clip-scales-up", "fp32"), ("decay-on-norms", "fp32"), ("last-loss", "fp32")}
"""Faults in the full tests, one more per phase. The matrix of all faults and recipes takes minutes;
docs/evidence/testing.md has its last result."""
SHAPE_OF = {"fp32": "tiny-gpt2", "bf16_autocast": "tiny-llama", "bf16": "tiny-gpt2"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Dist:
    return Dist(RankInfo(0, 1, 0, 1, 0, "test"), torch.device("cpu"), None, Mesh(Degrees(1), 0),
                RunDir(tmp_path_factory.mktemp("run")))


_judged: dict[str, tuple[list[Comparison], Spread]] = {}


def right(dtype: str, alone: Dist) -> tuple[list[Comparison], Spread]:
    """Return the comparisons of a process without a fault, computed once."""
    if dtype not in _judged:
        _judged[dtype] = one_process.compare_steps(observe(SHAPE_OF[dtype], dtype, alone), dtype)
    return _judged[dtype]


@pytest.mark.parametrize("dtype", ["fp32", *(pytest.param(dtype, marks=pytest.mark.slow)
                                             for dtype in ("bf16", "bf16_autocast"))])
def test_a_correct_process_is_within_the_bounds_of_every_phase(alone: Dist, dtype: str) -> None:
    comparisons, spread = right(dtype, alone)
    assert one_process.describe_failures(comparisons) is None
    assert set(one_process.worst_by_phase(comparisons)) == set(one_process.PHASES)
    findings = [comparison.finding for comparison in comparisons]
    assert all(math.isfinite(finding.bound) for finding in findings)
    # The bounds must be tight: an error of 1/8 in a gradient or of 1e-3 in the loss must not pass.
    limits = {"fp32": (2e-5, 1e-6), "bf16_autocast": (0.125, 1e-3), "bf16": (0.125, 1e-3)}[dtype]
    assert max(finding.bound for finding in findings if finding.what.startswith("gradient of")) < limits[0]
    assert max(finding.bound for finding in findings if finding.what == "loss") < limits[1] * math.log(96)
    assert spread.loss > 0


def _marks(name: str, dtype: str) -> list[pytest.MarkDecorator]:
    if (name, dtype) in IN_MINUTES:
        return []
    return [pytest.mark.full if (name, dtype) in IN_FULL else pytest.mark.slow]


@pytest.mark.parametrize(("name", "dtype"), [pytest.param(name, dtype, marks=_marks(name, dtype))
                                             for dtype in SHAPE_OF for name in SHARED])
def test_a_fault_shared_by_all_layouts_is_named(alone: Dist, name: str, dtype: str) -> None:
    _, spread = right(dtype, alone)
    comparisons, _ = one_process.compare_steps(observe(SHAPE_OF[dtype], dtype, alone, FAULTS[name]), dtype, spread)
    failing = [phase for phase in one_process.PHASES
               if any(each.phase == phase and each.finding.failed for each in comparisons)]
    shows = [phase for phase in FAULTS[name].shows if phase != TOO_SMALL.get((name, dtype))]
    assert set(shows) <= set(failing), one_process.describe_failures(comparisons)
    assert failing[0] == shows[0], one_process.describe_failures(comparisons)


@pytest.mark.parametrize("norm", [1.0, math.inf])
def test_a_skipped_step_gets_a_verdict(alone: Dist, norm: float) -> None:
    """Moments of 0 and the infinite norm of a skipped step must not lead to a division by 0."""
    first = observe("tiny-gpt2", "fp32", alone)[:1]
    skipped = replace(first[0], after=first[0].before, norm=norm)
    comparisons, _ = one_process.compare_steps([skipped], "fp32")
    failed = {each.phase for each in comparisons if each.finding.failed}
    assert {"reduction", "optimizer"} <= failed, one_process.describe_failures(comparisons)


def test_a_reference_that_disagrees_with_itself_is_rejected(alone: Dist, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise beyond rounding would let every layout pass."""
    def rounded(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.weight, self.bias)
        return y + (y.to(torch.float8_e4m3fn).float() - y).detach()

    @contextmanager
    def coarse(seed: int) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(nn.Linear, "forward", rounded)
            yield

    monkeypatch.setattr(reference, "reordered_sums", coarse)
    with pytest.raises(UserError, match="one process disagrees with itself: tiny-gpt2 fp32 in 8 micro-steps: "
                                        "forward, step 1: loss differs by"):
        reference.make_reference(tmp_path, "tiny-gpt2", "fp32", 3, alone)


@pytest.mark.full
def test_every_step_that_contributes_to_noise_is_checked(alone: Dist, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Including steps between the first and the last, which contribute to the tolerances of norms and losses."""
    inner = reference.train

    def train(engine: Engine, *args: Any, **options: Any) -> reference.Trajectory:
        trajectory = inner(engine, *args, **options)
        if engine.batch.accumulation == 1:
            trajectory.norms[1] *= 1.01
        return trajectory

    monkeypatch.setattr(reference, "train", train)
    with pytest.raises(UserError, match="one process disagrees with itself: tiny-gpt2 fp32 in 1 micro-steps: "
                                        "reduction, step 2: gradient norm"):
        reference.make_reference(tmp_path, "tiny-gpt2", "fp32", 3, alone)


@pytest.mark.full
def test_the_evaluation_of_the_reference_is_checked(alone: Dist, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    inner = reference.validation_loss
    monkeypatch.setattr(reference, "validation_loss",
                        lambda *args, **options: (inner(*args, **options)[0] + 1e-4, 0))
    with pytest.raises(UserError, match="the definition of the step: tiny-gpt2 fp32: evaluation, step 3: loss of"):
        reference.make_reference(tmp_path, "tiny-gpt2", "fp32", 3, alone)


@pytest.mark.full
def test_a_reference_that_disagrees_with_the_definition_is_rejected(alone: Dist, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    inner = reference.make_engine

    def faulty(*args: object, **options: object) -> object:
        engine = inner(*args, **options)
        FAULTS["beta2"].engine(engine, alone)
        return engine

    monkeypatch.setattr(reference, "make_engine", faulty)
    with pytest.raises(UserError, match="one process disagrees with the definition of the step: tiny-gpt2 fp32: "
                                        "optimizer, step 1: second moments of"):
        reference.make_reference(tmp_path, "tiny-gpt2", "fp32", 3, alone)
