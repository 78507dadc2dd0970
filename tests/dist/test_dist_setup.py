"""Setting ranks up under real launchers, and every way in which that is refused."""

from __future__ import annotations

import json
import os
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

from ezpz_llm.base.errors import UserError
from ezpz_llm.dist.setup import setup, warn_if_single_process
from ezpz_llm.launch.ranks import find_rank

SCRIPT = str(HELPERS / "dist_ranks.py")
MPIEXEC = shutil.which("mpiexec") or "mpiexec"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "EZPZ_LLM_RUN_DIR",
             "EZPZ_LLM_WORLD_SIZE")
ENV = {name: value for name, value in clean_env(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE").items()
       if name not in VARIABLES}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which nothing launched this process."""
    for name in os.environ.keys() - ENV.keys():
        monkeypatch.delenv(name)
    return monkeypatch


def run_ranks(launcher: list[str], folder: Path, **wanted) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*launcher, SCRIPT, json.dumps(wanted)], env=ENV, cwd=folder, capture_output=True,
                          text=True, timeout=scaled(90), check=False)


def told(run_dir: Path, ranks: int) -> list[dict]:
    return [json.loads((run_dir / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_four_ranks_of_a_bare_mpiexec_meet_over_mpi(tmp_path):
    """No MASTER_ADDR, no run directory: MPI tells where rank 0 is, rank 0 where to write."""
    done = run_ranks([MPIEXEC, "-n", "4", sys.executable], tmp_path, device="cpu", tp=2, name="bare")
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("bare-")
    ranks = told(run_dir, 4)
    for rank, one in enumerate(ranks):
        assert (one["rank"], one["world_size"], one["local_rank"]) == (rank, 4, rank)
        assert one["source"] == "Hydra (PMI_RANK)"
        assert (one["backend"], one["device"]) == ("gloo", "cpu")
        assert one["mpi4py"]
        assert one["run_dir"] == str(run_dir)
        exported = one["exported"]
        assert [exported[name] for name in VARIABLES[:4]] == [str(rank), "4", str(rank), "4"]
        assert exported["MASTER_ADDR"] == "127.0.0.1"
        assert one["environment_as_before"]
    assert len({one["exported"]["MASTER_PORT"] for one in ranks}) == 1
    # tp innermost: peers 0 1 and 2 3; dp: 0 2 and 1 3. Sums of 10^rank show who took part.
    assert [one["place"] for one in ranks] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [one["sums"]["tp"] for one in ranks] == [11, 11, 1100, 1100]
    assert [one["sums"]["dp"] for one in ranks] == [101, 1010, 101, 1010]


@pytest.mark.full
def test_with_a_master_address_mpi_is_left_alone(tmp_path):
    launcher = [MPIEXEC, "-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", free_port(), "-n", "2",
                sys.executable]
    done = run_ranks(launcher, tmp_path, device="cpu", run_dir=str(tmp_path / "here"))
    assert done.returncode == 0, done.stdout + done.stderr
    for one in told(tmp_path / "here", 2):
        assert not one["mpi4py"]
        assert one["sums"] == {"dp": 11, "tp": 11}  # no group of its own is the whole world
    assert not (tmp_path / "runs").exists()


def test_one_ranks_mistake_ends_all_of_them_at_once(tmp_path):
    """Without a launcher that kills the others, they would wait for the one that gave up."""
    begin = time.monotonic()
    done = run_ranks([MPIEXEC, "-n", "2", sys.executable], tmp_path, device="cpu", device_of_rank={"1": "cuda"})
    assert time.monotonic() - begin < scaled(60)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("error: no cuda device is visible to this process") == 2
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_after_an_exception_no_rank_waits_for_the_others(tmp_path):
    begin = time.monotonic()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_ranks(launcher, tmp_path, device="cpu", fail=1)
    assert time.monotonic() - begin < scaled(60)
    assert done.returncode == 1
    assert "ValueError: planted" in done.stderr


def test_an_mpi_that_counts_otherwise_is_named(tmp_path):
    """Open MPI's variables, MPICH's library: every process would be a world of its own."""
    env = ENV | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                 "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    done = subprocess.run([sys.executable, SCRIPT, "{}"], env=env, cwd=tmp_path, capture_output=True, text=True,
                          timeout=scaled(60), check=False)
    assert done.returncode == 2
    assert "MPI says rank 0 of 1, the environment says rank 1 of 2 (Open MPI (OMPI_COMM_WORLD_RANK))" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_single_process_needs_nothing(alone, tmp_path):
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


def test_libraries_are_told_the_device_that_they_take_the_local_rank_for(alone, tmp_path, monkeypatch):
    """A rank that sees only its own device has device 0, whatever its local rank; DeepSpeed reads LOCAL_RANK."""
    for name, value in (("RANK", "0"), ("SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "1")):
        alone.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setattr("ezpz_llm.dist.setup.choose_device", lambda asked, info: torch.device("cuda", 2))
    with setup(run_dir=tmp_path / "run"):
        assert (os.environ["LOCAL_RANK"], os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]) == ("2", "2")
    assert (os.environ.get("LOCAL_RANK"), os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]) == (None, "0")


def test_a_single_process_in_a_job_of_two_hosts_says_how_to_launch(capsys):
    """A batch script and an salloc shell have SLURM_NTASKS=4, and are no ranks."""
    command = ("python3", "train.py", "--hf-token", "secret")
    node_file = {"PBS_NODEFILE": str(CAPTURED / "pbs/nodefile_sel2_nc2_mpi2.txt")}
    for name in ("slurm/env_sbatch_script.txt", "slurm/env_salloc_shell.txt", "pbs/env_job_sel2_nc2_mpi2.txt"):
        env = captured_env(name) | (node_file if name.startswith("pbs") else {})
        info = find_rank(env)
        assert info.world_size == 1
        warn_if_single_process(info, env, command)
        said = capsys.readouterr().err
        assert "one process on one of the 2 hosts of" in said
        assert said.endswith("launch python3 train.py --hf-token '[redacted]'\n")
        # One that launch started as its only rank is what was asked for.
        warn_if_single_process(info, env | {"EZPZ_LLM_RUN_ID": "x"}, command)
    broken = captured_env("slurm/env_sbatch_script.txt") | {"SLURM_JOB_NODELIST": "n["}
    for env in ({}, broken, captured_env("slurm/env_srun_one_task_step.txt")):
        warn_if_single_process(find_rank(env), env, command)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_master_that_does_not_resolve_is_no_localhost(alone, rank):
    """Neither rank goes on as a world of its own."""
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "no-such-host.invalid",
                        "MASTER_PORT": free_port()}.items():
        alone.setenv(name, value)
    with pytest.raises(UserError, match=r"no-such-host\.invalid"):
        setup(device="cpu", timeout_s=2)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("address", "port", "found"), [
    ("127.0.0.1:29500", "29500", "has a port appended"), ("n 1", "29500", "is not a hostname or an address"),
    ("127.0.0.1", "²", "MASTER_PORT='²' is not a port number")])
def test_a_master_of_no_valid_form(alone, address, port, found):
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


def test_a_rank_without_a_master_address(alone):
    alone.setenv("RANK", "1")
    alone.setenv("WORLD_SIZE", "2")
    alone.setitem(sys.modules, "mpi4py", None)  # importing it would end in an ImportError, and another message
    with pytest.raises(UserError, match=r"rank 1 of 2 has no MASTER_ADDR\n"):
        setup(device="cpu")


@pytest.mark.parametrize(("variables", "found"), [
    ({"MASTER_ADDR": "n1"}, "rank 0 has MASTER_ADDR=n1 but no MASTER_PORT"),
    ({"MASTER_PORT": "1234"}, "rank 0 has MASTER_PORT=1234 but no MASTER_ADDR"),
    ({"MASTER_ADDR": "n1", "MASTER_PORT": "http"}, "MASTER_PORT='http' is not a port number"),
    ({"MASTER_ADDR": "n1", "MASTER_PORT": "99999"}, "MASTER_PORT='99999' is not a port number"),
])
def test_half_an_address(alone, variables, found):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **variables}.items():
        alone.setenv(name, value)
    with pytest.raises(UserError, match=found):
        setup(device="cpu")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_port_where_no_rank_0_answers_is_named(alone, rank):
    """Rank 0 finds the port taken, rank 1 finds nobody there."""
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
        assert f"did not meet the others at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}" in str(error.value)


def test_a_missing_interface_is_named_before_the_ranks_meet(alone):
    """Nobody listens at that address: the error is not of the meeting."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
                        "GLOO_SOCKET_IFNAME": "lo,hsn9"}.items():
        alone.setenv(name, value)
    with pytest.raises(UserError) as error:
        setup(device="cpu", timeout_s=2)
    assert f"rank 1 is to use interface hsn9, which {socket.gethostname()} does not have" in str(error.value)
    assert "lo (127.0.0.1)" in str(error.value)


def test_two_run_directories(alone, tmp_path):
    alone.setenv("EZPZ_LLM_RUN_DIR", str(tmp_path / "one"))
    with pytest.raises(UserError, match="two run directories"):
        setup(device="cpu", run_dir=tmp_path / "two")
    with setup(device="cpu", run_dir=tmp_path / "one") as dist:
        assert dist.run_dir.path == tmp_path / "one"


def test_degrees_that_do_not_divide_the_world(alone):
    with (setup(device="cpu") as dist,
          pytest.raises(UserError, match="tp 2 x pp 1 x sp 1 = 2 does not divide 1 ranks")):
        dist.arrange(tp=2)


def test_a_place_that_cannot_be_written_leaves_the_environment_as_it_was(alone, tmp_path):
    (tmp_path / "file").write_text("")
    before = dict(os.environ)
    with pytest.raises(UserError, match="cannot create the run directory"):
        setup(device="cpu", run_dir=tmp_path / "file" / "run")
    assert dict(os.environ) == before
