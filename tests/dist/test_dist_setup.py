"""Setup of ranks under real launchers, and all errors of `setup`."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launch_runs import CAPTURED, captured_env, clean_env
from places import HELPERS
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics.ranks import find_rank
from ezpz_llm.training.dist.setup import setup, warn_if_single_process

SCRIPT = str(HELPERS / "dist_ranks.py")
MPIEXEC = shutil.which("mpiexec") or "mpiexec"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "EZPZ_LLM_RUN_DIR",
             "EZPZ_LLM_WORLD_SIZE")
ENV = {name: value for name, value in clean_env(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE").items()
       if name not in VARIABLES}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Environment of a process that no launcher has started."""
    for name in os.environ.keys() - ENV.keys():
        monkeypatch.delenv(name)
    return monkeypatch


def run_ranks(launcher: list[str], folder: Path, **request) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*launcher, SCRIPT, json.dumps(request)], env=ENV, cwd=folder, capture_output=True,
                          text=True, timeout=scaled(90), check=False)


def read_results(run_dir: Path, ranks: int) -> list[dict]:
    return [json.loads((run_dir / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_four_ranks_of_plain_mpiexec_use_mpi_for_the_rendezvous(tmp_path):
    """Ranks have neither MASTER_ADDR nor a run directory, and get both from rank 0."""
    done = run_ranks([MPIEXEC, "-n", "4", sys.executable], tmp_path, device="cpu", tp=2, name="bare")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("bare-")
    ranks = read_results(run_dir, 4)
    for rank, result in enumerate(ranks):
        assert (result["rank"], result["world_size"], result["local_rank"]) == (rank, 4, rank)
        assert result["source"] == "Hydra (PMI_RANK)"
        assert (result["backend"], result["device"]) == ("gloo", "cpu")
        assert result["mpi4py"]
        assert result["numbers"] == [0.5, 1.5, 2.5, 3.5]
        assert result["run_dir"] == str(run_dir)
        exported = result["exported"]
        assert [exported[name] for name in VARIABLES[:4]] == [str(rank), "4", str(rank), "4"]
        assert exported["MASTER_ADDR"] == "127.0.0.1"
        assert result["environment_as_before"]
    assert len({result["exported"]["MASTER_PORT"] for result in ranks}) == 1
    # tp is innermost, with peers 0 1 and 2 3; dp has peers 0 2 and 1 3. Sums of 10^rank identify the ranks.
    assert [result["place"] for result in ranks] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [result["sums"]["tp"] for result in ranks] == [11, 11, 1100, 1100]
    assert [result["sums"]["dp"] for result in ranks] == [101, 1010, 101, 1010]


@pytest.mark.full
def test_mpi_is_not_used_if_master_addr_is_set(tmp_path):
    launcher = [MPIEXEC, "-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", free_port(), "-n", "2",
                sys.executable]
    done = run_ranks(launcher, tmp_path, device="cpu", run_dir=str(tmp_path / "here"))
    assert done.returncode == 0, done.stdout + done.stderr
    for result in read_results(tmp_path / "here", 2):
        assert not result["mpi4py"]
        assert result["sums"] == {"dp": 11, "tp": 11}  # no tp group: the sum is over the whole world
    assert not (tmp_path / "runs").exists()


def test_error_on_one_rank_ends_all_ranks_at_once(tmp_path):
    """mpiexec does not kill the other ranks, which would otherwise wait for the failed rank."""
    begin = time.monotonic()
    done = run_ranks([MPIEXEC, "-n", "2", sys.executable], tmp_path, device="cpu", device_of_rank={"1": "cuda"})
    assert time.monotonic() - begin < scaled(60)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("error: no cuda device is visible to this process") == 2
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_rank_with_an_exception_does_not_wait_for_the_others(tmp_path):
    begin = time.monotonic()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_ranks(launcher, tmp_path, device="cpu", fail=1)
    assert time.monotonic() - begin < scaled(60)
    assert done.returncode == 1
    assert "ValueError: planted" in done.stderr


def test_mpi_with_another_rank_is_reported(tmp_path):
    """Variables of Open MPI with the library of MPICH: every process would have world size 1."""
    env = ENV | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                 "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    done = subprocess.run([sys.executable, SCRIPT, "{}"], env=env, cwd=tmp_path, capture_output=True, text=True,
                          timeout=scaled(60), check=False)
    assert done.returncode == 2
    assert ("MPI reports rank 0 of 1, but the environment says rank 1 of 2 (Open MPI (OMPI_COMM_WORLD_RANK))"
            in done.stderr)
    assert "Traceback" not in done.stderr


def test_single_process_needs_no_launcher(alone, tmp_path):
    alone.chdir(tmp_path)
    with setup(name="mine") as dist:
        assert (dist.rank, dist.world_size, dist.backend, dist.is_main) == (0, 1, None, True)
        assert dist.run_dir.path.parent == tmp_path / "runs"
        assert dist.run_dir.profile.is_dir()
        assert os.environ["LOCAL_SIZE"] == "1"
        assert not torch.distributed.is_initialized()
        dist.barrier()
        dist.ensure_group()
        torch.distributed.all_reduce(torch.ones(1))
        dist.ensure_group()
    assert not torch.distributed.is_initialized()
    assert "LOCAL_SIZE" not in os.environ


def test_local_rank_is_exported_as_the_device_index(alone, tmp_path, monkeypatch):
    """DeepSpeed reads LOCAL_RANK as the device index. A rank that sees only its own device has index 0."""
    for name, value in (("RANK", "0"), ("SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "1")):
        alone.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setattr("ezpz_llm.training.dist.setup.choose_device", lambda asked, info: torch.device("cuda", 2))
    with setup(run_dir=tmp_path / "run"):
        assert (os.environ["LOCAL_RANK"], os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]) == ("2", "2")
    assert (os.environ.get("LOCAL_RANK"), os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]) == (None, "0")


def test_single_process_in_a_job_with_two_nodes_prints_how_to_launch(capsys):
    """A batch script and an salloc shell have SLURM_NTASKS=4, but are not ranks."""
    command = ("python3", "train.py", "--hf-token", "secret")
    node_file = {"PBS_NODEFILE": str(CAPTURED / "pbs/nodefile_sel2_nc2_mpi2.txt")}
    for name in ("slurm/env_sbatch_script.txt", "slurm/env_salloc_shell.txt", "pbs/env_job_sel2_nc2_mpi2.txt"):
        env = captured_env(name) | (node_file if name.startswith("pbs") else {})
        info = find_rank(env)
        assert info.world_size == 1
        warn_if_single_process(info, env, command)
        printed = capsys.readouterr().err
        assert re.match(r"note: running a single process, but \w+ job \S+ has 2 nodes\. ", printed)
        assert printed.endswith("launch python3 train.py --hf-token '[redacted]'\n")
        # A single rank that launch started is intended.
        warn_if_single_process(info, env | {"EZPZ_LLM_RUN_ID": "x"}, command)
    broken = captured_env("slurm/env_sbatch_script.txt") | {"SLURM_JOB_NODELIST": "n["}
    for env in ({}, broken, captured_env("slurm/env_srun_one_task_step.txt")):
        warn_if_single_process(find_rank(env), env, command)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_unresolvable_master_addr_is_an_error(alone, rank):
    """No rank falls back to localhost and continues with world size 1."""
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "no-such-host.invalid",
                        "MASTER_PORT": free_port()}.items():
        alone.setenv(name, value)
    with pytest.raises(UserError, match=r"no-such-host\.invalid"):
        setup(device="cpu", timeout_s=2)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("address", "port", "found"), [
    ("127.0.0.1:29500", "29500", "has a port appended"), ("n 1", "29500", "is not a hostname or an address"),
    ("127.0.0.1", "²", "MASTER_PORT='²' is not a port number")])
