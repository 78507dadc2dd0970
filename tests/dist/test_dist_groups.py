"""Process groups: as few calls per rank in a large world as in a small one, and the right ranks in each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from launch_runs import clean_env
from places import HELPERS
from slowness import scaled

ENV = clean_env(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
LAYOUTS = ("zero1", "fsdp2_within2", "zero3_hpz2", "tp2_zero3", "zero3,sp4", "pp2", "pp2,pp4", "3d")


def test_start_up_makes_as_many_calls_in_a_world_of_4096_ranks_as_of_64() -> None:
    ran = subprocess.run([sys.executable, str(HELPERS / "fake_world.py"), "64,512,4096", *LAYOUTS], env=ENV,
                         capture_output=True, text=True, timeout=scaled(200), check=True)
    calls = defaultdict(list)
    for line in ran.stdout.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            calls[found["layout"]].append((found["groups"], found["collectives"]))
    assert set(calls) == set(LAYOUTS)
    for layout, by_size in calls.items():
        assert len(by_size) == 3, layout
        assert by_size[0] == by_size[1] == by_size[2], layout
        assert by_size[0][0] <= 6, layout


def test_groups_of_changing_meshes_beside_groups_of_some_ranks_only(tmp_path: Path) -> None:
    """Names of torch's groups depend on the number of groups that a rank has, and are never used twice."""
    found = tmp_path / "found.json"
    mpiexec = shutil.which("mpiexec") or "mpiexec"
    subprocess.run([mpiexec, "-n", "4", sys.executable, str(HELPERS / "group_ranks.py"), str(found)], env=ENV,
                   cwd=tmp_path, timeout=scaled(120), check=True)
    pairs, halves = [11, 11, 1100, 1100], [101, 1010, 101, 1010]
    wanted = [{"tp": pairs, "dp": halves}, {"pp": halves, "dp": pairs, "sends": halves}, {},
              {"tp": pairs, "dp": halves}, {"ends": [1001, 110, 110, 1001]},
              {"pp": halves, "dp": pairs, "sends": halves}]
    for rank, by_mesh in enumerate(json.loads(found.read_text())):
        assert by_mesh == [{name: sums[rank] for name, sums in mesh.items()} for mesh in wanted], rank
