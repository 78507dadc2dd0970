"""The benchmark of what measuring costs: that it trains, takes pairs, and times what it says."""

from __future__ import annotations

import json
import subprocess
import sys

from ezpz_llm.resources import data_dir

SMALL = ["--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--block-size", "32", "--log-every", "5"]


def test_it_trains_in_pairs_of_blocks(tmp_path):
    out = tmp_path / "cost.json"
    done = subprocess.run([sys.executable, data_dir("benchmarks") / "measuring_cost.py", "--pairs", "3",
                           "--out", out, "--", *SMALL], cwd=tmp_path, capture_output=True, text=True, timeout=200,
                          check=False)
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
