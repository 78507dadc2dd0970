"""A launcher as the command of launch: the plan has a note with the command to use instead."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from launch_runs import launch

from ezpz_llm.launcher.jobs.nested_launcher import nested_launcher_notes


@pytest.mark.parametrize(("line", "name", "instead"), [
    ("torchrun --nproc_per_node 2 w.py --x 1", "torchrun", "launch --ppn 2 python3 w.py --x 1"),
    ("/opt/bin/torchrun --nproc-per-node=gpu -m pkg.train a", "torchrun", "launch python3 -m pkg.train a"),
    ("python3 -m torch.distributed.run --nproc_per_node=4 w.py", "torch.distributed.run",
     "launch --ppn 4 python3 w.py"),
    ("python -u -m torch.distributed.launch w.py", "torch.distributed.launch", "launch python3 w.py"),
    ("python3 /usr/bin/torchrun w.py", "torchrun", "launch python3 w.py"),
    ("accelerate launch --num_processes 4 w.py", "accelerate", "launch -n 4 python3 w.py"),
    ("python3 -m accelerate.commands.launch w.py", "accelerate.commands.launch", "launch python3 w.py"),
    ("deepspeed --num_gpus 2 w.py --deepspeed", "deepspeed", "launch --ppn 2 python3 w.py --deepspeed"),
    ("mpiexec -n 4 python3 w.py", "mpiexec", "launch -n 4 python3 w.py"),
    ("mpirun.openmpi -np 4 ./a.out", "mpirun.openmpi", "launch -n 4 PROGRAM"),
    ("srun -m cyclic -n 2 python w.py", "srun", "launch -n 2 python w.py"),
    ("flux run -n 2 python3 w.py", "flux", "launch -n 2 python3 w.py"),
    ("env A=1 numactl -l torchrun w.py", "torchrun", "launch python3 w.py"),
    ("bash -c 'source env; A=1 exec torchrun w.py'", "torchrun", "launch python3 w.py"),
    ("bash --norc -e -o pipefail -xc 'torchrun w.py'", "torchrun", "launch python3 w.py"),
])
def test_launchers_are_reported(line: str, name: str, instead: str) -> None:
    (note,) = nested_launcher_notes(shlex.split(line), 2)
    assert note == (f"NESTED LAUNCHER: {name} is a launcher itself, and each of the 2 ranks starts a separate run"
                    f" of it. Type instead: {instead}")


@pytest.mark.parametrize("line", [
    "hostname", "python3", "python3 w.py torchrun", "python3 deepspeed.py", "python3 -c pass srun",
    "python3 -m ezpz_llm.train --name srun", "accelerate config", "flux submit w.py", "bash torchrun.sh",
    "bash w.sh -c torchrun", "timeout 5 python3 w.py srun", "bash -c 'echo torchrun'", "bash -c \"torchrun ' \"",
])
def test_other_programs_are_not(line: str) -> None:
    words = ["bash", "-c", "torchrun '"] if line.endswith("' \"") else shlex.split(line)
    assert nested_launcher_notes(words, 2) == ()


def test_the_plan_has_it(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "2", "--dry-run", "--json", "torchrun", "--nproc_per_node", "2", "w.py")
    assert done.returncode == 0, done.stderr
    assert "Type instead: launch --ppn 2 python3 w.py" in json.loads(done.stdout)["notes"][0]
    done = launch(tmp_path, "-n", "1", "--wrap", "env", "mpiexec", "--version")
    assert "NESTED LAUNCHER" in done.stderr
