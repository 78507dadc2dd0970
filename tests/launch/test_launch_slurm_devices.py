"""Devices and tasks of real Slurm steps, on simulated nodes with two devices each.

A step has neither the devices nor the tasks of its batch script: srun gives it what is requested. The tests run on
the Slurm that is first on PATH.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from simcluster.cluster import Cluster

_SHOW = "echo $CUDA_VISIBLE_DEVICES on $(hostname)"


def _see(cluster: Cluster, folder: Path, request: str, *words: str, **env: str) -> tuple[list[str], str]:
    """Return each rank's device mask and node, of `launch WORDS` in a job with `request`, and launch's messages.

    Batch scripts and salloc's shells have different variables, but must have the same ranks.
    """
    line = f"launch --tee all {' '.join(words)} bash see.sh"
    (folder / "see.sh").write_text(_SHOW)
    settings = "".join(f"export {name}={value}\n" for name, value in env.items())
    (folder / "job.sh").write_text(f"#!/bin/bash\n{settings}{line} > out 2> err\n")
    found = []
    for start in (lambda: cluster.batch("-N2", *request.split(), "job.sh", cwd=folder),
                  lambda: cluster.run("salloc", "--quiet", "-N2", *request.split(), "bash", "job.sh", cwd=folder)):
        start()
        found.append((sorted((folder / "out").read_text().splitlines()), (folder / "err").read_text()))
    (by_batch, messages), (by_salloc, _) = found
    assert by_batch == by_salloc, found
    return by_batch, messages


_ALL = ["[0] 0,1 on n1", "[1] 0,1 on n1", "[2] 0,1 on n2", "[3] 0,1 on n2"]
_ONE_EACH = ["[0] 0 on n1", "[1] 0 on n2"]


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["srun", "mpiexec", "torchrun"])
@pytest.mark.parametrize("request_", ["--exclusive", "--exclusive --gpus-per-node=2", "--exclusive -G2",
                                      "--exclusive --hint=nomultithread"])
def test_ranks_have_the_devices_of_exclusive_nodes(gpu_cluster: Cluster, tmp_path: Path, request_: str,
                                                   launcher: str) -> None:
    ranks, messages = _see(gpu_cluster, tmp_path, request_, "--launcher", launcher)
    assert ranks == _ALL, messages


@pytest.mark.full
@pytest.mark.parametrize("request_", ["--exclusive --gpus-per-node=1", "--exclusive --gres=gpu:1",
                                      "--gpus-per-node=1"])
def test_a_requested_number_of_devices_is_also_that_of_the_ranks(gpu_cluster: Cluster, tmp_path: Path,
                                                                 request_: str) -> None:
    assert _see(gpu_cluster, tmp_path, request_)[0] == _ONE_EACH


@pytest.mark.full
@pytest.mark.parametrize("request_", ["--hint=nomultithread", "--threads-per-core=1", "--hint=memory_bound",
                                      "--sockets-per-node=1", "--ntasks-per-socket=1"])
def test_options_about_cores_request_no_ranks(gpu_cluster: Cluster, tmp_path: Path, request_: str) -> None:
    """sbatch and salloc derive one task per node from them; --ntasks-per-socket requests two."""
    assert _see(gpu_cluster, tmp_path, f"{request_} --gpus-per-node=2")[0] == _ALL
    more = _see(gpu_cluster, tmp_path, f"{request_} --gpus-per-node=2", "--ppn", "1")[0]
    assert more == ["[0] 0,1 on n1", "[1] 0,1 on n2"]


@pytest.mark.full
def test_tasks_that_are_requested_beside_options_about_cores(gpu_cluster: Cluster, tmp_path: Path) -> None:
    tasks = "--hint=nomultithread --gpus-per-node=2"
    assert _see(gpu_cluster, tmp_path, f"{tasks} --ntasks-per-node=2")[0] == _ALL
    assert _see(gpu_cluster, tmp_path, f"{tasks} --ntasks-per-node=1")[0] == ["[0] 0,1 on n1", "[1] 0,1 on n2"]


@pytest.mark.full
def test_ranks_with_several_devices_each(gpu_cluster: Cluster, tmp_path: Path) -> None:
    """--gpus-per-task=2: no device is idle. More ranks, which the job has no such devices for, share them."""
    job = "-n2 --gpus-per-task=2"
    ranks, messages = _see(gpu_cluster, tmp_path, job)
    assert ranks == ["[0] 0,1 on n1", "[1] 0,1 on n2"]
    assert "IDLE" not in messages
    assert _see(gpu_cluster, tmp_path, job, "--ppn", "2")[0] == _ALL
    assert _see(gpu_cluster, tmp_path, "-n4 --gpus-per-task=1")[0] == [
        "[0] 0 on n1", "[1] 1 on n1", "[2] 0 on n2", "[3] 1 on n2"]


@pytest.mark.full
def test_ranks_of_a_job_with_unequal_numbers_of_devices(gpu_cluster: Cluster, tmp_path: Path) -> None:
    """-G 3 on two nodes: srun can start three ranks only if each requests its own device."""
    ranks, messages = _see(gpu_cluster, tmp_path, "-G3")
    assert ranks == ["[0] 0 on n1", "[1] 1 on n1", "[2] 0 on n2"]
    assert "--gpus-per-node instead of -G" in messages
    assert _see(gpu_cluster, tmp_path, "-G3", "--ppn", "1")[0] == _ONE_EACH
    assert _see(gpu_cluster, tmp_path, "-G3", "--ppn", "2")[0] == [
        "[0] 0 on n1", "[1] 0 on n1", "[2] 0 on n2", "[3] 0 on n2"]


@pytest.mark.full
def test_a_mask_of_the_user_sets_the_number_of_devices(gpu_cluster: Cluster, tmp_path: Path) -> None:
    assert _see(gpu_cluster, tmp_path, "--exclusive", CUDA_VISIBLE_DEVICES="1")[0] == _ONE_EACH
    for request in ("--exclusive", "--gpus-per-node=2", "-G4"):
        assert _see(gpu_cluster, tmp_path, request, CUDA_VISIBLE_DEVICES="")[0] == ["[0] on n1", "[1] on n2"]
