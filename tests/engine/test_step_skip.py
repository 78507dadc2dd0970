"""Skipped steps, under every layout: one job of four ranks, read by many tests."""

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
           # Asked on the host, like the optimizers of offload and of 8 bits.
           "ddp:adamw_unfused", "zero2:adamw_unfused")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("gate")
    layouts = possible(list(LAYOUTS))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [shutil.which("mpiexec") or "mpiexec", "-n", "4", sys.executable, str(SCRIPT), str(folder), *layouts]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(300), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Results({layout: json.loads((folder / f"{layout}.json").read_text()) for layout in layouts})


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_by_decay_group_are_those_of_plain_torch(four_ranks, layout):
    """Gradient norms before clipping, updates over parameters; whatever divides or repeats an element."""
    found = four_ranks[layout]
    assert found["expected"].keys() < found.keys()
    for name, value in found["expected"].items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    assert (found["lr_decayed"], found["lr_others"]) == (3e-3, 3e-3)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_refused_step_changes_nothing_on_any_rank(four_ranks, layout):
    """Neither parameters, nor moments, nor the count of steps; a NaN is one rank's alone."""
    found = four_ranks[layout]
    assert found["too large"]
    assert found["not a number"]
    assert found["fine"]
    assert found["sound"]
