"""Run launch in Slurm's interactive shells, with the simulated cluster's real Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from places import HELPERS
from simcluster.cluster import Cluster

MEET = HELPERS / "connecting_ranks.py"


def _typed(cluster: Cluster, folder: Path, shell: str, *commands: str) -> subprocess.CompletedProcess[str]:
    """Start `shell` in a terminal, and type `commands` at its prompt."""
    script = folder / "typed.sh"
    script.write_text("\n".join(["exec > typed.txt 2>&1 < /dev/null", *commands, "touch done"]))
    # script(1) provides the terminal; without it the shell would treat the end of its input as a hang-up.
    typing = ("(echo 'bash typed.sh; exit'; timeout 270 bash -c 'until [ -e done ]; do sleep 0.1; done') | "
              f"script -qec '{shell}' /dev/null")
    return cluster.run("bash", "-c", typing, cwd=folder, timeout=280)


def test_the_shell_of_srun_pty_starts_ranks_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    """The shell is task 0 of four. srun, and mpiexec's helpers, which srun starts, share the step's resources."""
    meet = f"{sys.executable} {MEET}"
    # The other tasks have no terminal and end at once; this cluster's WaitTime would end the shell 5 s later.
    _typed(cluster, tmp_path, "srun -N2 --ntasks-per-node=2 -t 5 --wait=0 --pty bash",
           'squeue --noheader --jobs "$SLURM_JOB_ID" --format %e > end',
           f"timeout 120 launch --run-dir srun {meet}; echo rc=$?",
           f"timeout 120 launch --run-dir mpiexec --launcher mpiexec {meet}; echo rc=$?")
    output = (tmp_path / "typed.txt").read_text()
    assert output.count("rc=0") == 2, output
    ends_at = time.mktime(time.strptime((tmp_path / "end").read_text().strip(), "%Y-%m-%dT%H:%M:%S"))
    for run in ("srun", "mpiexec"):
        ranks = json.loads((tmp_path / run / "met.json").read_text())
        assert [rank["host"] for rank in ranks] == ["n1", "n1", "n2", "n2"]
        assert [rank["local_rank"] for rank in ranks] == [0, 1, 0, 1]
        assert {rank["EZPZ_LLM_ENDS_AT"] for rank in ranks} == {f"{ends_at:.0f}"}
