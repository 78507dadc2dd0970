"""Muon: its direction, and steps equal to those of a plain loop in one process under every family of layouts."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch_runs import need_mpiexec
from places import TESTS
from rank_jobs import results_of
from thread_ranks import ThreadMesh, run_ranks

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.dist import Degrees
from ezpz_llm.training.engine.optimizer_state import Slice
from ezpz_llm.training.engine.whole_matrices import WholeMatrices
from ezpz_llm.training.layout.optimizers.muon import MUON, _orthogonalized
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.parameters import whole_box

BOUND = 5e-5
"""Bound on weights relative to the distance that they moved, and on gradient norms.

A gradient differs from that of one process by about 4 roundings, 2^-22 of its norm. An iteration multiplies small
singular values by up to 3.4445, so five iterations multiply the difference by up to 485, relative to a matrix of
norm 1. A direction has the norm of about sqrt(24) such matrices, 24 being the smallest width: 485 / 2^22 / sqrt(24)
= 2.4e-5 for a step; twice this allows for gradients at weights that differ already. Measured: 4.4e-6 for weights,
9e-7 for norms. If ranks orthogonalize their parts separately: 0.48.
"""


SHARING = ("ddp", "fsdp2", "zero1", "zero3", "tp2")
"""Layouts in which all ranks share the work."""


def check(tmp_path: Path, ranks: int, *runs: str) -> None:
    need_mpiexec()
    results = results_of(TESTS / "helpers/muon_ranks.py", tmp_path, list(runs), ranks)
    for run, result in results.items():
        check_result(run, result)
        if run in SHARING:
            assert result["owners"] == ranks, run


def check_result(run: str, result: dict[str, Any]) -> None:
    if run.endswith("+skip"):
        assert result["unchanged"], run
    elif run.endswith("+parts"):
        assert result["weights"] > 1000 * BOUND, run
    else:
        assert result["weights"] <= BOUND, run
        assert result["norms"] <= BOUND, run
        assert result["kinds"] == [["matrix", "weight", "exp_avg"], ["other", "weight", "exp_avg", "exp_avg_sq"]]


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    check(tmp_path, 2, "zero1:tp2", "fsdp2", "fsdp2+parts", "zero3+skip")


def test_stages_and_copies_of_shards_equal_one_process(tmp_path: Path) -> None:
    check(tmp_path, 4, "pp2", "fsdp2_within2")


@pytest.mark.full
def test_every_layout_equals_one_process(tmp_path: Path) -> None:
    check(tmp_path / "2", 2, "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "tp2", "pp2", "sp2", "pp2:zero3",
          "tp2+parts", *(f"{layout}+skip" for layout in ("ddp", "zero1", "fsdp2", "tp2")))
    check(tmp_path / "3", 3, "zero1", "zero2", "zero3", "fsdp2")
    check(tmp_path / "4", 4, "zero1", "zero3", "fsdp2", "zero3_hpz2", "tp2", "tp2_zero1", "tp2_zero3",
          "pp2_tp2", "sp2", "zero3:pp2_tp2")


@pytest.mark.parametrize("shape", [(16, 16), (24, 16), (16, 64)])
def test_direction_is_nearly_orthogonal_in_any_shape(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    direction = _orthogonalized(matrix) / (0.2 * max(shape) ** 0.5)
    values = torch.linalg.svdvals(direction)
    assert 0.6 < values.min() < values.max() < 1.3
    # The singular vectors are those of the matrix.
    products = left.T @ direction @ right.T
    assert products.diag().allclose(torch.linalg.svdvals(direction).sort().values, atol=0.7)
    assert (products - products.diag().diag()).abs().max() < 1e-4


def test_a_step_is_that_of_torch() -> None:
    """Compare with torch's Muon, which orthogonalizes in bf16 (2^-8 relative)."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(24, 16, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    groups = [{"params": [ours], "names": ["transformer.h.0.mlp.c_fc.weight"], "weight_decay": 0.1}]
    optimizer = MUON.build(groups, {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}, False)
    optimizer.matrices = _Whole()  # type: ignore[attr-defined]
    expected = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, momentum=0.95, nesterov=True,
                                adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(24, 16, generator=generator)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        expected.step()
    assert (ours - theirs).norm() < 0.05 * (theirs - start).norm()


class _Whole:
    """Matrices of a single process."""

    def apply(self, function: Any, values: dict[torch.Tensor, torch.Tensor]) -> None:
        for matrix in values.values():
            matrix.copy_(function(matrix))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_function_of_matrices_in_a_flat_tensor_sharded_as_by_zero(ranks: int) -> None:
    shapes, offsets, length = {"a": (5, 4), "b": (3, 7)}, {"a": 0, "b": 20}, 41
    flat = torch.randn(length, generator=torch.Generator().manual_seed(0))

    def apply_on_rank(mesh: ThreadMesh) -> torch.Tensor:
        """Return this rank's elements of the results."""
        share = -(-length // mesh.dp_size)
        begin = mesh.dp_rank * share
        local = flat[begin:begin + share].clone()
        pieces = []
        for name, shape in shapes.items():
            start, stop = (min(max(edge - offsets[name], 0), math.prod(shape)) for edge in (begin, begin + share))
            if start < stop:
                place = offsets[name] + start - begin
                pieces.append(Slice(name, shape, whole_box(shape), start, stop,
                                    {"weight": local[place:place + stop - start]}))
        state: Any = SimpleNamespace(shapes=shapes, raw_slices=lambda: pieces,
                                     stepped=lambda: [(local, list(shapes))])
        WholeMatrices(state, mesh, shapes).apply(lambda matrix: matrix @ matrix.T @ matrix, {local: local})
        return local

    actual = torch.cat(run_ranks(Degrees(dp=ranks), apply_on_rank))
    matrices = [part.view(shape) for part, shape in zip(flat.split((20, 21)), shapes.values(), strict=True)]
    expected = torch.cat([(matrix @ matrix.T @ matrix).flatten() for matrix in matrices])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_tiled_layers_are_rejected() -> None:
    with pytest.raises(UserError, match="muon orthogonalizes whole matrices"):
        resolve(Request("tiled", world_size=2, optimizer="muon"))