def test_invalid_master_addr_or_port(alone, address, port, found):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": address,
                        "MASTER_PORT": port}.items():
        alone.setenv(name, value)
    with pytest.raises(UserError, match=found):
        setup(device="cpu")


def test_fewer_ranks_than_launch_promised(alone):
    alone.setenv("EZPZ_LLM_WORLD_SIZE", "2")
    with pytest.raises(UserError) as error:
        setup(device="cpu")
    assert "launch started 2 ranks, but this process sees 1" in str(error.value)
    assert "mpiexec" in error.value.instead
    assert "--mpi=none" in error.value.instead


def test_rank_without_master_addr(alone):
    alone.setenv("RANK", "1")
    alone.setenv("WORLD_SIZE", "2")
    alone.setitem(sys.modules, "mpi4py", None)  # importing it would raise an ImportError, with another message
    with pytest.raises(UserError, match=r"rank 1 of 2 has no MASTER_ADDR\n"):
        setup(device="cpu")


@pytest.mark.parametrize(("variables", "found"), [
    ({"MASTER_ADDR": "n1"}, "rank 0 has MASTER_ADDR=n1 but no MASTER_PORT"),
    ({"MASTER_PORT": "1234"}, "rank 0 has MASTER_PORT=1234 but no MASTER_ADDR"),
    ({"MASTER_ADDR": "n1", "MASTER_PORT": "http"}, "MASTER_PORT='http' is not a port number"),
    ({"MASTER_ADDR": "n1", "MASTER_PORT": "99999"}, "MASTER_PORT='99999' is not a port number"),
])
def test_only_one_of_master_addr_and_port(alone, variables, found):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **variables}.items():
        alone.setenv(name, value)
    with pytest.raises(UserError, match=found):
        setup(device="cpu")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_port_without_rank_0_is_reported(alone, rank):
    """Rank 0 cannot listen on the taken port, and rank 1 cannot connect."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        if rank == "0":
            holder.listen()
        port = str(holder.getsockname()[1])
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": port}.items():
            alone.setenv(name, value)
        with pytest.raises(UserError) as error:
            setup(device="cpu", timeout_s=2)
    if rank == "0":
        assert f"rank 0 cannot listen on port {port}" in str(error.value)
        assert f"pid {os.getpid()} (" in str(error.value)
    else:
        assert f"could not join the store at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}" in str(error.value)


def test_missing_interface_is_reported_before_the_rendezvous(alone):
    """No process listens at the address, but the error is not about the rendezvous."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
                        "GLOO_SOCKET_IFNAME": "lo,hsn9"}.items():
        alone.setenv(name, value)
    with pytest.raises(UserError) as error:
        setup(device="cpu", timeout_s=2)
    assert f"rank 1 must use interface hsn9, but {socket.gethostname()} has only " in str(error.value)
    assert "lo (127.0.0.1)" in str(error.value)


def test_two_run_directories(alone, tmp_path):
    alone.setenv("EZPZ_LLM_RUN_DIR", str(tmp_path / "one"))
    with pytest.raises(UserError, match="two run directories"):
        setup(device="cpu", run_dir=tmp_path / "two")
    with setup(device="cpu", run_dir=tmp_path / "one") as dist:
        assert dist.run_dir.path == tmp_path / "one"


def test_degrees_that_do_not_divide_the_world(alone):
    with (setup(device="cpu") as dist,
          pytest.raises(UserError, match="tp 2 x pp 1 x sp 1 = 2 does not divide 1 rank")):
        dist.arrange(tp=2)


def test_unwritable_run_directory_keeps_the_environment(alone, tmp_path):
    (tmp_path / "file").write_text("")
    before = dict(os.environ)
    with pytest.raises(UserError, match="cannot create the run directory"):
        setup(device="cpu", run_dir=tmp_path / "file" / "run")
    assert dict(os.environ) == before
