"""Skipped steps in every layout: many tests of one job with four ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from places import HELPERS
from rank_jobs import Results, possible
from slowness import scaled

SCRIPT = HELPERS / "step_skip_ranks.py"
LAYOUTS = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "tp2", "tp2_zero3", "pp2", "pp2_tp2", "sp2",
           # The CPU reads the decision to skip, as with optimizers of offload and 8 bits.
           "ddp:adamw_unfused", "zero2:adamw_unfused",
           "ddp::bf16", "zero1::bf16", "zero2::bf16", "zero3::bf16", "fsdp2::bf16", "pp2::bf16")
EXACT = [layout for layout in LAYOUTS if "bf16" not in layout]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("gate")
    layouts = possible(list(LAYOUTS))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [shutil.which("mpiexec") or "mpiexec", "-n", "4", sys.executable, str(SCRIPT), str(folder), *layouts]
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(300), check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return Results({layout: json.loads((folder / f"{layout}.json").read_text()) for layout in layouts})


@pytest.mark.full
@pytest.mark.parametrize("layout", EXACT)
def test_norms_by_decay_group_are_those_of_plain_torch(four_ranks, layout):
    """Gradient norms before clipping, and update ratios, for sharded and replicated elements."""
    result = four_ranks[layout]
    assert result["expected"].keys() < result.keys()
    for name, value in result["expected"].items():
        assert result[name] == pytest.approx(value, rel=1e-5), name
    assert (result["lr_decayed"], result["lr_others"]) == (3e-3, 3e-3)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_skipped_step_changes_nothing_on_any_rank(four_ranks, layout):
    """A skipped step changes neither parameters, moments, nor the step count, even if only one rank has the NaN.

    The squares of large gradients overflow, so that the norm is infinite; stage 3 adds the squares in fp64.
    """
    result = four_ranks[layout]
    assert result["too large"]
    assert result["not a number"]
    assert result["infinite"] == ("zero3" not in layout)
    assert result["fine"]
    assert result["sound"]
