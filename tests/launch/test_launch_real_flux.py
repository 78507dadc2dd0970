"""Real Flux on simulated nodes: Slurm starts the brokers, and a batch job runs in their instance.

Tested with flux-core 0.88, built from source. Skipped if flux is not on PATH.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from simcluster.cluster import Cluster

pytestmark = [pytest.mark.full,
              pytest.mark.skipif(shutil.which("flux") is None, reason="there is no flux on PATH")]

_JOB = """#!/bin/bash
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=5m
flux kvs get resource.R > resources
env | grep ^FLUX_ > variables
launch --tee all --ppn 2 bash -c 'echo $RANK of $WORLD_SIZE on $(hostname) as $LOCAL_RANK' > said 2> told
echo code $? >> told
launch --ppn 2 --run-dir failed bash -c 'test $RANK = 3 && exit 7; sleep 100' 2> judged
echo code $? >> judged
flux jobs --no-header --format={state} -a > states
"""


def _flux(cluster: Cluster, folder: Path, script: str) -> str:
    (folder / "outer.sh").write_text(script)
    path = f"{Path(shutil.which('flux') or '').parent}:{os.environ['PATH']}"
    done = cluster.run("srun", "-N2", "-n2", "--mpi=pmi2", "flux", "start", "bash", "outer.sh", cwd=folder,
                       timeout=120, PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_batch_job(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(_JOB)
    _flux(cluster, tmp_path, "flux job attach $(flux batch --output=none job.sh)")
    told = (tmp_path / "told").read_text()
    assert "code 0" in told, told
    said = (tmp_path / "said").read_text().splitlines()
    assert sorted(said) == [f"[{rank}] {rank} of 4 on n{rank // 2 + 1} as {rank % 2}" for rank in range(4)]
    variables = dict(line.split("=", 1) for line in (tmp_path / "variables").read_text().splitlines())
    assert variables["FLUX_ENCLOSING_ID"].startswith(("ƒ", "f"))
    assert "FLUX_JOB_ID" not in variables
    # The job's end time comes from its time limit.
    ends = json.loads((tmp_path / "resources").read_text())["execution"]["expiration"]
    record = next((tmp_path / "runs").glob("*/run.json"))
    assert abs(float(json.loads(record.read_text())["launch"]["env"]["EZPZ_LLM_ENDS_AT"]) - ends) < 1
    judged = (tmp_path / "judged").read_text()
    assert "code 7" in judged
    assert "rank 3 on n2 failed: exit code 7" in judged
    assert set((tmp_path / "states").read_text().split()) == {"INACTIVE"}
