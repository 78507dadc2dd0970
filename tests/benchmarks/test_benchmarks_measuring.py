"""The benchmark of the cost of measuring: it trains, runs pairs of blocks, and times them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from slowness import scaled

from ezpz_llm.core.base.package_data import data_dir

SMALL = ["--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--block-size", "32", "--log-every", "5"]


@pytest.mark.full
def test_it_trains_in_pairs_of_blocks(tmp_path):
    out = tmp_path / "cost.json"
    done = subprocess.run([sys.executable, data_dir("benchmarks") / "measuring_cost.py", "--pairs", "3",
                           "--out", out, "--", *SMALL], cwd=tmp_path, capture_output=True, text=True,
                          timeout=scaled(200), check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found == json.loads(done.stdout), "nothing else on standard output"
    assert found["lines"] == 5 * 4, "a warm-up and three blocks that log, none of those that do not"
    assert found["last_loss"] < found["first_loss"]
    for name in ("wall_ratio", "cpu_ratio"):
        low, high = found[name]["95_percent"]
        assert 0 < low <= found[name]["median"] <= high
        assert found["within_1_percent"][name] == (high < 1.01)
    assert not list(tmp_path.glob("runs*")), "its run directory is gone"


def test_the_committed_results_are_within_one_percent():
    """Add the costs that do not depend on the model (from a small one) and the norms of one step in fifty."""
    def kept(name):
        return json.loads((data_dir("benchmarks") / f"results/{name}.json").read_text())

    step = kept("measuring_cost")["cpu_s_off"]
    more = kept("measuring_cost_small")["cpu_s_more"]["95_percent"][1]
    norms = kept("guard_cost")["models"]["tiny-gpt2"]["norms_s"] / 50
    assert 0 < more + norms < 0.01 * step
