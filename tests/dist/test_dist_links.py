"""Links between hosts, between ranks that pretend to be on several."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from places import HELPERS
from slowness import scaled

from ezpz_llm.explain.split import slow_link

RANKS = HELPERS / "link_ranks.py"


def test_every_neighbour_is_measured_in_both_directions_and_the_slow_host_named(tmp_path):
    command = [shutil.which("mpiexec") or "mpiexec", "-n", "4", sys.executable, str(RANKS), str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "links.json").read_text())
    for hosts in (1, 2, 3, 4):
        links = found[str(hosts)]
        ways = {(link["sender"], link["receiver"]) for link in links}
        pairs = {(i, (i + 1) % hosts) for i in range(hosts)} if hosts > 1 else set()
        assert ways == {(f"node{a}", f"node{b}") for i, j in pairs for a, b in ((i, j), (j, i))}
        assert len(links) == len(ways)
        assert all(link["rate"] > 0 for link in links)
    slow = slow_link(found["slow"])
    # It is slow to send both its messages and its word that it is ready.
    assert slow is not None
    assert slow.host == "node3"
