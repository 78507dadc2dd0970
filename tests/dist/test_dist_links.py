"""Bandwidth between nodes, measured with ranks that report different hostnames."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from places import HELPERS
from slowness import scaled

from ezpz_llm.verify.explain.split import slow_link

RANKS = HELPERS / "link_ranks.py"


def test_all_neighbors_are_measured_in_both_directions_and_the_slow_node_is_found(tmp_path):
    command = [shutil.which("mpiexec") or "mpiexec", "-n", "4", sys.executable, str(RANKS), str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "links.json").read_text())
    for hosts in (1, 2, 3, 4):
        links = results[str(hosts)]
        directions = {(link["sender"], link["receiver"]) for link in links}
        pairs = {(i, (i + 1) % hosts) for i in range(hosts)} if hosts > 1 else set()
        assert directions == {(f"node{a}", f"node{b}") for i, j in pairs for a, b in ((i, j), (j, i))}
        assert len(links) == len(directions)
        assert all(link["rate"] > 0 for link in links)
    slow = slow_link(results["slow"])
    # node3 is slow to send both its data and the message that it is ready.
    assert slow is not None
    assert slow.host == "node3"
